"""The shelf of paged-out jobs: host memory up to a bound, files beyond it.

The state that was not used for longest goes to disk first. A file holds a checksum and the arrays as they are, so what comes
back is equal bit for bit or an error that names the file. The files are of no use to another process, which starts from
checkpoints: what an earlier one left is removed at the start.
"""

import hashlib
import logging
import shutil
from collections import OrderedDict
from pathlib import Path

import jax
from safetensors import SafetensorError
from safetensors.numpy import load, save

from marlaas_jax.errors import CorruptFile, StorageError
from marlaas_jax.learner.paging import State
from marlaas_jax.lora.adapter import Weights

DIGEST_BYTES = 32

log = logging.getLogger(__name__)


class Pages:
    """Keeps at most `max_bytes` in memory; None: everything."""

    def __init__(self, folder: Path, max_bytes: int | None):
        self._folder, self._max_bytes = folder, max_bytes
        self._kept: OrderedDict[str, State] = OrderedDict()  # least recently used first
        self._on_disk: set[str] = set()
        self._bytes = 0  # in memory
        self._num_writes = self._num_reads = 0
        shutil.rmtree(folder, ignore_errors=True)

    def __contains__(self, job: str) -> bool:
        return job in self._kept or job in self._on_disk

    def put(self, job: str, state: State) -> None:
        """Lays a job's state down; what is beyond the bound then goes to disk, or stays where the disk is full."""
        self.drop(job)
        self._kept[job] = state
        self._bytes += _size(state)
        while self._max_bytes is not None and self._bytes > self._max_bytes and self._kept:
            oldest = next(iter(self._kept))
            try:
                self._write(oldest, self._kept[oldest])
            except OSError as error:
                log.warning("paged-out job stays in memory job=%s reason=%s", oldest, error)
                return
            self._bytes -= _size(self._kept.pop(oldest))
            self._on_disk.add(oldest)

    def get(self, job: str) -> State:
        """Returns a job's state, which stays where it is. Raises CorruptFile or StorageError."""
        if job in self._kept:
            self._kept.move_to_end(job)
            return self._kept[job]
        return self._read(job)

    def drop(self, job: str) -> None:
        """Forgets a job's state; an unknown job is no error."""
        if job in self._kept:
            self._bytes -= _size(self._kept.pop(job))
        if job in self._on_disk:
            self._on_disk.remove(job)
            self._path(job).unlink(missing_ok=True)

    def gauges(self) -> dict[str, float]:
        """Returns how many jobs lie where, the bytes in memory, and the moves to disk and back since the start."""
        return {
            "learner/host_jobs": len(self._kept),
            "learner/host_bytes": self._bytes,
            "learner/disk_jobs": len(self._on_disk),
            "learner/disk_writes": self._num_writes,
            "learner/disk_reads": self._num_reads,
        }

    def _write(self, job: str, state: State) -> None:
        payload = save({f"{part}/{target}/{name}": array for part, tree in enumerate(state) for target, both in tree.items()
                        for name, array in both.items()})  # fmt: skip
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path(job).write_bytes(_digest(payload) + payload)
        self._num_writes += 1

    def _read(self, job: str) -> State:
        path = self._path(job)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StorageError(f"{path}: cannot be read ({error.strerror or error})") from None
        digest, payload = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if _digest(payload) != digest:
            raise CorruptFile(f"{path}: its checksum is wrong")
        try:
            arrays = load(payload)
        except SafetensorError as error:
            raise CorruptFile(f"{path}: cannot be read ({error})") from None
        parts: tuple[Weights, Weights, Weights] = ({}, {}, {})
        for key, array in arrays.items():
            part, target, name = key.split("/")
            parts[int(part)].setdefault(target, {})[name] = array
        self._num_reads += 1
        return parts

    def _path(self, job: str) -> Path:
        return self._folder / f"{job}.page"


def _size(state: State) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(state))


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()
