"""Watches the event loop of a process that others depend on: one that stands still is named, and ends the process.

Heartbeats come from a thread of their own, so without this a controller whose loop hangs would look alive for ever. Time in
which the whole process stood still, a stopped or suspended one, does not count.
"""

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

log = logging.getLogger(__name__)

TICK_S = 0.5
NAMED_AFTER_S = 5.0
ENDED_AFTER_S = 120.0
EXIT_HUNG = 6


def _end() -> None:
    logging.shutdown()
    os._exit(EXIT_HUNG)


class LoopWatch:
    """Use it as a context manager inside the loop. `end` is called, in a thread, when the loop stood still for too long."""

    def __init__(
        self, *, named_after_s: float = NAMED_AFTER_S, ended_after_s: float = ENDED_AFTER_S, end: Callable[[], None] = _end
    ):
        self._named_after_s, self._ended_after_s, self._end = named_after_s, ended_after_s, end
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._tick_s = min(TICK_S, named_after_s / 4)
        self._ticked = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="marlaas-loop-watch", daemon=True)
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "LoopWatch":
        self._tick()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join(2 * self._tick_s)

    def _tick(self) -> None:
        self._ticked = time.monotonic()
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _watch(self) -> None:
        last, paused_s, is_named = time.monotonic(), 0.0, False
        while not self._stopping.wait(self._tick_s):
            now = time.monotonic()
            paused_s += max(0.0, now - last - 2 * self._tick_s)
            last = now
            still_s = now - self._ticked - paused_s
            if still_s < self._named_after_s:
                if still_s < 2 * self._tick_s:
                    paused_s, is_named = 0.0, False
                continue
            if not is_named:
                is_named = True
                frame = sys._current_frames().get(self._thread_id)
                stack = "".join(traceback.format_stack(frame)[-8:]) if frame is not None else ""
                log.error("event loop stands still seconds=%.1f at:\n%s", still_s, stack)
            if still_s > self._ended_after_s:
                log.critical("event loop stood still for %.0f s; this process ends, and its next start goes on", still_s)
                self._end()
                return
