"""`marlaas serve`: one service until SIGTERM or an interrupt, which drain it: running steps end and are saved."""

import asyncio
import json as jsonlib
import logging
import os
import signal
import socket
from pathlib import Path

import typer

from marlaas_jax.service.api import serving
from marlaas_jax.service.config import load_service
from marlaas_jax.service.first_start import admin_key, data_folder
from marlaas_jax.service.service import Service
from marlaas_jax.store.engine import Store
from marlaas_jax.workers.controller import DEVICE_MODULE
from marlaas_jax.workers.sandbox.sandbox import NO_SANDBOX


def run(file: Path | None, overrides: list[str], json: bool, device_module: str = DEVICE_MODULE) -> None:
    """Serves until it is told to stop. Raises UserError for a bad start."""
    config = load_service(file, overrides)
    os.umask(0o077)  # also where a folder was made by somebody else
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    with (
        data_folder(Path(config.data_dir)) as folder,
        serving.bind(config.host, config.port) as listening,
        Store.open(config.db_url) as store,
    ):
        key_file = admin_key(store, folder)
        if key_file is not None:
            _tell(json, "admin_key", f"made the tenant `admin`; its API key is in {key_file}", path=str(key_file))
        asyncio.run(_serve(Service(config, store, device_module=device_module), listening, json))
    _tell(json, "stopped", "stopped; what ran goes on at the next start")


async def _serve(service: Service, listening: socket.socket, json: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    serving_task = asyncio.current_task()
    assert serving_task is not None

    def on_signal() -> None:
        if stop.is_set():
            serving_task.cancel()  # asked twice: at once
            return
        _tell(json, "draining", f"draining for at most {service.config.drain_s:.0f} s; a second signal stops at once")
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await serving.serve(service, listening, lambda url: _on_ready(service, url, json), stop)


def _on_ready(service: Service, url: str, json: bool) -> None:
    config, sandbox = service.config, service.sandbox
    where = NO_SANDBOX if sandbox is None else sandbox.text
    _tell(json, "sandbox", f"uploaded code runs {where}", mode="none" if sandbox is None else sandbox.mode, where=where)
    text = (
        f"serving {config.runtime.model} at {url}; export MARLAAS_URL={url} MARLAAS_API_KEY=$(cat {config.data_dir}/admin.key)"
    )
    _tell(json, "ready", text, url=url, data_dir=config.data_dir)


def _tell(json: bool, kind: str, text: str, **fields: str) -> None:
    typer.echo(jsonlib.dumps({"type": kind, **fields}) if json else text)
