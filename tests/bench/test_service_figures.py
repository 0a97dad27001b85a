"""The scripted day's plan and figures, held against results that are known."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

from marlaas_jax.bench.service import figures, plan
from marlaas_jax.bench.service.driver import Record, Shares, write_records
from marlaas_jax.client.records import Job
from marlaas_jax.config import JobConfig, RuntimeConfig, validate


def record(planned, state="succeeded", reason="", rewards=None, turns=(), eta_within=()):
    config = validate(JobConfig, planned.config | {"name": planned.name}).model_dump(mode="json")
    rewards = [0.5] * planned.config["steps"] if rewards is None else rewards
    steps = planned.config["steps"]
    job = Job("job_1", "t", planned.name, state, reason, len(rewards), steps, 0, 0.0, 1.0, 2.0, 2.0, None, {}, config)
    return Record(planned, job, rewards, [s for s, _ in turns], [n for _, n in turns], list(eta_within))


def test_the_day_is_its_seeds_and_every_job_is_valid():
    day = plan.plan(3)
    assert day == plan.plan(3) != plan.plan(4)
    assert len(day.tenants) == 32
    for job in day.jobs:
        validate(JobConfig, job.config | {"name": job.name})
    validate(RuntimeConfig, plan.RUNTIME)
    measured = {phase: [(j.kind, j.config) for j in day.of(phase) if j.kind in plan.KINDS] for phase in ("alone", "crowd")}
    assert measured["alone"] == measured["crowd"] and len(measured["alone"]) == 12
    assert {job.ends for job in day.of("crowd")} == {"succeeded", "failed", "cancelled"}


def test_a_job_that_ends_otherwise_is_counted_and_named():
    day = plan.plan(0, plan.QUICK)
    healthy = day.of("alone")[0]
    broken = next(job for job in day.jobs if job.name == "hangs")
    good = [record(healthy), record(broken, "failed", "EnvironmentFailed: ..., last: timeout: no answer within 2 s", [0.1])]
    assert figures.outcome_line(good).value == 0
    bad = [
        record(healthy, "failed", "WorkerLost: the device"),
        record(healthy, rewards=[0.5]),  # a step is missing
        record(broken, "failed", "InvalidConfig: refused", []),  # not its own reason
        record(broken, "succeeded"),
    ]
    line = figures.outcome_line(good + bad)
    assert line.value == 4 and not line.holds and "WorkerLost" in line.detail["wrong"][0]


def test_bands_that_held_are_counted_over_all_jobs_that_had_one():
    job = plan.plan(0, plan.QUICK).of("alone")[0]
    found = [record(dataclasses.replace(job, name=str(i)), eta_within=[True, i != 3]) for i in range(5)] + [record(job)]
    line = figures.eta_line(found)
    assert line.value == 0.9 and line.holds and line.detail["outside"] == ["3"]
    assert not figures.eta_line([*found, record(job, eta_within=[False])]).holds
    assert not figures.eta_line([record(job)]).holds, "nothing was forecast"


def test_seed_bound_is_students_two_sample_interval():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.6, 0.05, 3), rng.normal(0.6, 0.05, 3)
    interval = stats.ttest_ind(a, b).confidence_interval(0.99)
    assert figures.seed_bound(list(a), list(b), 10**9) == pytest.approx((interval.high - interval.low) / 2, rel=1e-3)
    drawn = 4.604 * math.sqrt(2 * 0.25 / 320 / 3)
    assert figures.seed_bound([0.5] * 3, [0.5] * 3, 320) == pytest.approx(drawn)


def test_reward_lines_tell_a_job_that_learned_less():
    sizes = dataclasses.replace(plan.QUICK, num_seeds=3, steps=12, last_steps=5)
    day = plan.plan(0, sizes)
    noise = iter(np.random.default_rng(1).normal(0, 0.02, 200))
    level = {"alone": 0.9, "crowd": 0.88}
    records = lambda: [
        record(j, rewards=[level[j.phase] + next(noise) for _ in range(12)])
        for j in day.of("alone", "crowd")
        if j.kind == "one turn"
    ]
    (line,) = figures.reward_lines(records(), sizes)
    assert line.holds and line.value > 0
    level["crowd"] = 0.5
    (line,) = figures.reward_lines(records(), sizes)
    assert not line.holds


def test_shares_by_weight():
    weights = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}
    fair = figures.share_lines(Shares({"a": 10.0, "b": 10.0, "c": 20.0, "d": 40.0}, weights, 80.0, 1.0))
    assert [line.value for line in fair] == pytest.approx([1.0, 0.0]) and all(line.holds for line in fair)
    unfair = figures.share_lines(Shares({"a": 30.0, "b": 10.0, "c": 20.0, "d": 20.0}, weights, 80.0, 1.0))
    assert unfair[0].value == pytest.approx(1600 / (2 * 1000)) and unfair[1].value == pytest.approx(2.0)
    assert not any(line.holds for line in unfair)
    assert figures.jain([0.0, 0.0, 9.0]) == pytest.approx(1 / 3)


def test_waits_are_what_a_turn_took_beyond_its_tokens():
    day = plan.plan(0, plan.QUICK)
    (small,) = day.of("small")
    alone = record(small, turns=[(0.1, 10), (0.3, 10), (0.06, 5)])  # the best pace is 10 ms per token
    assert figures.queue_waits(alone, 0.01) == pytest.approx([0.0, 0.2, 0.01])
    slow = record(small, turns=[(0.9, 10)] * 20)
    line = figures.wait_line(alone, slow)  # 0.8 s; allowed: three times 0.2 s
    assert line.value == pytest.approx(0.8 / 0.6) and not line.holds
    assert figures.wait_line(alone, record(small, turns=[(0.7, 10)] * 20)).holds
    assert figures.quantile(list(range(1, 101)), 0.95) == 95


def test_records_are_kept_as_json(tmp_path):
    day = plan.plan(0, plan.QUICK)
    write_records(tmp_path / "jobs.jsonl", [record(day.jobs[0])])
    line = json.loads((tmp_path / "jobs.jsonl").read_text())
    assert line["planned"]["phase"] == "alone" and line["job"]["ended"] == 2.0 and line["config"]["steps"] == plan.QUICK.steps
