"""What a confined process may use: decided by the service, applied by the process itself before any of a tenant's code runs."""

import msgspec

MIB, GIB = 1 << 20, 1 << 30


class Limits(msgspec.Struct, frozen=True):
    """Of one worker process, by setrlimit, and of all that it starts, by the watch (watch.py)."""

    address_space_bytes: int = 4 * GIB  # of each process
    total_memory_bytes: int = 4 * GIB  # resident, of all its processes
    file_bytes: int = 256 * MIB  # of one file
    total_disk_bytes: int = 1 * GIB  # of all that it writes
    processes: int = 512  # threads count; an environment worker has one per running call of a plain function
    open_files: int = 1024
    cpu_s: int = 6 * 3600  # then another worker takes its place


class Rules(msgspec.Struct, frozen=True):
    """What the process does to itself at its start."""

    limits: Limits
    nproc: int | None  # RLIMIT_NPROC; None: it does not bind root
    user: int | None = None  # to become, with `group`; None: it stays who it is
    group: int | None = None
    keeps_reading: bool = False  # the user may read what root may, within `readable`: the interpreter lies in root's home
    readable: tuple[str, ...] = ()  # Landlock: all else is out of reach; empty: no Landlock
    writable: tuple[str, ...] = ()
    network: bool = False  # Landlock: TCP may be used
