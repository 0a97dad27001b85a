"""What `marlaas run` does when it is told to end: the first signal ends it in order, the second at once."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import typer

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Returns the coroutine's result. SIGINT and SIGTERM cancel it, and what it does then is waited for.

    Raises KeyboardInterrupt after SIGINT, SystemExit(143) after SIGTERM. A second signal, of either kind, ends this process
    where it stands; its workers die with it.
    """
    received: list[int] = []

    async def cancellable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def on_signal(number: int, frame: object) -> None:
            if received:
                os._exit(128 + number)
            received.append(number)
            loop.call_soon_threadsafe(task.cancel)

        with _handled_by(on_signal):
            return await main

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        if received == [signal.SIGINT]:
            raise KeyboardInterrupt from None
        if received == [signal.SIGTERM]:
            typer.echo("terminated", err=True)
            raise SystemExit(128 + signal.SIGTERM) from None
        raise


@contextlib.contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    """Has `handler` called for SIGTERM, and for SIGINT unless that is ignored, as it is for a shell's background jobs."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
