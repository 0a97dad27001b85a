"""Evaluation on held-out items before the first and after the last step; the same machinery, nothing is trained."""

import collections
import math

from marlaas_jax.rollout.commands import EvalDone


class Evaluation:
    """The phase that runs, if any: "before" or "after"."""

    def __init__(self, num_items: int):
        self.num_items = num_items
        self.phase = ""
        self.waiting: collections.deque[int] = collections.deque()  # items not started
        self._rewards: list[float | None] = []

    def begin(self, phase: str) -> None:
        """Starts a phase."""
        self.phase = phase
        self._rewards = []
        self.waiting.extend(range(self.num_items))

    def add(self, reward: float | None) -> None:
        """Takes one item's reward; None where there is none."""
        self._rewards.append(reward)

    def finish(self, job: str, step: int) -> EvalDone | None:
        """Ends the phase when its last item has ended."""
        if not self.phase or len(self._rewards) < self.num_items:
            return None
        known = [reward for reward in self._rewards if reward is not None]
        mean = math.fsum(known) / len(known) if known else None  # whatever the order they came in
        done = EvalDone(job, self.phase, step, mean, len(known), self.num_items)
        self.phase = ""
        return done
