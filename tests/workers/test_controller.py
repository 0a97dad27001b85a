"""The controller with real environment and data workers and a fake device's process."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from marlaas_jax.config import RunConfig, validate
from marlaas_jax.errors import InvalidConfig, StorageError
from marlaas_jax.workers import controller
from marlaas_jax.workers.controller_files import read_lines

ROOT = Path(__file__).parents[2]

REWARDS = """
import os, sys, time
ITEMS = [f"Say yes to question {i}." for i in range(40)]

def good(prompt, completion, item):
    return float(completion == "yes")

def raises(prompt, completion, item):
    raise ValueError("no reward today")

def nan(prompt, completion, item):
    return float("nan")

def nan_for_no(prompt, completion, item):
    return 1.0 if completion == "yes" else float("nan")

def hangs(prompt, completion, item):
    time.sleep(1000)

async def blocks(prompt, completion, item):
    time.sleep(1000)

def exits(prompt, completion, item):
    os._exit(7)

def exits_at_no(prompt, completion, item):
    if completion == "no" and hash(prompt) % 3 == 0:
        os._exit(7)
    return 1.0

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
        return await asyncio.wait_for(
            controller.run(config, run_dir, device_module="tests.workers.fakes", **options), timeout=90
        )

    return asyncio.run(limited())


def steps_of(run_dir, name):
    return [row["step"] for row in read_lines(run_dir / "jobs" / name / "metrics.jsonl")]


def tickets_of(run_dir, name):
    return sorted(t for row in read_lines(run_dir / "jobs" / name / "metrics.jsonl") for t, _ in row["tickets"])


def test_two_jobs_train_and_leave_their_records(tmp_path, rewards):
    statuses, events = [], []
    config = make(job("file", f"{rewards}:good", steps=6), job("builtin", "arithmetic"))
    result = train(config, tmp_path / "run", on_status=statuses.append, on_event=events.append)
    assert result.succeeded, result
    assert steps_of(tmp_path / "run", "file") == [1, 2, 3, 4, 5, 6]
    assert tickets_of(tmp_path / "run", "file") == list(range(12))
    file = result.jobs[0]
    assert file.reward_last3 > file.reward_first and file.eval_after > file.eval_before and file.tokens > 0
    folder = tmp_path / "run" / "jobs" / "file"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["reward_last3"] == file.reward_last3 and summary["state"] == "succeeded"
    assert (folder / "adapter" / "adapter_config.json").is_file()
    episode = read_lines(folder / "episodes-00000.jsonl")[-1]
    assert "Say yes to question" in episode["prompt"] and episode["turns"][0]["text"] in ("yes", "no")
    assert episode["turns"][0]["fingerprint"] and episode["reward"] in (0.0, 1.0)
    assert statuses and statuses[-1].jobs[0].state == "succeeded" and statuses[-1].jobs[0].episodes["running"] == 0
    assert {event["kind"] for event in events} >= {"run_started", "job_ready", "evaluated", "job_succeeded"}
    assert (tmp_path / "run" / "config.yaml").is_file() and read_lines(tmp_path / "run" / "events.jsonl")


def test_metrics_are_strict_json(tmp_path, rewards):
    """H18."""
    train(make(job("a", f"{rewards}:good")), tmp_path / "run")

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    for path in (tmp_path / "run").rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        ("raises", "EnvironmentFailed", "no reward today"),
        ("nan", "EnvironmentFailed", "nan"),
        ("hangs", "EnvironmentFailed", "timeout"),
        ("exits", "EnvironmentFailed", "environment workers in a row"),
    ],
)
def test_a_broken_reward_ends_its_job_with_the_reason_and_no_other(tmp_path, rewards, function, kind, words):
    """H24, H27, H28."""
    bad = job("bad", f"{rewards}:{function}", rollout={"max_attempts": 2}, eval={"num_items": 0})
    result = train(make(bad, job("good", f"{rewards}:good", steps=6)), tmp_path / "run")
    failed, good = result.jobs
    assert failed.state == "failed" and failed.kind == kind and words in failed.reason.lower(), failed.reason
    assert good.state == "succeeded" and good.steps == 6 and tickets_of(tmp_path / "run", "good") == list(range(12))


def test_fifty_megabytes_of_output_change_nothing(tmp_path, rewards):
    result = train(make(job("loud", f"{rewards}:prints", steps=1, eval={"num_items": 0})), tmp_path / "run")
    assert result.succeeded
    assert sum(path.stat().st_size for path in (tmp_path / "run").rglob("*")) < 20 << 20


def test_missing_rewards_are_left_out_and_the_job_goes_on(tmp_path, rewards):
    result = train(make(job("some", f"{rewards}:nan_for_no", steps=3)), tmp_path / "run")
    assert result.succeeded
    rows = read_lines(tmp_path / "run" / "jobs" / "some" / "metrics.jsonl")
    assert all(row["rollout/reward_mean"] == 1.0 for row in rows) and any(row["rollout/num_missing_rewards"] for row in rows)


def test_a_killed_environment_worker_delays_and_nothing_more(tmp_path, rewards):
    """H27: kill -9 in the middle of the run."""
    killed = []

    def on_event(event):
        if event["kind"] == "worker_joined" and event["role"] == "environment" and not killed:
            killed.append(event["pid"])
            os.kill(event["pid"], 9)

    config = make(job("a", f"{rewards}:good"))
    assert train(config, tmp_path / "run", on_event=on_event).succeeded
    assert killed and tickets_of(tmp_path / "run", "a") == list(range(8))


def test_a_lost_device_goes_on_from_the_committed_step(tmp_path, rewards, monkeypatch):
    """The device dies after batch 3 was trained and before anybody knew; step 2 is committed."""
    options = {"die_at_step": 3, "marker": str(tmp_path / "died"), "commit_every": 2}
    monkeypatch.setenv("FAKE_DEVICE", json.dumps(options))
    result = train(make(job("a", f"{rewards}:good", steps=5)), tmp_path / "run")
    assert result.succeeded and (tmp_path / "died").exists() and result.jobs[0].incarnations == 2
    assert steps_of(tmp_path / "run", "a") == [1, 2, 3, 4, 5] and tickets_of(tmp_path / "run", "a") == list(range(10))


def test_a_batch_committed_before_it_was_reported_keeps_its_line(tmp_path, rewards, monkeypatch):
    """The device commits batch 3 and dies before it says so: the resumed history has no gap."""
    options = {"die_at_step": 3, "marker": str(tmp_path / "died"), "commit_every": 1}
    monkeypatch.setenv("FAKE_DEVICE", json.dumps(options))
    result = train(make(job("a", f"{rewards}:good", steps=5)), tmp_path / "run")
    assert result.succeeded
    assert steps_of(tmp_path / "run", "a") == [1, 2, 3, 4, 5] and tickets_of(tmp_path / "run", "a") == list(range(10))


def test_a_job_that_the_device_fails_ends_alone(tmp_path, rewards, monkeypatch):
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"fail_job": {"a": 2}}))
    result = train(make(job("a", f"{rewards}:good"), job("b", f"{rewards}:good")), tmp_path / "run")
    assert [entry.state for entry in result.jobs] == ["failed", "succeeded"]
    assert result.jobs[0].kind == "NonFinite" and "gradients in a row" in result.jobs[0].reason


def test_wrong_weights_end_the_job(tmp_path, rewards, monkeypatch):
    """H09."""
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"wrong_fingerprint_at": 2}))
    result = train(make(job("a", f"{rewards}:good")), tmp_path / "run")
    assert result.jobs[0].kind == "WrongWeights" and "sampled from wrong" in result.jobs[0].reason


@pytest.mark.parametrize(
    ("env", "words"), [("nothing_like_it", "no such environment"), ("rewards.py:missing", "no such"), ("words:nope", "words")]
)
def test_an_environment_that_does_not_exist_is_refused_at_once(tmp_path, rewards, env, words):
    env = str(tmp_path / env) if env.startswith("rewards") else env
    with pytest.raises(InvalidConfig, match=words) as caught:
        train(make(job("a", env)), tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_used_run_folder_is_refused_without_resume(tmp_path, rewards):
    config = make(job("a", f"{rewards}:good", steps=1))
    train(config, tmp_path / "run")
    with pytest.raises(StorageError, match="resume"):
        train(config, tmp_path / "run")
    assert train(config, tmp_path / "run", resume=True).succeeded
    assert steps_of(tmp_path / "run", "a") == [1]


CRASHING = """
import asyncio, sys
from pathlib import Path
from marlaas_jax.config import load_run
from marlaas_jax.workers import controller
asyncio.run(controller.run(load_run([Path(sys.argv[1])]), Path(sys.argv[2]), sys.argv[3] == "resume",
                           device_module="tests.workers.fakes"))
"""


@pytest.mark.parametrize("delay_s", [1.0, 2.0, 2.6])
def test_kill_of_the_whole_run_and_resume(tmp_path, rewards, monkeypatch, delay_s):
    """kill -9 of the controller at some moment; its children end with it; the resumed history has no gap and no repeat."""
    import yaml

    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"train_s": 0.1, "commit_every": 2}))
    config = make(job("a", f"{rewards}:good", steps=12))
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    process = subprocess.Popen([sys.executable, "-c", CRASHING, str(path), str(tmp_path / "run"), "start"], cwd=ROOT)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay_s)
    finally:
        process.kill()
        process.wait()
    assert train(config, tmp_path / "run", resume=True).succeeded
    assert steps_of(tmp_path / "run", "a") == list(range(1, 13)) and tickets_of(tmp_path / "run", "a") == list(range(24))


def test_an_interrupted_run_stops_soon_and_leaves_no_process(tmp_path, rewards):
    pids = []

    async def interrupted():
        config = make(job("a", f"{rewards}:good", steps=100))
        running = asyncio.create_task(
            controller.run(
                config,
                tmp_path / "run",
                device_module="tests.workers.fakes",
                on_event=lambda e: pids.append(e["pid"]) if e["kind"] == "worker_joined" else None,
            )
        )
        while len(pids) < 3:
            await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 20)

    asyncio.run(interrupted())
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_the_controller_loads_no_jax(tmp_path):
    """It starts with a platform that does not exist, and never imports jax at all."""
    code = (
        "import sys, marlaas_jax.workers.controller; assert not {'jax', 'flax', 'optax', 'orbax', 'grain'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "bogus"})
