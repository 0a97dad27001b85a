"""Quotas: what is beyond one is named with value and limit; rates hold in every window; the wait that is told is true."""

import hypothesis
import hypothesis.strategies as st
import pytest

from marlaas_jax.config import validate
from marlaas_jax.errors import InvalidConfig
from marlaas_jax.service.quotas import DailyTokens, Load, Quotas, RateLimiter, why_queued, why_refused

UNLIMITED = Quotas(**dict.fromkeys(set(Quotas.model_fields) - {"burst"}))


@pytest.mark.parametrize(
    ("quotas", "load", "free", "sentence"),
    [
        ({}, {}, 1, ""),
        ({"max_running_jobs": 2}, {"running_jobs": 1}, 1, ""),
        ({"max_running_jobs": 2}, {"running_jobs": 2}, 1, "max_running_jobs=2: this tenant has 2 running"),
        ({"max_running_jobs": 0}, {}, 1, "max_running_jobs=0: this tenant has 0 running"),
        ({"max_resident_adapters": 3}, {"resident_adapters": 4}, 1, "max_resident_adapters=3: this tenant has 4 resident"),
        ({"tokens_per_day": 10}, {"tokens_today": 12.0}, 0, "tokens_per_day=10: this tenant used 12 since 0:00 UTC"),
        ({}, {}, 0, "all places for running jobs are taken"),
    ],
)
def test_why_a_job_waits(quotas, load, free, sentence):
    assert why_queued(UNLIMITED.model_copy(update=quotas), Load(**load), free) == sentence


@pytest.mark.parametrize(
    ("quotas", "load", "asked", "sentence"),
    [
        ({}, {}, {"jobs": 10**9, "tokens": 10**9}, ""),
        ({"max_queued_jobs": 3}, {"queued_jobs": 2}, {"jobs": 1}, ""),
        (
            {"max_queued_jobs": 3},
            {"queued_jobs": 2},
            {"jobs": 2},
            "max_queued_jobs=3: this tenant has 2 waiting, 2 more asked",
        ),
        ({"max_queued_tokens": 100}, {"queued_tokens": 60}, {"tokens": 40}, ""),
        (
            {"max_queued_tokens": 100},
            {"queued_tokens": 60},
            {"tokens": 41},
            "max_queued_tokens=100: this tenant has 60 waiting, 41 more asked",
        ),
        ({"tokens_per_day": 5}, {"tokens_today": 5.0}, {"tokens": 1}, "tokens_per_day=5: this tenant used 5 since 0:00 UTC"),
        ({"tokens_per_day": 5, "max_queued_tokens": 0}, {"tokens_today": 5.0}, {"jobs": 1}, ""),
    ],
)
def test_why_a_request_is_refused(quotas, load, asked, sentence):
    assert why_refused(UNLIMITED.model_copy(update=quotas), Load(**load), **asked) == sentence


@pytest.mark.parametrize(
    ("document", "field"), [({"max_jobs": 1}, "max_jobs"), ({"burst": 0}, "burst=0"), ({"requests_per_second": 0}, "=0")]
)
def test_quotas_are_strict(document, field):
    with pytest.raises(InvalidConfig, match=field):
        validate(Quotas, document)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    rate=st.floats(0.01, 1000), burst=st.integers(1, 50), gaps=st.lists(st.floats(0, 2), max_size=200), start=st.floats(0, 1e9)
)
def test_no_window_holds_more_than_burst_and_rate_allow(rate, burst, gaps, start):
    limiter, quotas = RateLimiter(), Quotas(requests_per_second=rate, burst=burst)
    now, admitted = start, []
    for gap in gaps:
        now += gap / rate
        if limiter.admit("t", quotas, now) is None:
            admitted.append(now)
    for i, first in enumerate(admitted):
        for j in range(i, len(admitted)):
            assert j - i + 1 <= burst + (admitted[j] - first) * rate + 1e-3


@hypothesis.settings(deadline=None)
@hypothesis.given(rate=st.floats(0.01, 1000), burst=st.integers(1, 20), start=st.floats(0, 1e6))
def test_who_waits_as_told_is_admitted_and_who_comes_sooner_is_not(rate, burst, start):
    limiter, quotas = RateLimiter(), Quotas(requests_per_second=rate, burst=burst)
    assert [limiter.admit("t", quotas, start) for _ in range(burst)] == [None] * burst
    wait_s = limiter.admit("t", quotas, start)
    assert wait_s is not None and 0.99 / rate <= wait_s <= 1.01 / rate
    assert limiter.admit("t", quotas, start + 0.9 * wait_s) is not None
    assert limiter.admit("other", quotas, start) is None, "each tenant has a bucket of its own"
    assert limiter.admit("t", quotas, start + wait_s * 1.01) is None


def test_no_limit_is_none_and_a_clock_set_back_costs_one_interval():
    limiter = RateLimiter()
    assert not any(limiter.admit("t", UNLIMITED, 0.0) for _ in range(1000))
    quotas = Quotas(requests_per_second=2.0, burst=1)
    assert limiter.admit("t", quotas, 1e6) is None
    assert limiter.admit("t", quotas, 0.0) == 0.5
    assert limiter.admit("t", quotas, 0.5) is None


def test_the_limiter_remembers_a_bounded_number_of_tenants():
    limiter, quotas = RateLimiter(max_tenants=10), Quotas(requests_per_second=0.1, burst=1)
    for i in range(1000):
        limiter.admit(f"t{i}", quotas, float(i))
    assert len(limiter._full_at) == 10
    assert limiter.admit("t999", quotas, 999.0) is not None


def test_tokens_count_by_utc_day():
    tokens, quotas = DailyTokens(86400.0 * 10, {"t": 90.0}), Quotas(tokens_per_day=100)
    assert tokens.retry_after("t", quotas, 864100.0) is None
    tokens.add("t", 15, 864100.0)
    tokens.add("t", -3, 864100.0)
    assert tokens.used("t", 864100.0) == 102.0 and tokens.used("u", 864100.0) == 0.0
    assert tokens.retry_after("t", quotas, 864100.0) == 86300.0
    assert tokens.retry_after("t", UNLIMITED, 864100.0) is None
    assert tokens.used("t", 86400.0 * 11) == 0.0
    tokens.add("t", 7, 86400.0 * 11)
    assert tokens.used("t", 864100.0) == 0.0, "a clock set back to another day counts afresh"
