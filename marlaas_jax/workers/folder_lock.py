"""One process at a time writes a run folder: FOLDER/lock, which the kernel frees with the process, however that ends."""

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from marlaas_jax.errors import StorageError
from marlaas_jax.workers.controller_files import writing

LOCK = "lock"

log = logging.getLogger(__name__)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keeps every other process from writing `folder`, which must exist. Raises StorageError where another holds it."""
    with writing(folder / LOCK):
        file = (folder / LOCK).open("a+b", buffering=0)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(20).decode(errors="replace") or "unknown"
            raise StorageError(f"{folder}: is being written by another run (pid {holder}); wait for it or stop it") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            log.warning("run folder not locked, its file system knows no locks folder=%s", folder)
        with writing(folder / LOCK):
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        yield
