"""The colocated placement: one sampler and one learner share a device and one copy of the base; one thread runs both.

Owns the jobs' life on the device: opening (fresh, from a PEFT folder, from another run, or resumed), publishing with its two
proofs (fingerprint and canary), checkpoints, export, closing. Dispatch by dispatch it chooses between the sampler and the
learner so that both get an equal share of the device while both have work; but decoding never waits for two dispatches of the
learner in a row. A fault of one job fails that job only.
"""

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from marlaas_jax.checkpoint.job_checkpoints import JobCheckpoints, JobState
from marlaas_jax.config import JobConfig
from marlaas_jax.device import initial
from marlaas_jax.device.stored import StoredAdapters
from marlaas_jax.engine.sampler import Sampler
from marlaas_jax.errors import InternalError, MarlaasError, StorageError, WrongWeights
from marlaas_jax.learner.learner import Learner
from marlaas_jax.lora import peft_format, readme, receipt
from marlaas_jax.lora.adapter import AdapterSpec
from marlaas_jax.lora.snapshot import Snapshot
from marlaas_jax.messages import (
    AddJob,
    CancelGenerate,
    Checkpointed,
    FinishJob,
    Generate,
    JobFailed,
    JobFinished,
    JobPaused,
    JobReady,
    JobWarning,
    Message,
    PauseJob,
    ReleaseSnapshot,
    RemoveJob,
    Reweigh,
    StepDone,
    TrainBatch,
)
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.identity import require_same
from marlaas_jax.waits import Waits

log = logging.getLogger(__name__)

MAX_FAILED_SAVES = 3  # in a row; then the job fails
MAX_LEAD_S = 1.0  # a stage that was idle may not claim more than this when it comes back
CANARY_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # natural-log units, largest over the canary's tokens


@dataclasses.dataclass
class _Job:
    config: JobConfig
    incarnation: int
    spec: AdapterSpec
    checkpoints: JobCheckpoints
    ledgers: dict[int, tuple[bytes, float]]  # batch step -> (ledger after it, reward), until trained
    step: int = 0
    ledger: bytes = b""
    reward: float = 0.0
    saved_step: int = 0
    saved_at_s: float = 0.0
    failed_saves: int = 0
    is_pausing: bool = False
    holds: set[int] = dataclasses.field(default_factory=set)  # batch steps whose snapshot is to be held


class ColocatedDevice:
    """Takes the controller's messages by `handle`, does one dispatch per `step`; both return the messages to send back."""

    def __init__(
        self,
        model: ModelConfig,
        sampler: Sampler,
        learner: Learner,
        identity: dict[str, str],
        base: readme.Base,
        canary_ids: list[int],
        dtype: str,
        max_rank: int,
        clock: Callable[[], float],
        transfer: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot,
    ):
        self._model, self._sampler, self._learner = model, sampler, learner
        self._identity, self._base = identity, base
        self._canary_ids, self._dtype, self._max_rank = canary_ids, dtype, max_rank
        self._clock, self._transfer = clock, transfer
        self._stored = StoredAdapters(model, sampler, max_rank, identity, dtype)
        self._jobs: dict[str, _Job] = {}
        self._stage = ""  # that had the last dispatch
        self._service_s = {"sampler": 0.0, "learner": 0.0}
        self._busy_s = {"sampler": 0.0, "learner": 0.0, "publish": 0.0}
        self._trained_tokens = 0.0
        self._longest_s = {"learner/longest_dispatch_s": 0.0, "sampler/longest_wait_s": 0.0}
        self._sampler_waits_since: float | None = None
        self._published_by_job_s: dict[str, float] = {}  # beside what the sampler counts itself
        self._num_dispatches = 0  # since the last look at the backlog
        self._seen_waiting: dict[str, int] = {}  # at how many of them something of a job waited

    # ---- messages

    def handle(self, message: Message) -> list[Message]:
        """Returns the answers to one message of the controller."""
        match message:
            case Generate(adapter=""):
                self._sampler.submit(message)
            case Generate():
                self._stored.submit(message)
            case CancelGenerate():
                self._stored.cancel(message.request_id)
                self._sampler.cancel(message.request_id)
            case Reweigh():
                self._learner.reweigh(message.owner)
            case ReleaseSnapshot():
                self._sampler.release(message.job, message.incarnation, message.version)
            case TrainBatch():
                return self._for_job(message, self._train)
            case AddJob():
                return self._add(message)
            case FinishJob():
                return self._for_job(message, self._finish)
            case PauseJob():
                return self._for_job(message, self._pause)
            case RemoveJob():
                return self._for_job(message, self._remove)
            case _:
                raise TypeError(f"{type(message).__name__} is not a message for the device")
        return []

    def has_work(self) -> bool:
        """True if `step` has a dispatch to run."""
        return self._sampler.has_work() or self._learner.has_work() or self._stored.has_work()

    def step(self) -> list[Message]:
        """Runs one dispatch of the stage that is due; returns what it finished."""
        refused = self._stored.poll()
        sampler, learner = self._sampler.has_work(), self._learner.has_work()
        if not sampler and not learner:
            self._stored.wait()
            return [*refused, *self._poll_saves()]
        start = self._clock()
        self._note_backlog()
        if sampler and self._sampler_waits_since is None:
            self._sampler_waits_since = start
        stage = self._choose() if sampler and learner else "sampler" if sampler else "learner"
        self._stage = stage
        if stage == "sampler" and self._sampler_waits_since is not None:
            self._note("sampler/longest_wait_s", start - self._sampler_waits_since)
            self._sampler_waits_since = None
        done = self._sampler.step() if stage == "sampler" else self._learner.step()
        spent = self._clock() - start
        self._busy_s[stage] += spent
        self._service_s[stage] += spent
        if stage == "learner":
            self._note("learner/longest_dispatch_s", spent)
        out: list[Message] = [*refused, *self._sampler.take_parts()]
        for message in done:
            out += self._after_step(message) if isinstance(message, StepDone) else self._after(message)
        return out + self._poll_saves()

    def close(self) -> list[Message]:
        """Closes all jobs; what was trained since a job's last checkpoint is saved first."""
        out: list[Message] = []
        for name, job in list(self._jobs.items()):
            try:
                job.checkpoints.wait()
                if job.saved_step != job.step:
                    self._save(job)
            except MarlaasError as error:  # between two minibatches only the last whole batch counts, and it is not at hand
                out.append(JobWarning(name, job.incarnation, str(error)))
            out += self._close(name)
        self._stored.close()
        return out

    # ---- figures

    def totals(self) -> dict[str, float]:
        """Returns sums since the start: "busy/STAGE" and "job/NAME" in seconds, tokens by what was done with them."""
        busy = {f"busy/{stage}": seconds for stage, seconds in self._busy_s.items()}
        jobs = {f"job/{name}": seconds for name, seconds in self._sampler.busy_by_job_s.items()}
        for name, seconds in self._learner.busy_by_job_s.items():
            jobs[f"job/{name}"] = jobs.get(f"job/{name}", 0.0) + seconds
        for name, seconds in self._published_by_job_s.items():
            jobs[f"job/{name}"] = jobs.get(f"job/{name}", 0.0) + seconds
        sampled = float(sum(self._sampler.sampled_tokens.values()))
        prefilled = float(sum(self._sampler.prefilled_tokens.values()))
        return busy | jobs | {"sampled_tokens": sampled, "prefilled_tokens": prefilled, "trained_tokens": self._trained_tokens}

    def gauges(self) -> dict[str, float]:
        """Returns what holds now; besides, so far, the longest dispatch of the learner and the longest wait of decoding."""
        return self._sampler.counters() | self._learner.gauges() | self._longest_s

    def queued(self) -> dict[str, int]:
        """Returns the requests that wait in the sampler, by job."""
        return self._sampler.queued()

    def take_backlogged(self) -> tuple[str, ...]:
        """Returns the jobs of which, at every dispatch since the last call, something waited; of none where there was none."""
        found = tuple(sorted(job for job, seen in self._seen_waiting.items() if seen == self._num_dispatches))
        self._num_dispatches, self._seen_waiting = 0, {}
        return found

    def take_waits(self, max_entries: int = 256) -> dict[str, dict[str, Waits]]:
        """Returns how long what started since the last call had waited, by stage and job: at most so many entries."""
        taken = self._sampler.waits.take(max_entries)
        left = max_entries - sum(len(jobs) for jobs in taken.values())
        return taken | self._learner.waits.take(left)

    def _note_backlog(self) -> None:
        self._num_dispatches += 1
        for job in {*self._sampler.queued(), *self._learner.with_batches()}:
            self._seen_waiting[job] = self._seen_waiting.get(job, 0) + 1

    def compiles_since_warmup(self) -> int:
        """Returns how many programs were compiled after the warm-up; anything but 0 is a fault."""
        return self._sampler.compiles_since_warmup()

    def _choose(self) -> str:
        """The stage with less service so far; one that comes back from idling claims at most MAX_LEAD_S.

        The learner has no two turns in a row: what it lacks then, it gets once the sampler has less to do.
        """
        if self._stage == "learner":
            return "sampler"
        low, high = sorted(self._service_s, key=self._service_s.__getitem__)
        self._service_s[low] = max(self._service_s[low], self._service_s[high] - MAX_LEAD_S)
        return low

    def _note(self, name: str, seconds: float) -> None:
        self._longest_s[name] = max(self._longest_s[name], seconds)

    def _for_job(self, message: Any, action: Callable[[_Job, Any], list[Message]]) -> list[Message]:
        """Runs `action` unless the job is unknown or the message is of another incarnation."""
        job = self._jobs.get(message.job)
        if job is None or job.incarnation != message.incarnation:
            return []
        return self._guarded(job, lambda: action(job, message))

    def _guarded(self, job: _Job, action: Callable[[], list[Message]]) -> list[Message]:
        """Runs what concerns one job alone: whatever it raises ends that job and no other."""
        try:
            return action()
        except Exception as error:
            return self._fail(job, error)

    # ---- the life of a job

    def _add(self, message: AddJob) -> list[Message]:
        config = JobConfig.model_validate_json(message.config)
        if (old := self._jobs.get(message.job)) is not None:
            if old.incarnation >= message.incarnation:
                return []
            self._close(message.job)
        spec = initial.spec_of_job(config)
        try:
            checkpoints = JobCheckpoints(Path(message.job_dir) / "checkpoints", config.checkpoint.keep)
        except Exception as error:
            return [_failed(message.job, message.incarnation, error)]
        job = _Job(config, message.incarnation, spec, checkpoints, {}, saved_at_s=self._clock())
        self._jobs[message.job] = job
        return self._guarded(job, lambda: self._begin(job, message))

    def _begin(self, job: _Job, message: AddJob) -> list[Message]:
        """Gives a new job its weights, or those that it had, and publishes them."""
        config, spec, checkpoints = job.config, job.spec, job.checkpoints
        state, warnings = initial.restored(checkpoints, message)
        if state is not None:
            require_same(self._identity, state.identity, "this run's", f"the one of {checkpoints.directory}")
            initial.require_same_adapter(spec, initial.spec_of(state), f"the checkpoints in {checkpoints.directory}")
            job.step = job.saved_step = state.step
            job.ledger = state.ledger
            weights = {"arrays": state.arrays, "counters": state.counters}
            self._learner.add_job(config.name, job.incarnation, config, spec, state=weights, owner=message.owner)
        else:
            start = initial.weights(self._model, spec, config.lora.init_from, self._max_rank, self._identity)
            self._learner.add_job(config.name, job.incarnation, config, spec, weights=start, owner=message.owner)
        snapshot = self._publish(job, config.name)
        if message.hold:
            self._sampler.hold(config.name, job.incarnation, snapshot.version)
        record = receipt.receipt(self._model, spec).to_dict()
        ready = JobReady(config.name, job.incarnation, job.step, snapshot.version, job.ledger, snapshot.fingerprint, record)
        return [*warnings, ready]

    def _train(self, job: _Job, batch: TrainBatch) -> list[Message]:
        if batch.step != job.step + len(job.ledgers) and batch.step not in job.ledgers:
            return []  # trained already, or sent before a roll-back
        job.ledgers[batch.step] = (batch.ledger, batch.reward_mean)
        if batch.hold:
            job.holds.add(batch.step)
        self._learner.submit(batch)
        return []

    def _after_step(self, done: StepDone) -> list[Message]:
        job = self._jobs.get(done.job)
        if job is None or job.incarnation != done.incarnation:
            return []
        return self._guarded(job, lambda: self._end_step(job, done))

    def _end_step(self, job: _Job, done: StepDone) -> list[Message]:
        start, counted_s = self._clock(), self._sampler.busy_by_job_s[done.job]
        snapshot = self._publish(job, done.job)
        published_s = self._clock() - start
        self._busy_s["publish"] += published_s
        beside_s = published_s - (self._sampler.busy_by_job_s[done.job] - counted_s)
        self._published_by_job_s[done.job] = self._published_by_job_s.get(done.job, 0.0) + beside_s
        self._trained_tokens += done.metrics["learner/num_loss_tokens"]
        if done.step - 1 in job.holds:
            job.holds.remove(done.step - 1)
            self._sampler.hold(done.job, job.incarnation, snapshot.version)
        job.step = done.step
        job.ledger, job.reward = job.ledgers.pop(done.step - 1)
        saved = self._save_if_due(job)
        prefill_s, decode_s = self._sampler.s_per_token(done.job)
        metrics = {name: value for name, value in done.metrics.items() if math.isfinite(value)} | {
            "device/learner_s": done.metrics["learner/busy_s"],
            "device/publish_s": published_s,
            "device/prefill_s_per_token": prefill_s,
            "device/decode_s_per_token": decode_s,
        }
        step = StepDone(done.job, done.incarnation, done.step, snapshot.version, snapshot.fingerprint, metrics)
        return [step, *saved, *self._guarded(job, lambda: self._close_paused(job))]

    def _after(self, message: Message) -> list[Message]:
        if isinstance(message, JobFailed):
            self._close(message.job)
        return [message]

    def _finish(self, job: _Job, message: FinishJob) -> list[Message]:
        out: list[Message] = []
        try:
            if (step := job.checkpoints.wait()) is not None:
                out.append(Checkpointed(message.job, job.incarnation, step))
        except StorageError as error:  # it is tried once more below
            out += self._save_failed(job, error)
            if self._jobs.get(message.job) is not job:
                return out
        if job.saved_step != job.step or not job.checkpoints.steps():
            self._save(job)
            job.checkpoints.wait()
            out.append(Checkpointed(message.job, job.incarnation, job.step))
        folder = Path(message.export_dir)
        extra = {"job": message.job, "step": job.step}
        weights, base_name = self._learner.weights(message.job), str(self._base.folder.resolve())
        peft_format.save(folder, self._model, job.spec, weights, self._identity, base_name, extra)
        readme.write(folder, self._base)
        return [*out, JobFinished(message.job, job.incarnation, job.step, str(folder))]

    def _pause(self, job: _Job, message: PauseJob) -> list[Message]:
        if message.discard:
            saved = max(job.checkpoints.steps(), default=0)
            return [*self._close(message.job), JobPaused(message.job, job.incarnation, saved)]
        job.is_pausing = True
        return self._close_paused(job)

    def _close_paused(self, job: _Job) -> list[Message]:
        """Closes a pausing job once nothing of it is left to be trained; its last step is committed first."""
        if self._jobs.get(job.config.name) is not job or not job.is_pausing or job.ledgers:
            return []
        job.checkpoints.wait()
        if job.saved_step != job.step or not job.checkpoints.steps():
            self._save(job)
            job.checkpoints.wait()
        return [*self._close(job.config.name), JobPaused(job.config.name, job.incarnation, job.step)]

    def _remove(self, job: _Job, message: RemoveJob) -> list[Message]:
        return self._close(message.job)

    def _close(self, name: str) -> list[Message]:
        job = self._jobs.pop(name)
        self._learner.remove_job(name)
        self._sampler.forget(name)
        try:
            job.checkpoints.close()
        except StorageError as error:
            return [JobWarning(name, job.incarnation, str(error))]
        return []

    def _fail(self, job: _Job, error: Exception) -> list[Message]:
        name = job.config.name
        return [_failed(name, job.incarnation, error), *(self._close(name) if self._jobs.get(name) is job else [])]

    # ---- publishing

    def _publish(self, job: _Job, name: str) -> Snapshot:
        """Gives the learner's weights to the sampler and proves that they are the ones it samples from (cases H09, H10)."""
        snapshot = self._learner.snapshot(name)
        resident = self._sampler.publish(self._transfer(snapshot))
        label = f"job {name!r} version {snapshot.version}"
        if resident != snapshot.fingerprint:
            raise WrongWeights(f"{label}: the sampler holds {resident}, the learner published {snapshot.fingerprint}")
        ours = np.asarray(self._learner.score(name, self._canary_ids))
        theirs = np.asarray(self._sampler.score(name, snapshot.version, self._canary_ids))
        if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
            raise WrongWeights(f"{label}: the canary prompt has non-finite log-probs")
        gap = float(np.abs(ours - theirs).max())
        if gap > CANARY_TOLERANCE[self._dtype]:
            raise WrongWeights(f"{label}: canary log-probs of sampler and learner differ by {gap:.2e}")
        return snapshot

    # ---- checkpoints

    def _save_if_due(self, job: _Job) -> list[Message]:
        out = self._poll_save(job)
        if self._jobs.get(job.config.name) is not job:
            return out
        due = job.config.checkpoint
        late = self._clock() - job.saved_at_s >= due.every_s
        if job.checkpoints.busy or not (job.step - job.saved_step >= due.every_steps or late):
            return out
        try:
            self._save(job)
        except StorageError as error:
            return out + self._save_failed(job, error)
        return out

    def _save(self, job: _Job) -> None:
        learner = self._learner.state(job.config.name)
        state = JobState(
            job.step, learner["arrays"], learner["counters"], job.ledger, self._identity, dataclasses.asdict(job.spec)
        )
        job.saved_step, job.saved_at_s = job.step, self._clock()
        job.checkpoints.save(state, job.reward)

    def _poll_saves(self) -> list[Message]:
        return [answer for job in list(self._jobs.values()) for answer in self._poll_save(job)]

    def _poll_save(self, job: _Job) -> list[Message]:
        try:
            step = job.checkpoints.poll()
        except StorageError as error:
            return self._save_failed(job, error)
        if step is None:
            return []
        job.failed_saves = 0
        return [Checkpointed(job.config.name, job.incarnation, step)]

    def _save_failed(self, job: _Job, error: StorageError) -> list[Message]:
        job.failed_saves += 1
        job.saved_step = max(job.checkpoints.steps(), default=0)
        if job.failed_saves >= MAX_FAILED_SAVES:
            return self._fail(job, error)
        return [JobWarning(job.config.name, job.incarnation, str(error))]


def _failed(name: str, incarnation: int, error: Exception) -> JobFailed:
    """Returns the message; an error that nobody foresaw leaves its traceback in the log."""
    if isinstance(error, MarlaasError):
        return JobFailed(name, incarnation, type(error).__name__, str(error))
    log.error("job failed job=%s", name, exc_info=error)
    return JobFailed(name, incarnation, InternalError.__name__, f"{type(error).__name__}: {error}")
