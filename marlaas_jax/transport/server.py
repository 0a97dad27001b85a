"""The controller's end: one asyncio ROUTER that binds, many peers, each known by the worker id of its Hello.

    async with Server("ipc") as server:          # inside the running event loop; server.address is for the workers
        worker_id, message = await server.receive()   # Hello when a peer joins, PeerLost when one is gone
        server.send(worker_id, Shutdown())

One connection is one session: a worker that restarts has a new worker id, and what still arrives from a peer that was
given up is ignored. Heartbeats have a thread and a socket of their own, so no busy loop and no busy peer looks dead.
Every method but those of the heartbeat thread is for the event loop's thread only.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from marlaas_jax.errors import InternalError, InvalidConfig, WorkerLost
from marlaas_jax.messages import PROTOCOL_VERSION, Hello, Message, decode, encode
from marlaas_jax.transport import flow
from marlaas_jax.transport.address import resolve
from marlaas_jax.transport.flow import Counters, PeerLost, ReceiveWindow, SendWindow, header, parse_header

log = logging.getLogger(__name__)

_CLOSE_LINGER_MS = 1000


@dataclasses.dataclass
class Peer:
    """One connected worker."""

    worker_id: str
    role: str
    pid: int
    info: dict[str, Any]
    identity: bytes
    outgoing: SendWindow
    incoming: ReceiveWindow
    room: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # set while nothing waits for credits


class Server:
    """Binds, keeps peers apart, never drops silently."""

    def __init__(
        self,
        address: str = "ipc",
        *,
        window: int = flow.DEFAULT_WINDOW,
        max_queued: int = flow.MAX_QUEUED,
        heartbeat_s: float = flow.DEFAULT_HEARTBEAT_S,
        lost_after_s: float = flow.DEFAULT_LOST_AFTER_S,
    ):
        self.worker_id = f"controller-{os.getpid()}-{secrets.token_hex(4)}"
        self.peers: dict[str, Peer] = {}  # by worker id
        self._window = window
        self._max_queued = max_queued
        self._by_identity: dict[bytes, Peer] = {}
        self._used_ids: set[str] = set()
        self._inbox: asyncio.Queue[tuple[Peer | None, str, Message]] = asyncio.Queue()
        self._done = Counters()  # of peers that are gone, and the counts that belong to no peer
        self._loop = asyncio.get_running_loop()
        data_address, beat_address, self._folder = resolve(address)
        self._context = zmq.asyncio.Context()
        try:
            self._socket = _bind(self._context, zmq.ROUTER, data_address, 2 * window + 64)
            beat_socket = _bind(zmq.Context(self._context), zmq.ROUTER, beat_address, 1000)
        except BaseException:
            self._context.destroy(linger=0)
            self._remove_folder()
            raise
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.address = _endpoint(self._socket)
        self._welcome_info = {
            "heartbeat": _endpoint(beat_socket), "heartbeat_s": heartbeat_s, "lost_after_s": lost_after_s, "window": window
        }  # fmt: skip
        self._beats = _Heartbeats(beat_socket, self.worker_id, heartbeat_s, lost_after_s, self._from_beats)
        self._beats.start()
        self._reader = asyncio.create_task(self._read())

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def receive(self) -> tuple[str, Message]:
        """Returns the next (worker id, message): a Hello when a peer joins, a PeerLost when it is gone."""
        peer, worker_id, message = await self._inbox.get()
        if peer is not None:
            self._done.received += 1
            credits = peer.incoming.took()
            if credits and peer.worker_id in self.peers:
                self._transmit(peer, flow.CREDIT, flow.pack_credit(credits))
        return worker_id, message

    def send(self, worker_id: str, message: Message) -> None:
        """Accepts a message for a peer, never blocking. Raises WorkerLost for a peer that is not connected.

        Beyond the peer's credits it waits here; `await drain(worker_id)` waits until nothing does.
        """
        peer = self.peers.get(worker_id)
        if peer is None:
            raise WorkerLost(f"worker {worker_id}: not connected, so {type(message).__name__} cannot be sent")
        if peer.outgoing.is_full:
            raise InternalError(
                f"worker {worker_id}: {self._max_queued} messages wait already; await drain() before sending more"
            )
        peer.outgoing.push(encode(message))
        self._flush(peer)

    async def drain(self, worker_id: str) -> None:
        """Waits until everything sent to this peer is within its credits, or the peer is gone."""
        peer = self.peers.get(worker_id)
        if peer is not None:
            await peer.room.wait()

    def lose(self, worker_id: str, reason: str, *, expected: bool = False) -> None:
        """Gives a peer up, as when its process is known to be dead: PeerLost is delivered, all that comes later ignored."""
        peer = self.peers.pop(worker_id, None)
        if peer is None:
            return
        self._beats.unwatch(worker_id)
        failed = peer.outgoing.fail()
        self._done.sent += peer.outgoing.sent
        self._done.delivered += peer.outgoing.delivered
        self._done.failed += failed
        del self._by_identity[peer.identity]
        peer.room.set()
        level = logging.INFO if expected else logging.WARNING
        log.log(level, "peer lost worker_id=%s role=%s undelivered=%d reason=%s", worker_id, peer.role, failed, reason)
        self._inbox.put_nowait((None, worker_id, PeerLost(peer.role, reason)))

    def counters(self) -> Counters:
        """Returns the counts over all peers, those gone included."""
        total = dataclasses.replace(self._done)
        for peer in self.peers.values():
            total.sent += peer.outgoing.sent
            total.delivered += peer.outgoing.delivered
            total.in_flight += peer.outgoing.in_flight
        return total

    async def close(self) -> None:
        """Ends the server; messages already on the wire get a second to leave. A second call does nothing."""
        if self._context.closed:
            return
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        await asyncio.to_thread(self._beats.stop)
        self._socket.close(linger=_CLOSE_LINGER_MS)
        await asyncio.to_thread(self._context.term)
        self._remove_folder()

    # ---- wire

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                self._on_frames(frames)
            except Exception:  # one peer's strange frame must not stop the others'
                self._malformed(frames[0], "handling it failed")
                log.exception("transport failed identity=%s", frames[0].hex())

    def _on_frames(self, frames: list[bytes]) -> None:
        identity = frames[0]
        parsed = parse_header(frames[1]) if len(frames) == 3 else None
        if parsed is None:
            self._malformed(identity, f"{len(frames)} frames, no header of ours")
            return
        version, kind = parsed
        payload = frames[2]
        if kind == flow.HELLO:
            self._on_hello(identity, version, payload)
            return
        peer = self._by_identity.get(identity)
        if peer is None:
            self._done.ignored += 1
        elif version != PROTOCOL_VERSION:
            self._malformed(identity, f"protocol version {version}")
        elif kind == flow.DATA:
            self._on_data(peer, payload)
        elif kind == flow.CREDIT:
            credits = flow.unpack_credit(payload)
            if credits is None or not peer.outgoing.credit(credits):
                self._malformed(identity, f"credit {payload.hex()}")
                return
            self._flush(peer)
        else:
            self._malformed(identity, f"kind {kind!r}")

    def _on_hello(self, identity: bytes, version: int, payload: bytes) -> None:
        hello = None
        with contextlib.suppress(msgspec.MsgspecError):
            hello = decode(payload)
        if version != PROTOCOL_VERSION or (isinstance(hello, Hello) and hello.protocol_version != PROTOCOL_VERSION):
            theirs = hello.protocol_version if isinstance(hello, Hello) else version
            reason = (
                f"protocol version {theirs}: this controller speaks {PROTOCOL_VERSION}; install the same marlaas_jax on both"
            )
        elif not isinstance(hello, Hello):
            self._malformed(identity, "unreadable Hello")
            return
        elif identity in self._by_identity:
            return  # said twice
        elif hello.worker_id in self._used_ids:
            reason = f"worker id {hello.worker_id} was used before; a worker needs a new one on every start"
        else:
            self._join(identity, hello)
            return
        log.warning("peer refused reason=%s", reason)
        self._transmit_to(identity, flow.REFUSED, reason.encode())

    def _join(self, identity: bytes, hello: Hello) -> None:
        outgoing = SendWindow(self._window, self._max_queued)
        peer = Peer(hello.worker_id, hello.role, hello.pid, hello.info, identity, outgoing, ReceiveWindow(self._window))
        peer.room.set()
        self.peers[peer.worker_id] = self._by_identity[identity] = peer
        self._used_ids.add(peer.worker_id)
        self._beats.watch(peer.worker_id)
        self._transmit(peer, flow.WELCOME, encode(Hello("controller", self.worker_id, os.getpid(), info=self._welcome_info)))
        if peer.worker_id in self.peers:
            log.info("peer joined worker_id=%s role=%s pid=%d", peer.worker_id, peer.role, peer.pid)
            self._inbox.put_nowait((None, peer.worker_id, hello))

    def _on_data(self, peer: Peer, payload: bytes) -> None:
        peer.incoming.arrived()
        try:
            message = decode(payload)
        except msgspec.MsgspecError as error:
            self._malformed(peer.identity, f"worker_id={peer.worker_id} {error}")
            if credits := peer.incoming.took():
                self._transmit(peer, flow.CREDIT, flow.pack_credit(credits))
            return
        self._inbox.put_nowait((peer, peer.worker_id, message))

    def _flush(self, peer: Peer) -> None:
        while (payload := peer.outgoing.take()) is not None:
            if not self._transmit(peer, flow.DATA, payload):
                if peer.worker_id in self.peers:  # the socket is full for a moment
                    peer.outgoing.put_back(payload)
                    self._loop.call_later(0.02, self._flush_again, peer)
                break
        if peer.outgoing.queued:
            peer.room.clear()
        else:
            peer.room.set()

    def _flush_again(self, peer: Peer) -> None:
        if peer.worker_id in self.peers and not self._socket.closed:
            self._flush(peer)

    def _transmit(self, peer: Peer, kind: bytes, payload: bytes) -> bool:
        try:
            return self._transmit_to(peer.identity, kind, payload)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.lose(peer.worker_id, "its connection is closed")
            return False

    def _transmit_to(self, identity: bytes, kind: bytes, payload: bytes) -> bool:
        """Returns whether the socket took the frame; with NOBLOCK the future is settled at once."""
        future = self._socket.send_multipart([identity, header(kind), payload], flags=zmq.NOBLOCK)
        error = future.exception()
        if isinstance(error, zmq.Again):
            return False
        if error is not None:
            raise error
        return True

    def _malformed(self, identity: bytes, what: str) -> None:
        self._done.malformed += 1
        if self._done.malformed <= 20 or self._done.malformed % 1000 == 0:
            log.warning("frame dropped identity=%s count=%d reason=%s", identity.hex(), self._done.malformed, what)

    def _from_beats(self, worker_id: str, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self.lose, worker_id, reason)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class _Heartbeats(threading.Thread):
    """Answers every peer's heartbeat and reports those that are silent; touches nothing of the event loop's."""

    def __init__(
        self,
        beat_socket: zmq.Socket,
        worker_id: str,
        interval_s: float,
        lost_after_s: float,
        report: Callable[[str, str], None],
    ):
        super().__init__(name="marlaas-heartbeats", daemon=True)
        self._socket = beat_socket
        self._worker_id = worker_id.encode()
        self._interval_s = interval_s
        self._lost_after_s = lost_after_s
        self._report = report
        self._last_seen: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def watch(self, worker_id: str) -> None:
        with self._lock:
            self._last_seen[worker_id] = time.monotonic()

    def unwatch(self, worker_id: str) -> None:
        with self._lock:
            self._last_seen.pop(worker_id, None)

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def run(self) -> None:
        tick_s = min(self._interval_s, 0.25)
        last_tick = time.monotonic()
        while not self._stopping.is_set():
            arrived = self._socket.poll(int(tick_s * 1000))
            now = time.monotonic()
            pause = now - last_tick - tick_s
            last_tick = now
            while arrived and self._answer(now):
                pass
            self._find_silent(now, pause)
        self._socket.close(linger=0)

    def _answer(self, now: float) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(frames) == 3 and parse_header(frames[1]) == (PROTOCOL_VERSION, flow.BEAT):
            worker_id = frames[2].decode(errors="replace")
            with self._lock:
                known = worker_id in self._last_seen
                if known:
                    self._last_seen[worker_id] = now
            self._socket.send_multipart([frames[0], header(flow.BEAT if known else flow.GONE), self._worker_id], zmq.NOBLOCK)
        return True

    def _find_silent(self, now: float, pause: float) -> None:
        with self._lock:
            if pause > self._interval_s:  # it was us who slept (a suspended machine): nobody could be heard
                self._last_seen = {worker_id: seen + pause for worker_id, seen in self._last_seen.items()}
            silent = [worker_id for worker_id, seen in self._last_seen.items() if now - seen > self._lost_after_s]
            for worker_id in silent:
                del self._last_seen[worker_id]
        for worker_id in silent:
            self._report(worker_id, f"no heartbeat for {self._lost_after_s:g} s")


def _bind(context: zmq.Context, kind: int, address: str, hwm: int) -> Any:
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, _CLOSE_LINGER_MS)
    made.setsockopt(zmq.SNDHWM, hwm)
    made.setsockopt(zmq.RCVHWM, hwm)
    made.setsockopt(zmq.MAXMSGSIZE, flow.MAX_FRAME_BYTES)
    try:
        made.bind(address)
    except zmq.ZMQError as error:
        made.close(linger=0)
        if error.errno == zmq.EADDRINUSE:
            raise InvalidConfig(f"address={address!r}: in use; stop what uses it, or use port 0 for any free one") from None
        raise InvalidConfig(f"address={address!r}: cannot be bound ({error})") from None
    return made


def _endpoint(bound: Any) -> str:
    return bound.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
