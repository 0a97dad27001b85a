"""Evaluations on held-out items: before the first step, every so many steps beside the training, and after the last.

One evaluation runs at a time, all of it under one snapshot, and nothing is trained of it. One that is due while another
runs is left out, and that is said. Beside training few of its episodes run at once. The first goes before everything: then
no crash can cost it the untrained weights.
"""

import collections
import dataclasses
import math

from marlaas_jax.rollout.commands import EvalDone

BEFORE, DURING, AFTER = "before", "during", "after"
SHARE = 0.25  # of what training gets, in episodes that start and in episodes that run, while both have some


@dataclasses.dataclass(frozen=True)
class Running:
    """What one evaluation evaluates."""

    phase: str
    step: int
    version: int
    is_held: bool  # its snapshot was kept for it and is to be released


class Evaluation:
    """The evaluation that runs, if any, and the one that ended last."""

    def __init__(self, num_items: int, every_steps: int, max_beside_training: int, last: EvalDone | None = None):
        """`last`: of an earlier incarnation, as far as its step is still part of the job's history."""
        self.num_items = num_items
        self.last = last
        self.running: Running | None = None
        self.waiting: collections.deque[int] = collections.deque()  # items not started
        self._every_steps = every_steps
        self._max_beside_training = max_beside_training
        self._num_started = 0
        self._rewards: list[float | None] = []

    def is_due(self, step: int, last_step: int) -> bool:
        """True where an evaluation follows batch `step`; the one after the last batch is not meant."""
        return bool(self.num_items and self._every_steps and 0 < step < last_step and step % self._every_steps == 0)

    def was_missed(self, step: int, last_step: int) -> bool:
        """True where a job that goes on from `step` owes the evaluation of that step or of an earlier one."""
        if not (self.num_items and self._every_steps and step < last_step):
            return False
        due = step - step % self._every_steps
        return due > 0 and (self.last is None or self.last.step < due)

    def begin(self, phase: str, step: int, version: int, *, is_held: bool) -> None:
        """Starts one; none may be running."""
        assert self.running is None, self.running
        self.running = Running(phase, step, version, is_held)
        self._rewards = []
        self._num_started = 0
        self.waiting.extend(range(self.num_items))

    @property
    def is_first(self) -> bool:
        """True while the one before the first step runs."""
        return self.running is not None and self.running.phase == BEFORE

    def may_start(self, is_training: bool) -> bool:
        """True where another item may start now."""
        is_beside = is_training and not self.is_first
        num_running = self._num_started - len(self._rewards)
        return bool(self.waiting) and (not is_beside or num_running < self._max_beside_training)

    def start(self) -> int:
        """Returns the item that starts."""
        self._num_started += 1
        return self.waiting.popleft()

    def add(self, reward: float | None) -> None:
        """Takes one item's reward; None where there is none."""
        self._rewards.append(reward)

    def abandon(self) -> Running | None:
        """Drops the evaluation that runs and returns it; its episodes are the caller's to cancel."""
        running, self.running = self.running, None
        self.waiting.clear()
        return running

    def progress(self) -> str:
        """Returns how far the running one is, for people."""
        return f"{len(self._rewards)} of {self.num_items} items"

    def finish(self, job: str) -> EvalDone | None:
        """Ends the evaluation when its last item has ended."""
        if self.running is None or len(self._rewards) < self.num_items:
            return None
        known = [reward for reward in self._rewards if reward is not None]
        mean = math.fsum(known) / len(known) if known else None  # whatever the order they came in
        at = self.running
        self.running = None
        self.last = EvalDone(
            job, at.phase, at.step, mean, len(known), self.num_items, at.version, standard_error(known), at.is_held
        )
        return self.last


def standard_error(values: list[float]) -> float | None:
    """Returns the standard error of the mean (sample deviation over the root of the count), None for fewer than two."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
