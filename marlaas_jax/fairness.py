"""Whose turn it is where jobs share something: start-time fair queueing (Goyal et al. 1996), by weight. Pure Python.

Counted is what a job was served over its weight; the job furthest behind goes first. A job that was idle, or is new, starts
level with the one furthest behind of those that stayed, so idling earns no claim on the others. Once nobody waits the slate is
clean: all start level again with the one that was served most.

Jobs of one owner share what the owner gets (hierarchical, as in Goyal et al. section 3): owners take turns by their weights,
and an owner's jobs by theirs. So nobody gets more by having more jobs, or by a larger weight on them. A job without an owner
stands for itself, with its own weight.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

REBASE_AT = 1e9  # the count starts anew here, long before small amounts would be lost to rounding


@dataclass(frozen=True)
class Owner:
    """Whose jobs they are, and what all of them together weigh."""

    name: str
    weight: float


class _Turns:
    """One level: members that take turns."""

    def __init__(self) -> None:
        self.weight: dict[str, float] = {}
        self.served: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._level = 0.0

    def add(self, name: str, weight: float) -> None:
        self.weight[name] = weight
        self.served.setdefault(name, 0.0)

    def remove(self, name: str) -> None:
        self.weight.pop(name, None)
        self.served.pop(name, None)
        self._waiting.discard(name)

    def order(self, waiting: Collection[str]) -> list[str]:
        stayed = [self.served[name] for name in waiting if name in self._waiting]
        reached = min(stayed) if stayed else max(self.served.values(), default=0.0)
        self._level = max(self._level, reached)
        if self._level > REBASE_AT:
            self.served = {name: served - self._level for name, served in self.served.items()}
            self._level = 0.0
        for name in waiting:
            if name not in self._waiting:
                self.served[name] = max(self.served[name], self._level)
        self._waiting = set(waiting)
        return sorted(waiting, key=lambda name: (self.served[name], name))

    def charge(self, name: str, amount: float) -> None:
        self.served[name] += amount / self.weight[name]


class Shares:
    """What each job and each owner was served, in tokens or whatever else is shared, over its weight."""

    def __init__(self) -> None:
        self._owners = _Turns()  # a job without an owner has a place of its own here
        self._jobs: dict[str, _Turns] = {}  # by place
        self._place: dict[str, str] = {}  # of each job

    def __contains__(self, job: str) -> bool:
        return job in self._place

    def add(self, job: str, weight: float, owner: Owner | None = None) -> None:
        """Takes a job in, or changes its weight and its owner's from now on."""
        place = _place(job, owner)
        if self._place.setdefault(job, place) != place:
            self.remove(job)
            self._place[job] = place
        self._owners.add(place, weight if owner is None else owner.weight)
        self._jobs.setdefault(place, _Turns()).add(job, weight)

    def reweigh(self, owner: Owner) -> None:
        """Changes an owner's weight from now on; one without jobs here is no error."""
        if (place := _place("", owner)) in self._jobs:
            self._owners.add(place, owner.weight)

    def remove(self, job: str) -> None:
        """Forgets a job, and its owner with the last one; an unknown one is no error."""
        place = self._place.pop(job, None)
        if place is None:
            return
        self._jobs[place].remove(job)
        if not self._jobs[place].weight:
            del self._jobs[place]
            self._owners.remove(place)

    def served(self, job: str) -> tuple[float, float]:
        """Returns what the job's owner and the job were served over their weights, and where they started; to be compared."""
        place = self._place[job]
        return self._owners.served[place], self._jobs[place].served[job]

    def order(self, waiting: Iterable[str]) -> list[str]:
        """Returns the jobs that wait for a turn, the one furthest behind first; ties by name. Who is not named is idle."""
        by_place: defaultdict[str, list[str]] = defaultdict(list)
        for job in waiting:
            by_place[self._place[job]].append(job)
        for place, turns in self._jobs.items():
            if place not in by_place:
                turns.order(())
        return [job for place in self._owners.order(by_place) for job in self._jobs[place].order(by_place[place])]

    def charge(self, job: str, amount: float) -> None:
        """Counts what a job is served; a negative amount takes back what an estimate had too much."""
        place = self._place[job]
        self._owners.charge(place, amount)
        self._jobs[place].charge(job, amount)


def entitled(jobs: Mapping[str, tuple[float, Owner | None]]) -> dict[str, float]:
    """Returns each job's part of the whole while all of them wait: (weight, owner) by name -> parts that add up to 1."""
    owners, together = {}, defaultdict[str, float](float)
    for job, (weight, owner) in jobs.items():
        owners[_place(job, owner)] = weight if owner is None else owner.weight
        together[_place(job, owner)] += weight
    whole = sum(owners.values())
    places = {job: _place(job, owner) for job, (_, owner) in jobs.items()}
    return {job: owners[places[job]] / whole * weight / together[places[job]] for job, (weight, _) in jobs.items()}


def _place(job: str, owner: Owner | None) -> str:
    return f"job {job}" if owner is None else f"owner {owner.name}"
