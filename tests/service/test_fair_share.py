"""Fairness figures: Jain's index against NumPy, who counts in it, waits by tenant, bounded tenants."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from marlaas_jax.fairness import Owner
from marlaas_jax.messages import DeviceStatus
from marlaas_jax.service import fair_share
from marlaas_jax.service.fair_share import OTHERS, FairShare, jain
from marlaas_jax.waits import Waits


def report(busy, backlogged=(), waits=None):
    return DeviceStatus("device", {}, busy, {}, {}, 0, tuple(backlogged), waits or {})


@hypothesis.given(st.lists(st.floats(0.01, 1e6), min_size=2, max_size=50))
def test_jains_index_is_that_of_the_paper(shares):
    """(sum x)^2 / (n sum x^2), which is 1 / (1 + CV^2) with the population's coefficient of variation."""
    x = np.array(shares)
    assert jain(shares) == pytest.approx(x.sum() ** 2 / (len(x) * (x**2).sum()))
    assert jain(shares) == pytest.approx(1 / (1 + (x.std() / x.mean()) ** 2))
    assert 1 / len(x) - 1e-9 <= jain(shares) <= 1 + 1e-9


def test_there_is_no_index_of_fewer_than_two():
    assert jain([]) is None and jain([1.0]) is None and jain([0.0, 0.0]) is None
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25


def test_only_who_was_backlogged_all_the_time_is_counted_and_by_weight():
    found = FairShare()
    for job, tenant, weight in (("a1", "a", 2.0), ("a2", "a", 2.0), ("b1", "b", 1.0), ("c1", "c", 4.0), ("d1", "d", 1.0)):
        found.open_job(job, Owner(tenant, weight))
    for second in range(10):
        idle = second == 5
        waiting = ["a1", "a2", "b1", "c1"] + ([] if idle else ["d1"])
        found.report(report({"a1": 0.1, "a2": 0.1, "b1": 0.1, "c1": 0.4, "d1": 0.9}, waiting), {}, float(second))
    window = found.window(9.5, 60.0)
    assert set(window.shares) == {"a", "b", "c"} and window.num_reports == 10
    assert window.weights == {"a": pytest.approx(2.0), "b": pytest.approx(1.0), "c": pytest.approx(4.0)}
    assert window.jain == pytest.approx(1.0), "each has its share: 2:1:4"
    assert set(found.window(9.5, 3.0).shares) == {"a", "b", "c", "d"}
    expected = np.array([0.2 / 2, 0.1, 0.4 / 4, 0.9])
    assert found.window(9.5, 3.0).jain == pytest.approx(expected.sum() ** 2 / (4 * (expected**2).sum()))
    shown = found.document(9.5, "a", {"a": "ann"}, 60.0)
    assert [tenant["tenant"] for tenant in shown["tenants"]] == ["ann"], "nobody sees another's figures"
    assert shown["tenants"][0]["share"] == pytest.approx(2 / 7) == shown["tenants"][0]["entitled_share"]
    assert shown["num_backlogged"] == 3


def test_seconds_without_work_say_nothing():
    found = FairShare()
    for job in "ab":
        found.open_job(job, Owner(job, 1.0))
        found.report(report({}, ["a", "b"]), {}, 0.0)
    assert found.window(0.0).jain is None and found.window(0.0).num_reports == 0


def test_waits_are_those_of_the_tenant_from_both_processes_and_late_reports_count():
    found = FairShare()
    found.open_job("j", Owner("t", 1.0))
    found.close_job("j")
    waits = Waits()
    waits.add(2.0, 9)
    found.report(
        report({"unknown": 5.0}, waits={"generate": {"j": waits}, "nonsense": {"j": waits}}), {"environment": {"j": waits}}, 0.0
    )
    shown = found.document(0.0, None, {}, 60.0)["tenants"]
    assert len(shown) == 1 and set(shown[0]["waits"]) == set(fair_share.STAGES)
    assert shown[0]["waits"]["generate"]["number"] == 9 and shown[0]["waits"]["environment"]["p95_s"] == 2.0
    assert shown[0]["waits"]["train"]["number"] == 0 and shown[0]["waits"]["train"]["p95_s"] is None


def test_tenants_and_ended_jobs_are_bounded(monkeypatch):
    monkeypatch.setattr(fair_share, "MAX_TENANTS", 10)
    monkeypatch.setattr(fair_share, "MAX_ENDED_JOBS", 5)
    found = FairShare()
    for number in range(100):
        found.open_job(f"j{number}", Owner(f"t{number}", 1.0))
        found.report(report({f"j{number}": 1.0}), {}, float(number))
        found.close_job(f"j{number}")
    received = found.received()
    assert len(received) <= 11 and OTHERS in received
    assert sum(entry.device_s for entry in received.values()) == 100.0
    assert len(found._jobs) <= 6
