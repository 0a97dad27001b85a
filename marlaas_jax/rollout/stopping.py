"""When a job ends before its last step: decided from its history alone, so that to resume a job changes no decision.

The history is that of the batches in the order in which they are trained, and of the evaluations of their snapshots. A batch
counts when it leaves for the learner: what decides is known then, and no batch behind it is begun. After a crash the history
is that of the committed steps. The terms (target, patience, min_delta) are those of Keras' EarlyStopping.
"""

import dataclasses
from collections import deque

from marlaas_jax.rollout.commands import EvalDone


@dataclasses.dataclass(frozen=True)
class StopSettings:
    """See config.StopConfig."""

    metric: str = "train_reward"
    window: int = 3
    target: float | None = None
    patience: int | None = None
    min_delta: float = 0.0
    max_tokens: int | None = None
    max_time_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Past:
    """What a job has behind it when its rollouts (again) start: its committed steps."""

    rewards: tuple[float | None, ...] = ()  # mean of each batch trained
    tokens: int = 0  # sampled, of those batches
    running_s: float = 0.0
    evaluations: tuple[EvalDone, ...] = ()  # of those steps, in order
    stop: str = ""  # somebody has asked for the job's end, with this reason


NEVER, NOTHING = StopSettings(), Past()  # a job without a rule; one that begins


class StopRule:
    """Takes what happens to one job; each method returns the reason to stop, "" for none."""

    def __init__(self, settings: StopSettings, past: Past):
        self._settings = settings
        self._window: deque[float] = deque(maxlen=settings.window)
        self._step = 0
        self._tokens = 0
        self._best: tuple[float, int] | None = None  # the metric's best value, and its step
        self.reason = past.stop
        for reward in past.rewards:
            self._note(self._batch(reward))
        for done in past.evaluations:
            self.evaluation(done)
        self._tokens = past.tokens
        self._note(self._over_tokens())
        self._note(self.time(past.running_s))

    def batch(self, reward: float, tokens: int) -> str:
        """A batch leaves for the learner."""
        self._tokens += tokens
        return self._note(self._batch(reward)) or self._note(self._over_tokens())

    def evaluation(self, done: EvalDone) -> str:
        """An evaluation has ended."""
        if self._settings.metric != "eval_reward" or done.reward_mean is None:
            return ""
        return self._note(self._judge(done.reward_mean, done.step, f"held-out reward {done.reward_mean:.4g}"))

    def time(self, running_s: float) -> str:
        """The job has run for so many seconds."""
        limit = self._settings.max_time_s
        if limit is None or running_s < limit:
            return ""
        return self._note(f"max_time_s: it has run for {running_s:.0f} s, and stop.max_time_s={limit:g}")

    def _batch(self, reward: float | None) -> str:
        self._step += 1
        if reward is not None:
            self._window.append(reward)
        if self._settings.metric != "train_reward" or len(self._window) < self._settings.window:
            return ""
        mean = sum(self._window) / len(self._window)
        return self._judge(mean, self._step, f"train reward {mean:.4g} (mean of {self._settings.window} batches)")

    def _judge(self, value: float, step: int, what: str) -> str:
        s = self._settings
        if s.target is not None and value >= s.target:
            return f"target: {what} at step {step}, and stop.target={s.target:g}"
        if self._best is None or value > self._best[0] + s.min_delta:
            self._best = (value, step)
        if s.patience is not None and step - self._best[1] >= s.patience:
            best, best_step = self._best
            return f"patience: {what} at step {step}, no more than {best:.4g} of step {best_step}; stop.patience={s.patience}"
        return ""

    def _over_tokens(self) -> str:
        limit = self._settings.max_tokens
        if limit is None or self._tokens < limit:
            return ""
        return f"max_tokens: {self._tokens} tokens were sampled for its batches, and stop.max_tokens={limit}"

    def _note(self, reason: str) -> str:
        """Keeps the first reason."""
        self.reason = self.reason or reason
        return reason
