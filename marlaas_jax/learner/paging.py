"""Which jobs stand in the learner's adapter slots while the others wait in host memory: pure bookkeeping.

Slot 0 is the null adapter and never handed out. A job in the middle of a batch is *held*: what it has accumulated lives in its
slot, so it stays. Everybody else is evictable: the idle first, least recently used before others, then those that wait, the
last of the queue first. A job begins a batch only if nobody who waits without a slot is ahead of it in the queue, so whoever is
furthest behind has the next slot that comes free, and no slot is held for longer than a batch: nobody starves.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol

from marlaas_jax.lora.adapter import Weights

State = tuple[Weights, Weights, Weights]  # one job's weights and moments, NumPy


class Shelf(Protocol):
    """Where the state of jobs without a slot waits, bit for bit. Reading may raise CorruptFile or StorageError."""

    def __contains__(self, job: str) -> bool: ...

    def put(self, job: str, state: State) -> None:
        """Lays a job's state down."""
        ...

    def get(self, job: str) -> State:
        """Returns a job's state, which stays."""
        ...

    def drop(self, job: str) -> None:
        """Forgets a job's state; an unknown job is no error."""
        ...

    def gauges(self) -> dict[str, float]:
        """Returns what lies where."""
        ...


class HostMemory:
    """A shelf without a bound."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    def __contains__(self, job: str) -> bool:
        return job in self._states

    def put(self, job: str, state: State) -> None:
        """Lays a job's state down."""
        self._states[job] = state

    def get(self, job: str) -> State:
        """Returns a job's state, which stays."""
        return self._states[job]

    def drop(self, job: str) -> None:
        """Forgets a job's state; an unknown job is no error."""
        self._states.pop(job, None)

    def gauges(self) -> dict[str, float]:
        """Returns how many lie here."""
        return {"learner/host_jobs": len(self._states)}


class Slots:
    """Maps resident jobs to adapter slots 1 .. num_slots - 1."""

    def __init__(self, num_slots: int):
        self._slots: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._free = list(range(num_slots - 1, 0, -1))
        self._max_resident = num_slots - 1

    def __contains__(self, job: str) -> bool:
        return job in self._slots

    def __getitem__(self, job: str) -> int:
        return self._slots[job]

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, job: str) -> int | None:
        """Gives a job a free slot and returns it; None if there is none."""
        if not self._free:
            return None
        self._slots[job] = self._free.pop()
        return self._slots[job]

    def release(self, job: str) -> int | None:
        """Frees a job's slot and returns it; None if it had none."""
        slot = self._slots.pop(job, None)
        if slot is not None:
            self._free.append(slot)
        return slot

    def use(self, job: str) -> None:
        """Makes a resident job the most recently used."""
        self._slots.move_to_end(job)

    def admitted(self, queue: Sequence[str], held: Collection[str]) -> list[str]:
        """Returns who of the queue may run, in its order: who is held, and of the others as many as there is room for."""
        room = self._max_resident - len(held)
        others = [job for job in queue if job not in held][:room]
        return [job for job in queue if job in held or job in others]

    def leaving(self, queue: Sequence[str], held: Collection[str]) -> str | None:
        """Returns whose slot the first of `admitted` takes if it has none: nobody's, None, while one is free."""
        if self._free:
            return None
        idle = (job for job in self._slots if job not in queue and job not in held)
        last = (job for job in reversed(queue) if job in self._slots and job not in held)
        return next(idle, None) or next(last)
