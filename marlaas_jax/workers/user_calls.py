"""Runs a user's code under a time limit: coroutines in the event loop, plain functions in threads of their own.

Whatever the code does (raise, exit, never answer), `run` returns in time with what came of it; a late answer goes nowhere.

A thread that is over its limit is interrupted by an exception, so that an endless loop does not take the processor from the
others for ever. An exception that comes out of nowhere leaves locks locked that were just being taken, and the locks of imports
and of logging are everybody's: so it is thrown only at threads that are over their limit, and not while they hold such a lock.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

MAX_TRACEBACK_CHARACTERS = 4000
RETRY_S = 0.05  # until a thread that must not be interrupted where it is may be further on
# A thread with a frame of these may hold a lock that other threads need.
LOCKING_FILES = (
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
    logging.__file__,
    threading.__file__,
)


class Abandoned(BaseException):
    """Raised inside a thread whose caller has stopped waiting, so that an endless loop in Python ends."""


class TooManyAbandoned(Exception):
    """So many threads hang that the process had better be replaced."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A call without a result. kind: "raised" or "timeout", as in messages.EnvError."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class RunningCall:
    """A coroutine of a user's that is in progress."""

    label: Any  # whatever the caller wants to recognise it by
    timeout_s: float


class UserCalls:
    """All calls of one event loop."""

    def __init__(self, max_abandoned: int = 64):
        self.running: dict[asyncio.Future[Any], RunningCall] = {}  # coroutines only; read by the watchdog's thread
        self._max_abandoned = max_abandoned
        self._abandoned: set[threading.Thread] = set()

    async def run(self, label: Any, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any | Failure:
        """Returns what `function(*args)` returns, awaited where it is awaitable, or a Failure."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if inspect.iscoroutinefunction(function):
            return await self._coroutine(label, function(*args), timeout_s, timeout_s)
        result = await self._thread(function, args, timeout_s)
        if inspect.isawaitable(result):
            return await self._coroutine(label, _awaited(result), max(0.0, deadline - loop.time()), timeout_s)
        return result

    async def _coroutine(
        self, label: Any, coroutine: Coroutine[Any, Any, Any], left_s: float, timeout_s: float
    ) -> Any | Failure:
        task = asyncio.ensure_future(_guarded(coroutine))
        self.running[task] = RunningCall(label, timeout_s)
        task.add_done_callback(self._forget)
        try:
            done, _ = await asyncio.wait({task}, timeout=left_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done:
            return Failure("raised", "it was cancelled") if task.cancelled() else task.result()
        task.cancel()  # not awaited: it may refuse to end
        return _timeout(timeout_s)

    async def _thread(self, function: Callable[..., Any], args: tuple, timeout_s: float) -> Any | Failure:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        answer: asyncio.Future[Any] = loop.create_future()

        def body() -> None:
            try:
                try:
                    result = function(*args)
                except Abandoned:
                    return
                except BaseException as error:
                    result = Failure("raised", bounded_traceback(error))
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(_settle, answer, result)
            except Abandoned:  # it came a moment too late
                pass

        self._check_abandoned()
        thread = threading.Thread(target=body, name="marlaas-user-call", daemon=True)
        thread.start()
        try:
            done, _ = await asyncio.wait({answer}, timeout=timeout_s)
        except asyncio.CancelledError:  # nobody waits any more; it may still end by itself in its time
            loop.call_at(deadline, self._interrupt, loop, thread)
            raise
        if done:
            return answer.result()
        self._interrupt(loop, thread)
        return _timeout(timeout_s)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self.running.pop(task, None)
        if not task.cancelled():
            task.exception()  # nobody may be left to look at it

    def _interrupt(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        """Throws Abandoned into a thread that still runs, as soon as it holds no lock that others need."""
        if not thread.is_alive():
            return
        self._abandoned.add(thread)
        if _may_hold_a_lock(thread):
            loop.call_later(RETRY_S, self._interrupt, loop, thread)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Abandoned))

    def _check_abandoned(self) -> None:
        if self._abandoned:
            self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
        if len(self._abandoned) > self._max_abandoned:
            raise TooManyAbandoned(f"{len(self._abandoned)} calls were given up and still hang")


def bounded_traceback(error: BaseException) -> str:
    """Returns the traceback, its middle left out where it is long."""
    text = "".join(traceback.format_exception(error)).strip()
    if len(text) <= MAX_TRACEBACK_CHARACTERS:
        return text
    half = MAX_TRACEBACK_CHARACTERS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


async def _guarded(coroutine: Coroutine[Any, Any, Any]) -> Any | Failure:
    """Keeps SystemExit and its like from leaving the task: asyncio would let them end the loop."""
    try:
        return await coroutine
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return Failure("raised", bounded_traceback(error))


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _may_hold_a_lock(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        # Every thread's stack begins in threading.py: its bootstrap holds nothing.
        if frame.f_code.co_filename in LOCKING_FILES and frame.f_code.co_name not in ("_bootstrap", "_bootstrap_inner", "run"):
            return True
        frame = frame.f_back
    return False


def _settle(answer: asyncio.Future[Any], result: Any) -> None:
    if not answer.done():
        answer.set_result(result)


def _timeout(timeout_s: float) -> Failure:
    return Failure("timeout", f"no answer within {timeout_s:g} s")
