"""JetStream's own server (`server_lib.run`) on our engine, at one address of our choice.

`server_lib.run` makes its Driver and servicer by name and always listens on every interface; while it runs here, those names
stand for ours and the host is the given one. Nothing else of JetStream's module is changed, and the names are put back. It
opens no other port: JAX's profiler and Prometheus stay off, since JetStream would open those on every interface too.
"""

import contextlib
import functools
import socket
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from marlaas_jax.engine.jetstream import import_quietly
from marlaas_jax.errors import InvalidConfig
from marlaas_jax.jetstream import driver
from marlaas_jax.jetstream.engine import ServedEngine
from marlaas_jax.jetstream.prompts import Reader

server_lib = import_quietly("jetstream.core.server_lib")
config_lib = import_quietly("jetstream.core.config_lib")


def reserve(host: str, port: int) -> socket.socket:
    """Returns a bound socket that keeps an address (port 0: a free one) for gRPC in this process. Raises InvalidConfig.

    gRPC would not notice a taken port: it shares ports with whoever lets it, and 0.2.2 does not look at what it got. So the
    address is bound here first, alone, and only then opened for sharing with this process's gRPC; it never listens itself.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a server before it may linger
        reserved.bind((host, port))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except (OSError, UnicodeError, OverflowError) as error:
        reserved.close()
        reason = getattr(error, "strerror", None) or error
        raise InvalidConfig(
            f"--host {host} --port {port}: cannot be listened on ({reason}); --port 0 takes a free one"
        ) from None
    return reserved


def address_of(reserved: socket.socket) -> str:
    """Returns what clients connect to, as HOST:PORT."""
    host, port = reserved.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def start(engine: ServedEngine, reader: Reader, address: str, on_death: Callable[[str], None]) -> Any:
    """Returns JetStream's running server; its `stop` ends it. `on_death` is told when it can serve no more."""
    host, _, port = address.rpartition(":")
    config = config_lib.ServerConfig(
        interleaved_slices=(f"{jax.default_backend()}=1",), interleaved_engine_create_fns=(lambda devices: engine,)
    )
    ours = types.SimpleNamespace(
        Driver=functools.partial(driver.AdapterDriver, on_death=on_death),
        LLMOrchestrator=functools.partial(driver.AdapterOrchestrator, reader=reader),
    )
    with _standing_for(server_lib, orchestrator=ours, _HOST=host):
        return server_lib.run(port=int(port), config=config, devices=jax.devices()[:1])


@contextlib.contextmanager
def _standing_for(module: types.ModuleType, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    try:
        vars(module).update(values)
        yield
    finally:
        vars(module).update(before)
