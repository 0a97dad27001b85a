"""Which snapshot is resident in which adapter slot of the bank: pure bookkeeping, least recently used goes first.

Slot 0 is the null adapter and never handed out. A snapshot with running requests is pinned and stays. Running requests may
pin all but one of the other slots, so that a publish always finds a place: slots >= versions that may run at once + 1.
"""

from collections import OrderedDict
from collections.abc import Hashable

NULL_SLOT = 0


class Residency:
    """Maps keys to adapter slots 1 .. num_slots - 1."""

    def __init__(self, num_slots: int):
        if num_slots < 3:
            raise ValueError(
                f"num_slots={num_slots}: a bank needs at least 3: the null adapter, one that rows use, one being published"
            )
        self._slots: OrderedDict[Hashable, int] = OrderedDict()  # least recently used first
        self._pins: dict[Hashable, int] = {}
        self._free = list(range(num_slots - 1, 0, -1))
        self.max_pinned = num_slots - 2

    def slot_of(self, key: Hashable) -> int | None:
        """Returns where `key` is resident, or None."""
        return self._slots.get(key)

    @property
    def resident(self) -> dict[Hashable, int]:
        """All resident keys and their slots."""
        return dict(self._slots)

    @property
    def num_pinned(self) -> int:
        """Number of snapshots that running requests name."""
        return len(self._pins)

    def can_pin(self, key: Hashable) -> bool:
        """True if a request that names `key` may start now."""
        return key in self._pins or len(self._pins) < self.max_pinned

    def place(self, key: Hashable) -> tuple[int, bool]:
        """Returns (slot, whether its weights must be written). Drops the least recently used unpinned key if it must."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return self._slots[key], False
        if not self._free:
            victim = next((k for k in self._slots if k not in self._pins), None)
            assert victim is not None, f"all {len(self._slots)} adapter slots are pinned: {self.max_pinned} is the most allowed"
            self._free.append(self._slots.pop(victim))
        self._slots[key] = self._free.pop()
        return self._slots[key], True

    def pin(self, key: Hashable) -> tuple[int, bool]:
        """Places `key` and keeps it until as many `unpin`; the caller has asked `can_pin`."""
        assert self.can_pin(key), f"{len(self._pins)} snapshots are pinned; {self.max_pinned} is the most allowed"
        placed = self.place(key)
        self._pins[key] = self._pins.get(key, 0) + 1
        return placed

    def unpin(self, key: Hashable) -> None:
        """Takes back one `pin`."""
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]

    def drop(self, key: Hashable) -> None:
        """Frees the slot of a key that nobody will ask for again."""
        assert key not in self._pins, f"{key} is pinned"
        if key in self._slots:
            self._free.append(self._slots.pop(key))
