"""The controller's end: one asyncio ROUTER that binds, many peers, each known by the worker id of its Hello.

    async with Server("ipc") as server:          # inside the running event loop; server.address is for the workers
        worker_id, message = await server.receive()   # Hello when a peer joins, PeerLost when one is gone
        server.send(worker_id, Shutdown())

One connection is one session: a worker that restarts has a new worker id, and what still arrives from a peer that was
given up is ignored. Heartbeats have a thread and a socket of their own, so no busy loop and no busy peer looks dead.
Every method but those of the heartbeat thread is for the event loop's thread only.

A server may have more doors, `Server(..., joined_to=server)`: peers of all doors are reached and heard through the first. One
with a gate asks it about every Hello; one for strangers is told a key pair (CURVE), small frames and a small window. What a
peer can make a door keep is bounded: its window, one Hello at a time, frames up to `max_frame_bytes`.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from marlaas_jax.errors import InternalError, InvalidConfig, WorkerLost
from marlaas_jax.messages import PROTOCOL_VERSION, Hello, Message, decode, encode
from marlaas_jax.transport import flow
from marlaas_jax.transport.address import open_to_all, resolve
from marlaas_jax.transport.flow import Counters, PeerLost, ReceiveWindow, SendWindow, header, parse_header
from marlaas_jax.transport.heartbeats import Heartbeats

log = logging.getLogger(__name__)

Gate = Callable[[Hello], Awaitable[str]]  # returns why a peer may not join, "" if it may

_CLOSE_LINGER_MS = 1000
_MAX_USED_IDS = 100_000
_MAX_ADMITTING = 64  # Hellos that a gate looks at, at once
_MAX_BEAT_BYTES = 1024
_FRAMES_AT_ONCE = 64  # before others in the event loop have their turn


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
    home: "Server"  # the door it came through
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
        joined_to: "Server | None" = None,
        gate: Gate | None = None,
        key_pair: tuple[bytes, bytes] | None = None,  # CURVE, public and secret: then the address may be any tcp://HOST:PORT
        max_frame_bytes: int = flow.MAX_FRAME_BYTES,
        is_open: bool = False,  # "ipc": other users of this machine may knock; only with a gate
    ):
        assert gate is not None or not is_open
        self.worker_id = f"controller-{os.getpid()}-{secrets.token_hex(4)}"
        self._window = window
        self._max_queued = max_queued
        self._gate = gate
        self._admitting: dict[bytes, asyncio.Task[None]] = {}  # by identity
        self._by_identity: dict[bytes, Peer] = {}
        if joined_to is None:
            self.peers: dict[str, Peer] = {}  # by worker id
            self._used_ids: dict[str, None] = {}  # the oldest first
            self._inbox: asyncio.Queue[tuple[Peer | None, str, Message]] = asyncio.Queue()
            self._done = Counters()  # of peers that are gone, and the counts that belong to no peer
        else:
            self.peers, self._used_ids = joined_to.peers, joined_to._used_ids
            self._inbox, self._done = joined_to._inbox, joined_to._done
        self._loop = asyncio.get_running_loop()
        data_address, beat_address, self._folder = resolve(address, anywhere=key_pair is not None)
        self._context = zmq.asyncio.Context()
        try:
            self._socket = _bind(self._context, data_address, 2 * window + 64, max_frame_bytes, key_pair)
            beat_socket = _bind(zmq.Context(self._context), beat_address, 1000, _MAX_BEAT_BYTES, key_pair)
            if is_open and self._folder is not None:
                open_to_all(self._folder)
        except BaseException:
            self._context.destroy(linger=0)
            self._remove_folder()
            raise
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.address = _endpoint(self._socket)
        self._welcome_info = {
            "heartbeat": _endpoint(beat_socket), "heartbeat_s": heartbeat_s, "lost_after_s": lost_after_s, "window": window
        }  # fmt: skip
        self._beats = Heartbeats(beat_socket, self.worker_id, heartbeat_s, lost_after_s, self._from_beats)
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
                peer.home._transmit(peer, flow.CREDIT, flow.pack_credit(credits))
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
                f"worker {worker_id}: {peer.outgoing.max_queued} messages wait already; await drain() before sending more"
            )
        peer.outgoing.push(encode(message))
        peer.home._flush(peer)

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
        peer.home._beats.unwatch(worker_id)
        failed = peer.outgoing.fail()
        self._done.sent += peer.outgoing.sent
        self._done.delivered += peer.outgoing.delivered
        self._done.failed += failed
        del peer.home._by_identity[peer.identity]
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
        for task in (self._reader, *self._admitting.values()):
            task.cancel()
        await asyncio.gather(self._reader, *self._admitting.values(), return_exceptions=True)
        await asyncio.to_thread(self._beats.stop)
        self._socket.close(linger=_CLOSE_LINGER_MS)
        await asyncio.to_thread(self._context.term)
        self._remove_folder()

    # ---- wire

    async def _read(self) -> None:
        for number in itertools.count(1):
            frames = await self._socket.recv_multipart()
            if number % _FRAMES_AT_ONCE == 0:
                await asyncio.sleep(0)
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
        elif kind == flow.BYE:
            self.lose(peer.worker_id, "it left")
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
        elif identity in self._by_identity or identity in self._admitting:
            return  # said twice
        elif hello.worker_id in self._used_ids:
            reason = f"worker id {hello.worker_id} was used before; a worker needs a new one on every start"
        elif self._gate is None:
            self._join(identity, hello)
            return
        elif len(self._admitting) >= _MAX_ADMITTING:
            reason = "too many workers are joining; try again in a moment"
        else:
            task = self._admitting[identity] = asyncio.create_task(self._admit(identity, hello, self._gate))
            task.add_done_callback(lambda _: self._admitting.pop(identity, None))
            return
        self._refuse(identity, reason)

    async def _admit(self, identity: bytes, hello: Hello, gate: Gate) -> None:
        try:
            reason = await gate(hello)
        except Exception:
            log.exception("gate failed worker_id=%s", hello.worker_id[:80])
            reason = "the controller cannot tell who this is; try again later"
        if reason or hello.worker_id in self._used_ids:
            self._refuse(identity, reason or "its worker id was used before")
        else:
            self._join(identity, msgspec.structs.replace(hello, info={}))  # what it showed the gate goes no further

    def _refuse(self, identity: bytes, reason: str) -> None:
        self._done.refused += 1
        if self._done.refused <= 20 or self._done.refused % 1000 == 0:
            log.warning("peer refused count=%d reason=%s", self._done.refused, reason)
        with contextlib.suppress(zmq.ZMQError):  # gone already
            self._transmit_to(identity, flow.REFUSED, reason.encode())

    def _join(self, identity: bytes, hello: Hello) -> None:
        outgoing = SendWindow(self._window, self._max_queued)
        incoming = ReceiveWindow(self._window)
        peer = Peer(hello.worker_id, hello.role, hello.pid, hello.info, identity, outgoing, incoming, self)
        peer.room.set()
        self.peers[peer.worker_id] = self._by_identity[identity] = peer
        self._used_ids[peer.worker_id] = None
        if len(self._used_ids) > _MAX_USED_IDS:
            del self._used_ids[next(iter(self._used_ids))]
        self._beats.watch(peer.worker_id)
        self._transmit(peer, flow.WELCOME, encode(Hello("controller", self.worker_id, os.getpid(), info=self._welcome_info)))
        if peer.worker_id in self.peers:
            log.info("peer joined worker_id=%s role=%s pid=%d", peer.worker_id, peer.role, peer.pid)
            self._inbox.put_nowait((None, peer.worker_id, hello))

    def _on_data(self, peer: Peer, payload: bytes) -> None:
        peer.incoming.arrived()
        if peer.incoming.waiting > self._window:
            self.lose(peer.worker_id, f"it sent more than the {self._window} messages that it may have under way")
            return
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


def _bind(context: zmq.Context, address: str, hwm: int, max_frame_bytes: int, key_pair: tuple[bytes, bytes] | None) -> Any:
    made = context.socket(zmq.ROUTER)
    made.setsockopt(zmq.LINGER, _CLOSE_LINGER_MS)
    made.setsockopt(zmq.SNDHWM, hwm)
    made.setsockopt(zmq.RCVHWM, hwm)
    made.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    if key_pair is not None:
        made.setsockopt(zmq.CURVE_SERVER, 1)
        made.setsockopt(zmq.CURVE_PUBLICKEY, key_pair[0])
        made.setsockopt(zmq.CURVE_SECRETKEY, key_pair[1])
        made.setsockopt(zmq.TCP_KEEPALIVE, 1)
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
