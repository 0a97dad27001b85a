"""Calls of users' code that nobody waits for any more: they end, and what other threads need is not left locked."""

import asyncio
import logging
import threading
import time

from marlaas_jax.workers.user_calls import Failure, UserCalls


async def cancelled(calls, function, timeout_s, after_s=0.05):
    task = asyncio.ensure_future(calls.run(None, function, timeout_s=timeout_s))
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(condition, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_cancelled_call_ends_by_itself_within_its_limit():
    """It was once interrupted at once, wherever it was: an import's lock stayed locked, and the job's next load hung."""
    ended, late = threading.Event(), threading.Event()

    def short():
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass
        ended.set()

    async def story():
        calls = UserCalls()
        await cancelled(calls, short, timeout_s=30.0)
        await until(ended.is_set)

        def endless():
            try:
                while True:
                    pass
            finally:
                late.set()

        await cancelled(calls, endless, timeout_s=0.3)
        assert not late.is_set()
        await until(late.is_set)

    asyncio.run(story())


def test_a_call_beyond_its_limit_is_interrupted_once_it_holds_no_lock_of_others():
    class Slow(logging.Handler):
        def emit(self, record):
            end = time.monotonic() + 0.6
            while time.monotonic() < end:
                pass

    handler, logger, is_over = Slow(), logging.Logger("slow"), threading.Event()
    logger.addHandler(handler)

    def logs_for_ever():
        try:
            logger.warning("this takes longer than the call may")
            while True:
                pass
        finally:
            is_over.set()

    async def story():
        calls = UserCalls()
        start = time.monotonic()
        failure = await calls.run(None, logs_for_ever, timeout_s=0.1)
        assert isinstance(failure, Failure) and failure.kind == "timeout" and time.monotonic() - start < 0.5
        await until(is_over.is_set)
        assert time.monotonic() - start > 0.6, "not while it logs"
        assert handler.lock.acquire(timeout=1.0)
        handler.lock.release()

    asyncio.run(story())
