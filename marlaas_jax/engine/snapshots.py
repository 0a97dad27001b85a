"""The snapshots that a sampler keeps: each job's latest, those that a request still names, and a few that were loaded.

The rest die at once; of those that were loaded, the longest unused when there are too many. No job's latest ever makes room.

Of those that have no adapter slot, a fixed number stays on the device; the longest unused wait in host memory, from where they
are written into the bank like any other.
"""

import dataclasses
from collections.abc import Collection, Hashable
from typing import NamedTuple

import jax

from marlaas_jax.lora.snapshot import Snapshot


class SnapshotKey(NamedTuple):
    """A snapshot's name, which never means two different weights."""

    job: str
    incarnation: int
    version: int


def key_of(snapshot: Snapshot) -> SnapshotKey:
    """Returns the snapshot's name."""
    return SnapshotKey(snapshot.job, snapshot.incarnation, snapshot.version)


class SnapshotStore:
    """Snapshots by name, with a count of who uses each."""

    def __init__(self, max_on_device: int, max_loaded: int = 8) -> None:
        """`max_on_device` counts snapshots beside the resident ones; `max_loaded` those that no job publishes."""
        self._max_on_device = max_on_device
        self._max_loaded = max_loaded
        self._loaded: dict[SnapshotKey, None] = {}  # longest unused first
        self._snapshots: dict[SnapshotKey, Snapshot] = {}
        self._on_device: dict[SnapshotKey, None] = {}  # longest unused first
        self._latest: dict[str, SnapshotKey] = {}
        self._uses: dict[SnapshotKey, int] = {}

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def num_on_device(self) -> int:
        """Number of snapshots that are held as device arrays, the resident ones included."""
        return len(self._on_device)

    def latest(self, job: str) -> Snapshot | None:
        """Returns the job's newest snapshot."""
        key = self._latest.get(job)
        return None if key is None else self._snapshots[key]

    def __getitem__(self, key: SnapshotKey) -> Snapshot:
        return self._snapshots[key]

    def get(self, key: SnapshotKey) -> Snapshot | None:
        """Returns a snapshot if it is still kept."""
        return self._snapshots.get(key)

    def publish(self, snapshot: Snapshot) -> list[SnapshotKey]:
        """Makes a snapshot the job's latest; returns the names of those that died."""
        key = key_of(snapshot)
        self._snapshots[key] = snapshot
        self._on_device[key] = None
        before = self._latest.get(snapshot.job)
        self._latest[snapshot.job] = key
        return [] if before is None or before == key else self._collect(before)

    @property
    def num_loaded_in_use(self) -> int:
        """Number of loaded snapshots that cannot make room for another."""
        return sum(key in self._uses for key in self._loaded)

    @property
    def has_room_to_load(self) -> bool:
        """Whether another snapshot may be loaded now."""
        return self.num_loaded_in_use < self._max_loaded

    def load(self, snapshot: Snapshot) -> list[SnapshotKey]:
        """Keeps a snapshot, of host arrays, that is no job's latest; returns the names of those that made room for it."""
        key = key_of(snapshot)
        self._snapshots[key] = snapshot
        self._loaded[key] = None
        unused = [other for other in self._loaded if other not in self._uses and other != key]
        dead = unused[: max(len(self._loaded) - self._max_loaded, 0)]
        for other in dead:
            del self._loaded[other]
            self._collect(other)
        return dead

    def use(self, key: SnapshotKey) -> None:
        """Keeps a snapshot until as many `release`."""
        self._uses[key] = self._uses.get(key, 0) + 1
        if key in self._loaded:
            del self._loaded[key]
            self._loaded[key] = None

    def touch(self, key: SnapshotKey, resident: Collection[Hashable]) -> None:
        """Notes that a resident snapshot was put to use, and moves to host memory what is beyond the bound after that."""
        if key in self._on_device:
            del self._on_device[key]
            self._on_device[key] = None
        others = [other for other in self._on_device if other not in resident]
        for other in others[: max(len(others) - self._max_on_device, 0)]:
            snapshot = self._snapshots[other]
            self._snapshots[other] = dataclasses.replace(snapshot, weights=jax.device_get(snapshot.weights))
            del self._on_device[other]

    def release(self, key: SnapshotKey) -> list[SnapshotKey]:
        """Takes back one `use`; returns the names of those that died."""
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
        return self._collect(key)

    def forget(self, job: str) -> list[SnapshotKey]:
        """Drops a job's latest; returns the names of those that died."""
        key = self._latest.pop(job, None)
        return [] if key is None else self._collect(key)

    def _collect(self, key: SnapshotKey) -> list[SnapshotKey]:
        is_kept = key in self._uses or key in self._loaded or self._latest.get(key.job) == key
        if is_kept or key not in self._snapshots:
            return []
        del self._snapshots[key]
        self._on_device.pop(key, None)
        return [key]
