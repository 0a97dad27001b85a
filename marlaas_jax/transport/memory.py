"""In-process twins of Server and Client with the same interface: for tests and for runs in a single process.

    server = MemoryServer()
    client = MemoryClient(server, "environment")      # any thread
    await server.receive()                             # (worker id, Hello), as on the wire

Messages are encoded and decoded as on the wire, so what cannot travel fails here too. There are no heartbeats: a peer is lost
when its client is closed or the server gives it up, and there are no credits: both queues grow as they must.
"""

import asyncio
import dataclasses
import itertools
import os
import queue
import threading
from typing import Any

from marlaas_jax.errors import ProtocolMismatch, WorkerLost
from marlaas_jax.messages import Hello, Message, decode, encode
from marlaas_jax.transport.flow import Counters, PeerLost

_GONE = object()
_numbers = itertools.count()


@dataclasses.dataclass
class MemoryPeer:
    """One connected client, with the attributes of server.Peer that a caller may read."""

    worker_id: str
    role: str
    pid: int
    info: dict[str, Any]
    inbox: queue.SimpleQueue[Any]
    sent: int = 0
    delivered: int = 0


class MemoryServer:
    """The controller's end. Make it inside the running event loop."""

    address = "memory"

    def __init__(self):
        self.worker_id = "controller-memory"
        self.peers: dict[str, MemoryPeer] = {}
        self._used_ids: set[str] = set()
        self._inbox: asyncio.Queue[tuple[MemoryClient | None, str, Message]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._done = Counters()
        self._lock = threading.Lock()  # of peers and counters, which clients touch from their threads

    async def __aenter__(self) -> "MemoryServer":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def receive(self) -> tuple[str, Message]:
        """Returns the next (worker id, message): a Hello when a peer joins, a PeerLost when it is gone."""
        client, worker_id, message = await self._inbox.get()
        if client is not None:
            client._delivered()
            self._done.received += 1
        return worker_id, message

    def send(self, worker_id: str, message: Message) -> None:
        """Gives a message to a peer. Raises WorkerLost for one that is not connected."""
        with self._lock:
            peer = self.peers.get(worker_id)
            if peer is None:
                raise WorkerLost(f"worker {worker_id}: not connected, so {type(message).__name__} cannot be sent")
            peer.sent += 1
            peer.inbox.put(decode(encode(message)))

    async def drain(self, worker_id: str) -> None:
        """Nothing ever waits for credits here."""

    def lose(self, worker_id: str, reason: str) -> None:
        """Gives a peer up: PeerLost is delivered, the client is told, what it still sends is refused."""
        with self._lock:
            peer = self.peers.pop(worker_id, None)
            if peer is None:
                return
            self._done.sent += peer.sent
            self._done.delivered += peer.delivered
            self._done.failed += peer.sent - peer.delivered
        peer.inbox.put(_GONE)
        self._inbox.put_nowait((None, worker_id, PeerLost(peer.role, reason)))

    def counters(self) -> Counters:
        """Returns the counts over all peers, those gone included."""
        with self._lock:
            total = dataclasses.replace(self._done)
            for peer in self.peers.values():
                total.sent += peer.sent
                total.delivered += peer.delivered
                total.in_flight += peer.sent - peer.delivered
        return total

    async def close(self) -> None:
        """Ends the server: every client's `receive` raises after what it had."""
        with self._lock:
            peers, self.peers = list(self.peers.values()), {}
        for peer in peers:
            peer.inbox.put(_GONE)

    def _join(self, peer: MemoryPeer) -> None:
        with self._lock:
            if peer.worker_id in self._used_ids:
                raise ProtocolMismatch(f"worker id {peer.worker_id} was used before; a worker needs a new one on every start")
            self._used_ids.add(peer.worker_id)
            self.peers[peer.worker_id] = peer
        hello = Hello(peer.role, peer.worker_id, peer.pid, info=peer.info)
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, (None, peer.worker_id, hello))

    def _arrive(self, client: "MemoryClient", message: Message) -> None:
        if client.worker_id in self.peers:
            self._inbox.put_nowait((client, client.worker_id, message))
        else:
            self._done.ignored += 1


class MemoryClient:
    """A worker's end. Thread-safe, like Client."""

    def __init__(self, server: MemoryServer, role: str, worker_id: str | None = None, info: dict[str, Any] | None = None):
        self.worker_id = worker_id or f"{role}-memory-{next(_numbers)}"
        self.address = server.address
        self._server = server
        self._counters = Counters()
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._peer = MemoryPeer(self.worker_id, role, os.getpid(), info or {}, self._inbox)
        server._join(self._peer)

    def __enter__(self) -> "MemoryClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Returns the next message, or None after `timeout_s` (0: do not wait; None: for ever). Raises WorkerLost."""
        try:
            message = self._inbox.get(block=timeout_s is None or timeout_s > 0, timeout=timeout_s or None)
        except queue.Empty:
            return None
        if message is _GONE:
            self._inbox.put(_GONE)
            raise WorkerLost("the controller is gone")
        with self._lock:
            self._counters.received += 1
        with self._server._lock:
            self._peer.delivered += 1
        return message

    def send(self, message: Message, timeout_s: float | None = None) -> None:
        """Gives a message to the server. Raises WorkerLost if it is gone."""
        if self._server.peers.get(self.worker_id) is not self._peer:
            raise WorkerLost("the controller is gone")
        copy = decode(encode(message))
        with self._lock:
            self._counters.sent += 1
            self._counters.in_flight += 1
        self._server._loop.call_soon_threadsafe(self._server._arrive, self, copy)

    def counters(self) -> Counters:
        """Returns the counts since the connection was made."""
        with self._lock:
            return dataclasses.replace(self._counters)

    def close(self, flush_s: float = 2.0) -> None:
        """Disconnects; the server delivers what was sent, then PeerLost."""
        self._server._loop.call_soon_threadsafe(self._server.lose, self.worker_id, "its connection is closed")

    def _delivered(self) -> None:
        with self._lock:
            self._counters.in_flight -= 1
            self._counters.delivered += 1
