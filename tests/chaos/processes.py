"""The processes of a service, from outside: which there are, of which kind, under which name events speak of them."""

import contextlib
import re
from collections import Counter
from pathlib import Path

import psutil

MODULES = {"device": "device_process", "data": "data_worker", "environment": "env_worker", "guardian": "guardian.py"}
KINDS = ("service", "device", "data", "environment")


def kind_of(process: psutil.Process) -> str:
    """Returns the kind of a process of ours, "" for another or one that is gone."""
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return next((kind for kind, module in MODULES.items() if module in command), "")
    return ""


def name_of(process: psutil.Process) -> str:
    """Returns the name of a worker's place: its id without what is new at every start."""
    match = re.search(r"--worker-id (\S+)-[0-9a-f]{8}", " ".join(process.cmdline()))
    assert match is not None, process.cmdline()
    return match[1]


def workers(service_pid: int) -> list[psutil.Process]:
    """Returns the live children of the service, and theirs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(service_pid).children(recursive=True)
        return [child for child in found if is_alive(child)]
    return []


def is_alive(process: psutil.Process) -> bool:
    """Whether the very process runs, or is stopped; a zombie does not count."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def descriptors(pid: int) -> Counter[str]:
    """Returns how many open files of each sort a process has: sockets, pipes, and files by name."""
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            found[target.partition(":")[0] if ":" in target else Path(target).name] += 1
    return found
