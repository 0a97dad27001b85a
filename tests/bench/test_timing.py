"""Interleaved timing: pairing, units and the order of calls."""

import pytest

from marlaas_jax.bench import timing


def test_interleave_alternates_and_counts_calls():
    calls = []
    functions = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    samples = timing.interleave(functions, repeats=4, warmup=1, inner={"a": 1, "b": 2})
    assert "".join(calls) == "ab" + "abb" + "bba" + "abb" + "bba"
    assert set(samples) == {"a", "b"}
    assert len(samples["a"].wall_s) == len(samples["b"].cpu_s) == 4


def test_ratio_is_paired_so_drift_cancels():
    """A machine that slows down by 10x half-way leaves the paired ratio alone."""
    slow = timing.Samples((2.0, 20.0, 20.0, 200.0), (2.0, 2.0, 2.0, 2.0))
    fast = timing.Samples((1.0, 10.0, 10.0, 100.0), (1.0, 1.0, 1.0, 1.0))
    result = timing.ratio(slow, fast)
    assert (result.wall, result.cpu, result.best) == (2.0, 2.0, 2.0)
    assert str(result) == "2.00|2.00|2.00"


def test_ratio_refuses_unpaired_samples():
    with pytest.raises(ValueError):
        timing.ratio(timing.Samples((1.0,), (1.0,)), timing.Samples((1.0, 2.0), (1.0, 2.0)))


def test_work_of_another_process_brings_its_own_time():
    samples = timing.interleave({"theirs": lambda: timing.Measured(2.0, 1.0)}, repeats=3)["theirs"]
    assert samples.median_s == samples.best_s == 2.0 and samples.median_cpu_s == 1.0


def test_peaks_are_plausible():
    assert timing.matmul_peak(size=128, repeats=2) > 1e7
    assert timing.read_bandwidth(megabytes=8, repeats=2) > 1e7
    assert timing.machine()["cores"] >= 1
