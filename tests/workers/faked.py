"""Runs and services with real environment and data workers and a fake device's process (tests/workers/fakes.py)."""

import asyncio
import os
from pathlib import Path

import pytest

from marlaas_jax.config import RunConfig, RuntimeConfig, validate
from marlaas_jax.workers import run
from marlaas_jax.workers.controller import Controller
from marlaas_jax.workers.controller_files import read_lines

ROOT = Path(__file__).parents[2]

REWARDS = """
import os, sys, time
ITEMS = [f"Say yes to question {i}." for i in range(40)]

def good(prompt, completion, item):
    return float(completion == "yes")

def raises(prompt, completion, item):
    raise ValueError("no reward today")

def fickle(prompt, completion, item):
    return raises(prompt, completion, item) if completion in ("yes", "no") else 0.0

def nan(prompt, completion, item):
    return float("nan")

def nan_for_no(prompt, completion, item):
    return 1.0 if completion == "yes" else float("nan")

def hangs(prompt, completion, item):
    time.sleep(1000)

def exits(prompt, completion, item):
    os._exit(7)

def prints(prompt, completion, item):
    print("x" * 50_000_000)
    return float(completion == "yes")
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    paths = [str(ROOT), str(ROOT / "envs"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in paths if p))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("FAKE_DEVICE", raising=False)


@pytest.fixture
def rewards(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def job(name, env, **changes):
    rollout = {"group_size": 4, "groups_per_batch": 2, "max_staleness": 1, "step_timeout_s": 1.0} | changes.pop("rollout", {})
    document = {"name": name, "env": str(env), "steps": 4, "rollout": rollout, "eval": {"num_items": 3}}
    return document | changes


def make(*jobs, **runtime):
    return validate(RunConfig, {"runtime": {"model": "tiny", **runtime}, "jobs": list(jobs)})


def train(config, run_dir, **options):
    async def limited():
        return await asyncio.wait_for(run.run(config, run_dir, device_module="tests.workers.fakes", **options), timeout=100)

    return asyncio.run(limited())


def steps_of(run_dir, name):
    return [row["step"] for row in read_lines(run_dir / "jobs" / name / "metrics.jsonl")]


def tickets_of(run_dir, name):
    return sorted(t for row in read_lines(run_dir / "jobs" / name / "metrics.jsonl") for t, _ in row["tickets"])


class Served:
    """A controller inside a running event loop."""

    def __init__(self, folder):
        runtime = validate(RuntimeConfig, {"model": "tiny", "bank": {"num_sampler_slots": 9, "num_learner_slots": 9}})
        self.folder = folder
        self.controller = Controller(runtime, folder, device_module="tests.workers.fakes")

    async def __aenter__(self):
        started = asyncio.Event()
        self._task = asyncio.create_task(self.controller.serve(started.set))
        await self.until(started.is_set)
        return self

    async def __aexit__(self, *exc):
        self.controller.end()
        await asyncio.wait_for(self._task, 60)

    def add(self, name, env, **changes):
        config = make(job(name, env, **changes)).jobs[0]
        return self.controller.add(config, self.folder / "jobs" / name, resume=False)

    async def until(self, condition, timeout_s=60):
        async with asyncio.timeout(timeout_s):
            while not condition():
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.02)


def serve(folder, story):
    async def run():
        async with Served(folder) as served:
            await story(served)

    asyncio.run(run())
