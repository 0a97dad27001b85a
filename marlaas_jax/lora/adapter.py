"""One adapter: its specification and its weights.

Weights are `{target: {"down": [L, R, D], "up": [L, R, F]}}` over the targets of the bank it lives in; D and F are the
projection's input and output widths. In a bank every array leads with A. The update of a projection is
`alpha / rank * (x @ down.T) @ up` (Hu et al. 2021; `down` is their A, `up` the transpose of their B). A target that the job
left out and the ranks above the job's own are zero in both factors, so their gradients are exactly zero and they stay zero.
"""

import dataclasses
from typing import Any

import numpy as np

from marlaas_jax.errors import InvalidConfig
from marlaas_jax.model.config import ModelConfig

Weights = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class AdapterSpec:
    """What a job chose for its adapter."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int = 0

    @property
    def scale(self) -> float:
        """alpha / rank: what the low-rank product is multiplied by."""
        return self.alpha / self.rank


def weight_shapes(config: ModelConfig, max_rank: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shape of each array of one adapter in a bank of rank `max_rank`, for all seven targets."""
    return {
        target: {"down": (config.num_layers, max_rank, d), "up": (config.num_layers, max_rank, f)}
        for target, (d, f) in config.projection_dims().items()
    }


def init_weights(config: ModelConfig, spec: AdapterSpec, max_rank: int) -> Weights:
    """Returns a fresh adapter as float32 NumPy arrays: `down` uniform as PEFT draws it (bound 1/sqrt(D)), `up` zero."""
    if not 1 <= spec.rank <= max_rank:
        raise InvalidConfig(f"lora.rank={spec.rank}: the bank allows 1 to {max_rank} (runtime.bank.max_rank)")
    rng = np.random.default_rng(spec.seed)
    weights: Weights = {}
    for target, shapes in weight_shapes(config, max_rank).items():
        num_layers, _, width = shapes["down"]
        draw = rng.uniform(-(width**-0.5), width**-0.5, (num_layers, spec.rank, width)).astype(np.float32)
        down = np.zeros(shapes["down"], np.float32)
        if target in spec.targets:
            down[:, : spec.rank] = draw
        weights[target] = {"down": down, "up": np.zeros(shapes["up"], np.float32)}
    return weights
