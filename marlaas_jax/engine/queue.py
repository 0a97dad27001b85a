"""One queue per job; the job furthest behind its weighted share of tokens goes first, of the owner furthest behind its own.

When the job at the front cannot start (no adapter slot is free), others may overtake it, but by no more than
`max_overtaking_tokens` together: then only what has begun goes on, and that ends in bounded time.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from marlaas_jax.fairness import Owner, Shares

Item = TypeVar("Item")


@dataclasses.dataclass
class _Job(Generic[Item]):
    items: deque[Item]
    overtaken_tokens: float = 0.0  # what others were served since this job was first passed over


class FairQueue(Generic[Item]):
    """First come, first served within a job; weighted fair between jobs."""

    def __init__(self, max_overtaking_tokens: float):
        self.max_overtaking_tokens = max_overtaking_tokens
        self._shares = Shares()
        self._jobs: dict[str, _Job[Item]] = {}

    def __len__(self) -> int:
        return sum(len(job.items) for job in self._jobs.values())

    def lengths(self) -> dict[str, int]:
        """Returns the number of waiting items of each job that has any."""
        return {name: len(job.items) for name, job in self._jobs.items() if job.items}

    def push(self, name: str, item: Item, weight: float = 1.0, owner: Owner | None = None) -> None:
        """Appends an item; `weight` and `owner` are the job's from now on."""
        self._shares.add(name, weight, owner)
        job = self._jobs.setdefault(name, _Job(deque()))
        if not job.items:
            job.overtaken_tokens = 0.0
        job.items.append(item)

    def next(self, fits: Callable[[Item], bool], has_begun: Callable[[Item], bool]) -> tuple[str, Item] | None:
        """Returns (job, its first item) of the job that may start now, without removing it; None if none may.

        fits: the item could start now. has_begun: a part of it has, so that others wait for what it holds.
        """
        is_held_up = False
        for name in self._shares.order(self.lengths()):
            job = self._jobs[name]
            if fits(job.items[0]) and (has_begun(job.items[0]) or not is_held_up):
                return name, job.items[0]
            is_held_up |= job.overtaken_tokens >= self.max_overtaking_tokens
        return None

    def charge(self, name: str, tokens: float) -> None:
        """Counts tokens as served to a job whose turn it is; where the number is not known yet, an estimate."""
        for other, waiting in self._jobs.items():
            if waiting.items and self._shares.served(other) < self._shares.served(name):
                waiting.overtaken_tokens += tokens
        self._shares.charge(name, tokens)
        self._jobs[name].overtaken_tokens = 0.0

    def correct(self, name: str, tokens: float) -> None:
        """Adds what an estimate was short of, or takes back what it was too much; a job that has gone is ignored."""
        if name in self._shares:
            self._shares.charge(name, tokens)

    def remove(self, name: str, item: Item) -> None:
        """Takes out one item: it has started in full, or was cancelled."""
        self._jobs[name].items.remove(item)

    def forget(self, name: str) -> list[Item]:
        """Takes a job out, and returns what was waiting."""
        self._shares.remove(name)
        job = self._jobs.pop(name, None)
        return [] if job is None else list(job.items)
