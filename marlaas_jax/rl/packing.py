"""From the groups of a train batch to blocks of fixed shape, and from blocks to the arrays of one micro-batch. NumPy only.

A block holds a group's prompt once and up to G of its rows: [P + G * T] tokens. The prompt part is prompt[:-1]; every row's
inputs start with the prompt's last token, so that suffix position t predicts the row's token t, as in sampling. Rows are cut
after their last loss token. Larger groups are split, smaller ones padded; everything that differs between jobs is per-row data.
The order of rows and blocks depends on the batch alone.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from marlaas_jax.errors import InvalidRequest
from marlaas_jax.messages import TrainGroup, TrainRow


@dataclasses.dataclass(frozen=True, order=True)
class BlockShape:
    """Shape of one micro-batch: M blocks of P + G * T tokens. Hashable, so static to jit; one compiled program each."""

    prompt: int  # P
    suffix: int  # T
    rows: int  # G
    blocks: int  # M

    @property
    def tokens_per_block(self) -> int:
        """Padded tokens of one block."""
        return self.prompt + self.rows * self.suffix

    @property
    def num_tokens(self) -> int:
        """Padded tokens of the micro-batch."""
        return self.blocks * self.tokens_per_block

    def fits(self, num_prompt: int, num_suffix: int) -> bool:
        """Returns whether a row of `num_suffix` tokens fits after a prompt of `num_prompt`, whose last one is in the suffix."""
        return num_prompt - 1 <= self.prompt and num_suffix <= self.suffix


@dataclasses.dataclass
class Row:
    """One episode as trained; arrays end at its last loss token. `proximal` and `base` are filled in when they are scored."""

    token_ids: np.ndarray  # int32 [n]
    mask: np.ndarray  # bool [n]
    behaviour: np.ndarray  # float32 [n]
    versions: np.ndarray  # int32 [n]
    advantage: float
    weight: float = 0.0
    proximal: np.ndarray | None = None  # float32 [n]
    base: np.ndarray | None = None  # float32 [n]

    @property
    def num_tokens(self) -> int:
        """Number of loss tokens."""
        return int(self.mask.sum())


@dataclasses.dataclass(frozen=True)
class Block:
    """A prompt and rows of it that run together in a micro-batch of `shape`."""

    shape: BlockShape
    prompt: np.ndarray  # int32, the whole prompt
    rows: tuple[Row, ...]


def read_row(row: TrainRow, *, mask_truncated: bool, where: str) -> Row:
    """Returns the row as arrays, cut after its last loss token. Raises InvalidRequest on parts of different lengths."""
    count = len(row.token_ids)
    mask = np.frombuffer(row.loss_mask, np.uint8).astype(bool)
    behaviour, versions = _floats(row.logprobs, where, "logprobs"), _ints(row.versions, where, "versions")
    for name, part in (("loss_mask", mask), ("logprobs", behaviour), ("versions", versions)):
        if len(part) != count:
            raise InvalidRequest(f"{where}.{name}: {len(part)} entries for {count} token_ids; they must be as many")
    if not np.isfinite(row.advantage):
        raise InvalidRequest(f"{where}.advantage={row.advantage}: must be finite")
    if mask_truncated and row.truncated:
        mask = np.zeros_like(mask)
    length = int(mask.nonzero()[0][-1]) + 1 if mask.any() else 0
    tokens = np.asarray(row.token_ids[:length], np.int32)
    return Row(tokens, mask[:length], behaviour[:length], versions[:length], float(row.advantage))


def _floats(raw: bytes, where: str, name: str) -> np.ndarray:
    if len(raw) % 4:
        raise InvalidRequest(f"{where}.{name}: {len(raw)} bytes; must be a multiple of 4")
    return np.frombuffer(raw, "<f4")


def _ints(raw: bytes, where: str, name: str) -> np.ndarray:
    if len(raw) % 4:
        raise InvalidRequest(f"{where}.{name}: {len(raw)} bytes; must be a multiple of 4")
    return np.frombuffer(raw, "<i4")


def read_groups(groups: Sequence[TrainGroup], *, mask_truncated: bool) -> list[tuple[np.ndarray, list[Row]]]:
    """Returns (prompt, rows) per group, in the order of the batch. Raises InvalidRequest naming the field."""
    read = []
    for i, group in enumerate(groups):
        if not group.prompt_ids:
            raise InvalidRequest(f"groups.{i}.prompt_ids: empty; the first token of a row is predicted from the prompt's last")
        rows = [read_row(row, mask_truncated=mask_truncated, where=f"groups.{i}.rows.{j}") for j, row in enumerate(group.rows)]
        read.append((np.asarray(group.prompt_ids, np.int32), rows))
    return read


def smallest_shape(shapes: Sequence[BlockShape], num_prompt: int, num_suffix: int) -> BlockShape | None:
    """Returns the shape with the fewest padded tokens per block that fits, or None."""
    fitting = [shape for shape in shapes if shape.fits(num_prompt, num_suffix)]
    return min(fitting, key=lambda s: (s.tokens_per_block / s.rows, s)) if fitting else None


def blocks_of_group(prompt: np.ndarray, rows: Sequence[Row], shapes: Sequence[BlockShape]) -> list[Block]:
    """Returns the blocks of one group with the fewest padded tokens. Rows without loss tokens are left out.

    Rows are ordered by length; runs of rows that need the same bucket may be merged into the next longer bucket where repeating
    the prompt would cost more. Raises InvalidRequest if a row fits no shape.
    """
    used = sorted((row for row in rows if row.num_tokens), key=lambda row: -len(row.token_ids))
    if not used:
        return []
    needed = []
    for row in used:
        shape = smallest_shape(shapes, len(prompt), len(row.token_ids))
        if shape is None:
            raise InvalidRequest(
                f"a row of {len(prompt)} prompt and {len(row.token_ids)} answer tokens fits no bucket; (prompt, answer) are "
                + ", ".join(f"({s.prompt + 1}, {s.suffix})" for s in sorted(shapes))
            )
        needed.append(shape)
    edges = [i for i in range(1, len(used)) if needed[i] != needed[i - 1]]
    best: tuple[int, list[tuple[int, int]]] | None = None
    for kept in itertools.chain.from_iterable(itertools.combinations(edges, n) for n in range(len(edges) + 1)):
        runs = list(itertools.pairwise([0, *kept, len(used)]))
        cost = sum(-(-(end - start) // needed[start].rows) * needed[start].tokens_per_block for start, end in runs)
        if best is None or cost < best[0]:
            best = (cost, runs)
    assert best is not None
    blocks = []
    for start, end in best[1]:
        shape = needed[start]  # of the run's longest row
        for first in range(start, end, shape.rows):
            blocks.append(Block(shape, prompt, tuple(used[first : min(first + shape.rows, end)])))
    return blocks


@dataclasses.dataclass(frozen=True)
class Layout:
    """The integer arrays of one micro-batch; `capacity` (N) in an index means nowhere."""

    shape: BlockShape
    token_N: np.ndarray  # int32
    prompt_length_M: np.ndarray  # int32: tokens in the prompt part
    index_BT: np.ndarray  # int32: place of each loss position in token_N
    position: np.ndarray  # int32: places of all loss positions, ascending
    target: np.ndarray  # int32: the token each predicts
    rows: tuple[tuple[int, int, Row], ...]  # (row of index_BT, block, row)


def lay_out(shape: BlockShape, blocks: Sequence[Block], capacity: int, num_rows: int, num_suffix: int) -> Layout:
    """Returns the arrays of a micro-batch of at most shape.blocks blocks, padded to N, B and T."""
    assert len(blocks) <= shape.blocks
    token_N = np.zeros(capacity, np.int32)
    prompt_length_M = np.zeros(shape.blocks, np.int32)
    index_BT = np.full((num_rows, num_suffix), capacity, np.int32)
    positions, targets, rows = [], [], []
    for m, block in enumerate(blocks):
        start = m * shape.tokens_per_block
        prompt_length_M[m] = len(block.prompt) - 1
        token_N[start : start + len(block.prompt) - 1] = block.prompt[:-1]
        for g, row in enumerate(block.rows):
            first = start + shape.prompt + g * shape.suffix
            length = len(row.token_ids)
            token_N[first] = block.prompt[-1]
            token_N[first + 1 : first + length] = row.token_ids[:-1]
            times = row.mask.nonzero()[0]
            b = m * shape.rows + g
            index_BT[b, times] = first + times
            positions.append(first + times)
            targets.append(row.token_ids[times])
            rows.append((b, m, row))
    join = lambda parts: np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)
    return Layout(shape, token_N, prompt_length_M, index_BT, join(positions), join(targets), tuple(rows))


def lay_out_sequence(shape: BlockShape, token_ids: np.ndarray, capacity: int) -> Layout:
    """Returns a micro-batch of one sequence, all but its first token predicted; `shape` has P + T >= its length - 1."""
    inputs, targets = token_ids[:-1].astype(np.int32), token_ids[1:].astype(np.int32)
    in_prompt = min(len(inputs), shape.prompt)
    token_N = np.zeros(capacity, np.int32)
    token_N[: len(inputs)] = inputs  # the first suffix row follows the prompt part at once
    prompt_length_M = np.zeros(shape.blocks, np.int32)
    prompt_length_M[0] = in_prompt
    return Layout(
        shape, token_N, prompt_length_M, np.zeros((0, 0), np.int32), np.arange(len(inputs), dtype=np.int32), targets, ()
    )
