"""kill -9 costs time and nothing else: no gap, no repeat, every ticket trained once (design 13.6, H27, H35, H38).

A termination does not even cost what was trained since the last checkpoint.
"""

import contextlib
import os
import random
import signal
import time

import psutil
import pytest

from marlaas_jax.config import JobConfig, validate
from tests.e2e import history, runs

STEPS = 14
TASKS = ("upper", "double", "calc")


def assert_whole(run_dir, result):
    assert result["exit_code"] == 0 and all(job["state"] == "succeeded" for job in result["jobs"]), result
    for name in TASKS:
        folder = run_dir / "jobs" / name
        config = validate(JobConfig, runs.job(name, steps=STEPS)).model_dump(mode="json")
        assert history.faults(folder, config, is_whole=True) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_9_of_the_whole_run_at_five_random_moments(tmp_path):
    seed = int(os.environ.get("MARLAAS_CHAOS_SEED", random.randrange(1_000_000)))
    print(f"MARLAAS_CHAOS_SEED={seed}")
    rng = random.Random(seed)
    run_dir, log = tmp_path / "run", tmp_path / "log"
    file = runs.write(tmp_path / "jobs.yaml", [runs.job(task, steps=STEPS) for task in TASKS])
    process = runs.start(file, "--dir", run_dir, log=log)
    for _ in range(5):
        seen = runs.steps_so_far(run_dir)
        wanted = seen + rng.randrange(1, 6)
        ended = lambda: process.poll() is not None or runs.steps_so_far(run_dir) >= wanted  # noqa: B023
        runs.wait_for(ended, 300, "more steps")
        time.sleep(rng.uniform(0, 1.0))
        workers = runs.workers_of(run_dir)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        runs.wait_for(lambda: not any(w.is_running() and w.status() != "zombie" for w in workers), 20, "orphans to end")  # noqa: B023
        process = runs.start("--dir", run_dir, "--resume", log=log)
    assert_whole(run_dir, runs.finish(process, log, 300))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("module", ["env_worker", "device_process"])
def test_kill_9_of_a_worker_delays_the_run_and_nothing_more(tmp_path, module):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    file = runs.write(tmp_path / "jobs.yaml", [runs.job(task, steps=STEPS) for task in TASKS])
    process = runs.start(file, "--dir", run_dir, log=log)
    for step in (2, 12):
        runs.wait_for(lambda: runs.steps_so_far(run_dir) >= step, 300, "steps")  # noqa: B023
        victims = runs.workers_of(run_dir, f"marlaas_jax.workers.{module}")
        assert victims
        victims[0].kill()
    assert_whole(run_dir, runs.finish(process, log, 300))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_terminated_run_saves_the_last_step_of_every_job(tmp_path):
    """SIGTERM to all its processes, as systemd sends it; nothing was saved before."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    rare = {"every_steps": 10_000, "every_s": 10_000.0}
    file = runs.write(tmp_path / "jobs.yaml", [runs.job(task, steps=500, checkpoint=rare) for task in TASKS])
    process = runs.start(file, "--dir", run_dir, log=log)
    runs.wait_for(lambda: all(runs.steps_so_far(run_dir, task) >= 2 for task in TASKS), 300, "steps")
    for victim in (process, *runs.workers_of(run_dir)):
        with contextlib.suppress(psutil.NoSuchProcess):  # the first has ended it already
            victim.terminate()
    assert process.wait(20) == 143, log.read_text(errors="replace")[-4000:]
    assert "terminated" in log.read_text(errors="replace") and "Traceback" not in log.read_text(errors="replace")
    for task in TASKS:
        committed = [int(path.name) for path in (run_dir / "jobs" / task / "checkpoints").iterdir()]
        assert max(committed) >= history.history(run_dir / "jobs" / task)[0][-1], (task, committed)
