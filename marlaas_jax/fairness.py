"""Whose turn it is where jobs share something: start-time fair queueing (Goyal et al. 1996), by weight. Pure Python.

Counted is what a job was served over its weight; the job furthest behind goes first. A job that was idle, or is new, starts
level with the one furthest behind of those that stayed, so idling earns no claim on the others. Once nobody waits the slate is
clean: all start level again with the one that was served most.
"""

from collections.abc import Collection

REBASE_AT = 1e9  # the count starts anew here, long before small amounts would be lost to rounding


class Shares:
    """What each job was served, in tokens or whatever else is shared, over its weight."""

    def __init__(self) -> None:
        self._weight: dict[str, float] = {}
        self._served: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._level = 0.0

    def __contains__(self, job: str) -> bool:
        return job in self._weight

    def add(self, job: str, weight: float) -> None:
        """Takes a job in, or changes its weight from now on."""
        self._weight[job] = weight
        self._served.setdefault(job, 0.0)

    def remove(self, job: str) -> None:
        """Forgets a job; an unknown one is no error."""
        self._weight.pop(job, None)
        self._served.pop(job, None)
        self._waiting.discard(job)

    def served(self, job: str) -> float:
        """Returns what the job was served over its weight, together with where it started; to be compared, no more."""
        return self._served[job]

    def order(self, waiting: Collection[str]) -> list[str]:
        """Returns the jobs that wait for a turn, the one furthest behind first; ties by name. Who is not named is idle."""
        stayed = [self._served[job] for job in waiting if job in self._waiting]
        reached = min(stayed) if stayed else max(self._served.values(), default=0.0)
        self._level = max(self._level, reached)
        if self._level > REBASE_AT:
            self._served = {job: served - self._level for job, served in self._served.items()}
            self._level = 0.0
        for job in waiting:
            if job not in self._waiting:
                self._served[job] = max(self._served[job], self._level)
        self._waiting = set(waiting)
        return sorted(waiting, key=lambda job: (self._served[job], job))

    def charge(self, job: str, amount: float) -> None:
        """Counts what a job is served; a negative amount takes back what an estimate had too much."""
        self._served[job] += amount / self._weight[job]
