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


def bill(source, seq, amount=1.0, now=0.0, job="j"):
    return usage.Bill(source, seq, {("t", job, "m"): amount}, now)


def test_a_bill_is_added_once_and_only_behind_the_last_of_its_source(store):
    write = lambda *bills: store.write(usage.add_metered, bills).result(10)
    assert write(bill("j", 1), bill("j", 2), bill("k", 1)) == 3
    assert write(bill("j", 1), bill("j", 2), bill("j", 3)) == 1
    assert write(bill("j", 2)) == 0
    assert store.read(usage.list_usage, tenant_id=None)[0].amount == 4.0
    with pytest.raises(ValueError, match="must be finite"):
        write(bill("j", 4), bill("j", 5, float("inf")))
    assert write(bill("j", 4)) == 1, "what failed left nothing, its number neither"
    store.write(usage.reset_billed, "j", 2).result(10)
    assert write(bill("j", 3), bill("j", 2)) == 1


def test_old_days_are_folded_together_without_a_change_of_the_sum(store):
    for job in ("j", "k"):
        add(store, {("t", job, "m"): 3.0, ("u", job, "m"): 1.0})
        add(store, {("t", job, "m"): 5.0}, now=5 * DAY_S)
    add(store, {("t", "", "m"): 1.0})
    store.write(usage.add_metered, [bill("gone", 1), bill("process:x", 1), bill("process:me", 1)]).result(10)
    before = store.read(usage.sum_usage, ("tenant", "day"), tenant_id=None, limit=100)
    store.write(usage.fold_usage, before_day="1970-01-05", own_source="process:me").result(10)
    assert store.read(usage.sum_usage, ("tenant", "day"), tenant_id=None, limit=100) == before
    jobs = {used.job_id for used in store.read(usage.list_usage, tenant_id="t", last_day="1970-01-02")}
    assert jobs == {""} and len(store.read(usage.list_usage, tenant_id="t", first_day="1970-01-02")) == 2
    assert store.write(usage.add_metered, [bill("process:me", 1)]).result(10) == 0, "still known"


def test_use_is_told_apart_as_asked(store):
    add(store, {("t", "j", "m"): 1.0, ("t", "k", "m"): 2.0, ("u", "l", "m"): 4.0, ("t", "j", "n"): 8.0})
    add(store, {("t", "j", "m"): 16.0}, now=DAY_S)
    found = lambda *by, **bounds: store.read(usage.sum_usage, by, **({"tenant_id": None, "limit": 100} | bounds))
    assert [total.amounts for total in found()] == [{"m": 23.0, "n": 8.0}]
    assert [(total.tenant_id, total.amounts) for total in found("tenant")] == [("t", {"m": 19.0, "n": 8.0}), ("u", {"m": 4.0})]
    assert [(total.day, total.job_id) for total in found("job", "day", tenant_id="t")] == [
        ("1970-01-01", "j"), ("1970-01-01", "k"), ("1970-01-02", "j")
    ]  # fmt: skip
    assert len(found("job", limit=1)) == 2, "one more says that there are more"
    assert found("job", job_id="nobody") == []
    assert store.read(usage.used_by_job, ["j", "x"]) == {"j": {"m": 17.0, "n": 8.0}}
