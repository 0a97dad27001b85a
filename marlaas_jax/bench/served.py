"""`marlaas serve` in a process of its own, as the benchmarks around the service start and end it."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from marlaas_jax.errors import InternalError

END_S = 60.0  # to drain


@dataclasses.dataclass(frozen=True)
class Served:
    """A running service."""

    url: str
    admin_key: str
    data_dir: Path
    process: subprocess.Popen


@contextlib.contextmanager
def served(data_dir: Path, overrides: Sequence[str] = ()) -> Iterator[Served]:
    """Serves on a free port of the loopback until the block ends; the log is in `data_dir`/serve.log."""
    data_dir.mkdir(parents=True, exist_ok=True)
    settings = [f"data_dir={data_dir}", "port=0", *overrides]
    command = [sys.executable, "-m", "marlaas_jax.cli.main", "serve", "--json", *(f"--set={setting}" for setting in settings)]
    with (data_dir / "serve.log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        url = _ready(process, data_dir)
        yield Served(url, (data_dir / "admin.key").read_text().strip(), data_dir, process)
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _ready(process: subprocess.Popen, data_dir: Path) -> str:
    """Returns the URL once the service answers."""
    assert process.stdout is not None
    for line in process.stdout:
        record = json.loads(line)
        if record["type"] == "ready":
            return record["url"]
    log = (data_dir / "serve.log").read_text(errors="replace")
    raise InternalError(f"marlaas serve ended with {process.wait()}: {log[-500:]}")
