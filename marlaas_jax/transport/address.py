"""Where a server binds: ipc paths that fit into a socket address, or a loopback port chosen by the system."""

import contextlib
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
from pathlib import Path

from marlaas_jax.errors import InvalidConfig

MAX_IPC_PATH_BYTES = 103 if sys.platform == "darwin" else 107
_SUFFIX = ".hb"  # of the heartbeat socket beside an ipc socket


def resolve(address: str, *, anywhere: bool = False) -> tuple[str, str, Path | None]:
    """Returns (data address, heartbeat address, private folder to delete at the end or None).

    "ipc" puts a fresh socket into a private folder; "ipc://PATH" and "tcp://127.0.0.1:PORT" are used as given (port 0: any).
    `anywhere`: another tcp host is allowed too; the heartbeats then have the port after it.
    """
    if address == "ipc":
        folder = _private_folder()
        path = folder / "s"
        return f"ipc://{path}", f"ipc://{path}{_SUFFIX}", folder
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        _check_ipc_path(path)
        return address, address + _SUFFIX, None
    if address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if anywhere and host and port.isdigit() and int(port) < 65535:
            return address, f"tcp://{host}:{int(port) + 1 if int(port) else 0}", None
        if host not in ("127.0.0.1", "localhost") or not port.isdigit() or int(port) > 65535:
            raise InvalidConfig(f"address={address!r}: a server binds to the loopback only, as in tcp://127.0.0.1:0")
        return f"tcp://127.0.0.1:{port}", "tcp://127.0.0.1:0", None
    raise InvalidConfig(f"address={address!r}: allowed are ipc, ipc://PATH and tcp://127.0.0.1:PORT")


def _private_folder() -> Path:
    """Makes a folder only we can enter whose socket paths are short enough, whatever TMPDIR says (H34)."""
    for base in (tempfile.gettempdir(), "/tmp"):
        name = f"marlaas-{os.getpid()}-{secrets.token_hex(3)}"
        if len(os.fsencode(os.path.join(base, name, "s" + _SUFFIX))) <= MAX_IPC_PATH_BYTES and os.access(base, os.W_OK):
            _remove_left_behind(Path(base))
            folder = Path(base) / name
            folder.mkdir(mode=0o700)
            return folder
    raise InvalidConfig(f"address='ipc': neither {tempfile.gettempdir()} nor /tmp can hold a socket; use tcp://127.0.0.1:0")


def socket_folder(address: str) -> Path:
    """Returns the folder of an ipc address."""
    return Path(address.removeprefix("ipc://")).parent


def open_to_all(folder: Path) -> None:
    """Lets other users of this machine connect to the sockets in a folder of `resolve`; they can list and change nothing."""
    folder.chmod(0o711)
    for path in folder.iterdir():
        path.chmod(0o666)


def _remove_left_behind(base: Path) -> None:
    """Deletes our own folders whose process is dead and whose socket nobody serves: those of runs that were killed hard."""
    for folder in base.glob("marlaas-*-*"):
        pid = folder.name.split("-")[1]
        with contextlib.suppress(OSError):
            if (
                pid.isdigit()
                and folder.stat().st_uid == os.getuid()
                and not _is_alive(int(pid))
                and not _is_served(f"{folder}/s")
            ):
                shutil.rmtree(folder)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _check_ipc_path(path: str) -> None:
    length = len(os.fsencode(path + _SUFFIX))
    if length > MAX_IPC_PATH_BYTES:
        raise InvalidConfig(
            f"address='ipc://{path}': its {length} bytes exceed the {MAX_IPC_PATH_BYTES} of a local socket's path; "
            "use a shorter path, or `ipc` for one of our own"
        )
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise InvalidConfig(f"address='ipc://{path}': its folder does not exist")
    if os.path.exists(path) and (not stat.S_ISSOCK(os.stat(path).st_mode) or _is_served(path)):
        raise InvalidConfig(f"address='ipc://{path}': in use; stop what uses it or choose another path")


def _is_served(path: str) -> bool:
    """Whether somebody listens there: ZeroMQ would take the path away from them without a word."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
