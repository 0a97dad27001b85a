"""One job as the controller knows it: what is ready, what was trained, how it ended."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from marlaas_jax.config import JobConfig
from marlaas_jax.eta import Span
from marlaas_jax.fairness import Owner
from marlaas_jax.messages import EnvLoaded, JobReady, LoadEnv, StepDone
from marlaas_jax.rl import objective
from marlaas_jax.rollout.commands import EvalDone
from marlaas_jax.rollout.settings import RolloutSettings
from marlaas_jax.rollout.stopping import Past
from marlaas_jax.workers import roll_back
from marlaas_jax.workers.controller_evals import Evaluations
from marlaas_jax.workers.controller_files import JobFiles, read_lines, write_json
from marlaas_jax.workers.controller_status import (
    CANCELLED,
    FAILED,
    FINISHING,
    PAUSED,
    RUNNING,
    STARTING,
    SUCCEEDED,
    JobResult,
    JobStatus,
)
from marlaas_jax.workers.remote_worker import REMOTE
from marlaas_jax.workers.sandbox.sandbox import Room

RATE_SMOOTHING = 0.03  # weight of the newest second in tokens per second: a mean over about half a minute


def remote_group(owner: str, name: str, role: str) -> str:
    """Returns the group of the workers that a tenant brings along for its environment `remote:NAME`."""
    return f"remote-{role}/{owner}/{name}"


class Job:
    """State of one job over all its incarnations."""

    def __init__(self, config: JobConfig, folder: Path, room: Room | None = None, owner: Owner | None = None):
        self.config = config
        self.owner = owner  # whose share the job's is a part of
        self.name = config.name
        self.folder = folder
        self.files = JobFiles(folder, time.time)
        self.evaluations = Evaluations(folder, time.time)
        self.state = STARTING
        self.since = time.monotonic()  # of the state, for its limit
        self.kind = ""
        self.reason = ""
        self.incarnation = 0
        self.device_ready: JobReady | None = None
        self.data_ready: EnvLoaded | None = None
        self.env_ready: EnvLoaded | None = None  # the first worker's answer
        self.is_resumed = False
        self.step = 0
        self.tokens_sampled = 0
        self.tokens_per_s = 0.0
        self.device_share = 0.0
        self.episodes: dict[str, int] = {}
        self.adapter: str | None = None
        self.stop_reason = ""  # of a job that ends, or ended, before its last step and well
        self.started = time.monotonic()
        is_file = config.env.rpartition(":")[0].endswith(".py")  # a user's own code
        self.pool = f"job-{self.name}" if is_file else f"env-{config.env.partition(':')[0]}"
        # The items of a user's file come out of running it; whatever that does, other jobs' items are elsewhere.
        self.data_worker = f"data-{self.name}" if is_file and config.data is None else "data"
        self.is_remote = config.env.startswith(REMOTE)  # its owner's own workers run its environment
        if self.is_remote:
            tenant = "" if owner is None else owner.name
            self.pool = remote_group(tenant, config.env.removeprefix(REMOTE), "environment")
            if config.data is None:
                self.data_worker = remote_group(tenant, config.env.removeprefix(REMOTE), "data")
        self.room = room if is_file else None  # to which the workers that run the file are confined
        self.data_room = self.room if self.data_worker != "data" else None
        self.has_remote_data = self.is_remote and config.data is None
        self._tokens_counted = 0
        self.quoted_step: Span | None = None  # what a quote says of one step
        self.eval_s = 0.0  # one evaluation took
        self.eta: Span | None = None  # what is left, as it was last asked for
        self._active_before_s = 0.0
        self._active_since: float | None = None  # None: never began, or paused

    @property
    def is_over(self) -> bool:
        """True once the job has succeeded or failed."""
        return self.state in (SUCCEEDED, FAILED, CANCELLED)

    @property
    def is_live(self) -> bool:
        """True while the job has, or should have, workers and a place on the device."""
        return not self.is_over and self.state != PAUSED

    @property
    def go_on_from(self) -> int | None:
        """The committed step that the job was rolled back to and has not gone on from yet."""
        return roll_back.pending(self.files.state)  # pyright: ignore[reportArgumentType]

    def open(self, *, resume: bool) -> None:
        """Opens the files; a job that succeeded before stays so, unless it is asked for more steps than it had."""
        self.files.open(resume=resume)
        self.incarnation = self.files.state.get("incarnation", 0)
        self.is_resumed = self.incarnation > 0
        trained = self.files.state.get("steps", 0)
        if self.files.state.get("state") == SUCCEEDED and self._has_all(self.files.state, trained):
            self.state = SUCCEEDED
            self.stop_reason = self.files.state.get("stop_reason", "")
            self.files.cut_back(trained)
            self.evaluations.cut_back(trained)
            self.step = len(self.files.metrics)
            self.adapter = self.files.state.get("adapter")
        else:
            if (rows := read_lines(self.folder / "metrics.jsonl")) and isinstance(
                ran := rows[-1].get("job/active_s"), int | float
            ):
                self._active_before_s = ran
            self.new_incarnation()

    def active_s(self, now: float) -> float:
        """Returns how long the job has run, pauses and the time before its first start left out; `now` is monotonic."""
        return self._active_before_s + (0.0 if self._active_since is None else now - self._active_since)

    def _has_all(self, state: dict[str, Any], trained: int) -> bool:
        """Whether a job that succeeded has the steps asked for now, or ended early by the rule that it still has."""
        is_stopped = bool(state.get("stop_reason")) and state.get("stop") == self.config.stop.model_dump(mode="json")
        return self.config.steps <= (state.get("steps_asked", trained) if is_stopped else trained)

    def new_incarnation(self) -> None:
        """Starts again from the committed step: everything that an older incarnation sends will be ignored."""
        if self.incarnation:
            self.is_resumed = True
        self.incarnation += 1
        self.state = STARTING
        self.since = time.monotonic()
        self.device_ready = None
        self.data_ready = None
        self.env_ready = None
        self.files.save_state(incarnation=self.incarnation, state=STARTING)

    def load_message(self) -> LoadEnv:
        """Returns what the environment and data workers are told about the job."""
        data = self.config.data.model_dump_json().encode() if self.config.data is not None else b""
        return LoadEnv(self.name, self.incarnation, self.config.env, self.config.env_args, data, self.config.seed)

    def missing(self) -> list[str]:
        """Returns what must still be ready before rollouts can start."""
        parts = {"device": self.device_ready, "data": self.data_ready, "environment": self.env_ready}
        return [name for name, answer in parts.items() if answer is None]

    def begin(self) -> bool:
        """Takes the committed step as the truth once device and data are ready; returns whether evaluation comes first."""
        assert self.device_ready is not None
        self.step = self.device_ready.step
        self.files.cut_back(self.step)
        if self.go_on_from is not None:
            roll_back.remove_result(self.folder)
        self.evaluations.cut_back(self.step)
        self.stop_reason = ""  # decided anew, from the same history
        self.state = RUNNING
        if self._active_since is None:
            self._active_since = time.monotonic()
        self.files.save_state(state=RUNNING, receipt=self.device_ready.receipt, rollback_to=None)
        return self.step == 0 and "eval_before" not in self.files.state

    def settings(self, max_context: int) -> RolloutSettings:
        """Returns what the rollouts need to know."""
        assert self.data_ready is not None and self.env_ready is not None
        limit = self.data_ready.num_eval or self.config.eval.num_items  # 0: unlimited
        return RolloutSettings.from_config(
            self.config,
            incarnation=self.incarnation,
            max_context=max_context,
            normalize_std=objective.resolve(self.config.algorithm).normalize_std,
            eval_items=min(self.config.eval.num_items, limit),
            retry_lost=self.env_ready.retry_lost,
        )

    @property
    def holds_first(self) -> bool:
        """Whether the device is to hold the snapshot that the job starts from: an evaluation may be of it."""
        return self.config.eval.every_steps > 0

    def past(self) -> Past:
        """Returns what the rollouts need to know of the committed steps."""
        rows = self.files.metrics
        return Past(
            rewards=tuple(row.get("rollout/reward_mean") for row in rows),
            tokens=int(sum(row.get("rollout/num_tokens") or 0 for row in rows)),
            running_s=self.last_metric("rollout/running_s") or 0.0,
            evaluations=self.evaluations.past(self.name),
            stop=self.files.state.get("stop_asked", ""),
        )

    def ask_to_stop(self, reason: str) -> None:
        """Notes that somebody wants the job to end early and well; it outlives a restart."""
        self.files.save_state(stop_asked=reason)

    def evaluated(self, done: EvalDone) -> None:
        """Notes an evaluation that has ended."""
        self.evaluations.add(done, self.incarnation)
        if done.phase != "during":
            self.files.save_state(**{f"eval_{done.phase}": done.reward_mean})

    def trained(self, message: StepDone, figures: dict[str, float]) -> dict[str, Any]:
        """Notes a trained batch and our own figures of it; returns its line of metrics."""
        self.step = message.step
        return self.files.batch_trained(message.step, message.version, message.metrics | figures)

    def count_rate(self, seconds: float) -> None:
        """Updates tokens per second; call it once in a while."""
        rate = (self.tokens_sampled - self._tokens_counted) / max(seconds, 1e-6)
        self._tokens_counted = self.tokens_sampled
        self.tokens_per_s += RATE_SMOOTHING * (rate - self.tokens_per_s)

    def succeed(self) -> None:
        """Ends the job well."""
        self.state = SUCCEEDED
        self.files.save_state(
            state=SUCCEEDED,
            adapter=self.adapter,
            steps=self.step,
            steps_asked=self.config.steps,
            stop_reason=self.stop_reason,
            stop=self.config.stop.model_dump(mode="json"),
        )
        self._write_summary()

    def fail(self, kind: str, reason: str) -> None:
        """Ends the job; the reason is what its owner reads."""
        self.state, self.kind, self.reason = FAILED, kind, reason
        self.files.save_state(state=FAILED, kind=kind, reason=reason)
        self._write_summary()

    def refuse(self, kind: str, reason: str) -> None:
        """Ends a job whose files cannot be read; they stay as they are, for whoever mends them."""
        self.state, self.kind, self.reason = FAILED, kind, reason

    def cancel(self, reason: str) -> None:
        """Ends the job at its owner's wish."""
        self.state, self.reason = CANCELLED, reason
        self.files.save_state(state=CANCELLED, reason=reason, steps=self.step)
        self._write_summary()

    def paused(self) -> None:
        """All that was in training is committed; the job waits to be resumed."""
        self.state = PAUSED
        self.since = time.monotonic()
        self._active_before_s, self._active_since = self.active_s(self.since), None
        self.files.save_state(state=PAUSED)

    def finishing(self) -> None:
        """All is trained; the adapter is being written."""
        self.state = FINISHING
        self.since = time.monotonic()

    def reward(self, index: int) -> float | None:
        """Returns a trained batch's mean reward by index, None where there is none."""
        rows = self.files.metrics
        return rows[index].get("rollout/reward_mean") if -len(rows) <= index < len(rows) else None

    def last_metric(self, name: str) -> float | None:
        """Returns a figure of the last trained batch."""
        return self.files.metrics[-1].get(name) if self.files.metrics else None

    def reward_last3(self) -> float | None:
        """Returns the mean reward of the last three batches."""
        values = [value for i in (-3, -2, -1) if (value := self.reward(i)) is not None]
        return sum(values) / len(values) if values else None

    def status(self, queues: dict[str, int], waits_for: str) -> JobStatus:
        """Returns the live snapshot."""
        last = self.evaluations.last() or {}
        return JobStatus(
            name=self.name,
            state=self.state,
            step=self.step,
            steps=self.config.steps,
            reward=self.reward(-1),
            reward_first=self.reward(0),
            reward_last3=self.reward_last3(),
            eval_before=self.files.state.get("eval_before"),
            eval_after=self.files.state.get("eval_after"),
            live_share=self.last_metric("rollout/live_share"),
            staleness=self.last_metric("rollout/staleness_mean"),
            tokens_per_s=self.tokens_per_s,
            tokens=self.tokens_sampled,
            queues=queues,
            episodes=self.episodes,
            waits_for=waits_for,
            device_share=self.device_share,
            reason=self.reason,
            eta_s=None if self.eta is None else self.eta.expected_s,
            eta_low_s=None if self.eta is None else self.eta.low_s,
            eta_high_s=None if self.eta is None else self.eta.high_s,
            eta_basis="" if self.eta is None else self.eta.basis,
            eval_last=last.get("reward_mean"),
            eval_step=last.get("step"),
            stop_reason=self.stop_reason,
        )

    def result(self) -> JobResult:
        """Returns how the job stands or ended."""
        rows = self.files.metrics
        last = self.evaluations.last() or {}
        return JobResult(
            name=self.name,
            state=self.state,
            kind=self.kind,
            reason=self.reason,
            steps=self.step,
            steps_asked=self.config.steps,
            reward_first=self.reward(0),
            reward_last3=self.reward_last3(),
            eval_before=self.files.state.get("eval_before"),
            eval_after=self.files.state.get("eval_after"),
            tokens=int(sum(row.get("rollout/num_tokens") or 0 for row in rows)),
            restarts=self.episodes.get("restarts", 0) + sum(a for row in rows for _, a in row.get("tickets", ())),
            incarnations=self.incarnation,
            episodes=self.episodes,
            elapsed_s=time.monotonic() - self.started,
            adapter=self.adapter,
            eval_last=last.get("reward_mean"),
            stop_reason=self.stop_reason,
        )

    def close(self) -> None:
        """Closes all files."""
        self.files.close()
        self.evaluations.close()

    def _write_summary(self) -> None:
        write_json(self.folder / "summary.json", dataclasses.asdict(self.result()))
