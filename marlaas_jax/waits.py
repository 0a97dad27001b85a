"""How long things wait in a queue: counts in buckets of fixed bounds, gathered cheaply and handed over in bounded pieces.

A bound is the square root of two times the one before, from 1 ms to about half an hour, so that a quantile read from the counts
is at most 41% off, and exact where all waits of its bucket are equal to its upper bound. Pure Python, no clock.
"""

import bisect
from collections.abc import Sequence

import msgspec

FIRST_BOUND_S = 1e-3
BOUNDS_S = tuple(FIRST_BOUND_S * 2 ** (i / 2) for i in range(42))  # 1 ms to 1,483 s; what is longer has a bucket of its own


class Waits(msgspec.Struct):
    """Waits of one sort; also a part of a message. `counts` by index into BOUNDS_S; len(BOUNDS_S) is what is beyond."""

    counts: dict[int, int] = msgspec.field(default_factory=dict)
    sum_s: float = 0.0
    max_s: float = 0.0

    @property
    def number(self) -> int:
        """How many waits were counted."""
        return sum(self.counts.values())

    def add(self, seconds: float, number: int = 1) -> None:
        """Counts `number` waits of so many seconds; a negative one, of a clock that was set back, is none at all."""
        seconds = max(0.0, seconds)
        bucket = bisect.bisect_left(BOUNDS_S, seconds)
        self.counts[bucket] = self.counts.get(bucket, 0) + number
        self.sum_s += seconds * number
        self.max_s = max(self.max_s, seconds)

    def merge(self, more: "Waits") -> None:
        """Adds others. Buckets that do not exist, as a newer peer might send, are counted as the longest."""
        for bucket, number in more.counts.items():
            bucket = bucket if 0 <= bucket <= len(BOUNDS_S) else len(BOUNDS_S)
            self.counts[bucket] = self.counts.get(bucket, 0) + number
        self.sum_s += more.sum_s
        self.max_s = max(self.max_s, more.max_s)

    def quantile_s(self, share: float) -> float | None:
        """Returns the wait that `share` of all do not exceed, as the upper bound of its bucket; None without any."""
        number = self.number
        if not number:
            return None
        left = share * number
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 1e-9:
                return min(BOUNDS_S[bucket], self.max_s) if bucket < len(BOUNDS_S) else self.max_s
        return self.max_s

    def cumulative(self, bounds_s: Sequence[float]) -> list[int]:
        """Returns for each of the bounds, which are some of BOUNDS_S, how many waits are no longer."""
        return [sum(n for bucket, n in self.counts.items() if bucket <= bisect.bisect_left(BOUNDS_S, b)) for b in bounds_s]


class WaitLog:
    """Waits by stage and job since they were last taken; never more at once than asked for, the rest comes next time."""

    def __init__(self) -> None:
        self._waits: dict[tuple[str, str], Waits] = {}

    def add(self, stage: str, job: str, seconds: float, number: int = 1) -> None:
        """Counts `number` waits."""
        self._waits.setdefault((stage, job), Waits()).add(seconds, number)

    def take(self, max_entries: int = 256) -> dict[str, dict[str, Waits]]:
        """Returns and forgets at most so many (stage, job) entries, those first that were there first."""
        taken: dict[str, dict[str, Waits]] = {}
        for key in list(self._waits)[:max_entries]:
            taken.setdefault(key[0], {})[key[1]] = self._waits.pop(key)
        return taken
