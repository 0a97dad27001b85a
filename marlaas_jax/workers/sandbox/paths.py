"""What a confined process may read of this machine: the interpreter, its packages, the system's libraries; nobody's data."""

import functools
import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from marlaas_envs import registry
from marlaas_jax import errors

_OURS = (Path(errors.__file__).parent, Path(registry.__file__).parent)
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt")
_ETC = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "nsswitch.conf", "passwd", "group", "mime.types",
    "ssl", "ca-certificates", "pki", "alternatives",
)  # fmt: skip
_ETC_NETWORK = ("resolv.conf", "hosts", "services", "protocols", "gai.conf", "host.conf")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
KERNEL = ("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system/cpu")


@functools.cache
def packages() -> tuple[str, ...]:
    """Returns the folders of the interpreter and of what it can import: its own and site-packages, and our two packages."""
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    folders.add(os.path.dirname(os.path.realpath(sys.executable)))
    folders |= {path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {entry for entry in sys.path if os.path.basename(entry.rstrip("/")) in ("site-packages", "dist-packages")}
    folders |= {str(package) for package in _OURS}
    return _outermost(os.path.realpath(folder) for folder in folders if folder and os.path.isdir(folder))


def import_path() -> str:
    """Returns $PYTHONPATH for a confined process: where our two packages lie."""
    return os.pathsep.join(dict.fromkeys(str(package.parent) for package in _OURS))


def system(network: bool) -> tuple[str, ...]:
    """Returns the system's folders and files that exist here."""
    names = (*_ETC, *(_ETC_NETWORK if network else ()))
    return tuple(path for path in (*_SYSTEM, *(f"/etc/{name}" for name in names)) if os.path.exists(path))


def exposing(folder: Path, network: bool) -> str:
    """Returns the readable folder that the given one lies in, "" if it is out of reach."""
    inner = folder.resolve()
    return next((outer for outer in (*packages(), *system(network)) if inner.is_relative_to(outer)), "")


def _outermost(folders: Iterable[str]) -> tuple[str, ...]:
    kept: list[str] = []
    for folder in sorted(set(folders)):
        if not any(Path(folder).is_relative_to(outer) for outer in kept):
            kept.append(folder)
    return tuple(kept)
