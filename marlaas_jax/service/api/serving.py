"""The service and its HTTP server in one event loop, until they are told to stop."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn

from marlaas_jax.errors import InvalidConfig
from marlaas_jax.service.api.app import create_app
from marlaas_jax.service.service import Service

BACKLOG = 2048
LAST_ANSWERS_S = 5.0  # for requests under way when all else has ended


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises InvalidConfig, with the remedy, where that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # the protocol is what lets asyncio set NODELAY
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        where = f"host={host!r}, port={port}"
        raise InvalidConfig(f"{where}: cannot be listened on ({reason}); --set port=0 takes a free one") from None
    return listening


async def serve(service: Service, listening: socket.socket, ready: Callable[[str], None], stop: asyncio.Event) -> None:
    """Calls `ready` with the URL, serves until `stop`, then accepts no more, drains the service and ends.

    Event streams stay open while it drains. Raises the service's UserError for a bad start.
    """
    started = asyncio.Event()
    config = uvicorn.Config(
        create_app(service), lifespan="on", ws="none", access_log=False, log_config=None,
        timeout_graceful_shutdown=int(service.config.drain_s + LAST_ANSWERS_S),
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.create_task(service.serve(started.set))
    tasks: list[asyncio.Task] = [serving]
    stopping, starting = asyncio.create_task(stop.wait()), asyncio.create_task(started.wait())
    try:
        await asyncio.wait([serving, starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if started.is_set():
            answering = asyncio.create_task(server.serve(sockets=[listening]))
            tasks.append(answering)
            host, port = listening.getsockname()[:2]
            ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            await asyncio.wait([serving, answering, stopping], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        if not serving.done():
            await service.drain()
        for task in tasks:
            await task
    finally:
        listening.close()
        for task in [*tasks, stopping, starting]:
            task.cancel()
        await asyncio.gather(*tasks, stopping, starting, return_exceptions=True)
