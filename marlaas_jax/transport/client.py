"""A worker's end: a blocking interface over a DEALER. One thread owns the data socket, another the heartbeats.

    client = Client(address, "environment", worker_id)   # raises ProtocolMismatch or WorkerLost
    message = client.receive(timeout_s=0.5)               # None when nothing came
    client.send(EnvDone(...))                             # from any thread

`receive` and `send` raise WorkerLost once the controller is gone, after everything that had arrived was received: a worker
then exits. One connection is one session, so a broken connection counts as gone.
"""

import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from marlaas_jax.errors import ProtocolMismatch, WorkerLost
from marlaas_jax.messages import PROTOCOL_VERSION, Hello, Message, decode, encode
from marlaas_jax.transport import flow
from marlaas_jax.transport.flow import Counters, ReceiveWindow, SendWindow, header, parse_header

log = logging.getLogger(__name__)

SEND_S = 300.0  # a controller whose heart beats and that takes nothing for so long is as good as gone
TOKEN_VARIABLE = "MARLAAS_WORKER_TOKEN"  # by which the controller knows a worker that it started

_GONE = object()  # in the inbox: nothing follows


def new_worker_id(role: str) -> str:
    """Returns an id that no other start of any worker has."""
    return f"{role}-{os.getpid()}-{secrets.token_hex(4)}"


class Client:
    """Connects, says Hello and waits for the welcome. Thread-safe."""

    def __init__(
        self,
        address: str,
        role: str,
        worker_id: str | None = None,
        info: dict[str, Any] | None = None,
        *,
        connect_timeout_s: float = 60.0,
        max_queued: int = flow.MAX_QUEUED,
        server_key: bytes | None = None,  # the server's public CURVE key, in Z85: the connection is encrypted
    ):
        self.worker_id = worker_id or new_worker_id(role)
        self.address = address
        self._context = zmq.Context()
        self._server_key = server_key
        self._socket = self._dealer()
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, flow.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 1 << 17)  # the window is the limit that works
        self._socket.setsockopt(zmq.RCVHWM, 1 << 17)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(address)
            token = os.environ.pop(TOKEN_VARIABLE, "")
            self.server_info = self._shake_hands(role, (info or {}) | ({"token": token} if token else {}), connect_timeout_s)
        except BaseException:
            self._socket.disable_monitor()
            self._context.destroy(linger=0)
            raise
        window = self.server_info["window"]
        self._changed = threading.Condition()  # guards the windows and the counters
        self._outgoing = SendWindow(window, max_queued)
        self._incoming = ReceiveWindow(window)
        self._credits = 0  # to return to the server
        self._received = self._malformed = 0
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reason = ""  # why the controller counts as gone
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._io = threading.Thread(target=self._run_io, name="marlaas-transport", daemon=True)
        self._beats = threading.Thread(target=self._run_beats, name="marlaas-heartbeat", daemon=True)
        self._beats_wake = threading.Event()
        self._io.start()
        self._beats.start()

    def __enter__(self) -> "Client":
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
            self._inbox.put(_GONE)  # for every later call
            raise WorkerLost(self._reason)
        with self._changed:
            self._received += 1
            self._credits += self._incoming.took()
            owed = self._credits
        if owed:
            self._wake()
        return message

    def send(self, message: Message, timeout_s: float = SEND_S) -> None:
        """Accepts a message. Blocks while too much waits for the controller; raises WorkerLost if it is gone or stays so."""
        payload = encode(message)
        with self._changed:
            if not self._changed.wait_for(lambda: self._reason or not self._outgoing.is_full, timeout_s):
                raise WorkerLost(f"the controller at {self.address} took nothing for {timeout_s:g} s")
            if self._reason:
                raise WorkerLost(self._reason)
            self._outgoing.push(payload)
        self._wake()

    def counters(self) -> Counters:
        """Returns the counts since the connection was made."""
        with self._changed:
            out = self._outgoing
            return Counters(out.sent, out.delivered, out.failed, out.in_flight, self._received, self._malformed)

    def close(self, flush_s: float = 2.0) -> None:
        """Sends what is queued (at most `flush_s`), then disconnects. A second call does nothing."""
        with self._changed:
            if self._closing:
                return
            self._changed.wait_for(lambda: self._reason or not self._outgoing.queued, flush_s)
            self._closing = True
        self._wake()
        self._beats_wake.set()
        self._io.join()
        self._beats.join()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ---- wire

    def _dealer(self) -> zmq.Socket:
        made = self._context.socket(zmq.DEALER)
        if self._server_key is not None:
            made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()  # who we are is said in the Hello
            made.curve_serverkey = self._server_key
        return made

    def _shake_hands(self, role: str, info: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        hello = Hello(role, self.worker_id, os.getpid(), info=info)
        self._socket.send_multipart([header(flow.HELLO), encode(hello)])
        if not self._socket.poll(int(timeout_s * 1000)):
            raise WorkerLost(f"no controller answered at {self.address} within {timeout_s:g} s")
        frames = self._socket.recv_multipart()
        parsed = parse_header(frames[0])
        if parsed is not None and parsed[1] == flow.REFUSED:
            raise ProtocolMismatch(f"the controller at {self.address} refused: {frames[1].decode(errors='replace')}")
        if parsed != (PROTOCOL_VERSION, flow.WELCOME):
            theirs = f"protocol version {parsed[0]}" if parsed else "another protocol"
            raise ProtocolMismatch(f"the controller at {self.address} speaks {theirs}, this worker {PROTOCOL_VERSION}")
        welcome = decode(frames[1])
        assert isinstance(welcome, Hello)
        return welcome.info

    def _run_io(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake_read):
            poller.register(source, zmq.POLLIN)
        retry = False
        try:
            while not self._closing and not self._reason:
                events = dict(poller.poll(20 if retry else 1000))
                if self._wake_read in events:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 65536)
                if self._socket in events:
                    self._read_all()
                if self._monitor in events:
                    self._read_all()
                    recv_monitor_message(self._monitor)
                    self._lose(f"the controller at {self.address} closed the connection")
                retry = not self._flush()
        except Exception as error:  # never leave the application waiting on a dead thread
            log.exception("transport failed worker_id=%s", self.worker_id)
            self._lose(f"the connection to {self.address} failed: {error!r}")
        finally:
            self._lose("this client is closed")
            if self._server_key is not None:  # nobody over there sees our process end
                with contextlib.suppress(zmq.ZMQError):
                    self._socket.send_multipart([header(flow.BYE), b""], zmq.NOBLOCK)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()

    def _read_all(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            parsed = parse_header(frames[0]) if len(frames) == 2 else None
            if parsed == (PROTOCOL_VERSION, flow.DATA):
                self._on_data(frames[1])
            elif parsed == (PROTOCOL_VERSION, flow.CREDIT):
                self._on_credit(frames[1])
            else:
                self._drop(f"{len(frames)} frames, header {frames[0][:8].hex()}")

    def _on_data(self, payload: bytes) -> None:
        with self._changed:
            self._incoming.arrived()
        try:
            message = decode(payload)
        except msgspec.MsgspecError as error:
            self._drop(str(error))
            with self._changed:
                self._credits += self._incoming.took()
            return
        self._inbox.put(message)

    def _on_credit(self, payload: bytes) -> None:
        credits = flow.unpack_credit(payload)
        with self._changed:
            known = credits is not None and self._outgoing.credit(credits)
            self._changed.notify_all()
        if not known:
            self._drop(f"credit {payload.hex()}")

    def _flush(self) -> bool:
        """Sends what may go. Returns False where the socket is full for the moment."""
        with self._changed:
            credits, self._credits = self._credits, 0
            try:
                if credits:
                    self._socket.send_multipart([header(flow.CREDIT), flow.pack_credit(credits)], zmq.NOBLOCK)
            except zmq.Again:
                self._credits += credits
                return False
            while (payload := self._outgoing.take()) is not None:
                try:
                    self._socket.send_multipart([header(flow.DATA), payload], zmq.NOBLOCK)
                except zmq.Again:
                    self._outgoing.put_back(payload)
                    return False
            self._changed.notify_all()
        return True

    def _drop(self, what: str) -> None:
        with self._changed:
            self._malformed += 1
            count = self._malformed
        if count <= 20 or count % 1000 == 0:
            log.warning("frame dropped worker_id=%s count=%d reason=%s", self.worker_id, count, what)

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._reason:
                return
            self._reason = reason
            self._outgoing.fail()
            self._changed.notify_all()
        self._inbox.put(_GONE)
        self._beats_wake.set()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake anyway; closed: nobody to wake
            os.write(self._wake_write, b"w")

    def _run_beats(self) -> None:
        interval_s, lost_after_s = self.server_info["heartbeat_s"], self.server_info["lost_after_s"]
        beat_socket = self._dealer()
        beat_socket.setsockopt(zmq.LINGER, 0)
        beat_socket.setsockopt(zmq.SNDHWM, 100)
        beat_socket.connect(self._beat_address())
        beat = [header(flow.BEAT), self.worker_id.encode()]
        heard = last_tick = time.monotonic()
        while not self._closing and not self._reason:
            with contextlib.suppress(zmq.Again):
                beat_socket.send_multipart(beat, zmq.NOBLOCK)
            self._beats_wake.wait(interval_s)
            now = time.monotonic()
            heard += max(0.0, now - last_tick - 2 * interval_s)  # it was us who slept
            last_tick = now
            while beat_socket.poll(0):
                frames = beat_socket.recv_multipart()
                heard = now
                if parse_header(frames[0]) == (PROTOCOL_VERSION, flow.GONE):
                    self._lose(f"the controller at {self.address} has given this worker up")
            if now - heard > lost_after_s:
                self._lose(f"the controller at {self.address} is silent for {lost_after_s:g} s")
        beat_socket.close()

    def _beat_address(self) -> str:
        """Returns where heartbeats go: on tcp to the host that answered, whatever name the server has for itself."""
        beats: str = self.server_info["heartbeat"]
        if not beats.startswith("tcp://"):
            return beats
        return f"{self.address.rpartition(':')[0]}:{beats.rpartition(':')[2]}"
