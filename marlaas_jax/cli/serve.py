"""`marlaas serve`: one service until SIGTERM or an interrupt, which drain it: running steps end and are saved."""

import asyncio
import json as jsonlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import typer

from marlaas_jax.errors import InternalError, InvalidConfig, StorageError
from marlaas_jax.service.api import serving
from marlaas_jax.service.config import ServiceConfig, load_service
from marlaas_jax.service.first_start import admin_key, data_folder
from marlaas_jax.service.service import Service
from marlaas_jax.store.engine import Store
from marlaas_jax.workers.controller import DEVICE_MODULE
from marlaas_jax.workers.sandbox.sandbox import NO_SANDBOX

START_LIMIT_S = 120.0  # until a service in the background answers


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


def detach(file: Path | None, overrides: list[str], json: bool) -> None:
    """Starts a service that outlives this command; returns once it answers. Its output goes to DATA_DIR/serve.log."""
    config = load_service(file, overrides)
    log_path = Path(config.data_dir) / "serve.log"
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = log_path.open("ab")
    except OSError as error:
        raise StorageError(f"{log_path}: cannot be written ({error.strerror})") from None
    arguments = [*([str(file)] if file else []), *(f"--set={override}" for override in overrides), "--json"]
    with log:
        begin = log.seek(0, os.SEEK_END)
        command = [sys.executable, "-m", "marlaas_jax.cli.main", "serve", *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    ready = _wait_ready(process, log_path, begin)
    text = f"{_ready_text(config, ready['url'])}\nlog: {log_path}; stop it with: kill {process.pid}"
    _tell(json, "ready", text, **ready | {"pid": process.pid, "log": str(log_path)})


def _wait_ready(process: subprocess.Popen, log_path: Path, begin: int) -> dict[str, Any]:
    """Returns what the service printed when it was ready. Raises what kept it from that."""
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        code = process.poll()
        with log_path.open("rb") as log:
            log.seek(begin)
            lines = log.read().decode(errors="replace").rpartition("\n")[0].splitlines()  # whole lines only
        for line in lines:
            if line.startswith('{"type": "ready"'):
                record = jsonlib.loads(line)
                return {name: record[name] for name in ("url", "data_dir")}
        if code is not None:
            reason = (lines or ["it printed nothing"])[-1].removeprefix("error: ")
            raise InvalidConfig(reason) if code == 2 else InternalError(f"marlaas serve ended with {code}: {reason}")
        time.sleep(0.05)
    process.kill()
    raise InternalError(f"marlaas serve was not ready within {START_LIMIT_S:.0f} s; see {log_path}")


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
    _tell(json, "ready", _ready_text(config, url), url=url, data_dir=config.data_dir)


def _ready_text(config: ServiceConfig, url: str) -> str:
    return (
        f"serving {config.runtime.model} at {url}; export MARLAAS_URL={url} MARLAAS_API_KEY=$(cat {config.data_dir}/admin.key)"
    )


def _tell(json: bool, kind: str, text: str, **fields: str | int) -> None:
    typer.echo(jsonlib.dumps({"type": kind, **fields}) if json else text)
