"""Starts worker processes, keeps their output within bounds, restarts them with growing pauses, ends them.

    supervisor = Supervisor()                                   # inside the running event loop
    worker = supervisor.start(WorkerSpec("env-0", "marlaas_jax.workers.env_worker", ("--address", server.address)))
    event = await supervisor.next_event()                       # Exited, Restarted or GaveUp
    await supervisor.stop(worker)

A worker is a fresh interpreter (never a fork: H32) in a session of its own, and gets `--worker-id ID`, new on every start, so
that an exit and a lost peer can be matched. It dies with this process (lifeline.py), and so does what it started
(guardian.py). Only processes started here are signalled.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from marlaas_jax.errors import StorageError
from marlaas_jax.transport.client import TOKEN_VARIABLE
from marlaas_jax.workers import lifeline
from marlaas_jax.workers.guardian import Guardian
from marlaas_jax.workers.output import OutputLog

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_CRASHED = 1  # an exception that nobody caught
EXIT_BAD_CONFIG = 2  # would fail the same way again: never restarted
EXIT_CONTROLLER_GONE = 3  # the worker lost the controller, or was given up by it
EXIT_ORPHANED = lifeline.EXIT_ORPHANED
KILLED_S = 15.0  # for the kernel to end what was killed
MAX_DOUBLINGS = 30  # of a pause; its limit is reached long before
EXIT_BLOCKED = 5  # an environment blocked its worker's event loop


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a process is started: what comes before the module's name, its whole environment, its working directory."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None = None
    is_wrapped: bool = False  # the worker is a child of the process, in a process namespace that dies with it


class Confined(Protocol):
    """Where a worker runs code that is not ours; see sandbox/sandbox.py."""

    def start(self) -> Launch:
        """Prepares one start. Raises StorageError."""
        ...

    def started(self, pid: int) -> None:
        """Is told the process's id."""
        ...

    def ended(self) -> str:
        """Cleans up after the process; returns why it was killed, "" if it was not."""
        ...

    def close(self) -> None:
        """There will be no other start."""
        ...


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """What to run and how often to try."""

    name: str  # of the place, the same over all restarts
    module: str  # run with `python -m`
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # besides our own environment
    log_path: Path | None = None  # stdout and stderr of all starts; None: only the tail is kept, in memory
    max_log_bytes: int = 4 << 20
    max_restarts: int = 5  # in a row; a worker that lived `healthy_after_s` starts counting anew
    healthy_after_s: float = 60.0
    backoff_s: float = 0.5  # before the first restart; doubles each time
    max_backoff_s: float = 30.0
    grace_s: float = 5.0  # between SIGTERM and SIGKILL
    confined: Confined | None = None


@dataclasses.dataclass(frozen=True)
class Exited:
    """A worker's process ended. `expected`: we asked it to."""

    name: str
    worker_id: str
    code: int
    reason: str
    log_tail: str
    expected: bool
    failures: int = 0  # in a row, this one included
    restart_s: float | None = None  # until the next start; None: there is none


@dataclasses.dataclass(frozen=True)
class Restarted:
    """A new process stands in for one that ended; its Hello is still to come."""

    name: str
    worker_id: str
    pid: int


@dataclasses.dataclass(frozen=True)
class GaveUp:
    """The worker will not be started again."""

    name: str
    reason: str


Event = Exited | Restarted | GaveUp


class Worker:
    """Handle of one place: its current process, if any. Read it; change it through the supervisor."""

    def __init__(self, spec: WorkerSpec):
        self.spec = spec
        self.worker_id = ""
        self.pid = 0
        self.token = ""  # only this start of it and we know it
        self.failures = 0  # in a row
        self.output = OutputLog(spec.log_path, spec.max_log_bytes)
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline_fd = -1
        self._started_at = 0.0
        self._stopping = False
        self._ended = asyncio.Event()  # the current process is reaped, or there is none
        self._ended.set()
        self._restart: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """Whether a process of this worker lives, as far as we were told."""
        return self._process is not None

    @property
    def age_s(self) -> float:
        """Seconds since the current process was started."""
        return time.monotonic() - self._started_at


class Supervisor:
    """Owns worker processes. For the event loop's thread only, which must outlive the workers."""

    def __init__(self):
        self.workers: dict[str, Worker] = {}  # by name
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._guardian = Guardian()

    async def __aenter__(self) -> "Supervisor":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop_all()

    def start(self, spec: WorkerSpec) -> Worker:
        """Starts a worker and returns its handle. Raises OSError where no process can be made."""
        if spec.name in self.workers:
            raise ValueError(f"name={spec.name!r}: a worker of that name exists")
        worker = Worker(spec)
        self._spawn(worker)
        self.workers[spec.name] = worker
        return worker

    async def next_event(self) -> Event:
        """Returns the next thing that happened to a worker."""
        return await self._events.get()

    def kill(self, worker: Worker) -> None:
        """Ends the current process at once, as for one that hangs; it is restarted by the usual rule."""
        if worker._process is not None:
            _signal_group(worker._process, signal.SIGKILL)

    async def stop(self, worker: Worker) -> None:
        """Ends the worker for good: SIGTERM, then SIGKILL after the grace. Returns when its process is gone."""
        worker._stopping = True
        if worker._restart is not None:
            worker._restart.cancel()
        if worker._process is not None:
            _signal_group(worker._process, signal.SIGTERM)
            try:
                await asyncio.wait_for(worker._ended.wait(), worker.spec.grace_s)
            except TimeoutError:
                if worker._process is not None:
                    _signal_group(worker._process, signal.SIGKILL)
                try:
                    await asyncio.wait_for(worker._ended.wait(), KILLED_S)
                except TimeoutError:  # the kernel holds it, on a disk that does not answer say
                    log.error("worker not gone after SIGKILL name=%s pid=%d", worker.spec.name, worker.pid)
        self.workers.pop(worker.spec.name, None)
        worker.output.close()
        if worker.spec.confined is not None:
            await asyncio.to_thread(worker.spec.confined.close)

    async def stop_all(self) -> None:
        """Stops every worker, all at the same time."""
        await asyncio.gather(*(self.stop(worker) for worker in list(self.workers.values())))
        await asyncio.to_thread(self._guardian.close)

    def _spawn(self, worker: Worker) -> None:
        spec = worker.spec
        worker.worker_id = f"{spec.name}-{secrets.token_hex(4)}"
        worker.token = secrets.token_hex(16)
        if spec.confined is None:
            launch = Launch((sys.executable, "-m"), os.environ)
        else:
            launch = spec.confined.start()
        self._guardian.start()
        read_fd, write_fd = os.pipe()
        env = dict(launch.env) | {
            "PYTHONUNBUFFERED": "1",  # what it printed last must not die with it
            "PYTHONFAULTHANDLER": "1",  # a segmentation fault leaves a traceback
            **spec.env,
            lifeline.FD_VARIABLE: str(read_fd),
            lifeline.PARENT_VARIABLE: "" if launch.is_wrapped else str(os.getpid()),
            TOKEN_VARIABLE: worker.token,
        }
        try:
            process = subprocess.Popen(
                [*launch.command, spec.module, *spec.args, "--worker-id", worker.worker_id],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=env, cwd=launch.cwd, pass_fds=(read_fd,), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
        self._guardian.watch(process.pid)
        if spec.confined is not None:
            spec.confined.started(process.pid)
        worker._process, worker._lifeline_fd = process, write_fd
        worker.pid = process.pid
        worker._started_at = time.monotonic()
        worker._ended.clear()
        log.info("worker started name=%s worker_id=%s pid=%d", spec.name, worker.worker_id, process.pid)
        reader = threading.Thread(
            target=worker.output.read_from, args=(process.stdout,), name=f"{spec.name}-output", daemon=True
        )
        reader.start()
        threading.Thread(target=self._wait, args=(worker, process, reader), name=f"{spec.name}-wait", daemon=True).start()

    def _wait(self, worker: Worker, process: subprocess.Popen[bytes], reader: threading.Thread) -> None:
        code = process.wait()
        _signal_group(process, signal.SIGKILL)  # what it started itself and left behind
        killed_for = worker.spec.confined.ended() if worker.spec.confined is not None else ""
        reader.join(1.0)  # its last words
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_exit, worker, code, killed_for)

    def _on_exit(self, worker: Worker, code: int, killed_for: str) -> None:
        spec = worker.spec
        lived_s = time.monotonic() - worker._started_at
        worker._process = None
        self._guardian.forget(worker.pid)
        os.close(worker._lifeline_fd)
        reason = killed_for or describe_exit(code)
        expected = worker._stopping
        worker.failures = 0 if expected else 1 if lived_s >= spec.healthy_after_s else worker.failures + 1
        has_next = not expected and code != EXIT_BAD_CONFIG and worker.failures <= spec.max_restarts
        pause_s = min(spec.backoff_s * 2 ** min(worker.failures - 1, MAX_DOUBLINGS), spec.max_backoff_s) if has_next else None
        event = Exited(
            spec.name, worker.worker_id, code, reason, worker.output.tail(), expected, worker.failures, restart_s=pause_s
        )
        level = logging.INFO if expected or code == EXIT_OK else logging.WARNING
        log.log(level, "worker ended name=%s worker_id=%s pid=%d reason=%s",
                spec.name, worker.worker_id, worker.pid, reason)  # fmt: skip
        self._events.put_nowait(event)
        worker._ended.set()
        if expected:
            return
        if code == EXIT_BAD_CONFIG:
            self._events.put_nowait(GaveUp(spec.name, f"{reason}; it would fail again"))
        elif pause_s is None:
            self._events.put_nowait(GaveUp(spec.name, f"it ended {worker.failures} times in a row, the last time: {reason}"))
        else:
            worker._restart = self._loop.call_later(pause_s, self._restart, worker)

    def _restart(self, worker: Worker) -> None:
        worker._restart = None
        if worker._stopping:
            return
        try:
            self._spawn(worker)
        except (OSError, StorageError) as error:  # no memory, no process or no disk to be had
            self._events.put_nowait(GaveUp(worker.spec.name, f"it cannot be started: {error}"))
            return
        self._events.put_nowait(Restarted(worker.spec.name, worker.worker_id, worker.pid))


def describe_exit(code: int) -> str:
    """Returns what an exit code means, in words."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    known = {
        EXIT_OK: "it ended by itself",
        EXIT_CRASHED: "it crashed",
        EXIT_BAD_CONFIG: "it was started wrongly",
        EXIT_CONTROLLER_GONE: "it lost the controller",
        EXIT_ORPHANED: "its parent died",
        EXIT_BLOCKED: "an environment blocked it",
    }
    return f"{known.get(code, 'it ended by itself')} (exit code {code})"


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signals the worker and what it started: its process group, whose id is its pid and which only we made."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
