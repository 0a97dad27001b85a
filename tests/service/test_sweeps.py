"""Sweeps in a service with real workers and a fake device, whose policy learns by its learning rate."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from marlaas_jax.cli.main import app
from marlaas_jax.errors import InvalidConfig, InvalidRequest, NotFound
from marlaas_jax.store import sweeps
from marlaas_jax.store.engine import Store
from tests.e2e.runs import wait_for
from tests.service.live import FILES, live, of

pytestmark = pytest.mark.multiprocess
RATES = [2e-6, 4e-4, 2e-6, 1e-5]
DOCUMENT = {
    "name": "rate",
    "job": of("base", steps=24, eval={"num_items": 0}, rollout={"group_size": 8}),
    "trials": [{"optimizer.learning_rate": rate, "seed": seed} for seed, rate in enumerate(RATES)],
    "halving": {"min_steps": 4, "eta": 2},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_DEVICE", json.dumps({"train_s": 0.01}))
        with live(tmp_path_factory.mktemp("sweeps"), quotas={"max_running_jobs": 3, "max_queued_jobs": 2}) as found:
            yield found


def ended(client, sweep_id):
    return wait_for(lambda: (found := client.sweep(sweep_id)).is_over and found, 90, "the sweep to end")


@pytest.mark.slow
def test_the_good_rate_wins_and_the_bad_ones_are_stopped(service):
    """Its quota lets three run and two wait at once, so the fourth and the rest wait for room; all are tried."""
    client = service.client("ann")
    sweep = client.submit_sweep(DOCUMENT, files=FILES, labels={"team": "x"})
    assert sweep.num_trials == 4 and [trial.values["seed"] for trial in sweep.trials] == [0, 1, 2, 3]
    sweep = ended(client, sweep.id)
    assert sweep.state == "succeeded" and sweep.best == 2
    states = {trial.number: trial.state for trial in sweep.trials}
    assert states[2] == "succeeded" and [trial.is_best for trial in sweep.trials] == [False, True, False, False]
    stopped = [trial for trial in sweep.trials if trial.state == "stopped"]
    assert len(stopped) >= 2, states
    for trial in stopped:
        assert trial.stopped_at in (4, 8, 16) and trial.stopped_at <= trial.step < 24 and not trial.reason.startswith("fail")
        assert trial.reason.startswith("halving: train_reward") and sweep.id in trial.reason
        job = client.job(trial.job_id)
        assert job.state == "succeeded" and job.stop_reason == trial.reason and job.labels["sweep"] == sweep.id
        rows = [row["rollout/reward_mean"] for row in client.metrics(trial.job_id)]
        for rung, value in trial.rungs.items():
            assert value == pytest.approx(sum(rows[int(rung) - 3 : int(rung)]) / 3)
    winner = client.job(sweep.trials[1].job_id)
    assert (winner.name, winner.step, winner.labels["team"], winner.labels["trial"]) == ("rate-002", 24, "x", "2")
    assert sweep.trials[1].reward > 0.8
    assert not list((service.service.data_dir / "sweeps").glob("*")), "its files are with its jobs now"


def test_what_is_wrong_with_any_trial_refuses_the_whole(service):
    client = service.client("bob")
    wrong = [
        ({"trials": [{"lora.rank": 2}, {"lora.rank": 9}]}, InvalidConfig, r"trial 2: lora\.rank=9: this service's bank"),
        ({"trials": [{"lora.rnk": 2}]}, InvalidConfig, r"lora\.rnk: unknown key"),
        ({"trials": [{"env": "other.py:good"}]}, InvalidRequest, r"trial 1: env='other\.py'"),
        ({"trials": None}, InvalidConfig, "exactly one of grid, trials, random"),
        ({"haling": {}}, InvalidConfig, "haling: unknown key"),
    ]
    for changes, kind, sentence in wrong:
        with pytest.raises(kind, match=sentence):
            client.submit_sweep(DOCUMENT | changes, files=FILES)
    assert client.sweeps() == [] and list(client.jobs()) == []
    with pytest.raises(NotFound, match="no such sweep"):
        client.sweep("sweep_" + "0" * 22)


@pytest.mark.slow
def test_a_cancelled_sweep_takes_its_trials_along(service):
    client = service.client("cal")
    endless = DOCUMENT | {"job": of("base", steps=5000), "halving": None}
    sweep = client.submit_sweep(endless, files=FILES)
    wait_for(lambda: any(trial.step for trial in client.sweep(sweep.id).trials), 60, "a trial to train")
    done = client.cancel_sweep(sweep.id)
    assert done.state == "cancelled" and {trial.state for trial in done.trials} == {"cancelled"}
    assert {job.state for job in client.jobs()} == {"cancelled"}
    with pytest.raises(InvalidRequest, match="only a sweep that runs"):
        client.cancel_sweep(sweep.id)


@pytest.mark.slow
def test_a_sweep_is_submitted_and_read_from_the_command_line(service, tmp_path, monkeypatch):
    monkeypatch.setenv("MARLAAS_URL", service.url)
    monkeypatch.setenv("MARLAAS_API_KEY", service.key("dee"))
    run = lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    (tmp_path / "rewards.py").write_bytes(FILES["rewards.py"])
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(of("base", steps=2)))
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"name": "cli", "job": "base.yaml", "grid": {"lora.rank": [2, 4]}}))
    told = run("submit", "--sweep", file, "--json")
    assert told.exit_code == 0, told.output
    sweep_id = json.loads(told.stdout)["id"]
    ended(service.client("dee"), sweep_id)
    shown = run("sweep", sweep_id).stdout
    assert "cli: succeeded; 2 trials: 2 succeeded" in shown and "rank" in shown and "2/2" in shown and shown.count("*") == 1
    assert json.loads(run("sweep", sweep_id, "--json").stdout)["trials"][1]["values"] == {"lora.rank": 4}
    assert sweep_id in run("sweeps").stdout
    refused = run("submit", file, "--sweep", file)
    assert refused.exit_code == 2 and "takes no job files" in refused.stderr
    assert run("submit").exit_code == 2
    file.write_text("name: x\njob: [1]\n")
    assert "job=[1]: must be a job's fields" in run("submit", "--sweep", file).stderr


def test_a_repeated_post_makes_one_sweep(service):
    import httpx

    headers = {"Authorization": f"Bearer {service.key('eve')}", "Idempotency-Key": "once"}
    body = {"name": "x", "job": {"env": "arithmetic", "steps": 1}, "grid": {"seed": [1, 2]}}
    answers = [httpx.post(f"{service.url}/v1/sweeps", json=body, headers=headers, timeout=30) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201] and answers[1].headers["Idempotency-Replayed"] == "true"
    assert answers[0].json()["id"] == answers[1].json()["id"] and len(service.client("eve").sweeps()) == 1
    service.client("eve").cancel_sweep(answers[0].json()["id"])


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_restart(tmp_path, monkeypatch):
    """The service ends while trials run and others wait for room in the queue."""
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"train_s": 0.05}))
    quotas = {"max_running_jobs": 2, "max_queued_jobs": 1}
    with live(tmp_path, quotas=quotas) as service:
        client = service.client("ann")
        sweep = client.submit_sweep(DOCUMENT, files=FILES)
        wait_for(lambda: client.sweep(sweep.id).trials[0].step >= 1, 60, "a trial to train")
        before = client.sweep(sweep.id)
        assert any(trial.job_id is None for trial in before.trials)
        place = service.service.store.place
    with Store.open(f"sqlite:///{place}") as store:  # as if it had died right after it found the first trial worse
        store.write(sweeps.update_trial, sweep.id, 1, rungs={"4": 0.0}, stopped_at=4).result()
    with live(tmp_path, quotas=quotas) as service:
        client = service.client("ann")
        assert client.sweep(sweep.id).state == "running"
        after = ended(client, sweep.id)
        jobs = [trial.job_id for trial in after.trials]
        assert len(set(jobs)) == 4 and len(list(client.jobs())) == 4, "no trial was queued twice"
        assert {trial.job_id for trial in before.trials if trial.job_id} <= set(jobs)
        assert after.state == "succeeded" and after.best == 2
        assert after.trials[0].state == "stopped" and after.trials[0].step < 24
        assert service.service.store.read(sweeps.running_sweeps) == []
