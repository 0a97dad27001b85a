"""One job's batch on its way through the learner: what to score first, the minibatches, their figures. NumPy only."""

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from marlaas_jax.messages import TrainBatch
from marlaas_jax.rl.objective import Objective, row_weights
from marlaas_jax.rl.packing import Block, BlockShape, Row, blocks_of_group, read_groups

TRAIN, SCORE_PROXIMAL, SCORE_BASE = "train", "proximal", "base"


@dataclasses.dataclass(frozen=True)
class Work:
    """A block of one job that waits for a micro-batch. `purpose`: TRAIN, or which log-probs of its rows are scored."""

    job: str
    purpose: str
    block: Block


@dataclasses.dataclass
class Minibatch:
    """What one optimizer step trains."""

    work: deque[Work]
    num_rows: int  # with loss tokens, flat ones included
    num_tokens: int  # loss tokens of those rows
    totals: dict[str, float] = dataclasses.field(default_factory=dict)
    unfinished: int = 0  # blocks waiting or running


class Batch:
    """A TrainBatch as work. Rows that cannot move the weights (advantage 0, no KL term) are counted, but not computed."""

    def __init__(self, message: TrainBatch, objective: Objective, max_tokens: int, shapes: Sequence[BlockShape]):
        self.message = message
        groups = read_groups(message.groups, mask_truncated=objective.mask_truncated)
        parts = np.array_split(np.arange(len(groups)), objective.minibatches)
        chosen = [[groups[i] for i in part] for part in parts]
        self.rows = [row for _, rows in groups for row in rows if row.num_tokens]
        self.minibatches = deque(_minibatch(message.job, part, objective, max_tokens, shapes) for part in chosen)
        blocks = [work.block for minibatch in self.minibatches for work in minibatch.work]
        self.scoring: deque[Work] = deque()
        if objective.objective == "decoupled" and objective.minibatches > 1:
            self.scoring.extend(Work(message.job, SCORE_PROXIMAL, block) for block in blocks)
        if objective.kl_weight > 0:
            self.scoring.extend(Work(message.job, SCORE_BASE, block) for block in blocks)
        self.unscored = len(self.scoring)
        self.has_begun = False  # a block was taken into a micro-batch
        self.done: list[dict[str, float]] = []  # figures of the minibatches that are through
        self.busy: dict[str, float] = {}  # seconds of the device

    @property
    def current(self) -> Minibatch:
        """The minibatch being accumulated."""
        return self.minibatches[0]

    def waiting(self) -> deque[Work]:
        """Returns the work that may run now: scoring first, then the current minibatch's blocks."""
        if self.unscored:
            return self.scoring
        return self.current.work if self.minibatches else deque()

    @property
    def is_due(self) -> bool:
        """True once the current minibatch is accumulated and its optimizer step may run."""
        return bool(self.minibatches) and not self.unscored and self.current.unfinished == 0

    def finished(self, work: Work) -> None:
        """Counts a block whose micro-batch is through."""
        if work.purpose == TRAIN:
            self.current.unfinished -= 1
        else:
            self.unscored -= 1


def _minibatch(
    job: str, groups: list[tuple[np.ndarray, list[Row]]], objective: Objective, max_tokens: int, shapes: Sequence[BlockShape]
) -> Minibatch:
    counted = [row for _, rows in groups for row in rows if row.num_tokens]
    # The normaliser is that of the whole minibatch, fixed here, before any micro-batch runs.
    for row, weight in zip(
        counted, row_weights([row.num_tokens for row in counted], objective.aggregation, max_tokens), strict=True
    ):
        row.weight = float(weight)
    moves = lambda row: row.num_tokens > 0 and (row.advantage != 0 or objective.kl_weight > 0)
    blocks: list[Block] = []
    for prompt, rows in groups:
        blocks += blocks_of_group(prompt, [row for row in rows if moves(row)], shapes)
    blocks.sort(key=lambda block: block.shape)  # stable: micro-batches are of one shape
    work = deque(Work(job, TRAIN, block) for block in blocks)
    return Minibatch(work, len(counted), sum(row.num_tokens for row in counted), unfinished=len(work))
