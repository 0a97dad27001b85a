"""A copy of an SQLite file, made at each start once the file was found whole: what to go back to if it rots."""

import contextlib
import logging
import os
import sqlite3
import time
from pathlib import Path

MAX_BYTES = 256 << 20  # a larger file would hold up the start; its owner copies it by `sqlite3 FILE ".backup COPY"`
SUFFIX = ".copy"

log = logging.getLogger(__name__)


def make(path: Path) -> None:
    """Replaces the copy of the database. One that cannot be made, for lack of room say, leaves the old one and a warning."""
    temporary, copy = path.with_name(f"{path.name}{SUFFIX}.tmp"), path.with_name(path.name + SUFFIX)
    if not 0 < path.stat().st_size <= MAX_BYTES:
        return
    try:
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(temporary)) as target:
            source.backup(target)
        os.replace(temporary, copy)
    except (OSError, sqlite3.Error) as error:
        log.warning("no copy of the database made path=%s reason=%s", copy, error)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def remedy(place: str) -> str:
    """Returns what to do about a damaged file, as the end of a sentence."""
    copy = Path(place + SUFFIX)
    try:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(copy.stat().st_mtime))
    except (OSError, ValueError):  # also where the place is a server
        return "restore a copy of it"
    return f"with no service running, put back the copy of {made}: rm -f {place}-wal {place}-shm; mv {copy} {place}"
