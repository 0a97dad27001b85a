"""Tickets, staleness and the ledger of one job.

A ticket is the job's running number of a prompt. Ticket `t` aims at step `t // groups_per_batch` and may start while that step
is at most `steps_done + max_staleness`. Finished groups enter the open step (the first one not sent to the learner) the
moment enough of them are there, whatever step they aimed at; so a slow group slips to a later step, and once that would break
the cap it is restarted as a new attempt. Staleness is counted in batches: a group whose oldest token was sampled after `b`
trained batches may enter step `s` only if `s - b <= max_staleness`.

Why nothing waits for ever: at most `(max_staleness + 1) * groups_per_batch` tickets are out, so when all of them are slow the
open step stands still and they finish in time. A ticket that was restarted for staleness `max_attempts - 1` times is waited
for: the open step is held back rather than throw it away once more. With `max_staleness = 0` every ticket that is out belongs
to the open step, which is the synchronous loop.
"""

import bisect
import hashlib
from collections.abc import Iterable

import msgspec

from marlaas_jax.errors import CorruptFile


def derive_seed(job_seed: int, ticket: int, attempt: int, sample: int, turn: int, split: str = "train") -> int:
    """Returns the seed in [0, 2**63) of one draw; the same on every machine and in every process."""
    text = f"{split}/{job_seed}/{ticket}/{attempt}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class _LedgerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    low_water: int
    above: tuple[int, ...]


class Ledger:
    """Which tickets are used up (trained, or given up by the job's rule): all below `low_water`, and those in `above`."""

    def __init__(self, low_water: int = 0, above: Iterable[int] = ()):
        self.low_water = low_water
        self.above = set(above)
        self._settle()

    def __contains__(self, ticket: int) -> bool:
        return ticket < self.low_water or ticket in self.above

    def __len__(self) -> int:
        return self.low_water + len(self.above)

    def add(self, ticket: int) -> None:
        """Uses up a ticket; it must not be used up yet."""
        assert ticket not in self, f"ticket {ticket} is used up twice"
        self.above.add(ticket)
        self._settle()

    def to_bytes(self) -> bytes:
        """Returns the ledger as it is committed with the weights."""
        return msgspec.msgpack.encode(_LedgerRecord(schema=1, low_water=self.low_water, above=tuple(sorted(self.above))))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Ledger":
        """Returns the ledger in `data`; empty bytes are the ledger of step 0."""
        if not data:
            return cls()
        try:
            record = msgspec.msgpack.decode(data, type=_LedgerRecord)
        except msgspec.MsgspecError as error:
            raise CorruptFile(f"the checkpoint's ledger cannot be read: {error}") from None
        if record.schema != 1:
            raise CorruptFile(f"the checkpoint's ledger has schema {record.schema}; this version reads schema 1")
        return cls(record.low_water, record.above)

    def _settle(self) -> None:
        while self.low_water in self.above:
            self.above.remove(self.low_water)
            self.low_water += 1


class VersionLog:
    """Maps a snapshot's version (optimizer steps) to the number of batches trained when it was published.

    With `minibatches` > 1 one batch raises the version several times, and a batch whose steps were all skipped does not raise
    it; the cap is counted in batches, so a version stands for the newest batch count under which it was published. A version
    that no StepDone has announced yet is newer than all known ones and counts as the newest known: never too young.
    """

    def __init__(self, version: int, batches: int):
        self._versions = [version]
        self._batches = [batches]

    def record(self, version: int, batches: int) -> None:
        """Notes that `version` was published after `batches` batches."""
        if version == self._versions[-1]:
            self._batches[-1] = max(batches, self._batches[-1])
        elif version > self._versions[-1]:
            self._versions.append(version)
            self._batches.append(batches)

    def batches(self, version: int) -> int:
        """Returns the batch count of the newest published version that is not above `version`."""
        return self._batches[max(bisect.bisect_right(self._versions, version) - 1, 0)]


class TicketBook:
    """Decides which ticket starts, which finished group enters the open step, and which running group is too old."""

    def __init__(
        self,
        *,
        steps: int,
        groups_per_batch: int,
        max_staleness: int,
        max_attempts: int,
        ledger: Ledger | None = None,
        steps_done: int = 0,
    ):
        self.steps = steps
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.max_attempts = max_attempts
        self.ledger = ledger if ledger is not None else Ledger()
        self.steps_done = steps_done
        self.open_step = steps_done
        self.running: set[int] = set()
        self.ready: dict[int, int | None] = {}  # ticket -> batch count of its oldest token; None: an empty place
        self._attempts: dict[int, int] = {}  # number of the next attempt
        self._failures: dict[int, int] = {}
        self._stale_restarts: dict[int, int] = {}
        self._restarts: list[int] = []  # sorted tickets that wait for a new attempt
        self._next_ticket = self.ledger.low_water
        if len(self.ledger) != steps_done * groups_per_batch:
            raise CorruptFile(
                f"the ledger of step {steps_done} names {len(self.ledger)} tickets; "
                f"rollout.groups_per_batch={groups_per_batch} makes {steps_done * groups_per_batch}"
            )

    @property
    def finished(self) -> bool:
        """True once every batch is trained."""
        return self.steps_done >= self.steps

    def next_startable(self) -> int | None:
        """Returns the ticket that would start now, or None."""
        if self.open_step >= self.steps or self.open_step - self.steps_done > self.max_staleness:
            return None  # what starts now could not enter the open step
        if self._restarts:
            return self._restarts[0]
        while self._next_ticket in self.ledger:
            self._next_ticket += 1
        target = self._next_ticket // self.groups_per_batch
        if target >= self.steps or target > self.steps_done + self.max_staleness:
            return None
        return self._next_ticket

    def start(self) -> tuple[int, int]:
        """Starts the next ticket; returns (ticket, attempt)."""
        ticket = self.next_startable()
        assert ticket is not None, "no ticket may start"
        if self._restarts and ticket == self._restarts[0]:
            self._restarts.pop(0)
        else:
            self._next_ticket += 1
        self.running.add(ticket)
        attempt = self._attempts.get(ticket, 0)
        self._attempts[ticket] = attempt + 1
        return ticket, attempt

    def reserve_attempts(self, ticket: int, next_attempt: int) -> None:
        """Makes the ticket's next attempt number at least `next_attempt` (its episodes have used those below)."""
        self._attempts[ticket] = max(self._attempts.get(ticket, 0), next_attempt)

    def finish(self, ticket: int, oldest_batch: int) -> bool:
        """Takes a scored group; False if it is too old for the open step, then the ticket is to be restarted."""
        if self.open_step - oldest_batch > self.max_staleness:
            self.restart_stale(ticket)
            return False
        self.running.remove(ticket)
        self.ready[ticket] = oldest_batch
        return True

    def fail(self, ticket: int, *, final: bool = False) -> bool:
        """Counts a failed attempt; returns True while another may follow. `final`: no other attempt can do better."""
        self.running.remove(ticket)
        self._failures[ticket] = self._failures.get(ticket, 0) + 1
        if final or self._failures[ticket] >= self.max_attempts:
            return False
        bisect.insort(self._restarts, ticket)
        return True

    def give_up(self, ticket: int) -> None:
        """Leaves the ticket's place in its batch empty (rule smaller_batch)."""
        self.ready[ticket] = None

    def restart_stale(self, ticket: int) -> None:
        """Puts a ticket back whose group is too old, running or finished."""
        self.running.discard(ticket)
        self.ready.pop(ticket, None)
        self._stale_restarts[ticket] = self._stale_restarts.get(ticket, 0) + 1
        bisect.insort(self._restarts, ticket)

    def is_too_old(self, oldest_batch: int) -> bool:
        """True if a group with such a token can enter neither the open step nor a later one."""
        return self.open_step - oldest_batch > self.max_staleness

    def take_batch(self, running_floor: dict[int, int]) -> list[int] | None:
        """Returns the tickets of the open step in order and closes it, or None while it must wait.

        running_floor: per running ticket the batch count of its oldest token so far (or of the oldest it may get). A ticket
        that was restarted too often already holds the step back if it would be too old for the next one.
        """
        if self.open_step >= self.steps or len(self.ready) < self.groups_per_batch:
            return None
        for ticket, floor in running_floor.items():
            waited_for = self._stale_restarts.get(ticket, 0) >= self.max_attempts - 1
            if waited_for and self.open_step + 1 - floor > self.max_staleness:
                return None
        chosen = self._choose()
        for ticket in chosen:
            del self.ready[ticket]
            self.ledger.add(ticket)
            for table in (self._attempts, self._failures, self._stale_restarts):
                table.pop(ticket, None)
        self.open_step += 1
        return chosen

    def stop(self) -> None:
        """Makes the batches sent so far the last ones."""
        self.steps = self.open_step
        self.ready.clear()
        self._restarts.clear()

    def step_done(self, steps_done: int) -> None:
        """Notes that the learner has trained this many batches."""
        self.steps_done = max(self.steps_done, steps_done)

    def failures(self, ticket: int) -> int:
        """Returns how many attempts of the ticket have failed."""
        return self._failures.get(ticket, 0)

    def restarts_waiting(self) -> int:
        """Returns how many tickets wait for a new attempt."""
        return len(self._restarts)

    def _choose(self) -> list[int]:
        """Returns the tickets of a full step: empty places first, but never only those; then the oldest tokens."""
        empty = sorted(ticket for ticket, oldest in self.ready.items() if oldest is None)
        groups = sorted((oldest, ticket) for ticket, oldest in self.ready.items() if oldest is not None)
        num_empty = min(len(empty), self.groups_per_batch - (1 if groups else 0))
        return sorted(empty[:num_empty] + [ticket for _, ticket in groups[: self.groups_per_batch - num_empty]])
