"""When a job will be done: an estimate with a band, from how long its own steps took. Pure.

Seconds are those in which the job was not paused. A step's time is first brought to the present number of competitors:
seconds * (load now / load then) ** busy, where load is one over the job's part of a full device and busy the device's
busy share at that step. So on a device that is never idle twice the competitors mean twice the time, and on one that mostly
waits for environments nearly the same. The rest is the mean of the latest steps (each capped at CAP times the median) times the
steps left. The band is that times exp(+-Z * sigma), where sigma^2
adds up what the mean of so many steps scatters, how far the level wanders (differences of neighbouring blocks beyond what
scatter explains, as a random walk to the middle of what is left), how much the load changed, and a floor. Where steps grow
longer or shorter, the band reaches as far as that would go on (the slope of their logarithms, less half its standard error).

Where competitors will end first, the job speeds up: that is the estimate, and the band's upper end stays at the present load
or, if that was higher lately, at the load of then.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 64  # steps looked at
MIN_STEPS = 3  # fewer: the quote
CAP = 10.0  # times the median
BLOCK = 4  # steps
Z = 1.8
FLOOR = 0.2  # of sigma
MAX_DRIFT = 0.3
MAX_TREND = math.log(2.0)
TAIL_FACTOR = 3.0  # what comes after the last step takes so many times longer or shorter than expected


@dataclass(frozen=True)
class StepTime:
    """One step that was trained."""

    seconds: float
    load: float = 1.0  # one over the job's part of the device while all running jobs wait for it
    busy: float = 1.0  # the device's busy share, 0 to 1


@dataclass(frozen=True)
class Span:
    """Seconds from now on, with a band."""

    expected_s: float
    low_s: float
    high_s: float
    basis: str = "steps"  # or "quote": before there were steps enough

    def after(self, seconds: float) -> "Span":
        """Returns what is left of it after so many seconds."""
        expected_s, low_s, high_s = (max(0.0, value - seconds) for value in (self.expected_s, self.low_s, self.high_s))
        return Span(expected_s, low_s, high_s, self.basis)


def estimate(
    times: Sequence[StepTime],
    num_left: int,
    *,
    load: float,
    sharers: Sequence[tuple[float, float]] = (),
    tail_s: float = 0.0,
    per_step: Span | None = None,
) -> Span | None:
    """Returns how long `num_left` more steps and what follows them take; None where nothing is known.

    load: now. sharers: (weight, seconds left at the present load) of the jobs beside it, weights in units of the job's own.
    per_step: what a quote says of one step.
    """
    if len(times) < MIN_STEPS:
        if per_step is None:
            return None
        rest = Span(num_left * per_step.expected_s, num_left * per_step.low_s, num_left * per_step.high_s, "quote")
        return _with_tail(rest, tail_s)
    recent = times[-WINDOW:]
    busy = min(1.0, max(0.0, statistics.fmean(time.busy for time in recent)))
    scaled = [time.seconds * (load / time.load) ** busy for time in recent]
    cap = CAP * statistics.median(scaled)
    scaled = [min(seconds, cap) for seconds in scaled]
    mean = statistics.fmean(scaled)
    if mean <= 0.0:
        return _with_tail(Span(0.0, 0.0, 0.0), tail_s)
    spread = Z * _sigma(scaled, mean, num_left, [time.load for time in recent], busy)
    trend = _trend(scaled, num_left)
    rest = mean * num_left
    shorter = rest * (1 - busy + busy * _speed_up(rest, sharers))
    longer = rest * (max(load, max(time.load for time in recent)) / load) ** busy
    low, high = math.exp(min(0.0, trend) - spread), math.exp(max(0.0, trend) + spread)
    return _with_tail(Span(shorter, shorter * low, longer * high), tail_s)


def _with_tail(rest: Span, tail_s: float) -> Span:
    low, high = rest.low_s + tail_s / TAIL_FACTOR, rest.high_s + tail_s * TAIL_FACTOR
    return Span(rest.expected_s + tail_s, low, high, rest.basis)


def _sigma(scaled: Sequence[float], mean: float, num_left: int, loads: Sequence[float], busy: float) -> float:
    """Returns the relative error of the rest of the run."""
    number = len(scaled)
    variance = _variance(scaled) / mean**2
    scatter = variance * (1 / max(1, num_left) + 1 / number)
    blocks = [statistics.fmean(scaled[i : i + BLOCK]) / mean for i in range(number % BLOCK, number, BLOCK)]
    drift = 0.0
    if len(blocks) >= 2:
        moved = statistics.fmean((b - a) ** 2 for a, b in itertools.pairwise(blocks))
        within = [_variance(scaled[i : i + BLOCK]) / mean**2 for i in range(number % BLOCK, number, BLOCK)]
        per_block = max(0.0, moved - 2 * statistics.fmean(within) / BLOCK)
        drift = min(MAX_DRIFT**2, per_block * (1 + num_left / BLOCK / 3))
    turbulence = busy**2 * _variance([math.log(load) for load in loads])
    return math.sqrt(scatter + drift + turbulence + FLOOR**2)


def _trend(scaled: Sequence[float], num_left: int) -> float:
    """Returns the logarithm of how much longer the steps to come may be than those seen, if their trend goes on."""
    number = len(scaled)
    logs = [math.log(max(seconds, 1e-9)) for seconds in scaled]
    centre, level = (number - 1) / 2, statistics.fmean(logs)
    squares = sum((i - centre) ** 2 for i in range(number))
    slope = sum((i - centre) * log for i, log in enumerate(logs)) / squares
    residual = sum((log - level - slope * (i - centre)) ** 2 for i, log in enumerate(logs))
    error = math.sqrt(residual / max(1, number - 2) / squares)
    certain = max(0.0, abs(slope) - error / 2)
    return math.copysign(min(MAX_TREND, certain * (number + num_left) / 2), slope)


def _variance(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)


def _speed_up(rest_s: float, sharers: Sequence[tuple[float, float]]) -> float:
    """Returns by what factor `rest_s` shrinks as those who share a full device end and leave it to the others.

    Each has work = weight * seconds left / all weights; the device is shared by weight at all times (processor sharing).
    """
    if rest_s <= 0.0:
        return 1.0
    weights = 1.0 + sum(weight for weight, _ in sharers)
    own, reached, now, active = rest_s / weights, 0.0, 0.0, weights
    for weight, left_s in sorted(sharers, key=lambda sharer: sharer[1]):
        per_weight = left_s / weights
        if per_weight >= own:
            break
        now += (per_weight - reached) * active
        reached, active = per_weight, active - weight
    return (now + (own - reached) * active) / rest_s
