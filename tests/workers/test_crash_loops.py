"""A job whose batch kills the device's process every time is found and fails alone; real workers, a fake device."""

import json

import pytest

from marlaas_jax.workers.controller_files import read_lines
from tests.workers.faked import job, make, serve, steps_of, tickets_of, train

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_the_job_that_kills_the_device_fails_with_the_reason_and_the_others_finish(tmp_path, rewards, monkeypatch):
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"poison_at": {"poison": 4}, "train_s": 0.05}))
    names = ["a", "b", "poison", "c"]
    jobs = [job(name, f"{rewards}:good", steps=30, eval={"num_items": 0}) for name in names]
    result = {entry.name: entry for entry in train(make(*jobs), tmp_path / "run").jobs}
    assert result["poison"].state == "failed" and result["poison"].kind == "WorkerLost"
    assert "times in a row with this job on it, the last time with no other job there" in result["poison"].reason
    assert "exit code 9" in result["poison"].reason
    for name in "abc":
        assert result[name].state == "succeeded", result[name]
        assert steps_of(tmp_path / "run", name) == list(range(1, 31)) and tickets_of(tmp_path / "run", name) == list(range(60))
    events = read_lines(tmp_path / "run" / "events.jsonl")
    trials = [event for event in events if event["kind"] == "device_suspects"]
    assert trials and all("poison" in {*event["tried"], *event["held"]} for event in trials)
    pauses = [event["after_s"] for event in events if event["kind"] == "worker_restarting" and event["worker"] == "device"]
    assert pauses == [min(0.5 * 2**i, 30.0) for i in range(len(pauses))] and len(pauses) >= 3


@pytest.mark.slow
def test_a_job_alone_that_kills_the_device_fails_and_the_next_one_runs(tmp_path, rewards, monkeypatch):
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"poison_at": {"poison": 1}}))

    async def story(served):
        poison = served.add("poison", f"{rewards}:good", eval={"num_items": 0})
        await served.until(lambda: poison.is_over)
        assert (poison.state, poison.kind) == ("failed", "WorkerLost") and "died 3 times in a row" in poison.reason
        good = served.add("good", f"{rewards}:good", steps=2)
        await served.until(lambda: good.is_over)
        assert good.state == "succeeded"

    serve(tmp_path / "run", story)
