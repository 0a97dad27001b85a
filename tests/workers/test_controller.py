"""The controller with real environment and data workers and a fake device's process."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from marlaas_jax.cli.run import exit_code
from marlaas_jax.errors import InvalidConfig, StorageError
from marlaas_jax.workers import controller, run
from marlaas_jax.workers.controller_files import read_lines
from marlaas_jax.workers.controller_status import RunResult
from tests.workers.faked import ROOT, job, make, steps_of, tickets_of, train

pytestmark = pytest.mark.multiprocess


def test_jobs_train_and_leave_their_records(tmp_path, rewards):
    """H27: one environment worker is killed (kill -9) as soon as it is there; that delays the run and nothing more."""
    statuses, events, killed = [], [], []

    def on_event(event):
        events.append(event)
        if event["kind"] == "worker_joined" and event["worker"] == "job-file-0" and not killed:
            killed.append(event["pid"])
            os.kill(event["pid"], 9)

    config = make(job("file", f"{rewards}:good", steps=6), job("builtin", "arithmetic"))
    result = train(config, tmp_path / "run", on_status=statuses.append, on_event=on_event)
    assert result.succeeded and killed, result
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
    assert statuses[-1].jobs[0].state == "succeeded" and statuses[-1].jobs[0].episodes["running"] == 0
    counts = statuses[-1].transport
    assert counts["sent"] == counts["delivered"] + counts["in_flight"] + counts["failed"]
    assert {event["kind"] for event in events} >= {"run_started", "worker_lost", "job_ready", "evaluated", "job_succeeded"}
    assert (tmp_path / "run" / "config.yaml").is_file() and read_lines(tmp_path / "run" / "events.jsonl") == events
    check_strict(tmp_path / "run")
    with pytest.raises(StorageError, match="resume"):
        train(config, tmp_path / "run")


def check_strict(run_dir):
    """H18: every line is JSON for the strictest reader."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    for path in run_dir.rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=refuse)


@pytest.mark.slow
def test_broken_rewards_end_their_jobs_with_the_reason_and_no_other(tmp_path, rewards):
    """H24, H27, H28: rewards that raise, give NaN, hang, exit the process or print 50 MB, beside one that works."""
    broken = {"raises": "no reward today", "nan": "nan", "hangs": "timeout", "exits": "workers in a row"}
    jobs = [job(name, f"{rewards}:{name}", rollout={"max_attempts": 2}, eval={"num_items": 0}) for name in broken]
    jobs += [
        job("prints", f"{rewards}:prints", steps=1, eval={"num_items": 0}, rollout={"step_timeout_s": 30.0}),
        job("some", f"{rewards}:nan_for_no", steps=3),
        job("good", f"{rewards}:good", steps=6),
    ]
    result = {entry.name: entry for entry in train(make(*jobs), tmp_path / "run").jobs}
    for name, words in broken.items():
        found = result[name]
        assert found.state == "failed" and found.kind == "EnvironmentFailed" and words in found.reason.lower(), found
    for name, steps in {"prints": 1, "some": 3, "good": 6}.items():
        assert result[name].state == "succeeded" and result[name].steps == steps, result[name]
        assert tickets_of(tmp_path / "run", name) == list(range(2 * steps))
    assert sum(path.stat().st_size for path in (tmp_path / "run").rglob("*")) < 20 << 20
    rows = read_lines(tmp_path / "run" / "jobs" / "some" / "metrics.jsonl")
    assert all(row["rollout/reward_mean"] == 1.0 for row in rows) and any(row["rollout/num_missing_rewards"] for row in rows)
    check_strict(tmp_path / "run")


def test_a_lost_device_goes_on_from_the_committed_steps(tmp_path, rewards, monkeypatch):
    """It dies with batch 3 of job a trained and not reported: committed for a (its line of metrics must not be missing),
    not committed for b (its steps since must not be there twice)."""
    options = {"die_at": {"a": 3}, "marker": str(tmp_path / "died"), "commit_every": {"a": 1, "b": 3}}
    monkeypatch.setenv("FAKE_DEVICE", json.dumps(options))
    steps = {"a": 5, "b": 40}  # b still runs when a comes to batch 3, whichever of them was ready first
    jobs = [job(name, f"{rewards}:good", steps=count) for name, count in steps.items()]
    result = train(make(*jobs), tmp_path / "run")
    assert result.succeeded and (tmp_path / "died").exists()
    for name, count in steps.items():
        assert steps_of(tmp_path / "run", name) == list(range(1, count + 1))
        assert tickets_of(tmp_path / "run", name) == list(range(2 * count))
    assert [entry.incarnations for entry in result.jobs] == [2, 2]


def test_h36_a_job_whose_folder_is_full_when_the_device_is_lost_ends_alone(tmp_path, rewards, monkeypatch):
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"die_at": {"a": 2}, "marker": str(tmp_path / "died")}))

    def fill(event):
        if event["kind"] == "worker_lost":
            (tmp_path / "run/jobs/b/state.tmp").mkdir()  # the file that state.json is written to first

    jobs = [job("a", f"{rewards}:good"), job("b", f"{rewards}:good", steps=100)]
    a, b = train(make(*jobs), tmp_path / "run", on_event=fill).jobs
    assert (a.state, a.incarnations) == ("succeeded", 2)
    assert (b.state, b.kind) == ("failed", "StorageError") and "state.json: cannot be written" in b.reason


def test_h22_prompts_longer_than_the_context_are_the_callers_to_mend(tmp_path, rewards):
    """Its neighbour trains on; where all that failed is the caller's to mend, the command's exit code is 2."""
    long, good = (job(name, f"{rewards}:good", steps=2) for name in ("long", "good"))
    (tmp_path / "long.jsonl").write_text("\n".join(json.dumps({"prompt": "a" * 90, "answer": "yes"}) for _ in range(20)))
    long["data"] = {"source": f"jsonl:{tmp_path}/long.jsonl"}
    result = train(make(long, good, engine={"max_context": 80}), tmp_path / "run")
    refused, trained = result.jobs
    assert refused.kind == "InvalidRequest" and "91 tokens" in refused.reason and "max_context=80" in refused.reason
    assert trained.state == "succeeded" and exit_code(result) == 2


def test_a_job_that_fails_on_the_device_ends_alone(tmp_path, rewards, monkeypatch):
    """H09: also where completions come from weights that were never published."""
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"fail_at": {"a": 2}, "wrong_weights_at": {"b": 2}}))
    result = train(make(*(job(name, f"{rewards}:good") for name in "abc")), tmp_path / "run").jobs
    assert [entry.state for entry in result] == ["failed", "failed", "succeeded"]
    assert result[0].kind == "NonFinite" and "gradients in a row" in result[0].reason
    assert result[1].kind == "WrongWeights" and "sampled from wrong" in result[1].reason
    assert exit_code(RunResult(tuple(result), 1.0)) == 1


DAMAGE = {
    "list": ("state.json", "[]", "state.json: cannot be read (Expected `object`, got `array`)"),
    "word": ("state.json", '{"incarnation": "x"}', "Expected `int`, got `str` - at `$.incarnation`"),
    "metrics": ("metrics.jsonl", '{"step": 1}\n5\n', "metrics.jsonl: line 2 is not a JSON object"),
    "batches": ("batches.jsonl", '{"step": 1, "env/x": [1]}\n', "batches.jsonl: line 1: env/x=[1] must be a number or null"),
    "tickets": ("batches.jsonl", '{"step": 1, "tickets": [3]}\n', "batches.jsonl: line 1: Expected `array`, got `int`"),
    "ledger": ("checkpoints/step-000002.json", '{"step": 2, "ledger": "AAAA"}', "ledger cannot be read"),
}


def test_damaged_files_of_a_job_end_it_with_the_reason_and_no_other(tmp_path, caplog):
    """One line each, without a traceback; what cannot be read stays as it is."""
    run_dir, names = tmp_path / "run", [*DAMAGE, "whole"]
    jobs = lambda steps: make(*(job(name, "arithmetic", steps=steps, eval={"num_items": 0}) for name in names))
    assert train(jobs(2), run_dir).succeeded
    for name, (file, text, _) in DAMAGE.items():
        path = run_dir / "jobs" / name / file
        assert path.is_file(), sorted(path.parent.iterdir())
        path.write_text(text)
    caplog.clear()
    for steps in (2, 4):  # as ended jobs, and as jobs that go on
        result = {entry.name: entry for entry in train(jobs(steps), run_dir, resume=True).jobs}
        for name, (_, _, words) in DAMAGE.items():
            if (name, steps) != ("ledger", 2):  # an ended job is not given to the device
                found = result[name]
                assert found.state == "failed" and found.kind == "CorruptFile" and words in found.reason, found
        assert result["whole"].state == "succeeded" and steps_of(run_dir, "whole") == list(range(1, steps + 1))
    assert (run_dir / "jobs/list/state.json").read_text() == "[]"
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("nothing_like_it", "no such environment"),
        pytest.param("rewards.py:missing", "no such", marks=pytest.mark.slow),
        pytest.param("words:nope", "words", marks=pytest.mark.slow),
    ],
)
def test_an_environment_that_does_not_exist_is_refused_at_once(tmp_path, rewards, env, words):
    env = str(tmp_path / env) if env.startswith("rewards") else env
    with pytest.raises(InvalidConfig, match=words) as caught:
        train(make(job("a", env)), tmp_path / "run")
    assert "\n" not in str(caught.value)


CRASHING = """
import asyncio, sys
from pathlib import Path
from marlaas_jax.config import load_run
from marlaas_jax.workers import controller, run
asyncio.run(run.run(load_run([Path(sys.argv[1])]), Path(sys.argv[2]), sys.argv[3] == "resume",
                           device_module="tests.workers.fakes"))
"""


@pytest.mark.parametrize("kill_at", [pytest.param(n, marks=pytest.mark.slow) for n in (0, 3, 6)])
def test_kill_of_the_whole_run_and_resume(tmp_path, rewards, monkeypatch, kill_at):
    """kill -9 of the controller once `kill_at` batches are recorded; the resumed history has no gap and no repeat."""
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"train_s": 0.2}))
    config = make(job("a", f"{rewards}:good", steps=12))
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    arguments = [sys.executable, "-c", CRASHING, str(path), str(tmp_path / "run"), "start"]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while len(steps_of(tmp_path / "run", "a")) < kill_at:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
    assert train(config, tmp_path / "run", resume=True).succeeded
    assert steps_of(tmp_path / "run", "a") == list(range(1, 13)) and tickets_of(tmp_path / "run", "a") == list(range(24))
    assert train(config, tmp_path / "run", resume=True).succeeded, "a finished run resumes to its result"


def test_an_interrupted_run_stops_soon_and_leaves_no_process(tmp_path, rewards):
    pids = []

    async def interrupted():
        config = make(job("a", f"{rewards}:good", steps=100))
        running = asyncio.create_task(
            run.run(
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


@pytest.mark.slow
def test_a_process_that_never_reports_is_named_and_replaced_h27(tmp_path, rewards, monkeypatch):
    """It hangs before its Hello, so no heartbeat is missed: frozen while it starts, or stuck in an import."""
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"hang_at_start": True, "marker": str(tmp_path / "hung")}))
    monkeypatch.setattr(controller, "JOIN_TIMEOUT_S", 15.0)

    def once(event):  # on a busy machine others need longer to start than that
        if event["kind"] == "worker_killed" and event["worker"] == "device":
            monkeypatch.setattr(controller, "JOIN_TIMEOUT_S", 1000.0)

    result = train(make(job("a", f"{rewards}:good")), tmp_path / "run", on_event=once)
    assert result.succeeded
    events = read_lines(tmp_path / "run" / "events.jsonl")
    named = [event for event in events if event["kind"] == "worker_killed" and event["worker"] == "device"]
    assert len(named) == 1 and "did not report within 15 s" in named[0]["reason"]
    assert [event["pid"] for event in events if event["kind"] == "worker_restarted" and event["worker"] == "device"]
