"""Looks at the machine's processes (Linux): who belongs to a worker, what they use, which users have any."""

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


@dataclass(frozen=True)
class Seen:
    """One process at one moment."""

    pid: int
    parent: int
    session: int
    uid: int
    num_threads: int
    resident_bytes: int


def all_seen() -> list[Seen]:
    """Returns the processes that there are; none where there is no /proc."""
    found = []
    for name in os.listdir(_PROC) if _PROC.is_dir() else ():
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
                text = (_PROC / name / "stat").read_text(errors="replace")
                fields = text[text.rindex(")") + 2 :].split()  # the command before it may hold anything
                uid = os.stat(_PROC / name).st_uid
                resident = int(fields[21]) * _PAGE_BYTES
                found.append(Seen(int(name), int(fields[1]), int(fields[3]), uid, int(fields[17]), resident))
    return found


def belonging(seen: list[Seen], pid: int, uid: int | None) -> list[Seen]:
    """Returns a worker's processes: its descendants, those of its session, and those of the user that only it is."""
    children: dict[int, list[Seen]] = {}
    for process in seen:
        children.setdefault(process.parent, []).append(process)
    own = {process.pid: process for process in seen if process.pid == pid or process.session == pid or process.uid == uid}
    waiting = list(own.values())
    while waiting:
        for child in children.get(waiting.pop().pid, ()):
            if child.pid not in own:
                own[child.pid] = child
                waiting.append(child)
    return list(own.values())


def kill_all_of(uid: int) -> None:
    """Kills every process of a user at one stroke, however fast they make new ones. Takes root."""
    command = ["/bin/sh", "-c", "kill -9 -1"]
    subprocess.run(command, user=uid, group=uid, extra_groups=(), cwd="/", env={}, timeout=30, check=False)
