"""Group-relative advantages from rewards (Shao et al. 2024, DeepSeekMath, section 4.1.2; Liu et al. 2025, Dr. GRPO). No jax.

A reward of None, or one that is not finite, is a missing reward: it leaves its group's statistics and its episode gets no
gradient (advantage 0). A group whose rewards are all equal has advantage exactly 0, whatever the normalisation.
"""

import math
from collections.abc import Sequence

import numpy as np

STD_EPSILON = 1e-4  # added to the standard deviation


def group_advantages(rewards: Sequence[float | None], normalize_std: bool) -> np.ndarray:
    """Returns the advantages [G] of one group, float32: reward - mean, divided by (std + 1e-4) if `normalize_std`.

    The standard deviation is that of the sample (divisor n - 1). A group of one scored episode has advantage 0.
    """
    scored = np.array([r is not None and math.isfinite(r) for r in rewards], bool)
    values = np.array([r if ok else 0.0 for r, ok in zip(rewards, scored, strict=True)], np.float64)
    advantages = np.zeros(len(rewards), np.float64)
    kept = values[scored]
    if len(kept) < 2 or np.all(kept == kept[0]):
        return advantages.astype(np.float32)
    centred = kept - kept.mean()
    if normalize_std:
        centred /= kept.std(ddof=1) + STD_EPSILON
    advantages[scored] = centred
    return advantages.astype(np.float32)


def is_live(rewards: Sequence[float | None]) -> bool:
    """Returns whether the group teaches something: at least two different finite rewards."""
    return len({float(r) for r in rewards if r is not None and math.isfinite(r)}) > 1


def live_share(groups: Sequence[Sequence[float | None]]) -> float:
    """Returns the share of live groups; 0 without groups."""
    return sum(map(is_live, groups)) / len(groups) if groups else 0.0
