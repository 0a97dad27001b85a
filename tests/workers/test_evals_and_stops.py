"""Evaluations beside training and early stops with real workers and a fake device, across its death."""

import asyncio
import json

import pytest

from marlaas_jax import plots
from marlaas_jax.workers.controller_files import read_lines
from tests.workers.faked import job, make, serve, steps_of, tickets_of, train

pytestmark = pytest.mark.multiprocess
ROLLOUT = {"group_size": 4, "groups_per_batch": 2, "max_staleness": 1}


def evaluations(run_dir, name="a"):
    return read_lines(run_dir / "jobs" / name / "evaluations.jsonl")


@pytest.mark.slow
def test_evaluations_survive_the_devices_death_and_none_is_there_twice(tmp_path, rewards, monkeypatch):
    """H32: an evaluation every second step; the device dies at step 5, its last commit is of step 4."""
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"die_at": {"a": 5}, "marker": str(tmp_path / "died"), "train_s": 0.2}))
    events = []
    config = make(job("a", f"{rewards}:good", steps=8, eval={"num_items": 4, "every_steps": 2}, rollout=ROLLOUT))
    result = train(config, tmp_path / "run", on_event=events.append)
    assert result.succeeded and (tmp_path / "died").is_file(), result
    rows = evaluations(tmp_path / "run")
    skipped = sum(event["kind"] == "evaluation_skipped" for event in events)
    assert [row["step"] for row in rows if row["phase"] != "during"] == [0, 8]
    during = [row["step"] for row in rows if row["phase"] == "during"]
    assert len(during) == len(set(during)) and set(during) <= {2, 4, 6} and len(during) + skipped >= 3
    assert all(row["version"] == row["step"] and row["num_scored"] == 4 for row in rows)
    assert tickets_of(tmp_path / "run", "a") == list(range(16)) and steps_of(tmp_path / "run", "a") == list(range(1, 9))
    told = [event for event in events if event["kind"] == "evaluated" and event["phase"] == "during"]
    assert {event["step"] for event in told} == set(during)
    assert told[0]["reward_std_error"] is not None
    (episodes,) = (tmp_path / "run" / "jobs" / "a").glob("episodes-*.jsonl")
    for record in read_lines(episodes):
        if record["split"] == "eval" and record["turns"]:
            assert len({turn["version"] for turn in record["turns"]}) == 1
    assert result.jobs[0].eval_last == result.jobs[0].eval_after == rows[-1]["reward_mean"]
    picture = plots.reward_figure(plots.read_metrics(tmp_path / "run"), "run", plots.read_evaluations(tmp_path / "run"))
    assert "points: held-out" in picture.axes[0].get_title()
    points = [len(line.get_xdata()) for line in picture.axes[0].get_lines() if line.get_marker() == "o"]
    assert points == [len({row["step"] for row in rows})]


def test_a_job_that_reached_its_target_has_succeeded_and_stays_so(tmp_path, rewards):
    run_dir = tmp_path / "run"
    config = make(job("a", f"{rewards}:good", steps=60, stop={"target": 0.7}), job("b", f"{rewards}:good", steps=3))
    result = train(config, run_dir)
    stopped, other = result.jobs
    assert result.succeeded and 3 <= stopped.steps < 60 and other.steps == 3
    assert stopped.stop_reason.startswith("target: train reward") and not other.stop_reason and stopped.reason == ""
    rewards_of = [row["rollout/reward_mean"] for row in read_lines(run_dir / "jobs" / "a" / "metrics.jsonl")]
    means = [sum(rewards_of[i - 2 : i + 1]) / 3 for i in range(2, len(rewards_of))]
    assert means[-1] >= 0.7 and all(mean < 0.7 for mean in means[:-1])
    summary = json.loads((run_dir / "jobs" / "a" / "summary.json").read_text())
    assert summary["stop_reason"] == stopped.stop_reason and summary["eval_after"] is not None
    assert (run_dir / "jobs" / "a" / "adapter" / "adapter_config.json").is_file()
    again = train(config, run_dir, resume=True)
    assert again.jobs[0].steps == stopped.steps and again.jobs[0].stop_reason == stopped.stop_reason
    onward = make(job("a", f"{rewards}:good", steps=stopped.steps + 2), job("b", f"{rewards}:good", steps=3))
    assert train(onward, run_dir, resume=True).jobs[0].steps == stopped.steps + 2, "without the rule it goes on"


@pytest.mark.slow
def test_a_running_job_is_ended_early_and_well(tmp_path, rewards):
    async def story(served):
        found = served.add("a", f"{rewards}:good", steps=500)
        other = served.add("b", f"{rewards}:good", steps=4)
        await served.until(lambda: found.step >= 2)
        served.controller.stop_early("a", "halving: others did better")
        served.controller.stop_early("a", "again")
        await served.until(lambda: found.is_over and other.is_over)
        assert (found.state, found.stop_reason) == ("succeeded", "halving: others did better")
        assert 2 <= found.step < 500 and found.adapter and other.stop_reason == ""
        assert [line["phase"] for line in found.evaluations.lines] == ["before"], "it is not evaluated any more"

    serve(tmp_path / "run", story)


@pytest.mark.slow
def test_a_paused_job_that_is_ended_early_ends_when_it_goes_on(tmp_path, rewards):
    async def story(served):
        found = served.add("a", f"{rewards}:good", steps=500)
        await served.until(lambda: found.step >= 2)
        served.controller.pause("a")
        await served.until(lambda: found.state == "paused")
        served.controller.stop_early("a", "halving: others did better")
        await asyncio.sleep(0.1)
        assert found.state == "paused"
        step = found.step
        served.controller.unpause("a")
        await served.until(lambda: found.is_over)
        assert (found.state, found.step) == ("succeeded", step)

    serve(tmp_path / "run", story)
