"""The newcomer's page: the commands of docs/service.md, pasted into a shell in a fresh folder."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def pasted(page: Path) -> str:
    """Returns the first block of commands of a page."""
    block = re.search(r"^```\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None, page
    return block[1]


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like a clone after its set-up: what `make` compares, and this interpreter's environment."""
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (0, 0))  # older than the environment: nothing is installed again
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def test_from_nothing_to_a_job_watched_in_the_terminal(checkout):
    if not (checkout / ".venv/.installed").exists():
        pytest.skip("needs the environment that `make` builds")
    commands = pasted(ROOT / "docs/service.md")
    assert len(commands.splitlines()) == 5
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MARLAAS_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "envs")])
    shell = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=checkout, env=environment, capture_output=True, text=True, timeout=300
    )
    pid = re.search(r"stop it with: kill (\d+)", shell.stdout)
    try:
        assert shell.returncode == 0, shell.stdout + shell.stderr
        assert "20/20" in shell.stdout and "succeeded" in shell.stdout, shell.stdout
        assert list(checkout.glob("marlaas-data/jobs/*/adapter/adapter_model.safetensors"))
    finally:
        if pid:
            os.kill(int(pid[1]), signal.SIGTERM)
