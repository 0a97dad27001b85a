"""Forecasts of the jobs of a controller, and the check of what was forecast.

Each batch's line of metrics tells `job/active_s` (seconds the job ran until then, pauses left out), `job/load` and
`device/busy_share`: what `marlaas_jax.eta` works from, so a restart loses nothing. When a fifth and half of a job's steps are
trained, the band of that moment is written down (event `eta`, and `eta_marks` in state.json); when the job has succeeded, event
`eta_checked` says how long it really took from then on and whether that was within.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from marlaas_jax import eta
from marlaas_jax.eta import Span, StepTime
from marlaas_jax.fairness import entitled
from marlaas_jax.workers.controller_jobs import Job
from marlaas_jax.workers.controller_status import RUNNING

MARKS = (0.2, 0.5)  # of the steps
FIRST_EXPORT_S = 2.0  # of the last checkpoint and the adapter, before one was timed
SMOOTHING = 0.3

Tell = Callable[..., None]  # Controller.event


@dataclasses.dataclass
class _Forecast:
    span: Span
    at_s: float  # on the job's own clock


class Forecasts:
    """One per controller."""

    def __init__(self, tell: Tell, clock: Callable[[], float] = time.monotonic):
        self._tell = tell
        self._clock = clock
        self._export_s = FIRST_EXPORT_S
        self._made: dict[str, _Forecast] = {}

    def figures(self, job: Job, jobs: Iterable[Job], busy_share: float) -> dict[str, float]:
        """Returns what the line of a batch that was just trained tells about time."""
        load = 1.0 / _parts(job, jobs)[job.name]
        return {"job/active_s": job.active_s(self._clock()), "job/load": load, "device/busy_share": busy_share}

    def stepped(self, job: Job, jobs: Iterable[Job]) -> None:
        """Makes a new forecast after a batch; notes the band where it is due."""
        running = list(jobs)
        at_s = job.active_s(self._clock())
        parts = _parts(job, running)
        sharers = [
            (parts[other.name] / parts[job.name], left.expected_s)
            for other in running
            if other is not job and other.name in parts and (left := self.left(other)) is not None
        ]
        span = eta.estimate(
            times_of(job), job.config.steps - job.step, load=1.0 / parts[job.name], sharers=sharers,
            tail_s=job.eval_s + self._export_s, per_step=job.quoted_step,
        )  # fmt: skip
        if span is None:
            return
        self._made[job.name] = _Forecast(span, at_s)
        for share in MARKS:
            if job.step == math.ceil(share * job.config.steps) < job.config.steps:
                self._mark(job, share, span, at_s)

    def left(self, job: Job) -> Span | None:
        """Returns how long a job still takes, None where that is not known."""
        if (made := self._made.get(job.name)) is not None:
            return made.span.after(job.active_s(self._clock()) - made.at_s)
        if job.quoted_step is None:
            return None
        return eta.estimate((), job.config.steps - job.step, load=1.0, tail_s=self._export_s, per_step=job.quoted_step)

    def finished(self, job: Job) -> None:
        """Compares what was forecast of a job that has just succeeded with what it took; learns how long exports take."""
        self._export_s += SMOOTHING * (self._clock() - job.since - self._export_s)
        end_s = job.active_s(self._clock())
        for mark in job.files.state.get("eta_marks", ()):
            took_s = end_s - mark["active_s"]
            is_within = mark["low_s"] <= took_s <= mark["high_s"]
            self._tell("eta_checked", job.name, **mark, took_s=took_s, is_within=is_within)

    def forget(self, job: str) -> None:
        """Drops a job."""
        self._made.pop(job, None)

    def _mark(self, job: Job, share: float, span: Span, at_s: float) -> None:
        marks: list[dict[str, Any]] = [mark for mark in job.files.state.get("eta_marks", ()) if mark["share"] != share]
        mark = {"share": share, "step": job.step, "active_s": at_s, **dataclasses.asdict(span)}
        job.files.save_state(eta_marks=[*marks, mark])
        self._tell("eta", job.name, **mark)


def times_of(job: Job) -> list[StepTime]:
    """Returns how long the job's steps took; the first is left out: it holds the start and the first evaluation."""
    rows = job.files.metrics[-eta.WINDOW - 1 :]
    times = []
    for before, row in itertools.pairwise(rows):
        start, end = before.get("job/active_s"), row.get("job/active_s")
        if start is not None and end is not None and end >= start:
            load, busy = row.get("job/load") or 1.0, row.get("device/busy_share")
            times.append(StepTime(end - start, max(1.0, load), 1.0 if busy is None else busy))
    return times


def _parts(job: Job, jobs: Iterable[Job]) -> dict[str, float]:
    """Returns the share of each running job, and of this one, while all of them wait for the device."""
    return entitled({j.name: (j.config.weight, j.owner) for j in (job, *jobs) if j is job or j.state == RUNNING})
