"""`marlaas bench streams`: what a thousand open event streams and a hundred requests a second do to a service that trains.

Sixteen jobs on `tiny` train all the time. The device's process has core 0; the service, its other workers and the load share
core 1. A quiet stretch, the load, a quiet stretch again: training under load is held against the mean of the two.
"""

import asyncio
import contextlib
import json as json_format
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from marlaas_jax.bench import timing
from marlaas_jax.bench.report import Line, show
from marlaas_jax.bench.service.served import Served
from marlaas_jax.client.blocking import Client
from marlaas_jax.errors import InternalError

NUM_JOBS = 16
TASKS = ("upper", "lower", "swap", "double")
UNLIMITED = {"max_running_jobs": None, "max_resident_adapters": None, "requests_per_second": None}
RUNTIME = {
    "model": "tiny",
    "engine": {"num_decode_slots": 32, "max_context": 64, "context_buckets": [64], "prefill_buckets": [64]},
    "learner": {"prompt_buckets": [32], "suffix_buckets": [32]},
}
START_S = 300.0


def run(json: bool = False, quick: bool = False) -> dict[str, Any]:
    """Runs the benchmark, prints a table (or JSON) and returns the report. quick: fewer streams, for seconds."""
    log = lambda text: print(text, file=sys.stderr, flush=True)
    num_streams, rate, seconds = (100, 50.0, 8.0) if quick else (1000, 100.0, 60.0)
    quiet: list[float] = []
    is_pinned = {0, 1} <= os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder, _serving(Path(folder)) as service:
        with Client(service.url, service.admin_key, patience_s=60.0) as client:
            key = client.create_key(client.create_tenant("load", quotas=UNLIMITED).id).secret
        assert key is not None
        jobs = _start_jobs(service, key, log)
        if is_pinned:
            _pin(service)
        log(f"quiet for {seconds / 2:.0f} s")
        quiet.append(_steps_per_s(service, seconds / 2))
        log(f"{num_streams} streams, {rate:.0f} requests/s for {seconds:.0f} s")
        with _load(service, key, jobs, num_streams, rate) as load:
            loaded = _steps_per_s(service, seconds)
            lag_s = _figure(service, r'marlaas_loop_lag_s\{quantile="0.99"\} (\S+)')
            seen = load()
        log(f"quiet for {seconds / 2:.0f} s")
        quiet.append(_steps_per_s(service, seconds / 2))
    cores = "pinned" if is_pinned else "not pinned"
    rates = {"quiet_steps_per_s": quiet, "loaded_steps_per_s": loaded}
    lines = [
        _line("requests and streams that failed", seen["num_errors"] + seen["num_streams_cut"], "{:.0f}", "<= 0", seen),
        _line("GET /v1/jobs/ID, p99", seen["request_p99_s"], "{:.3f} s", "<= 0.5", {"p50_s": seen["request_p50_s"]}),
        _line("event loop lag, p99", lag_s, "{:.3f} s", "<= 0.05", {}),
        _line("training under load, of the quiet rate", loaded / (sum(quiet) / 2), "{:.2f}", ">= 0.9", rates),
        _line("events delivered per second", seen["events_per_s"], "{:.0f}", "", {}),
    ]
    report = {"machine": timing.machine(), "cores": cores, "lines": [line.as_dict() for line in lines]}
    show(report, f"streams, {cores}", json, figures="measured")
    return report


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[Served]:
    service = Served(folder, RUNTIME)
    asyncio.run(service.start())
    try:
        yield service
    finally:
        asyncio.run(service.stop())


def _line(name: str, value: float, form: str, wanted: str, detail: dict[str, Any]) -> Line:
    return Line(name, float(value), form.format(value), wanted, detail)


def _start_jobs(service: Served, key: str, log: Any) -> list[str]:
    """Returns the ids of jobs that train without an end, once each has trained a batch."""
    with Client(service.url, key, patience_s=60.0) as client:
        jobs = [
            client.submit({
                "name": f"job{number}", "env": f"tiny:{TASKS[number % len(TASKS)]}", "steps": 1_000_000, "seed": number,
                "sampling": {"max_tokens": 12}, "eval": {"num_items": 0},
                "rollout": {"group_size": 4, "groups_per_batch": 4, "max_staleness": 1},
            }).id
            for number in range(NUM_JOBS)
        ]  # fmt: skip
        end, told = time.monotonic() + START_S, None
        while waiting := [job for job in map(client.job, jobs) if job.step < 1]:
            if time.monotonic() > end or any(job.state == "failed" for job in waiting):
                raise InternalError(f"{waiting[0].id}: trained nothing; {waiting[0].reason or waiting[0].why}")
            if len(waiting) != told:
                log(f"{(told := len(waiting))} of {len(jobs)} jobs have not trained yet")
            time.sleep(1.0)
    return jobs


def _pin(service: Served) -> None:
    """Gives core 0 to the device's process, core 1 to all others and to what this process starts from now on."""
    root = psutil.Process(service.pid)
    for process in (root, *root.children(recursive=True)):
        core = 0 if "device_process" in " ".join(process.cmdline()) else 1
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})
    os.sched_setaffinity(0, {1})


def _steps_per_s(service: Served, seconds: float) -> float:
    """Returns the batches of all jobs trained per second."""
    before, begin = _steps(service), time.monotonic()
    time.sleep(seconds)
    return (_steps(service) - before) / (time.monotonic() - begin)


def _steps(service: Served) -> float:
    return sum(float(value) for value in re.findall(r"^marlaas_job_step\{.*\} (\S+)$", _metrics(service), re.MULTILINE))


def _figure(service: Served, pattern: str) -> float:
    found = re.search(pattern, _metrics(service))
    assert found is not None, pattern
    return float(found[1])


def _metrics(service: Served) -> str:
    response = httpx.get(f"{service.url}/metrics", headers={"Authorization": f"Bearer {service.admin_key}"}, timeout=60.0)
    response.raise_for_status()
    return response.text


@contextlib.contextmanager
def _load(service: Served, key: str, jobs: list[str], num_streams: int, rate: float) -> Iterator[Any]:
    """Yields, once all streams are open, what ends the load and returns what it saw."""
    command = [sys.executable, "-m", "marlaas_jax.bench.stream_load"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            settings = {"url": service.url, "key": key, "jobs": jobs, "num_streams": num_streams, "rate": rate}
            process.stdin.write(json_format.dumps(settings) + "\n")
            process.stdin.flush()
            if process.stdout.readline().strip() != "open":
                raise InternalError(f"the load ended with {process.wait()} before its streams were open")
            yield lambda: _seen(process)
        finally:
            process.kill()


def _seen(process: subprocess.Popen) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    return json_format.loads(process.stdout.readline())
