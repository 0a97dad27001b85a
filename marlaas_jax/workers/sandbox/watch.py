"""Looks once a second at what confined workers use together with all that they started, and kills those beyond a limit.

setrlimit bounds one process and one file; this bounds the sums: memory, processes, disk.
"""

import contextlib
import logging
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from marlaas_jax.workers.sandbox.processes import Seen, all_seen, belonging
from marlaas_jax.workers.sandbox.rules import Limits

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
_MAX_FILES = 100_000  # in one temp folder


@dataclass
class _Watched:
    pid: int
    uid: int | None
    folder: Path
    reason: str = ""


class Watch:
    """A thread that starts with the first worker. Thread-safe."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._lock = threading.Lock()
        self._watched: dict[Path, _Watched] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, pid: int, uid: int | None, folder: Path | None) -> None:
        """Watches a worker's process; its temp folder names it."""
        assert folder is not None
        with self._lock:
            self._watched[folder] = _Watched(pid, uid, folder)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="marlaas-sandbox-watch", daemon=True)
                self._thread.start()

    def remove(self, folder: Path | None) -> str:
        """Ends the watch over a process; returns why it was killed, "" if it was not."""
        with self._lock:
            watched = None if folder is None else self._watched.pop(folder, None)
        return watched.reason if watched else ""

    def close(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> None:
        """Looks at all, once."""
        with self._lock:
            watched = list(self._watched.values())
        if not watched:
            return
        seen = all_seen()
        for entry in watched:
            entry.reason = entry.reason or self._excess(belonging(seen, entry.pid, entry.uid), entry.folder)
            if entry.reason:
                log.warning("confined worker killed pid=%d reason=%s", entry.pid, entry.reason)
                with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
                    if entry.folder in self._watched:  # else it has ended, and its number may be another's
                        os.killpg(entry.pid, signal.SIGKILL)

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            self.look()

    def _excess(self, own: list[Seen], folder: Path) -> str:
        limits = self._limits
        memory, disk = sum(process.resident_bytes for process in own), _size(folder, limits.total_disk_bytes)
        if memory > limits.total_memory_bytes:
            return f"its processes took {_mib(memory)} MiB of memory; {_mib(limits.total_memory_bytes)} are allowed"
        if len(own) > limits.processes:
            return f"it had {len(own)} processes; {limits.processes} are allowed"
        if disk > limits.total_disk_bytes:
            return f"it wrote over {_mib(limits.total_disk_bytes)} MiB, or too many files; more is not allowed"
        return ""


def _size(folder: Path, enough: int) -> int:
    """Returns the bytes on disk below a folder; it may stop counting beyond `enough`."""
    total = number = 0
    with contextlib.suppress(OSError):
        waiting = [folder]
        while waiting and total <= enough:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    number += 1
                    if number > _MAX_FILES:
                        return enough + 1
                    with contextlib.suppress(OSError):  # it is being removed
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(Path(entry.path))
    return total


def _mib(size: int) -> int:
    return size >> 20
