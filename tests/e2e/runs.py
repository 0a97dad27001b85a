"""Starts `marlaas run` as a person does, and reads what it left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

RUNTIME = {
    "model": "tiny",
    # few buckets: what these tests wait for is mostly the compiler
    "engine": {"num_decode_slots": 16, "max_context": 64, "context_buckets": [64], "prefill_buckets": [64]},
    "learner": {"prompt_buckets": [32], "suffix_buckets": [32]},
}


def job(task: str, **settings: Any) -> dict[str, Any]:
    """Returns a small job on the tiny model, checkpointed after every step it can be."""
    return {
        "name": task,
        "env": f"tiny:{task}",
        "steps": 8,
        "sampling": {"max_tokens": 12},
        "optimizer": {"learning_rate": 1e-3},
        "rollout": {"group_size": 4, "groups_per_batch": 4},
        "eval": {"num_items": 0},
        "checkpoint": {"every_steps": 1},
    } | settings


def write(path: Path, jobs: list[dict[str, Any]], **runtime: Any) -> Path:
    """Writes a job file."""
    path.write_text(yaml.safe_dump({"runtime": RUNTIME | runtime, "jobs": jobs}))
    return path


def start(*arguments: str | Path, log: Path) -> subprocess.Popen:
    """Starts `marlaas run` with these arguments; its output goes to `log`."""
    command = [sys.executable, "-m", "marlaas_jax.cli.main", "run", *map(str, arguments), "--json"]
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def finish(process: subprocess.Popen, log: Path, timeout_s: float) -> dict[str, Any]:
    """Waits for a run; returns its result record, whatever the exit code."""
    try:
        code = process.wait(timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    results = [record for record in printed(log) if record["type"] == "result"]
    assert results, f"exit code {code}:\n" + log.read_text(errors="replace")[-4000:]
    return results[-1] | {"exit_code": code}


def lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a log."""
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def printed(log: Path) -> list[dict[str, Any]]:
    """Returns the records that a run with --json printed; warnings between them are left out."""
    return [json.loads(line) for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]


def episodes(run_dir: Path, name: str, split: str = "train") -> list[dict[str, Any]]:
    """Returns the episodes of a job, in order of ticket and sample."""
    found = [record for path in sorted(run_dir.glob(f"jobs/{name}/episodes-*.jsonl")) for record in lines(path)]
    return sorted((e for e in found if e["split"] == split), key=lambda e: (e["ticket"], e["sample"]))


def wait_for(condition, timeout_s: float, what: str):
    """Waits until `condition()` is true; returns its value."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.05)
    return value


def steps_so_far(run_dir: Path, name: str = "*") -> int:
    """Returns the number of metric lines of all jobs, or of one."""
    return sum(path.read_bytes().count(b"\n") for path in run_dir.glob(f"jobs/{name}/metrics.jsonl"))


def workers_of(run_dir: Path, module: str = "marlaas_jax.workers") -> list[psutil.Process]:
    """Returns the live worker processes whose controller writes `run_dir`, found by the folder of their logs."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if module in command:
            try:
                parents = [p.pid for p in process.parents()]
                controllers = [p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in (p.info["cmdline"] or [])]
            except psutil.NoSuchProcess:
                continue
            if str(run_dir / "runtime.yaml") in command or any(c.pid in parents for c in controllers):
                found.append(process)
    return found
