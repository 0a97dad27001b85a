"""What a worker prints: a file up to a cap, the last few kilobytes in memory, the rest discarded and counted.

The reader never stops reading, so a worker that prints 50 MB is neither blocked nor able to fill the disk or our memory.
"""

import contextlib
import logging
import threading
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

TAIL_BYTES = 8192
_CHUNK_BYTES = 1 << 16


class OutputLog:
    """One worker's output over all its starts. Thread-safe."""

    def __init__(self, path: Path | None, max_bytes: int):
        self.path = path
        self.max_bytes = max_bytes
        self.num_bytes = 0  # ever read
        self.num_discarded_bytes = 0  # not in the file
        self._tail = b""
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            self._room = max(0, max_bytes - path.stat().st_size)

    def read_from(self, pipe: IO[bytes]) -> None:
        """Reads `pipe` to its end."""
        with pipe:
            while chunk := pipe.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]
                self.write(chunk)

    def write(self, chunk: bytes) -> None:
        """Keeps what still fits into the file, and the tail."""
        with self._lock:
            self.num_bytes += len(chunk)
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            if self._file is None:
                return
            kept = chunk[: self._room]
            self._room -= len(kept)
            if kept:
                try:
                    self._file.write(kept)
                except OSError as error:  # a full disk must not stop the reading
                    log.warning("worker output lost path=%s error=%s", self.path, error)
                    self._room = 0
                    kept = b""
            if len(kept) < len(chunk):
                if not self.num_discarded_bytes:
                    with contextlib.suppress(OSError):
                        self._file.write(f"\n[the rest is discarded: {self.max_bytes} bytes are kept]\n".encode())
                self.num_discarded_bytes += len(chunk) - len(kept)

    def tail(self) -> str:
        """Returns the last few kilobytes, as text."""
        with self._lock:
            return self._tail.decode(errors="replace")

    def close(self) -> None:
        """Closes the file; what comes later is only counted."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
