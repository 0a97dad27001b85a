"""Which job's work comes next: deficit-weighted round robin by tokens. Pure Python.

Kept as service received per weight: the job that is furthest behind goes first. A job that was idle, or is new, starts level
with the one furthest behind, so idling earns no claim on the others.
"""

from collections.abc import Collection


class FairQueue:
    """Service in tokens / weight of each job."""

    def __init__(self) -> None:
        self._weight: dict[str, float] = {}
        self._service: dict[str, float] = {}
        self._active: set[str] = set()

    def add(self, job: str, weight: float) -> None:
        """Takes a job in."""
        self._weight[job] = weight
        self._service[job] = 0.0

    def remove(self, job: str) -> None:
        """Forgets a job."""
        del self._weight[job], self._service[job]
        self._active.discard(job)

    def order(self, waiting: Collection[str]) -> list[str]:
        """Returns the jobs that have work, the one furthest behind first; ties by name."""
        stayed = [self._service[job] for job in waiting if job in self._active]
        level = min(stayed, default=max((self._service[job] for job in self._active), default=0.0))
        for job in waiting:
            if job not in self._active:
                self._service[job] = max(self._service[job], level)
        self._active = set(waiting)
        return sorted(waiting, key=lambda job: (self._service[job], job))

    def charge(self, job: str, tokens: float) -> None:
        """Counts service."""
        self._service[job] += tokens / self._weight[job]
