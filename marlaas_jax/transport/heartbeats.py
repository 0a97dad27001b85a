"""The controller's side of the heartbeats, on a thread and a socket of their own: no busy loop makes a peer look dead."""

import threading
import time
from collections.abc import Callable

import zmq

from marlaas_jax.messages import PROTOCOL_VERSION
from marlaas_jax.transport import flow
from marlaas_jax.transport.flow import header, parse_header

_AT_ONCE = 1000


class Heartbeats(threading.Thread):
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
        """Expects heartbeats of a peer from now on."""
        with self._lock:
            self._last_seen[worker_id] = time.monotonic()

    def unwatch(self, worker_id: str) -> None:
        """Expects none any more."""
        with self._lock:
            self._last_seen.pop(worker_id, None)

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self.join()

    def run(self) -> None:
        """The thread: answers and looks out until it is stopped."""
        tick_s = min(self._interval_s, 0.25)
        last_tick = time.monotonic()
        while not self._stopping.is_set():
            arrived = self._socket.poll(int(tick_s * 1000))
            now = time.monotonic()
            pause = now - last_tick - tick_s
            last_tick = now
            for _ in range(_AT_ONCE if arrived else 0):  # however many come, silent peers are found
                if not self._answer(now):
                    break
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
