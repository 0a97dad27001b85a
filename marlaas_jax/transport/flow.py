"""Frames, credits and counts, shared by server, client and the in-memory twins. Pure logic: no socket, no clock.

A frame is HEADER (magic, protocol version, kind) + one payload. Of DATA frames at most `window` are on their way to a peer at
any time; the receiver returns a CREDIT when its application has *taken* a message, so a slow reader holds the sender back and
nothing is dropped. Everything accepted by `send` is in exactly one state: sent = delivered + in flight + failed.
"""

import dataclasses
import struct
from collections import deque

from marlaas_jax.messages import PROTOCOL_VERSION, Message

HELLO, WELCOME, REFUSED, DATA, CREDIT, BEAT, GONE, BYE = (bytes([c]) for c in b"hwrdcbgy")
MAGIC = b"ML"
DEFAULT_WINDOW = 1024
DEFAULT_HEARTBEAT_S = 1.0
DEFAULT_LOST_AFTER_S = 8.0  # so that a process that stands still is named within 10 s
MAX_QUEUED = 100_000  # messages waiting for credits; more means that somebody sends without looking
MAX_FRAME_BYTES = 512 << 20

_credit = struct.Struct("<I")


class PeerLost(Message, frozen=True):
    """Not on the wire: what `receive` delivers when a peer stopped answering, went away or was given up."""

    role: str
    reason: str


def header(kind: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    """Returns the first frame of a message of this kind."""
    return MAGIC + bytes([version]) + kind


def parse_header(frame: bytes) -> tuple[int, bytes] | None:
    """Returns (protocol version, kind), or None where `frame` is not a header of ours."""
    if len(frame) != 4 or frame[:2] != MAGIC:
        return None
    return frame[2], frame[3:4]


def pack_credit(count: int) -> bytes:
    """Returns the payload of a CREDIT frame."""
    return _credit.pack(count)


def unpack_credit(payload: bytes) -> int | None:
    """Returns the number of credits, or None for a payload that is not one."""
    return _credit.unpack(payload)[0] if len(payload) == _credit.size else None


@dataclasses.dataclass
class Counters:
    """What one endpoint saw since it started. sent = delivered + in_flight + failed."""

    sent: int = 0  # accepted by send()
    delivered: int = 0  # taken by the peer's application
    failed: int = 0  # accepted, but the peer was lost before it took them
    in_flight: int = 0  # waiting here, on the wire, or waiting in the peer's queue
    received: int = 0  # delivered to our application
    malformed: int = 0  # frames that could not be read
    ignored: int = 0  # frames of peers that are unknown or were given up
    refused: int = 0  # Hellos that were turned down


class SendWindow:
    """Messages accepted for one peer: at most `window` on their way, the rest waiting in order."""

    def __init__(self, window: int, max_queued: int = MAX_QUEUED):
        self.window = window
        self.max_queued = max_queued
        self.sent = self.delivered = self.failed = 0
        self._waiting: deque[bytes] = deque()
        self._on_wire = 0

    @property
    def queued(self) -> int:
        """Messages that wait for a credit."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Messages accepted and neither delivered nor failed."""
        return len(self._waiting) + self._on_wire

    @property
    def is_full(self) -> bool:
        """Whether `push` would exceed the limit."""
        return len(self._waiting) >= self.max_queued

    def push(self, payload: bytes) -> None:
        """Accepts a message; call `take` to learn what may go out."""
        self.sent += 1
        self._waiting.append(payload)

    def take(self) -> bytes | None:
        """Returns the next payload that may go out now, or None."""
        if not self._waiting or self._on_wire >= self.window:
            return None
        self._on_wire += 1
        return self._waiting.popleft()

    def put_back(self, payload: bytes) -> None:
        """Undoes `take` after the socket refused the payload."""
        self._on_wire -= 1
        self._waiting.appendleft(payload)

    def credit(self, count: int) -> bool:
        """Notes that the peer took `count` messages. Returns False where it cannot have taken so many."""
        if count > self._on_wire:
            return False
        self._on_wire -= count
        self.delivered += count
        return True

    def fail(self) -> int:
        """The peer is lost: everything under way fails. Returns how many did."""
        count = self.in_flight
        self.failed += count
        self._waiting.clear()
        self._on_wire = 0
        return count


class ReceiveWindow:
    """Counts what the application took and says when to return credits."""

    def __init__(self, window: int):
        self._batch = max(1, window // 4)
        self._waiting = 0
        self._owed = 0

    @property
    def waiting(self) -> int:
        """Messages in the application's queue; more than the window where the peer breaks the rule."""
        return self._waiting

    def arrived(self) -> None:
        """Notes a message put into the application's queue."""
        self._waiting += 1

    def took(self) -> int:
        """Notes that the application took one. Returns the credits to send now (0: none yet)."""
        self._waiting -= 1
        self._owed += 1
        if self._owed < self._batch and self._waiting > 0:
            return 0
        owed, self._owed = self._owed, 0
        return owed
