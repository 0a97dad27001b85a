"""The band of a forecast holds for step times of known kinds, and follows the number of competitors."""

import math

import numpy as np
import pytest

from marlaas_jax import eta
from marlaas_jax.eta import Span, StepTime

STEPS = 100
RUNS = 100


def lognormal(rng):
    return rng.lognormal(0.0, 0.5, STEPS)


def correlated(rng):
    """Log step times as an AR(1) process."""
    level, out = 0.0, []
    for _ in range(STEPS):
        level = 0.9 * level + rng.normal(0.0, 0.15)
        out.append(math.exp(level))
    return np.array(out)


def growing(rng):
    """Completions get longer: twice as long at the end as at the start."""
    return np.linspace(1.0, 2.0, STEPS) * rng.lognormal(0.0, 0.15, STEPS)


def heavy(rng):
    """Pareto with index 2.5: single steps that take many times the median."""
    return 1.0 + rng.pareto(2.5, STEPS)


@pytest.mark.parametrize("series", [lognormal, correlated, growing, heavy])
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_nine_in_ten_runs_end_within_their_band(series, share):
    rng = np.random.default_rng(0)
    within, widths = 0, []
    for _ in range(RUNS):
        seconds = series(rng)
        done = int(share * STEPS)
        span = eta.estimate([StepTime(s) for s in seconds[:done]], STEPS - done, load=1.0)
        assert span is not None
        took = seconds[done:].sum()
        within += span.low_s <= took <= span.high_s
        widths.append(span.high_s / span.low_s)
    assert within >= 0.9 * RUNS, within / RUNS
    assert np.median(widths) < 8.0, "a band that says something"


@pytest.mark.parametrize("busy", [0.0, 0.5, 1.0])
def test_competitors_that_come_and_go_are_taken_into_account(busy):
    """Each step takes 1 s alone; how many jobs share the device changes on the way, and no more after the forecast."""
    rng = np.random.default_rng(1)
    within = 0
    for _ in range(RUNS):
        loads = np.repeat(rng.integers(1, 9, 10), STEPS // 10).astype(float)
        seconds = loads**busy * rng.lognormal(0.0, 0.2, STEPS)
        loads[50:] = loads[49]
        seconds[50:] = loads[50:] ** busy * rng.lognormal(0.0, 0.2, 50)
        times = [StepTime(s, load, busy) for s, load in zip(seconds[:50], loads[:50], strict=True)]
        span = eta.estimate(times, 50, load=loads[49])
        assert span is not None
        within += span.low_s <= seconds[50:].sum() <= span.high_s
        assert span.expected_s == pytest.approx(seconds[50:].sum(), rel=0.35)
    assert within >= 0.9 * RUNS


def test_a_job_gets_faster_as_others_end():
    """Against a simulation in small slices: three jobs of weights 1, 1, 2 share a full device."""
    weights, work = np.array([1.0, 1.0, 2.0]), np.array([30.0, 6.0, 8.0])
    left_s = work * weights.sum() / weights  # at the present load
    sharers = [(1.0, left_s[1]), (2.0, left_s[2])]
    times = [StepTime(left_s[0] / 10, 4.0, 1.0)] * 20
    span = eta.estimate(times, 10, load=4.0, sharers=sharers)
    rest, now = work.copy(), 0.0
    while rest[0] > 0:
        is_running = rest > 0
        rest -= 0.001 * weights / weights[is_running].sum() * is_running
        now += 0.001
    assert span is not None and span.expected_s == pytest.approx(now, rel=0.01)
    assert span.low_s < now < span.high_s and span.high_s >= left_s[0]


def test_before_there_are_steps_enough_the_quote_holds():
    assert eta.estimate([StepTime(1.0)] * (eta.MIN_STEPS - 1), 10, load=1.0) is None
    quoted = eta.estimate([], 10, load=1.0, tail_s=3.0, per_step=Span(2.0, 1.0, 5.0))
    assert quoted == Span(23.0, 11.0, 59.0, "quote")
    assert quoted.after(12.0) == Span(11.0, 0.0, 47.0, "quote")
    measured = eta.estimate([StepTime(1.0)] * 3, 10, load=1.0, per_step=Span(2.0, 1.0, 5.0))
    assert measured is not None and measured.basis == "steps" and measured.expected_s == 10.0


def test_one_long_step_does_not_spoil_the_forecast():
    times = [StepTime(1.0)] * 20 + [StepTime(1000.0)] + [StepTime(1.0)] * 20
    span = eta.estimate(times, 10, load=1.0)
    assert span is not None and span.expected_s < 15.0
