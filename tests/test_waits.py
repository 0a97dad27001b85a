"""Histograms of waits against NumPy's quantiles; what is handed over is bounded and loses nothing."""

import hypothesis
import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest

from marlaas_jax.waits import BOUNDS_S, WaitLog, Waits

SECONDS = st.lists(st.floats(0.0, 1e4), min_size=1, max_size=200)


@hypothesis.given(SECONDS, st.sampled_from([0.5, 0.95, 1.0]))
def test_quantiles_are_those_of_numpy_up_to_a_bucket(seconds, share):
    waits = Waits()
    for value in seconds:
        waits.add(value)
    true = float(np.quantile(seconds, share, method="inverted_cdf"))
    found = waits.quantile_s(share)
    assert found is not None and found >= true * (1 - 1e-9)
    assert found <= max(true * 2**0.5 * (1 + 1e-9), BOUNDS_S[0]) or true > BOUNDS_S[-1]
    assert waits.max_s == max(seconds) and waits.sum_s == pytest.approx(sum(seconds))
    bounds = BOUNDS_S[::4]
    counts = waits.cumulative(bounds)
    assert all(abs(count - sum(v <= b for v in seconds)) == 0 for count, b in zip(counts, bounds, strict=True))


@hypothesis.given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.floats(0, 10)), max_size=60), st.integers(1, 4)
)
def test_what_is_taken_in_parts_is_what_was_added(added, size):
    log, whole, taken = WaitLog(), {}, {}
    for stage, job, seconds in added:
        log.add(stage, job, seconds)
        whole.setdefault((stage, job), Waits()).add(seconds)
    while part := log.take(size):
        assert sum(len(jobs) for jobs in part.values()) <= size
        part = msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=dict[str, dict[str, Waits]])
        for stage, jobs in part.items():
            for job, waits in jobs.items():
                taken.setdefault((stage, job), Waits()).merge(waits)
    assert taken == whole


def test_nothing_has_no_quantile_and_odd_waits_do_no_harm():
    waits = Waits()
    assert waits.quantile_s(0.95) is None
    waits.add(-5.0)
    waits.merge(Waits({999: 1, -3: 1}, 2.0, 2.0))
    assert (waits.number == 3 and waits.quantile_s(0.01) == 0.0) or waits.quantile_s(0.01) == BOUNDS_S[0]
