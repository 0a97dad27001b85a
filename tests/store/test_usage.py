"""Meters add up by tenant, job, UTC day and meter."""

import pytest

from marlaas_jax.store import usage

DAY_S = 86400


def add(store, amounts, now=0.0):
    store.write(usage.add_usage, amounts, now=now).result(10)


def test_amounts_add_up(store):
    add(store, {("t", "j", "sampled_tokens"): 10, ("t", "j", "device_s"): 0.5, ("u", "", "sampled_tokens"): 1})
    add(store, {("t", "j", "sampled_tokens"): 5}, now=DAY_S - 1)
    add(store, {("t", "j", "sampled_tokens"): -2}, now=DAY_S - 1)
    add(store, {("t", "k", "sampled_tokens"): 7}, now=DAY_S)
    add(store, {})
    found = store.read(usage.list_usage, tenant_id="t")
    assert [(used.day, used.job_id, used.meter, used.amount) for used in found] == [
        ("1970-01-01", "j", "device_s", 0.5),
        ("1970-01-01", "j", "sampled_tokens", 13.0),
        ("1970-01-02", "k", "sampled_tokens", 7.0),
    ]
    assert len(store.read(usage.list_usage, tenant_id=None)) == 4
    assert len(store.read(usage.list_usage, tenant_id=None, first_day="1970-01-02")) == 1
    assert len(store.read(usage.list_usage, tenant_id="t", last_day="1970-01-01", job_id="j")) == 2
    meters = ("sampled_tokens", "trained_tokens")
    assert store.read(usage.used_on_day, day=usage.utc_day(5.0), meters=meters) == {"t": 13.0, "u": 1.0}


def test_adding_from_many_threads_loses_nothing(store):
    futures = [store.write(usage.add_usage, {("t", "j", "m"): 1, ("t", "", "m"): 2}, now=0.0) for _ in range(300)]
    for future in futures:
        future.result(20)
    assert [used.amount for used in store.read(usage.list_usage, tenant_id="t")] == [600, 300]


def test_an_amount_that_is_not_finite_is_refused_before_it_spoils_the_sum(store):
    for amount in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"m={amount} of job 'j', tenant 't': must be finite"):
            add(store, {("t", "j", "n"): 1, ("t", "j", "m"): amount})
    assert store.read(usage.list_usage, tenant_id=None) == []


@pytest.mark.parametrize(("now", "day"), [(0.0, "1970-01-01"), (86399.999, "1970-01-01"), (1796083200.0, "2026-12-01")])
def test_days_are_those_of_utc(now, day):
    assert usage.utc_day(now) == day
