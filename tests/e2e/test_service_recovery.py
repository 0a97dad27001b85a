"""A service on the `tiny` model with a real device: more jobs than slots, and kill -9 of everything (design 13.6, H38)."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from marlaas_jax.client.blocking import Client
from tests.e2e import runs

pytestmark = pytest.mark.multiprocess
START_S = 900  # on a busy machine the compiler takes minutes


@contextlib.contextmanager
def served(folder, log, **settings):
    """Runs `marlaas serve`; yields (process, client). The process is killed at the end, with all that it started."""
    document = {"runtime": runs.RUNTIME, "data_dir": str(folder / "data"), "port": 0} | settings
    (folder / "service.yaml").write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "marlaas_jax.cli.main", "serve", str(folder / "service.yaml"), "--json"]
    start = log.stat().st_size if log.exists() else 0
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        told = lambda: [r for r in map(json.loads, log.read_text()[start:].splitlines()) if r["type"] == "ready"]
        (ready,) = runs.wait_for(told, START_S, "the service")
        with Client(ready["url"], (folder / "data" / "admin.key").read_text().strip(), patience_s=60) as client:
            yield process, client
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def events(folder, kind):
    return [event for event in runs.lines(folder / "data" / "events.jsonl") if event["kind"] == kind]


@pytest.mark.slow
def test_after_kill_9_of_everything_the_next_step_comes_soon_and_nothing_is_compiled_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
    log = tmp_path / "log"
    with served(tmp_path, log) as (process, client):
        ids = [client.submit(runs.job(task, steps=12)).id for task in ("upper", "double")]
        runs.wait_for(lambda: all(client.job(job_id).step >= 3 for job_id in ids), START_S, "steps")
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        alive = lambda: [child for child in children if child.is_running() and child.status() != "zombie"]
        runs.wait_for(lambda: not alive(), 20, "workers to end")
    with served(tmp_path, log) as (_, client):
        assert all(client.wait(job_id).state == "succeeded" for job_id in ids)
    for job_id in ids:
        rows = runs.lines(tmp_path / "data" / "jobs" / job_id / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, 13))
        assert sorted(ticket for row in rows for ticket, _ in row["tickets"]) == list(range(4 * 12))
    cold, warm = [event["figures"] for event in events(tmp_path, "device_ready")]
    first, second = events(tmp_path, "first_step")
    assert first["text"].startswith("started: first step after ") and second["text"].startswith("resumed: first step after ")
    print(f"first start {cold}, {first['text']}; after kill -9 {warm}, {second['text']}")
    assert cold["programs_compiled_anew"] > 0 and warm["programs_compiled_anew"] == 0
    assert warm["programs_from_cache"] >= cold["programs_compiled_anew"]


@pytest.mark.long
def test_a_hundred_jobs_end_on_eight_resident_slots(tmp_path):
    """Their state pages through a host memory of two jobs and the disk; nothing compiles after the start."""
    log = tmp_path / "log"
    runtime = runs.RUNTIME | {
        "bank": {"num_learner_slots": 9, "num_sampler_slots": 17, "max_rank": 4},
        "learner": runs.RUNTIME["learner"] | {"max_host_bytes": 2_000_000},
    }
    no_limits = dict.fromkeys(("max_running_jobs", "max_queued_jobs", "max_resident_adapters"))
    limits = {"max_running_jobs": 100, "quotas": no_limits}
    job = runs.job("upper", steps=2, lora={"rank": 4}, rollout={"group_size": 2, "groups_per_batch": 2})
    with served(tmp_path, log, runtime=runtime, **limits) as (_, client):
        start = time.monotonic()
        ids = [client.submit(job | {"name": f"job{i}", "seed": i}).id for i in range(100)]
        most_pages = 0
        while any(not client.job(job_id).is_over for job_id in ids[::9]) or list(client.jobs(state=["running", "queued"])):
            time.sleep(1.0)
            most_pages = max(most_pages, len(list((tmp_path / "data" / "pages").glob("*.page"))))
            assert time.monotonic() - start < 1800
        states = {client.job(job_id).state for job_id in ids}
        print(f"100 jobs of 2 steps on 8 slots: {time.monotonic() - start:.0f} s, at most {most_pages} of them on disk")
    assert most_pages > 0
    assert states == {"succeeded"}, events(tmp_path, "job_failed")[:3]
    for job_id in ids:
        assert [row["step"] for row in runs.lines(tmp_path / "data" / "jobs" / job_id / "metrics.jsonl")] == [1, 2]
