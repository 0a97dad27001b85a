"""Landlock (Linux 5.13 and later): a process gives up all files but those named, TCP, and signals to others, for good.

Numbers and structures: include/uapi/linux/landlock.h of the kernel. Connecting to a local socket by its path is not
restricted by the versions known here.
"""

import ctypes
import os
import stat
import sys

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # first version that knows so many rights to files
_TCP = 0b11  # bind, connect: version 4
_SCOPES = 0b11  # abstract local sockets, signals: version 6


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def version() -> int:
    """Returns the kernel's version of Landlock, 0 where there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def restrict(readable: tuple[str, ...], writable: tuple[str, ...], *, network: bool) -> None:
    """Restricts this thread and all that it starts; no_new_privs must be set. Raises OSError.

    Paths that do not exist are skipped.
    """
    known = version()
    all_rights = (1 << max(count for first, count in _RIGHTS.items() if first <= known)) - 1
    ruleset = _Ruleset(all_rights, _TCP if known >= 4 and not network else 0, _SCOPES if known >= 6 else 0)
    size = ctypes.sizeof(ruleset) if known >= 6 else 16 if known >= 4 else 8
    fd = _checked(_libc().syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0))
    try:
        for path in readable:
            _allow(fd, path, _EXECUTE | _READ_FILE | _READ_DIR)
        for path in writable:
            _allow(fd, path, all_rights)
        _checked(_libc().syscall(_RESTRICT_SELF, fd, 0))
    finally:
        os.close(fd)


def _allow(ruleset_fd: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
        rule = _PathBeneath(rights, fd)
        _checked(_libc().syscall(_ADD_RULE, ruleset_fd, _RULE_PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(fd)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"landlock: {os.strerror(ctypes.get_errno())}")
    return result
