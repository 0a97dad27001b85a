"""With the tiny model: evaluations change nothing that is trained, a target ends a job, a sweep finds the good rate."""

import pytest

from marlaas_jax.workers.controller import DEVICE_MODULE
from tests.e2e import runs
from tests.service.live import live

ROLLOUT = {"group_size": 4, "groups_per_batch": 4, "max_staleness": 0}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_evaluations_between_steps_change_nothing_that_is_trained_and_a_target_ends_a_job(tmp_path):
    """H32. `plain` and `evaluated` are the same job but for the evaluations; `target` needs no more than a few batches."""
    plain = runs.job("upper", name="plain", steps=7, rollout=ROLLOUT)
    evaluated = plain | {"name": "evaluated", "eval": {"num_items": 6, "every_steps": 2}}
    rollout = {"group_size": 8, "groups_per_batch": 8, "max_staleness": 1}
    target = runs.job("upper", name="target", steps=200, rollout=rollout, seed=2, stop={"target": 0.5})
    run_dir, log = tmp_path / "run", tmp_path / "log"
    file = runs.write(tmp_path / "jobs.yaml", [plain, evaluated, target])
    result = runs.finish(runs.start(file, "--dir", run_dir, log=log), log, 500)
    assert result["exit_code"] == 0, result
    rows = {name: runs.lines(run_dir / "jobs" / name / "metrics.jsonl") for name in ("plain", "evaluated", "target")}
    same = ("step", "version", "tickets", "rollout/num_tokens", "rollout/reward_mean", "rollout/staleness_max")
    for one, other in zip(rows["plain"], rows["evaluated"], strict=True):
        assert [one[name] for name in same[:3]] == [other[name] for name in same[:3]]
    first, second = ([[row[name] for name in same] for row in rows[name][:3]] for name in ("plain", "evaluated"))
    assert first == second, "three batches alike to the token and the reward"
    found = runs.lines(run_dir / "jobs" / "evaluated" / "evaluations.jsonl")
    skipped = [record for record in runs.printed(log) if record.get("kind") == "evaluation_skipped"]
    assert [row["phase"] for row in found][:2] == ["before", "during"] and found[-1]["step"] == 7
    assert len(found) + len(skipped) == 5 and all(row["num_scored"] == 6 for row in found)
    assert all(row["version"] == row["step"] for row in found if row["phase"] == "during")
    for episode in runs.episodes(run_dir, "evaluated", "eval"):
        assert episode["turns"][0]["version"] in {row["version"] for row in found}
    ended = {entry["name"]: entry for entry in result["jobs"]}["target"]
    rewards = [row["rollout/reward_mean"] for row in rows["target"]]
    means = [sum(rewards[i - 2 : i + 1]) / 3 for i in range(2, len(rewards))]
    print(f"target: {len(rewards)} steps, {rewards[0]:.2f} -> {means[-1]:.2f}; evaluations {found}")
    assert ended["state"] == "succeeded" and ended["stop_reason"].startswith("target: train reward")
    assert means[-1] >= 0.5 and all(mean < 0.5 for mean in means[:-1]) and ended["steps"] == len(rewards) < 200
    statuses = [record for record in runs.printed(log) if record["type"] == "status"]
    assert statuses[-1]["compiles_since_warmup"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sweep_of_six_rates_finds_the_good_one_and_stops_the_bad(tmp_path):
    rates = [1e-7, 1e-6, 2e-3, 3e-7, 3e-6, 1e-5]
    rollout = {"group_size": 8, "groups_per_batch": 4, "max_staleness": 1}
    job = runs.job("upper", steps=16, rollout=rollout)
    document = {
        "name": "rate",
        "job": {name: value for name, value in job.items() if name not in ("name", "optimizer")},
        "grid": {"optimizer.learning_rate": rates},
        "halving": {"min_steps": 6, "eta": 2},
    }
    quotas = {"max_running_jobs": 6, "max_resident_adapters": 8}
    with live(tmp_path, device_module=DEVICE_MODULE, runtime=runs.RUNTIME, quotas=quotas) as service:
        client = service.client("ann")
        sweep_id = client.submit_sweep(document).id
        sweep = runs.wait_for(lambda: (found := client.sweep(sweep_id)).is_over and found, 500, "the sweep to end")
    told = [(trial.values["optimizer.learning_rate"], trial.state, trial.step, trial.reward) for trial in sweep.trials]
    print(told)
    best = sweep.trials[sweep.best - 1]
    assert best.values == {"optimizer.learning_rate": 2e-3} and (best.state, best.step) == ("succeeded", 16), told
    others = [trial for trial in sweep.trials if trial is not best]
    assert {trial.state for trial in others} <= {"stopped", "succeeded"}
    assert sum(trial.state == "stopped" for trial in others) >= 3, told
    assert all(trial.step < 16 for trial in others if trial.state == "stopped")
