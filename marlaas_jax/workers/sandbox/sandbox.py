"""Where the code that tenants upload runs: how, is chosen once, at the service's start, by trying what works here.

"bubblewrap": namespaces of its own with only the interpreter, the system's libraries and the job's files in sight, read-only;
a bounded /tmp; no network unless it is allowed. "process": Landlock where the kernel has it. Both: where we are root, a user of
its own for each worker, else the service's user; limits (rules.py), no_new_privs, an environment made from an allow-list, a
temp folder of its own as working directory, no open files of ours, and a watch over the sums (watch.py).

    sandbox = Sandbox.choose("auto", network=False, hidden=data_dir)     # raises InvalidConfig; None for "none"
    room = sandbox.room({"rewards.py": b"..."})                          # of one job; room.files is where they lie
    supervisor.start(WorkerSpec(..., confined=room.place("env-0", socket_folder)))
    room.close(); sandbox.close()
"""

import contextlib
import functools
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from marlaas_jax.errors import InvalidConfig, StorageError
from marlaas_jax.workers.sandbox import landlock, paths
from marlaas_jax.workers.sandbox.identities import Identities
from marlaas_jax.workers.sandbox.processes import all_seen, kill_all_of
from marlaas_jax.workers.sandbox.rules import Limits, Rules
from marlaas_jax.workers.sandbox.watch import Watch
from marlaas_jax.workers.supervisor import Launch

log = logging.getLogger(__name__)

Setting = Literal["auto", "bubblewrap", "process", "none"]

NO_SANDBOX = "as the service's user, with all that this user may do; serve only tenants whose code you trust"
CONFINED = "marlaas_jax.workers.sandbox.confined"
PROBE_TIMEOUT_S = 60.0
KEPT_VARIABLES = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
DEFAULTS = Limits()
_DEV_SHM_BYTES = 64 << 20


@dataclass(frozen=True)
class Way:
    """One way to confine."""

    mode: Literal["bubblewrap", "process"]
    has_users: bool = False  # every worker is a user of its own
    keeps_reading: bool = False  # that user reads what only root can, as far as Landlock lets it


def _ways(setting: Setting) -> Iterator[Way]:
    """Yields the ways of a setting that could work, the strongest first."""
    is_root = os.geteuid() == 0
    if setting in ("auto", "bubblewrap"):
        yield from (Way("bubblewrap", True), Way("bubblewrap")) if is_root else (Way("bubblewrap"),)
    if setting in ("auto", "process"):
        if is_root:
            yield Way("process", True)
            if landlock.version():
                yield Way("process", True, keeps_reading=True)
        yield Way("process")


class Sandbox:
    """One chosen way to confine, and the folder under which the jobs' rooms are."""

    def __init__(self, way: "Way", *, network: bool, limits: Limits):
        self.mode = way.mode
        self.has_users = way.has_users
        self.keeps_reading = way.keeps_reading
        self.network = network
        self.limits = limits
        self.landlock = landlock.version() if way.mode == "process" else 0
        self.identities = Identities()
        self.watch = Watch(limits)
        base = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()  # every user can go through it
        self.root = Path(tempfile.mkdtemp(prefix="marlaas-sandbox-", dir=base))
        self.root.chmod(0o711)

    @classmethod
    def choose(cls, setting: Setting, *, network: bool, hidden: Path, limits: Limits = DEFAULTS) -> "Sandbox | None":
        """Returns the strongest sandbox of the setting that works here, None for "none". `hidden`: the service's own folder.

        Raises InvalidConfig, one sentence, where there is none, or none that keeps `hidden` out of reach.
        """
        if setting == "none":
            return None
        if outer := paths.exposing(hidden, network):
            raise InvalidConfig(f"data_dir={str(hidden)!r}: uploaded code may read all of {outer}; choose a folder elsewhere")
        fault = ""
        for way in _ways(setting):
            if way.mode == "bubblewrap" and shutil.which("bwrap") is None:
                fault = "bwrap is not installed (the package bubblewrap)"
                continue
            sandbox = cls(way, network=network, limits=limits)
            if not (fault := sandbox._probe()):
                return sandbox
            log.info("sandbox not usable way=%s reason=%s", way, fault)
            sandbox.close()
        other = "process" if setting == "bubblewrap" else "none, for tenants whose code you trust"
        raise InvalidConfig(f"sandbox={setting!r}: not possible here, {fault}; mend that or set sandbox: {other}")

    @property
    def text(self) -> str:
        """What it keeps uploaded code from, in one sentence."""
        net = "with the network" if self.network else "without a network"
        if self.mode == "bubblewrap":
            return f"in bubblewrap, {net}, seeing its own files and the system's libraries only"
        who = "as a user of its own" if self.has_users else "as the service's user"
        if not self.landlock:
            rest = "with all files and the network" if self.has_users else "with the service's files and the network"
            rest += " that this user may use"
        elif self.landlock < 4 or self.network:
            rest = "with Landlock, so seeing its own files and the system's libraries only, with the network"
        else:
            rest = "with Landlock, so seeing its own files and the system's libraries only, without TCP"
        signals = "" if self.has_users or self.landlock >= 6 else "; it can signal the service's processes"
        return f"in a process with limits, {who}, {rest}{signals}"

    @property
    def is_weak(self) -> bool:
        """Whether the service's own files or processes are in the reach of uploaded code."""
        return self.mode == "process" and self.landlock < 6 and not self.has_users

    def room(self, files: Path | Mapping[str, bytes]) -> "Room":
        """Returns a job's room with a copy of its files. Raises StorageError."""
        return Room(self, files)

    def close(self) -> None:
        """Ends the watch and removes all rooms; their workers must have ended."""
        self.watch.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def _probe(self) -> str:
        """Returns why a worker cannot start so, "" if it can: by starting one that prints its help."""
        room = self.room({})
        place = room.place("probe", None)
        try:
            launch = place.start()
            done = subprocess.run(
                [*launch.command, "marlaas_jax.workers.env_worker", "--help"], env=launch.env, cwd=launch.cwd,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=PROBE_TIMEOUT_S,
                start_new_session=True,
            )  # fmt: skip
            lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
            return f"it says {lines[-1][:200]!r}" if done.returncode else ""
        except (OSError, subprocess.SubprocessError, StorageError) as error:
            return str(error)
        finally:
            place.ended()
            room.close()


class Room:
    """The files of one job, where all of its workers may read them and nobody else's worker can."""

    def __init__(self, sandbox: Sandbox, files: Path | Mapping[str, bytes]):
        self.sandbox = sandbox
        self._group = sandbox.identities.take() if sandbox.has_users else None
        self.folder = sandbox.root / secrets.token_hex(8)
        self.files = self.folder / "files"
        try:
            self.folder.mkdir(mode=0o711)
            if isinstance(files, Path):
                shutil.copytree(files, self.files)
            else:
                self.files.mkdir()
                for name, content in files.items():
                    path = self.files / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
            for path in (self.files, *self.files.rglob("*")):
                if self._group is not None:
                    os.chown(path, -1, self._group)
                path.chmod(0o750 if path.is_dir() else 0o640)
        except OSError as error:
            self.close()
            raise StorageError(f"{self.folder}: cannot be written ({error.strerror or error})") from None

    def place(self, name: str, sockets: Path | None) -> "Place":
        """Returns a place for one worker; `sockets` is the folder of the sockets that it connects to."""
        return Place(self, name, sockets, self._group)

    def close(self) -> None:
        """Removes the files; workers that still run lose them."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._group is not None:
            self.sandbox.identities.give_back(self._group)
            self._group = None


class Place:
    """One confined worker over all its starts, as the supervisor needs it (supervisor.Confined)."""

    def __init__(self, room: Room, name: str, sockets: Path | None, group: int | None):
        self._room = room
        self._sandbox = room.sandbox
        self._name = name
        self._sockets = sockets
        self._user = self._sandbox.identities.take() if self._sandbox.has_users else None
        self._group = group
        self._temp: Path | None = None

    def start(self) -> Launch:
        """Returns how to start it, in a temp folder that is new. Raises StorageError."""
        self._remove_temp()
        self._temp = self._room.folder / f"{self._name}-{secrets.token_hex(4)}"
        try:
            self._temp.mkdir(mode=0o700)
            if self._user is not None:
                os.chown(self._temp, self._user, -1)
        except OSError as error:
            raise StorageError(f"{self._temp}: cannot be written ({error.strerror or error})") from None
        is_wrapped = self._sandbox.mode == "bubblewrap"
        temp = "/tmp" if is_wrapped else str(self._temp)
        env = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        env |= {"HOME": temp, "TMPDIR": temp, "PYTHONPATH": paths.import_path(), "PYTHONSAFEPATH": "1"}
        env |= {"PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}
        rules = msgspec.json.encode(self._rules()).decode()
        inner = (sys.executable, "-P", "-m", CONFINED, rules)
        command = (*self._bubblewrap(), *inner) if is_wrapped else inner
        return Launch(command, env, cwd="/" if is_wrapped else temp, is_wrapped=is_wrapped)

    def started(self, pid: int) -> None:
        """Has the process and all that it starts watched."""
        self._sandbox.watch.add(pid, self._user, self._temp)

    def ended(self) -> str:
        """Kills what the process left behind; returns why the watch killed it, "" if it did not."""
        reason = self._sandbox.watch.remove(self._temp)
        if self._user is not None:
            kill_all_of(self._user)
        self._remove_temp()
        return reason

    def close(self) -> None:
        """Gives the place up; it is not started again."""
        self._remove_temp()
        if self._user is not None:
            self._sandbox.identities.give_back(self._user)
            self._user = None

    def _rules(self) -> Rules:
        sandbox = self._sandbox
        nproc: int | None = sandbox.limits.processes
        if self._user is None:
            own = os.geteuid()
            nproc = None if own == 0 else nproc + sum(process.num_threads for process in all_seen() if process.uid == own)
        rules = Rules(sandbox.limits, nproc, self._user, self._group, sandbox.keeps_reading)
        if not sandbox.landlock:
            return rules
        readable = (*paths.packages(), *paths.system(sandbox.network), *paths.KERNEL, str(self._room.files))
        writable = (*paths.DEVICES, str(self._temp))
        return msgspec.structs.replace(rules, readable=readable, writable=writable, network=sandbox.network)

    def _bubblewrap(self) -> list[str]:
        sandbox = self._sandbox
        command = ["bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        command += [] if sandbox.network else ["--unshare-net"]
        command += ["--die-with-parent", "--cap-drop", "ALL"]
        if sandbox.has_users:  # it becomes its user inside, where the way to the interpreter is open
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
            command += ["--disable-userns"] if "--disable-userns" in _bwrap_help() else []
        command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        for folder, size in (("/dev/shm", _DEV_SHM_BYTES), ("/tmp", sandbox.limits.total_disk_bytes)):
            command += ["--size", str(size)] if "--size" in _bwrap_help() else []
            command += ["--perms", "1777", "--tmpfs", folder]
        seen = [*paths.system(sandbox.network), *paths.packages(), str(self._room.files)]
        seen += [] if self._sockets is None else [str(self._sockets)]
        parents = {str(parent) for path in seen for parent in Path(path).parents} - {"/", "/tmp"}
        for path in sorted(parents):  # those that bwrap makes by itself let only root through
            command += ["--perms", "0755", "--dir", path]
        for path in seen:
            command += ["--ro-bind", path, path]
        return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]

    def _remove_temp(self) -> None:
        if self._temp is not None:
            shutil.rmtree(self._temp, ignore_errors=True)


@functools.cache
def _bwrap_help() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["bwrap", "--help"], capture_output=True, text=True, timeout=10, check=False).stdout
    return ""
