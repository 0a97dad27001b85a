"""The figures of a trained batch: per-row sums from the device become means over tokens, weighted by the tokens themselves."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from marlaas_jax.rl.packing import Row

MAXIMA = ("ratio_max", "staleness_max")


def row_totals(metrics: Mapping[str, np.ndarray], index: int, row: Row, version: int) -> dict[str, float]:
    """Returns one row's sums: those of the device, plus staleness in optimizer steps."""
    totals = {name: float(values[index]) for name, values in metrics.items()}
    staleness = version - row.versions[row.mask]
    totals["staleness"] = float(staleness.sum())
    totals["staleness_max"] = float(staleness.max(initial=0))
    return totals


def add(totals: dict[str, float], more: Mapping[str, float]) -> None:
    """Adds sums to sums, in place; maxima stay maxima."""
    for name, value in more.items():
        if name in MAXIMA:
            totals[name] = max(totals.get(name, -math.inf), value)
        else:
            totals[name] = totals.get(name, 0.0) + value


def summarize(totals: Mapping[str, float]) -> dict[str, float]:
    """Returns the batch's metrics from the sums over its minibatches. Means are per computed loss token; empty sums give 0."""
    tokens, fresh = totals.get("tokens", 0.0), totals.get("fresh_tokens", 0.0)
    steps = totals.get("steps", 0.0)
    share = lambda name: totals.get(name, 0.0) / tokens if tokens else 0.0
    metrics = {
        "learner/loss": totals.get("loss", 0.0) / max(totals.get("minibatches", 0.0), 1.0),
        "learner/entropy": share("entropy"),
        "learner/clip_share": share("clipped"),
        "learner/ratio_mean": share("ratio"),
        "learner/ratio_max": totals.get("ratio_max", 0.0),
        "learner/off_policy_truncated_share": share("off_policy_truncated"),
        "learner/behaviour_kl": share("behaviour_kl"),
        "learner/mismatch_kl": totals.get("fresh_kl", 0.0) / fresh if fresh else 0.0,
        "learner/base_kl": share("base_kl"),
        "learner/staleness_mean": share("staleness"),
        "learner/staleness_max": totals.get("staleness_max", 0.0),
        "learner/grad_norm": totals.get("grad_norm", 0.0) / steps if steps else 0.0,
        "learner/learning_rate": totals.get("learning_rate", 0.0) / steps if steps else 0.0,
        "learner/num_loss_tokens": totals.get("counted_tokens", 0.0),
        "learner/num_computed_loss_tokens": tokens,
        "learner/num_rows": totals.get("rows", 0.0),
        "learner/num_optimizer_steps": steps,
        "learner/num_skipped_nonfinite": totals.get("skipped_nonfinite", 0.0),
        "learner/num_skipped_flat": totals.get("skipped_flat", 0.0),
        "learner/busy_s": totals.get("busy_s", 0.0),
    }
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def merge(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the sums of sums."""
    totals: dict[str, float] = {}
    for part in parts:
        add(totals, part)
    return totals
