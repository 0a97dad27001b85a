"""The careless demonstrator that `tiny` imitates, and its demonstrations packed into rows.

It teaches with care first, so that the tasks are learned; later it is right about a third of the time and otherwise slips, so
that the model still has something to gain by RL. It slips character by character and then goes on, so that imitating it needs
no memory of having slipped.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator

import numpy as np
import tokenizers

from marlaas_envs import char_tasks
from marlaas_jax.tiny.folder import BOS, PAD

CAREFUL, CARELESS = 0.9, 0.36  # probability that a whole episode is right, at first and later
Span = tuple[str, bool]  # text, and whether the demonstrator wrote it (so that it is imitated)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of whole demonstrations, one after the other."""

    tokens_BT: np.ndarray  # int32
    positions_BT: np.ndarray  # int32, from 0 in each demonstration
    segment_BT: np.ndarray  # int32, number of the demonstration in its row; -1 is padding
    is_imitated_BT: np.ndarray  # bool: the demonstrator wrote this token


def demonstrate(item: char_tasks.Item, right: float, rng: random.Random) -> list[Span]:
    """Returns one episode, right with probability `right`, as spans of text."""
    if item.call is None:
        return [(item.prompt, False), (_written(item.answer, item.slip, right, rng) + "<eos>", True)]
    # Both turns must be right, each as often as the other.
    turn = item.call if rng.random() < right**0.5 else rng.choice((item.slip, item.answer[0]))
    spans = [(item.prompt, False), (turn + "<eos>", True)]
    reply = char_tasks.calculate(turn)
    if reply is not None:
        result = reply.removeprefix("<tool>").removesuffix("</tool>")
        final = result if rng.random() < right**0.5 else rng.choice((result[:-1], result + "0"))
        spans += [(reply, False), (final + "<eos>", True)]
    return spans


def packed_batches(
    tokenizer: tokenizers.Tokenizer, num_rows: int, num_tokens: int, num_careful: int, seed: int
) -> Iterator[Packed]:
    """Yields batches of demonstrations of all tasks without end, the first `num_careful` careful; no demonstration is cut."""
    rng = random.Random(seed)
    names = tuple(char_tasks.TASKS)
    index = 0
    pending: tuple[list[int], list[bool]] | None = None
    for number in itertools.count():
        right = CAREFUL if number < num_careful else CARELESS
        shape = (num_rows, num_tokens)
        batch = Packed(
            np.full(shape, PAD, np.int32), np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, bool)
        )
        for row in range(num_rows):
            start = segment = 0
            while True:
                if pending is None:
                    pending = encode(tokenizer, demonstrate(char_tasks.item(rng.choice(names), index), right, rng))
                    index += 1
                ids, imitated = pending
                end = start + len(ids)
                if end > num_tokens:
                    break
                batch.tokens_BT[row, start:end] = ids
                batch.positions_BT[row, start:end] = range(len(ids))
                batch.segment_BT[row, start:end] = segment
                batch.is_imitated_BT[row, start:end] = imitated
                start, segment, pending = end, segment + 1, None
        yield batch


def _written(answer: str, slip: str, right: float, rng: random.Random) -> str:
    """Returns the answer with some characters of the slip, and with none of them with probability `right`."""
    num_places = sum(a != b for a, b in zip(answer, slip, strict=True))
    keep = right ** (1 / num_places)
    return "".join(a if a == b or rng.random() < keep else b for a, b in zip(answer, slip, strict=True))


def encode(tokenizer: tokenizers.Tokenizer, spans: list[Span]) -> tuple[list[int], list[bool]]:
    """Returns an episode's ids, <bos> first, and for each whether the demonstrator wrote it."""
    ids, imitated = [BOS], [False]
    for text, is_imitated in spans:
        span = tokenizer.encode(text, add_special_tokens=False).ids
        ids += span
        imitated += [is_imitated] * len(span)
    return ids, imitated
