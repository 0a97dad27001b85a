"""Predicts how long the learner's programs take, from work counted in floating point operations and times measured before."""

import dataclasses
from collections.abc import Sequence

from marlaas_jax.model.config import ModelConfig
from marlaas_jax.rl.packing import BlockShape

FIRST_GUESS_PER_S = 5e10  # operations per second before anything was measured
SMOOTHING = 0.3  # weight of the newest measurement
OVERHEAD_OPS = 1e7  # of any dispatch, in operations


@dataclasses.dataclass(frozen=True)
class Unit:
    """One program call: its kind and its work in floating point operations."""

    kind: str  # "embed", "forward", "head", "score_head", "finish", "backward", "update"
    ops: float


def layer_ops(model: ModelConfig, shape: BlockShape) -> float:
    """Returns the operations of one layer's forward pass over a micro-batch."""
    weights = sum(d * f for d, f in model.projection_dims().values())
    width = model.num_query_heads * model.head_dim
    seen = shape.prompt * shape.prompt + shape.rows * shape.suffix * (shape.prompt + shape.suffix)
    return shape.blocks * (2.0 * weights * shape.tokens_per_block + 4.0 * width * seen)


def projection_ops(model: ModelConfig, num_positions: int) -> float:
    """Returns the operations of one vocabulary projection."""
    return 2.0 * num_positions * model.model_dim * model.vocab_size


def update_unit(model: ModelConfig, max_rank: int, num_adapters: int) -> Unit:
    """Returns the optimizer step of some adapters."""
    numbers = model.num_layers * max_rank * sum(d + f for d, f in model.projection_dims().values())
    return Unit("update", 20.0 * num_adapters * numbers)


class CostModel:
    """Seconds per operation for each kind of unit, corrected by what a dispatch really took."""

    def __init__(self) -> None:
        self._s_per_op: dict[str, float] = {}

    def predict_s(self, units: Sequence[Unit]) -> float:
        """Returns the predicted seconds of these units."""
        return sum((unit.ops + OVERHEAD_OPS) * self._s_per_op.get(unit.kind, 1 / FIRST_GUESS_PER_S) for unit in units)

    def observe(self, units: Sequence[Unit], seconds: float) -> None:
        """Learns from one dispatch. What is off is shared by its kinds; a single reading moves a rate at most fourfold."""
        predicted = self.predict_s(units)
        if not units or predicted <= 0 or seconds <= 0:
            return
        off = min(max(seconds / predicted, 0.25), 4.0)
        for kind in {unit.kind for unit in units}:
            rate = self._s_per_op.get(kind, 1 / FIRST_GUESS_PER_S)
            self._s_per_op[kind] = rate * ((1 - SMOOTHING) + SMOOTHING * off)

    def calibrate(self, unit: Unit, seconds: float) -> None:
        """Sets a kind's rate from one clean measurement, as in warm-up."""
        self._s_per_op[unit.kind] = seconds / (unit.ops + OVERHEAD_OPS)
