"""Learning rate as a function of the optimizer step. Pure Python."""

import math

from marlaas_jax.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Returns the rate of optimizer step `step`, counted from 0.

    Warm-up is linear, (step + 1) / warmup_steps of the full rate, so that no step has rate 0. After it "linear" and "cosine"
    fall from the full rate towards 0, which they would reach at `total_steps`.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = min((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 1.0)
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - done)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
