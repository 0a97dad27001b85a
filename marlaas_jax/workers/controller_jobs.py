"""One job as the controller knows it: what is ready, what was trained, how it ended."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from marlaas_jax.config import JobConfig
from marlaas_jax.messages import EnvLoaded, JobReady, LoadEnv, StepDone
from marlaas_jax.rl import objective
from marlaas_jax.rollout.settings import RolloutSettings
from marlaas_jax.workers.controller_files import JobFiles, write_json
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

    def __init__(self, config: JobConfig, folder: Path, room: Room | None = None, owner: str = ""):
        self.config = config
        self.name = config.name
        self.folder = folder
        self.files = JobFiles(folder, time.time)
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
        self.started = time.monotonic()
        is_file = config.env.rpartition(":")[0].endswith(".py")  # a user's own code
        self.pool = f"job-{self.name}" if is_file else f"env-{config.env.partition(':')[0]}"
        # The items of a user's file come out of running it; whatever that does, other jobs' items are elsewhere.
        self.data_worker = f"data-{self.name}" if is_file and config.data is None else "data"
        self.is_remote = config.env.startswith(REMOTE)  # its owner's own workers run its environment
        if self.is_remote:
            self.pool = remote_group(owner, config.env.removeprefix(REMOTE), "environment")
            if config.data is None:
                self.data_worker = remote_group(owner, config.env.removeprefix(REMOTE), "data")
        self.room = room if is_file else None  # to which the workers that run the file are confined
        self.data_room = self.room if self.data_worker != "data" else None
        self.has_remote_data = self.is_remote and config.data is None
        self._tokens_counted = 0

    @property
    def is_over(self) -> bool:
        """True once the job has succeeded or failed."""
        return self.state in (SUCCEEDED, FAILED, CANCELLED)

    @property
    def is_live(self) -> bool:
        """True while the job has, or should have, workers and a place on the device."""
        return not self.is_over and self.state != PAUSED

    def open(self, *, resume: bool) -> None:
        """Opens the files; a job that succeeded before stays so, unless it is asked for more steps than it had."""
        self.files.open(resume=resume)
        self.incarnation = self.files.state.get("incarnation", 0)
        self.is_resumed = self.incarnation > 0
        trained = self.files.state.get("steps", 0)
        if self.files.state.get("state") == SUCCEEDED and self.config.steps <= trained:
            self.state = SUCCEEDED
            self.files.cut_back(trained)
            self.step = len(self.files.metrics)
            self.adapter = self.files.state.get("adapter")
        else:
            self.new_incarnation()

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
        self.state = RUNNING
        self.files.save_state(state=RUNNING, receipt=self.device_ready.receipt)
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

    def trained(self, message: StepDone) -> dict[str, Any]:
        """Notes a trained batch; returns its line of metrics."""
        self.step = message.step
        return self.files.batch_trained(message.step, message.version, message.metrics)

    def count_rate(self, seconds: float) -> None:
        """Updates tokens per second; call it once in a while."""
        rate = (self.tokens_sampled - self._tokens_counted) / max(seconds, 1e-6)
        self._tokens_counted = self.tokens_sampled
        self.tokens_per_s += RATE_SMOOTHING * (rate - self.tokens_per_s)

    def succeed(self) -> None:
        """Ends the job well."""
        self.state = SUCCEEDED
        self.files.save_state(state=SUCCEEDED, adapter=self.adapter, steps=self.step)
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
        )

    def result(self) -> JobResult:
        """Returns how the job stands or ended."""
        rows = self.files.metrics
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
        )

    def _write_summary(self) -> None:
        write_json(self.folder / "summary.json", dataclasses.asdict(self.result()))
