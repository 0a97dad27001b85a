"""Deficit-weighted round robin (Shreedhar & Varghese 1996) over the jobs that share one stage."""

import math
from collections.abc import Callable


class FairQueue:
    """Shares a stage by weight: each visit earns a job `quantum * weight` of credit, each start spends its cost."""

    def __init__(self, quantum: float = 8.0):
        self.quantum = quantum
        self._weights: dict[str, float] = {}
        self._credit: dict[str, float] = {}
        self._order: list[str] = []
        self._earned = False  # the job in front has had its credit for this visit

    def add(self, job: str, weight: float) -> None:
        """Lets a job take part, at the end of the round."""
        if job not in self._weights:
            self._order.append(job)
            self._credit[job] = 0.0
        self._weights[job] = weight

    def remove(self, job: str) -> None:
        """Forgets a job."""
        if self._weights.pop(job, None) is not None:
            if self._order[0] == job:
                self._earned = False
            self._order.remove(job)
            del self._credit[job]

    def next(self, cost_of: Callable[[str], float | None], room: float = math.inf) -> str | None:
        """Returns the job that may start something now and charges it, or None when no job has anything to start.

        cost_of: what the job's next piece of work costs, None when it has none. A job without work keeps no credit. When the
        job whose turn it is needs more than `room`, nobody starts: else small pieces would keep a large one out for ever.
        """
        costs = {job: cost for job in self._order if (cost := cost_of(job)) is not None}
        if not costs:
            return None
        while True:
            job = self._order[0]
            cost = costs.get(job)
            if cost is not None and not self._earned:
                self._credit[job] += self.quantum * self._weights[job]
                self._earned = True
            if cost is not None and self._credit[job] >= cost:
                if cost > room:
                    return None
                self._credit[job] -= cost
                return job
            if cost is None:
                self._credit[job] = 0.0
            self._order.append(self._order.pop(0))
            self._earned = False
