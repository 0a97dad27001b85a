"""What is done to a running service, drawn from a seed: processes killed or frozen, connections left half open or unread."""

import asyncio
import contextlib
import dataclasses
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from marlaas_jax.bench.service.served import Served
from tests.chaos import processes
from tests.e2e import runs

KILLED = (*processes.KINDS, "client")
FROZEN = (*processes.KINDS, "client", "half-open sockets", "full queues")
NUM_UNREAD = 8
VICTIM_TIMEOUT_S = 120.0  # until there is a process of the kind
RECOVERY_TIMEOUT_S = 240.0  # until the service is ready again, its device compiled


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """One thing to do."""

    action: str  # kill, freeze
    kind: str  # of process
    pause_s: float  # before it


@dataclasses.dataclass(frozen=True)
class Done:
    """What was done. Times are seconds since 1970, as in events."""

    disturbance: Disturbance
    victim: str  # its name in events; "" where no event is due
    since: float
    until: float  # from then on an event is due: at once, for the service when it runs again
    recovered_s: float


def draw(seed: int, kills: int, freezes: int, max_pause_s: float) -> list[Disturbance]:
    """Returns the disturbances in their order; every kind occurs as soon as there are enough."""
    rng = random.Random(seed)
    cycled = lambda kinds, count: [kinds[i % len(kinds)] for i in range(count)]
    drawn = [("kill", kind) for kind in cycled(KILLED, kills)] + [("freeze", kind) for kind in cycled(FROZEN, freezes)]
    rng.shuffle(drawn)
    return [Disturbance(action, kind, rng.uniform(0.2, max_pause_s)) for action, kind in drawn]


class Monkey:
    """Disturbs one service; keeps a client with an open stream beside it, as one of the victims."""

    def __init__(self, service: Served, rng: random.Random, freeze_s: float, log: Callable[[str], None]):
        self.done: list[Done] = []
        self.seen: dict[int, psutil.Process] = {}  # all processes that the service ever had, as far as they were seen
        self._service = service
        self._rng = rng
        self._freeze_s = freeze_s
        self._log = log
        self._client: asyncio.subprocess.Process | None = None

    async def run(self, disturbances: list[Disturbance]) -> None:
        """Does one after the other, each time waiting until the service is whole again."""
        await self._open_stream()
        try:
            for disturbance in disturbances:
                await asyncio.sleep(disturbance.pause_s)
                self._note()
                self.done.append(await self._do(disturbance))
                last = self.done[-1]
                self._log(f"{disturbance.action} {disturbance.kind} {last.victim}: whole again after {last.recovered_s:.1f} s")
        finally:
            await self._close_stream()

    async def _do(self, disturbance: Disturbance) -> Done:
        start, since = time.monotonic(), time.time()
        until, victim = since, ""
        match disturbance.action, disturbance.kind:
            case "kill", "service":
                victim = "service"
                self._service.kill()
                await self._service.start()
                until = time.time()
            case "freeze", "service":
                victim = "service"
                with _frozen(psutil.Process(self._service.pid)):
                    await asyncio.sleep(self._freeze_s)
                until = time.time()
            case "kill", "client":
                await self._close_stream()
                await self._open_stream()
            case "freeze", "client":
                assert self._client is not None
                with _frozen(psutil.Process(self._client.pid)):
                    await asyncio.sleep(self._freeze_s)
            case "freeze", "half-open sockets":
                with self._half_open():
                    await asyncio.sleep(self._freeze_s)
            case "freeze", "full queues":
                with self._unread():
                    await asyncio.sleep(self._freeze_s)
            case action, kind:
                process = await self._victim(kind, is_connected=action == "freeze")
                victim, start, since = processes.name_of(process), time.monotonic(), time.time()
                until = since
                if action == "kill":
                    process.kill()
                else:
                    with _frozen(process):
                        await _ended(process, self._freeze_s)
                await _ended(process, self._freeze_s)
        await self._whole()
        return Done(disturbance, victim, since, until, time.monotonic() - start)

    async def _victim(self, kind: str, is_connected: bool) -> psutil.Process:
        """Returns a process of the kind; one that still starts has another limit than 10 s, so it is killed but not frozen."""
        end = time.monotonic() + VICTIM_TIMEOUT_S
        while True:
            found = [p for p in processes.workers(self._service.pid) if processes.kind_of(p) == kind]
            if is_connected:
                events = runs.lines(self._service.data / "events.jsonl")
                joined = {event["pid"] for event in events if event["kind"] == "worker_joined"}
                found = [process for process in found if process.pid in joined]
            if found:
                return self._rng.choice(found)
            assert time.monotonic() < end, f"no {kind} process within {VICTIM_TIMEOUT_S:.0f} s"
            await asyncio.sleep(0.1)

    async def _whole(self) -> None:
        """Returns once the API answers and the device's process is there."""
        end = time.monotonic() + RECOVERY_TIMEOUT_S
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{self._service.url}/readyz")).status_code == 200:
                        self._note()
                        return
                assert time.monotonic() < end, f"the service is not ready within {RECOVERY_TIMEOUT_S:.0f} s"
                await asyncio.sleep(0.2)

    def _note(self) -> None:
        for process in processes.workers(self._service.pid):
            self.seen[process.pid] = process

    # ---- clients

    async def _open_stream(self) -> None:
        command = [sys.executable, "-m", "tests.chaos.listener", self._service.url, self._service.admin_key]
        self._client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert self._client.stdout is not None
        await asyncio.wait_for(self._client.stdout.readline(), 60.0)  # it listens

    async def _close_stream(self) -> None:
        if self._client is not None and self._client.returncode is None:
            self._client.kill()
            await self._client.wait()

    @contextlib.contextmanager
    def _half_open(self) -> Any:
        """Connections that say half of something and then nothing: two over HTTP, one to the workers' socket."""
        where = urlsplit(self._service.url)
        opened = []
        try:
            for text in (b"", b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"):
                connection = socket.create_connection((where.hostname, where.port), 5.0)
                opened.append(connection)
                connection.sendall(text)
            for address in {a for p in processes.workers(self._service.pid) if (a := _address(p))}:
                opened.append(socket.socket(socket.AF_UNIX))
                opened[-1].connect(address)
                opened[-1].sendall(b"\xff\x00\x00\x00")  # the beginning of ZeroMQ's greeting
            yield
        finally:
            for connection in opened:
                connection.close()

    @contextlib.contextmanager
    def _unread(self) -> Any:
        """Streams of all events, from the first on, of which nobody reads a byte: what the service has for them piles up."""
        where = urlsplit(self._service.url)
        request = (
            f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._service.admin_key}\r\nLast-Event-ID: 0\r\n\r\n"
        )
        with contextlib.ExitStack() as opened:
            for _ in range(NUM_UNREAD):
                connection = opened.enter_context(socket.socket())
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.settimeout(5.0)
                connection.connect((where.hostname, where.port))
                connection.sendall(request.encode())
            yield


@contextlib.contextmanager
def _frozen(process: psutil.Process) -> Any:
    """Stops a process; it goes on at the end, if it is still there."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        if processes.is_alive(process):
            process.send_signal(signal.SIGCONT)


async def _ended(process: psutil.Process, timeout_s: float) -> None:
    """Returns once the process has ended, or after so long."""
    end = time.monotonic() + timeout_s
    while processes.is_alive(process) and time.monotonic() < end:
        await asyncio.sleep(0.05)


def _address(process: psutil.Process) -> str:
    """Returns the path of the socket that a worker connects to."""
    command = process.cmdline()
    return command[command.index("--address") + 1].removeprefix("ipc://") if "--address" in command else ""
