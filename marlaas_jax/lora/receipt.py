"""What a job trains: the modules that carry its adapter, layer by layer, and the number of parameters."""

import dataclasses
from typing import Any

from marlaas_jax.errors import InvalidConfig
from marlaas_jax.lora.adapter import AdapterSpec
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.hf_names import LAYER_MODULES


@dataclasses.dataclass(frozen=True)
class Receipt:
    """The effective settings of one adapter; `modules` lists, for each layer, the projections with an adapter."""

    rank: int
    alpha: float
    scale: float
    targets: tuple[str, ...]
    seed: int
    num_trainable: int
    modules: tuple[tuple[str, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the receipt as JSON has it."""
        return dataclasses.asdict(self)


def receipt(config: ModelConfig, spec: AdapterSpec) -> Receipt:
    """Returns what the adapter of `spec` trains on this model. Raises InvalidConfig for a target that matches no module."""
    dims = config.projection_dims()
    for target in spec.targets:
        if target not in dims:
            raise InvalidConfig(f"lora.targets: {target!r} matches no module of this model; allowed: {', '.join(dims)}")
    if not spec.targets:
        raise InvalidConfig(f"lora.targets=(): no module would train; name at least one of {', '.join(dims)}")
    targets = tuple(target for target in dims if target in spec.targets)
    per_layer = sum(spec.rank * sum(dims[target]) for target in targets)
    names = tuple(LAYER_MODULES[target] for target in targets)
    return Receipt(
        rank=spec.rank,
        alpha=spec.alpha,
        scale=spec.scale,
        targets=targets,
        seed=spec.seed,
        num_trainable=per_layer * config.num_layers,
        modules=(names,) * config.num_layers,
    )
