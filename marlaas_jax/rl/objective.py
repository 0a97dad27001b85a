"""A job's objective with every default filled in, and the weight of each row in it. NumPy only; losses.py has the formulas."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from marlaas_jax.config import AlgorithmConfig

LOSS_IDS = {"clip": 0, "sequence_clip": 1, "cispo": 2, "importance_sampling": 3}


@dataclasses.dataclass(frozen=True)
class Objective:
    """One job's objective, every default filled in."""

    loss_id: int  # see LOSS_IDS
    aggregation: str  # "token", "sequence" or "constant"
    normalize_std: bool
    clip_low: float
    clip_high: float
    importance_cap: float
    kl_weight: float
    objective: str  # "behaviour", "decoupled" or "decoupled_interpolated"
    minibatches: int
    mask_truncated: bool


# loss: form, aggregation, normalize_std, clip_low, clip_high. The papers' own values; CISPO's lower bound is off (1 - 1 = 0).
_DEFAULTS = {
    "grpo": ("clip", "sequence", True, 0.2, 0.2),
    "dr_grpo": ("clip", "constant", False, 0.2, 0.2),
    "dapo": ("clip", "token", True, 0.2, 0.28),
    "gspo": ("sequence_clip", "sequence", True, 3e-4, 4e-4),
    "cispo": ("cispo", "token", True, 1.0, 0.28),
    "importance_sampling": ("importance_sampling", "token", False, float("inf"), float("inf")),
}


def resolve(config: AlgorithmConfig) -> Objective:
    """Returns the job's objective: what its file leaves open is the loss's own default."""
    form, aggregation, normalize_std, clip_low, clip_high = _DEFAULTS[config.loss]
    return Objective(
        loss_id=LOSS_IDS[form],
        aggregation=config.aggregation or aggregation,
        normalize_std=normalize_std if config.normalize_std is None else config.normalize_std,
        clip_low=clip_low if config.clip_low is None else config.clip_low,
        clip_high=clip_high if config.clip_high is None else config.clip_high,
        importance_cap=config.importance_cap,
        kl_weight=config.kl_weight,
        objective=config.objective,
        minibatches=config.minibatches,
        mask_truncated=config.mask_truncated,
    )


def row_weights(num_tokens_B: np.ndarray | Sequence[int], aggregation: str, max_tokens: int) -> np.ndarray:
    """Returns what each row's token sum is multiplied by [B], float32, from its number of loss tokens in the minibatch.

    Rows without loss tokens (masked, truncated) count nowhere: neither in the sums nor among the sequences or tokens (H25).
    "token": 1 / all tokens. "sequence": 1 / (sequences * own tokens). "constant": 1 / (sequences * max_tokens).
    """
    num_tokens_B = np.asarray(num_tokens_B, np.int64)
    counts_B = num_tokens_B > 0
    num_sequences = max(int(counts_B.sum()), 1)
    if aggregation == "token":
        weight_B = np.full(len(num_tokens_B), 1.0 / max(int(num_tokens_B.sum()), 1))
    elif aggregation == "sequence":
        weight_B = 1.0 / (num_sequences * np.maximum(num_tokens_B, 1))
    else:
        weight_B = np.full(len(num_tokens_B), 1.0 / (num_sequences * max_tokens))
    return np.where(counts_B, weight_B, 0.0).astype(np.float32)


def anchor_weights(objective: str, staleness: np.ndarray) -> np.ndarray:
    """Returns the given log-prob's weight in log pi_prox, float32, per token of that staleness (optimizer steps).

    A-3PO: the older the token, the nearer its anchor to the policy itself: 1 / staleness, 0 at staleness 0.
    """
    if objective == "decoupled_interpolated":
        return np.where(staleness > 0, 1.0 / np.maximum(staleness, 1), 0.0).astype(np.float32)
    return np.ones(staleness.shape, np.float32)
