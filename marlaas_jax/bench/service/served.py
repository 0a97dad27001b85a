"""A real `marlaas serve` of one's own: on the loopback, on a free port, in its own folder. It may end and start again."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from marlaas_jax.client.asynchronous import AsyncClient
from marlaas_jax.errors import InternalError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 180.0
UNLIMITED = {"requests_per_second": None}


class Served:
    """One service over all its starts, which keep the port of the first."""

    def __init__(self, folder: Path, runtime: dict[str, Any], **settings: Any):
        self.folder = folder
        self.data = folder / "data"
        self.log = folder / "service.log"
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._file = folder / "service.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        document = {"runtime": runtime, "port": 0, "data_dir": str(self.data), **settings}
        self._file.write_text(yaml.safe_dump(document))

    @property
    def admin_key(self) -> str:
        """The key that the first start wrote down."""
        return (self.data / "admin.key").read_text().strip()

    @property
    def pid(self) -> int:
        """Of the present process."""
        assert self.process is not None, "not started"
        return self.process.pid

    def client(self, key: str, patience_s: float = 60.0) -> AsyncClient:
        """Returns a client with this key."""
        return AsyncClient(self.url, key, patience_s=patience_s)

    async def start(self) -> None:
        """Returns once the API answers; jobs may be submitted then. Raises InternalError if that does not come."""
        command = [sys.executable, "-m", "marlaas_jax.cli.main", "serve", str(self._file), "--json"]
        if self.url:
            command += ["--set", f"port={httpx.URL(self.url).port}"]
        with self.log.open("ab") as out:
            offset = out.tell()
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        end = time.monotonic() + START_TIMEOUT_S
        while not (url := self._url_behind(offset)):
            if self.process.poll() is not None or time.monotonic() > end:
                raise InternalError(f"marlaas serve did not come up; it printed last: {self.log_tail()}")
            await asyncio.sleep(0.05)
        self.url = url

    async def stop(self) -> int:
        """Asks the service to drain and end; returns its exit code. After three minutes it is killed."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(self.process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise InternalError(f"marlaas serve did not end within {STOP_TIMEOUT_S:.0f} s of SIGTERM") from None

    def kill(self) -> None:
        """Kills the process, if it runs, and reaps it."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def log_tail(self) -> str:
        """Returns what the service printed last."""
        return self.log.read_text(errors="replace")[-1000:].strip()

    def _url_behind(self, offset: int) -> str:
        with self.log.open("rb") as file:
            file.seek(offset)
            lines = file.read().decode(errors="replace").splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return next((record["url"] for record in records if record["type"] == "ready"), "")


async def gauges(http: httpx.AsyncClient, service: Served) -> list[tuple[str, dict[str, str], float]]:
    """Returns all figures of /metrics as an admin sees them: (name, labels, value)."""
    from prometheus_client.parser import text_string_to_metric_families

    headers = {"Authorization": f"Bearer {service.admin_key}"}
    response = await http.get(f"{service.url}/metrics", headers=headers)
    response.raise_for_status()
    families = text_string_to_metric_families(response.text)
    return [(sample.name, dict(sample.labels), float(sample.value)) for family in families for sample in family.samples]
