"""The load of `marlaas bench streams`, in a process of its own: many open event streams and a steady rate of requests.

    python -m marlaas_jax.bench.stream_load < {"url": ..., "key": ..., "jobs": [...], "num_streams": ..., "rate": ...}

It prints `open` when all streams are, measures until its input ends, and prints what it saw as JSON. Requests are sent when
they are due, whether earlier ones were answered or not, and their time counts from when they were due: a server that stalls
cannot hide it by slowing the load. Sockets and parsing are by hand because a thousand streams of a client library would keep
the core busy that the server is measured on.
"""

import asyncio
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

CONNECTIONS = 32  # for requests
OPEN_AT_ONCE = 50
GIVE_UP_S = 30.0


class _Stream(asyncio.Protocol):
    """One event stream: counts events, and whether it was cut off."""

    def __init__(self, head: bytes):
        self.num_events = 0
        self.is_open: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.was_cut = False
        self._head = head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._head)

    def data_received(self, data: bytes) -> None:
        if not self.is_open.done():
            self.is_open.set_result(data.startswith(b"HTTP/1.1 200"))
        self.num_events += data.count(b"\nevent: ")

    def connection_lost(self, exc: Exception | None) -> None:
        self.was_cut = True
        if not self.is_open.done():
            self.is_open.set_result(False)


class _Requests(asyncio.Protocol):
    """One kept connection: a request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[int] | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def status(self, head: bytes) -> int:
        """Sends a request; returns the answer's status once its whole body is here."""
        assert self._transport is not None
        self._buffer, self._answer = b"", asyncio.get_running_loop().create_future()
        self._transport.write(head)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found or self._answer is None or self._answer.done():
            return
        lines = head.lower().split(b"\r\n")
        length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
        if len(body) >= length:
            self._answer.set_result(int(lines[0].split()[1]))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("closed"))


class Load:
    """The streams and requests of one measurement."""

    def __init__(self, url: str, key: str, jobs: list[str], num_streams: int, rate: float):
        parts = urlsplit(url)
        assert parts.hostname and parts.port, url
        self._where = (parts.hostname, parts.port)
        self._lines = f"Host: {parts.netloc}\r\nAuthorization: Bearer {key}\r\n"
        self._jobs = jobs
        self._num_streams = num_streams
        self._rate = rate
        self._streams: list[_Stream] = []
        self._waits_s: list[float] = []
        self._num_errors = 0
        self._idle: asyncio.Queue[_Requests] = asyncio.Queue()

    async def open(self) -> None:
        """Opens all streams, each at the events that come next, and the connections for requests."""
        loop = asyncio.get_running_loop()
        newest = await self._newest()
        for start in range(0, self._num_streams, OPEN_AT_ONCE):
            numbers = range(start, min(start + OPEN_AT_ONCE, self._num_streams))
            made = [self._head(f"/v1/jobs/{self._jobs[number % len(self._jobs)]}/events?after={newest}") for number in numbers]
            streams = [(await loop.create_connection(lambda head=head: _Stream(head), *self._where))[1] for head in made]
            self._streams += streams
            async with asyncio.timeout(GIVE_UP_S):
                self._num_errors += sum([not await stream.is_open for stream in streams])
        for _ in range(CONNECTIONS):
            self._idle.put_nowait((await loop.create_connection(_Requests, *self._where))[1])

    async def measure(self, stop: asyncio.Event) -> dict[str, Any]:
        """Sends requests until `stop`; returns what was seen."""
        seen = sum(stream.num_events for stream in self._streams)
        begin = time.monotonic()
        tasks = []
        while not stop.is_set():
            due = begin + len(tasks) / self._rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self._ask(self._jobs[len(tasks) % len(self._jobs)], due)))
        seconds = time.monotonic() - begin
        await asyncio.gather(*tasks)
        waits = sorted(self._waits_s)
        return {
            "seconds": seconds,
            "num_requests": len(tasks),
            "num_errors": self._num_errors,
            "num_streams_cut": sum(stream.was_cut for stream in self._streams),
            "events_per_s": (sum(stream.num_events for stream in self._streams) - seen) / seconds,
            "request_p50_s": waits[len(waits) // 2],
            "request_p99_s": waits[int(0.99 * len(waits))],
            "request_max_s": waits[-1],
        }

    async def _ask(self, job: str, due: float) -> None:
        try:
            async with asyncio.timeout(GIVE_UP_S):
                connection = await self._idle.get()
                status = await connection.status(self._head(f"/v1/jobs/{job}"))
        except (OSError, TimeoutError):
            self._num_errors += 1
            return
        self._num_errors += status != 200
        self._waits_s.append(time.monotonic() - due)
        self._idle.put_nowait(connection)

    async def _newest(self) -> int:
        reader, writer = await asyncio.open_connection(*self._where)
        writer.write(self._head("/v1/events"))
        while not (line := await reader.readline()).startswith(b"id: "):
            if not line:
                raise ConnectionError("the service closed an event stream")
        writer.close()
        return int(line.split()[1])

    def _head(self, path: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\n{self._lines}\r\n".encode()


async def _main() -> None:
    load = Load(**json.loads(sys.stdin.readline()))
    await load.open()
    print("open", flush=True)
    stop = asyncio.Event()
    reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    reading.add_done_callback(lambda _: stop.set())
    print(json.dumps(await load.measure(stop)), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
