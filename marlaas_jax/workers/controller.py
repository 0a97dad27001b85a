"""The controller: one asyncio process that joins the stages and keeps the books; it never loads a JAX backend.

Owns the transport server, the supervisor of all child processes, the orchestrator of rollouts and its folder. Every
handler is synchronous and runs in the event loop; rendering runs in a small thread pool. A fault while a job's message is
handled ends that job. The device's process may die at any time: its jobs go on from their committed steps as new incarnations.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import replace

from marlaas_jax.config import JobConfig, RuntimeConfig
from marlaas_jax.errors import (
    CorruptFile,
    InternalError,
    InvalidConfig,
    InvalidRequest,
    JobFailure,
    StorageError,
    UserError,
    WorkerLost,
    user_error,
)
from marlaas_jax.eta import Span
from marlaas_jax.fairness import Owner
from marlaas_jax.messages import (
    AddJob,
    CancelGenerate,
    Checkpointed,
    DeviceStatus,
    EnvDone,
    EnvError,
    EnvLoaded,
    EnvObservation,
    FinishJob,
    Generate,
    Generated,
    GeneratedPart,
    GetItem,
    Hello,
    Item,
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
    Shutdown,
    StepDone,
    TrainBatch,
    WorkerFailed,
)
from marlaas_jax.model import usable
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.rollout.commands import (
    BatchSent,
    Command,
    EpisodeEnded,
    EvalDone,
    JobDone,
    JobGivenUp,
    KillWorker,
    Note,
    Render,
    Send,
    Stopping,
    TurnKey,
)
from marlaas_jax.rollout.orchestrator import Orchestrator
from marlaas_jax.rollout.records import Wait
from marlaas_jax.text.tokenizer import Tokenizer
from marlaas_jax.transport.flow import PeerLost
from marlaas_jax.transport.server import Server
from marlaas_jax.workers import folder_lock
from marlaas_jax.workers.controller_device import SILENCE_S, DeviceLink
from marlaas_jax.workers.controller_doors import Doors, Strangers, job_of
from marlaas_jax.workers.controller_eta import Forecasts
from marlaas_jax.workers.controller_evals import figures
from marlaas_jax.workers.controller_files import Log, writing
from marlaas_jax.workers.controller_jobs import Job
from marlaas_jax.workers.controller_processes import Processes
from marlaas_jax.workers.controller_render import Renderer
from marlaas_jax.workers.controller_requests import Requests
from marlaas_jax.workers.controller_status import FINISHING, PAUSED, PAUSING, RUNNING, STARTING, JobStatus, RunStatus
from marlaas_jax.workers.controller_suspects import SuspectJobs
from marlaas_jax.workers.controller_why import told_in_one_line, waiting
from marlaas_jax.workers.loop_watch import LoopWatch
from marlaas_jax.workers.remote_worker import REMOTE
from marlaas_jax.workers.sandbox.sandbox import Room, Sandbox
from marlaas_jax.workers.supervisor import Exited, GaveUp, Restarted

log = logging.getLogger(__name__)

DEVICE_MODULE = "marlaas_jax.workers.device_process"
RETIRED = "it was retired"
RUN_RESTARTS, SERVICE_RESTARTS = 12, 10**9  # of the device in a row: a run ends some time, a service goes on trying
TICK_S = 0.25
STALL_S = 5.0  # without a tick: the process was stopped, or something blocked the event loop
STATUS_INTERVAL_S = 1.0
JOIN_TIMEOUT_S = 120.0  # from a worker's start to its Hello: imports, on a busy machine
START_TIMEOUT_S = 3600.0  # loading, compiling and opening of one job
FINISH_TIMEOUT_S = 900.0  # the last checkpoint and the adapter
LIMITS = {STARTING: START_TIMEOUT_S, PAUSING: FINISH_TIMEOUT_S, FINISHING: FINISH_TIMEOUT_S}
STOP_TIMEOUT_S = 30.0  # for the device to finish its running saves
ABORT_TIMEOUT_S = 5.0  # the same, when the run is cut short

OnStatus = Callable[[RunStatus], None]
OnEvent = Callable[[dict[str, Any]], None]


class Controller:
    """Serves jobs that come and go. Make it and call `serve` once, inside an event loop; jobs are added while that runs.

    `is_strict`: what is wrong with a new job's environment ends everything with an InvalidConfig, as the one who waits for
    `marlaas run` wants it; else it ends that job. `on_step` is called with each trained batch's metrics, `on_over` with each
    job that has ended or is paused, `on_device_status` with each report of the device. `sandbox`: jobs may come with a room in
    it, so there is code of others on this machine.
    `device_module` is what runs as the device's process; tests give a fake one.
    """

    def __init__(
        self,
        runtime: RuntimeConfig,
        folder: Path,
        *,
        on_status: OnStatus | None = None,
        on_event: OnEvent | None = None,
        on_step: Callable[[Job, dict[str, Any]], None] = lambda job, metrics: None,
        on_over: Callable[[Job], None] = lambda job: None,
        on_device_status: Callable[[DeviceStatus], None] = lambda status: None,
        is_strict: bool = False,
        device_module: str = DEVICE_MODULE,
    ):
        self.sandbox: Sandbox | None = None  # to be set before `serve`, as the next one
        self.strangers: Strangers | None = None  # how tenants' own workers join
        self.runtime = runtime  # every size filled in
        self.folder = folder.resolve()
        self.jobs: dict[str, Job] = {}
        self.orchestrator = Orchestrator()
        self.requests = Requests(lambda message: self._send(self._device.worker_id, message))
        self.phase = "checking"
        self._on_status = on_status
        self._on_event = on_event
        self._on_step = on_step
        self._on_over = on_over
        self._on_device_status = on_device_status
        self._is_strict = is_strict
        self._device_module = device_module
        self._events = Log(self.folder / "events.jsonl")
        self._started = time.monotonic()
        self._ended = asyncio.Event()
        self._fatal: BaseException | None = None
        self._device = DeviceLink()
        self._suspects = SuspectJobs(self.event)
        self._interrupted_at: float | None = self._started  # or when the device was lost; None: a step was trained since
        self._forecasts = Forecasts(self.event)
        self._lag_s = 0.0
        self.model: ModelConfig | None = None  # once `serve` has looked at it
        self._last_words: dict[str, str] = {}  # of workers that said why they fail
        self._last_death: dict[str, str] = {}  # why a place's last process ended
        self._doors: Doors
        self._server: Server
        self._processes: Processes
        self._renderer: Renderer

    @property
    def elapsed_s(self) -> float:
        """Seconds since the controller was made."""
        return time.monotonic() - self._started

    @property
    def busy_share(self) -> float:
        """The share of the last second in which the device worked; 1 where that is not known."""
        return self._device.busy_share

    @property
    def has_device(self) -> bool:
        """True while a device's process is there and ready."""
        return bool(self._device.worker_id)

    @property
    def programs(self) -> tuple[int, int]:
        """How many of the device's programs are compiled, and how many there are."""
        return self._device.programs

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; there is one once `serve` has called `started`."""
        return self._renderer.tokenizer

    async def serve(self, started: Callable[[], None]) -> None:
        """Calls `started` once jobs may be added, serves until `end`, stops all processes.

        Raises a UserError, before any compute where that is possible, for what the caller can mend.
        """
        tokenizer = await asyncio.to_thread(self._load_tokenizer)  # what is refused leaves no folder behind
        with writing(self.folder):
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        with folder_lock.hold(self.folder), LoopWatch():
            await self._serve(started, tokenizer)

    async def _serve(self, started: Callable[[], None], tokenizer: Tokenizer) -> None:
        tasks: list[asyncio.Task] = []
        try:
            document = yaml.safe_dump(self.runtime.model_dump(mode="json"), sort_keys=False)
            with writing(self._runtime_path):
                self._runtime_path.write_text(document)
            self._renderer = Renderer(tokenizer, self._on_rendered)
            async with Doors(self.jobs, self.sandbox, self.strangers) as doors:
                self._doors, self._server = doors, doors.server
                addresses = (doors.server.address, doors.confined_address)
                restarts = RUN_RESTARTS if self._is_strict else SERVICE_RESTARTS
                self._processes = Processes(*addresses, self.folder, self._device_module, self.runtime.env_workers, restarts)
                doors.processes = self._processes
                try:
                    started()
                    tasks = [asyncio.create_task(loop()) for loop in (self._receive, self._watch_processes, self._tick_forever)]
                    tasks.append(asyncio.create_task(self._ended.wait()))
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in tasks:
                        if task.done():
                            task.result()  # raises what ended it
                    if self._fatal is not None:
                        raise self._fatal
                finally:
                    await self._stop(tasks)
                    self._renderer.close()
            self._publish_status()
        finally:
            for job in self.jobs.values():
                job.close()
            self._events.close()

    def end(self, error: BaseException | None = None) -> None:
        """Ends `serve`; with an error, at once, and it raises that."""
        if self._fatal is None:
            self._fatal = error
        self._ended.set()

    # ---- jobs

    def start_device(self) -> None:
        """Starts the device's process, if it was not yet."""
        if not self._processes.has_device:
            self._processes.start_device(self._runtime_path)

    def add(self, config: JobConfig, folder: Path, resume: bool, room: Room | None = None, owner: Owner | None = None) -> Job:
        """Takes a job in: a new one, or with `resume` one that has a history in `folder`. Its name must not be in use."""
        assert config.name not in self.jobs, config.name
        job = Job(config, folder, room, owner)
        try:
            job.open(resume=resume)
        except CorruptFile as error:  # of this job: the others go on
            job.refuse(type(error).__name__, str(error))
            self.event("job_failed", job.name, failure=job.kind, reason=job.reason)
        self.jobs[job.name] = job
        if not job.is_over:
            self._open(job)
        return job

    def reweigh(self, owner: Owner) -> None:
        """Changes what an owner's jobs weigh together, in all stages."""
        for job in self.jobs.values():
            if job.owner is not None and job.owner.name == owner.name:
                job.owner = owner
        self.orchestrator.reweigh(owner)
        if self._device.worker_id:
            self._send(self._device.worker_id, Reweigh(owner))

    def pause(self, name: str) -> None:
        """Stops a job's rollouts, lets the device train and save what it has of it, and frees its places."""
        job = self.jobs[name]
        if job.state not in (STARTING, RUNNING):
            return
        self._note_episodes(job)
        self.orchestrator.remove_job(name, time.monotonic())
        was_running, job.state, job.since = job.state == RUNNING, PAUSING, time.monotonic()
        if was_running and self._device.worker_id:
            self._send(self._device.worker_id, PauseJob(name, job.incarnation))
        else:
            self._on_paused(job)

    def halt(self, name: str) -> None:
        """Takes a live job off the device; what was not committed is lost. It is paused once the device has closed it."""
        job = self.jobs[name]
        self._note_episodes(job)
        self.orchestrator.remove_job(name, time.monotonic())
        job.state, job.since = PAUSING, time.monotonic()
        if self._device.is_serving:
            self._send(self._device.worker_id, PauseJob(name, job.incarnation, discard=True))
        else:
            self._on_paused(job)

    def unpause(self, name: str) -> None:
        """Lets a paused job go on from its committed step, as a new incarnation."""
        job = self.jobs[name]
        if job.state == PAUSED:
            with self._ends_on_fault(name):
                job.new_incarnation()
                self._open(job)

    def cancel(self, name: str, reason: str) -> None:
        """Ends a job for good; its last checkpoint stays."""
        job = self.jobs[name]
        if not job.is_over:
            self._note_episodes(job)
            self._record_end(job, lambda: job.cancel(reason))
            self.event("job_cancelled", name, reason=reason)
            self._retire(job)

    def stop_early(self, name: str, reason: str) -> None:
        """Ends a job as succeeded after the batches that have begun to be trained; one that waits ends when it runs again."""
        job = self.jobs[name]
        if not job.is_over and not job.files.state.get("stop_asked"):
            with self._ends_on_fault(name):
                job.ask_to_stop(reason)
            self.orchestrator.stop_job(name, reason, time.monotonic())
            self._execute_all(time.monotonic())

    def forget(self, name: str) -> None:
        """Drops a job that is over or paused from the books."""
        assert not self.jobs[name].is_live, name
        self._forecasts.forget(name)
        self.jobs.pop(name).close()

    def _open(self, job: Job) -> None:
        """Gets a job its workers and its place on the device."""
        self.orchestrator.register(job.name, job.pool, job.config.weight, job.owner)
        if not job.has_remote_data:
            self._processes.start_data_worker(job.data_worker, job.data_room)
        if not job.is_remote:
            self._processes.start_pool(job.pool, job.room)
        self._reload(job)  # for those that are there already; others ask by their Hello
        if self._device.worker_id and not self._suspects.must_wait(job.name):
            self._add_to_device(job)
        self.start_device()

    # ---- start and stop

    def _load_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer, once its configuration and the headers of its weights are known to be usable."""
        folder, self.model = usable.require(self.runtime.model, self.runtime.engine.max_context)
        return Tokenizer.load(folder, self.runtime.chat_template)

    async def _stop(self, tasks: list[asyncio.Task]) -> None:
        """Ends everything that was started here: asks first, insists then."""
        self.phase = "stopping"
        self.requests.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        now = time.monotonic()
        for job in self.jobs.values():
            self.orchestrator.remove_job(job.name, now)
        for command in self.orchestrator.take():
            if isinstance(command, EpisodeEnded):
                with self._ends_on_fault(command.job):
                    self._execute(command)
        if self._device.worker_id:
            self._send(self._device.worker_id, Shutdown())
        cut_short = self._fatal is not None or not self._ended.is_set()
        patience_s = 0.0 if not self._device.worker_id else ABORT_TIMEOUT_S if cut_short else STOP_TIMEOUT_S
        await self._processes.stop(patience_s)

    # ---- loops

    async def _receive(self) -> None:
        while True:
            worker_id, told = await self._server.receive()
            now = time.monotonic()
            if (message := self._doors.heard(worker_id, told)) is None:
                continue
            try:
                self._handle(worker_id, message, now)
                self._execute_all(now)
            except Exception as error:  # the one broad catch of this process
                if not isinstance(error, UserError | JobFailure):  # those say in their one sentence all there is to know
                    log.exception("message failed type=%s worker_id=%s", type(message).__name__, worker_id)
                name = job_of(message)
                if name not in self.jobs:
                    raise
                self._fail_job(self.jobs[name], type(error).__name__, str(error))
                self._execute_all(now)

    async def _watch_processes(self) -> None:
        while True:
            event = await self._processes.next_event()
            now = time.monotonic()
            match event:
                case Exited():
                    self._on_exited(event, now)
                case Restarted():
                    self.event("worker_restarted", worker=event.name, pid=event.pid)
                case GaveUp():
                    self._on_gave_up(event)
            self._execute_all(now)

    async def _tick_forever(self) -> None:
        due = time.monotonic()
        status_at = due
        while True:
            due += TICK_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            self._lag_s = max(0.0, now - due)
            if self._lag_s > STALL_S:
                self.event("stalled", worker="service", reason=f"its event loop stood still for {self._lag_s:.1f} s")
            due = max(due, now - TICK_S)
            self.orchestrator.tick(now)
            self._check_limits(now)
            self._execute_all(now)
            if now - status_at >= STATUS_INTERVAL_S:
                for job in self.jobs.values():
                    job.count_rate(now - status_at)
                status_at = now
                self._publish_status()

    # ---- messages

    def _handle(self, worker_id: str, message: Message, now: float) -> None:
        self._device.heard(worker_id, now)
        match message:
            case Generated() | GeneratedPart() if self.requests.owns(message):
                self.requests.on_answer(message)
            case Generated():
                if self._is_current(message):
                    self.jobs[message.job].tokens_sampled += len(message.token_ids)
                    self.orchestrator.on_generated(message, now)
            case EnvObservation():
                self.orchestrator.on_env_observation(worker_id, message, now)
            case EnvDone():
                self.orchestrator.on_env_done(worker_id, message, now)
            case EnvError():
                self.orchestrator.on_env_error(worker_id, message, now)
            case Item():
                self.orchestrator.on_item(message, now)
            case StepDone():
                self._on_step_done(message, now)
            case DeviceStatus():
                self._device.report(message)
                if "start_s" in message.counters:
                    self.event("device_ready", figures=message.counters)
                self._on_device_status(message)
            case JobReady():
                if self._is_current(message):
                    self.jobs[message.job].device_ready = message
                    self.event("job_ready", message.job, step=message.step, version=message.version, receipt=message.receipt)
                    self._begin_if_ready(self.jobs[message.job], now)
            case JobFailed():
                if self._is_current(message):
                    self._fail_job(self.jobs[message.job], message.kind, message.reason)
            case JobFinished():
                if self._is_current(message):
                    self._on_finished(self.jobs[message.job], message)
            case JobPaused():
                if self._is_current(message) and self.jobs[message.job].state == PAUSING:
                    self._on_paused(self.jobs[message.job])
            case Checkpointed():
                self.event("checkpointed", message.job, step=message.step)
            case JobWarning():
                self.event("warning", message.job, text=message.text)
            case EnvLoaded():
                self._on_loaded(worker_id, message, now)
            case Hello():
                self._on_hello(worker_id, message)
            case PeerLost():
                self._on_lost(worker_id, message, now)
            case WorkerFailed():
                self._last_words[worker_id] = f"{message.kind}: {message.text}"
                if worker_id == self._device.worker_id and (kind := user_error(message.kind)):
                    self.end(kind(message.text))
            case _:
                log.warning("message ignored type=%s worker_id=%s", type(message).__name__, worker_id)

    def _on_hello(self, worker_id: str, message: Hello) -> None:
        name = self._processes.name_of(worker_id)
        self.event("worker_joined", worker=name or worker_id, role=message.role, pid=message.pid)
        live = [job for job in self.jobs.values() if job.is_live]
        if message.role == "device":
            self._device_gone(time.monotonic(), "a new one took its place")  # an older one, if it was not missed yet
            self._device.joined(worker_id, time.monotonic())
            self.requests.device_joined()
            self.phase = "loading" if self.phase == "checking" else self.phase
            for job in live:
                if not self._suspects.is_held(job.name):
                    self._add_to_device(job)
        elif message.role == "data":
            for job in live:
                if job.data_worker == self._processes.group_of(name):
                    self._send(worker_id, job.load_message())
        elif message.role == "environment":
            for job in live:
                if job.pool == self._processes.pool_of(name):
                    self._send(worker_id, job.load_message())

    def _on_loaded(self, worker_id: str, message: EnvLoaded, now: float) -> None:
        if not self._is_current(message):
            return
        job = self.jobs[message.job]
        name = self._processes.name_of(worker_id)
        is_data = self._processes.group_of(name) == job.data_worker
        if error := message.error or self._reply_fault(job, message):
            what = "data" if is_data else "environment"
            self.event("load_failed", job.name, what=what, text=error)
            if job.is_resumed:
                self._fail_job(job, "EnvironmentFailed", f"its {what} cannot be loaded any more: {error}")
            elif self._is_strict:
                self.end(InvalidConfig(f"job {job.name!r}: {error.strip().splitlines()[-1]}"))
            else:
                self._fail_job(job, "InvalidConfig", error.strip().splitlines()[-1])
            return
        if is_data:
            is_again = job.data_ready is not None
            job.data_ready = message
            if is_again:
                self.orchestrator.on_data_worker_ready(job.name, now)
        else:
            job.env_ready = job.env_ready or message
            self.orchestrator.on_worker_ready(self._processes.pool_of(name), worker_id, job.name, now)
        self._begin_if_ready(job, now)

    def _reply_fault(self, job: Job, message: EnvLoaded) -> str:
        """Returns why the model's chat template cannot hold what the environment answers; an empty text if it can."""
        try:
            self.check_replies(job.config.env, message.reply_roles)
        except InvalidConfig as error:
            return str(error)
        return ""

    def env_workers(self, owner: str) -> tuple[str, dict[str, int]]:
        """Returns where tenants' own environment workers join, and how many of this tenant have, by environment."""
        return self._doors.remote_address, self._doors.connected(owner)

    def check_replies(self, env: str, roles: tuple[str, ...]) -> None:
        """Raises InvalidConfig where the model's chat template cannot append messages of these roles to a sampled turn."""
        try:
            if roles:
                self._renderer.tokenizer.check_followups(roles)
        except InvalidRequest as error:
            raise InvalidConfig(f"env={env!r} answers in turns of the role {'/'.join(roles)}, but {error}") from None

    def _begin_if_ready(self, job: Job, now: float) -> None:
        if job.state != STARTING or job.device_ready is None or job.missing():
            return
        eval_first = job.begin()
        self.phase = "running"
        settings = job.settings(self.runtime.engine.max_context)
        self.orchestrator.on_job_ready(settings, job.device_ready, now, eval_before=eval_first, past=job.past())

    def _on_step_done(self, message: StepDone, now: float) -> None:
        job = self.jobs.get(message.job)
        if job is None or not self._is_current(message) or message.step != job.step + 1:
            return
        self._suspects.trained(job.name, message.step)
        if self._interrupted_at is not None:
            after_s, self._interrupted_at = now - self._interrupted_at, None
            text = f"{'resumed' if job.is_resumed else 'started'}: first step after {after_s:.1f} s"
            log.info("%s job=%s step=%d", text, job.name, message.step)
            self.event("first_step", job.name, step=message.step, after_s=after_s, text=text)
        line = job.trained(message, self._forecasts.figures(job, self.jobs.values(), self._device.busy_share))
        self._forecasts.stepped(job, self.jobs.values())
        self._on_step(job, line)
        self.orchestrator.on_step_done(message, now)

    def _on_rendered(self, key: TurnKey, token_ids: tuple[int, ...], error: str) -> None:
        now = time.monotonic()
        self.orchestrator.on_rendered(key, token_ids, error, now)
        self._execute_all(now)

    def _on_finished(self, job: Job, message: JobFinished) -> None:
        if job.state != FINISHING:
            return
        job.adapter = message.export_dir
        self._forecasts.finished(job)
        job.succeed()
        why = {"stop_reason": job.stop_reason} if job.stop_reason else {}
        self.event("job_succeeded", job.name, step=job.step, adapter=message.export_dir, **why)
        self._retire(job)

    # ---- workers that come and go

    def _on_lost(self, worker_id: str, message: PeerLost, now: float) -> None:
        reason = self._last_words.pop(worker_id, "") or message.reason
        if reason == RETIRED:
            return
        name = self._processes.name_of(worker_id)
        self._last_death[name] = reason
        self.event("worker_lost", worker=name or worker_id, role=message.role, reason=reason)
        self._processes.make_sure_it_ends(worker_id)
        if worker_id == self._device.worker_id:
            self._device_gone(now, reason)
        elif message.role == "environment":
            may_leave = self._processes.is_adopted(name)
            self.orchestrator.on_worker_lost(worker_id, reason, now, pool=self._processes.pool_of(name), may_leave=may_leave)
        self._adopted_left(worker_id, name, now)

    def _adopted_left(self, worker_id: str, name: str, now: float) -> None:
        """A tenant's own worker went: items that it owes are asked of another, or wait until there is one."""
        group = self._processes.group_of(name) if self._processes.is_adopted(name) else ""
        self._processes.abandon(worker_id)
        for job in self.jobs.values():
            if group and job.is_live and job.data_worker == group:
                is_there = bool(self._processes.adopted(group))
                tell = self.orchestrator.on_data_worker_ready if is_there else self.orchestrator.on_data_worker_lost
                tell(job.name, now)

    def _device_gone(self, now: float, reason: str) -> None:
        """Every job goes on from its committed step, as a new incarnation, when the next device is there."""
        was_serving = self._device.is_serving
        if not self._device.gone():
            return
        self._interrupted_at = now
        self.requests.device_gone()
        if (blamed := self._suspects.on_death(reason, was_serving=was_serving)) is not None:
            self._fail_job(self.jobs[blamed.job], "WorkerLost", blamed.text)
        for job in self.jobs.values():
            with self._ends_on_fault(job.name):
                if job.state == PAUSING:
                    self._on_paused(job)
                elif job.is_live:
                    self.orchestrator.pause_job(job.name, now)
                    job.new_incarnation()
                    self._reload(job)

    def _on_exited(self, event: Exited, now: float) -> None:
        if event.expected:
            if event.worker_id in self._server.peers:
                self._last_words[event.worker_id] = RETIRED
                self._server.lose(event.worker_id, RETIRED, expected=True)
            return
        if event.restart_s is not None:
            self.event("worker_restarting", worker=event.name, failures=event.failures, after_s=event.restart_s)
        last_line = event.log_tail.strip().splitlines()[-1:] or [""]
        reason = f"{event.reason}; it printed last: {last_line[0][:300]}" if last_line[0] else event.reason
        if event.worker_id in self._server.peers:
            self._last_words.setdefault(event.worker_id, reason)
            self._server.lose(event.worker_id, reason)
        elif not self._processes.was_connected(event.worker_id):
            self._last_death[event.name] = reason
            self.event("worker_lost", worker=event.name, role="", reason=reason, tail=event.log_tail[-4000:])
            if pool := self._processes.pool_of(event.name):
                self.orchestrator.on_worker_lost(event.worker_id, reason, now, pool=pool)

    def _on_gave_up(self, event: GaveUp) -> None:
        last = self._last_death.get(event.name, "")
        reason = f"worker {event.name}: {event.reason}" + (f" ({last.strip().splitlines()[-1]})" if last.strip() else "")
        self.event("worker_given_up", worker=event.name, reason=reason)
        if event.name == self._processes.DEVICE:
            self.requests.close(reason)
        for job in self.jobs.values():
            group = self._processes.group_of(event.name)
            if job.is_live and (event.name == self._processes.DEVICE or group in (job.data_worker, job.pool)):
                self._fail_job(job, "WorkerLost", reason)

    def _check_limits(self, now: float) -> None:
        if self._device.is_silent(now):
            self._server.lose(self._device.worker_id, f"the device said nothing for {SILENCE_S:.0f} s")
        for name in self._suspects.released(now):
            if self._device.worker_id:
                self._add_to_device(self.jobs[name])
        for name in self._processes.kill_unconnected(JOIN_TIMEOUT_S):
            self.event("worker_killed", worker=name, reason=f"it did not report within {JOIN_TIMEOUT_S:.0f} s of its start")
        for job in self.jobs.values():
            limit = LIMITS.get(job.state)
            if self._waits_for_owner(job):
                job.since = now
            elif limit is not None and now - job.since > limit:
                self._fail_job(job, "WorkerLost", f"it waited too long: {self._why(job, now)[0]}")

    def _waits_for_owner(self, job: Job) -> bool:
        """Whether nothing but a worker of the job's owner, who may take any time, is missing."""
        if not job.is_remote or job.state not in (STARTING, RUNNING) or (job.state == STARTING and job.device_ready is None):
            return False
        groups = (job.pool, job.data_worker) if job.has_remote_data else (job.pool,)
        return not all(self._processes.adopted(group) for group in groups)

    def _reload(self, job: Job) -> None:
        """Tells the workers of a job about its new incarnation."""
        for worker_id in self._workers_of(job):
            self._send(worker_id, job.load_message())

    def _workers_of(self, job: Job) -> list[str]:
        """Returns the workers that hold the job's items or run its environment."""
        groups, of = (job.data_worker, job.pool), self._processes
        return [worker_id for worker_id in self._server.peers if of.group_of(of.name_of(worker_id)) in groups]

    def _add_to_device(self, job: Job) -> None:
        config = job.config.model_dump_json().encode()
        step = -1 if job.go_on_from is None else job.go_on_from
        where, hold = str(job.folder), job.holds_first
        added = AddJob(job.name, job.incarnation, config, where, job.is_resumed, step, hold, job.owner)
        self._suspects.joined(job.name, time.monotonic())
        self._send(self._device.worker_id, added)

    # ---- ends

    def _fail_job(self, job: Job, kind: str, reason: str) -> None:
        if job.is_over:
            return
        self._note_episodes(job)
        log.warning("job failed job=%s kind=%s reason=%s", job.name, kind, reason)
        self._record_end(job, lambda: job.fail(kind, reason))
        self.event("job_failed", job.name, failure=kind, reason=reason)
        self._retire(job)

    def _record_end(self, job: Job, record: Callable[[], None]) -> None:
        """Writes down how a job ends. On a full disk it ends all the same: the result and the log say why."""
        try:
            record()
        except StorageError as error:
            log.error("job not recorded job=%s reason=%s", job.name, error)

    @contextlib.contextmanager
    def _ends_on_fault(self, name: str) -> Iterator[None]:
        """Ends the job of this name over what its files or its user got wrong, a full disk say; the others go on."""
        try:
            yield
        except UserError as error:
            if name not in self.jobs:
                raise
            self._fail_job(self.jobs[name], type(error).__name__, str(error))

    def _on_paused(self, job: Job) -> None:
        try:
            job.paused()
        except StorageError as error:
            return self._fail_job(job, type(error).__name__, str(error))
        self.event("job_paused", job.name, step=job.step)
        self._retire(job)

    def _retire(self, job: Job) -> None:
        """Forgets a job that is over or paused: its slots, its workers' copies, its workers when nobody else uses them."""
        self.orchestrator.remove_job(job.name, time.monotonic())
        self._suspects.left(job.name)
        for worker_id in (self._device.worker_id, *self._workers_of(job)):  # nobody else learns that there is such a job
            self._send(worker_id, RemoveJob(job.name, job.incarnation))
        needed = [group for other in self.jobs.values() if other.is_live for group in (other.pool, other.data_worker)]
        self._processes.retire_unused(needed)
        self._on_over(job)

    # ---- commands

    def _execute_all(self, now: float) -> None:
        while commands := self.orchestrator.take():
            for command in commands:
                with self._ends_on_fault(getattr(command, "job", "")):
                    self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case Send():
                self._send(command.worker_id, command.message)
            case Generate():
                owner = self.jobs[command.job].owner
                self._send(self._device.worker_id, command if owner is None else replace(command, owner=owner))
            case CancelGenerate() | TrainBatch() | ReleaseSnapshot():
                self._send(self._device.worker_id, command)
            case GetItem():
                job = self.jobs[command.job]
                if job.data_ready is not None:  # else it is asked for again when the worker is there
                    self._send(self._processes.worker_id_of(job.data_worker), command)
            case Render():
                self._renderer.submit(command)
            case EpisodeEnded():
                record = dict(command.record)
                record["prompt"] = self._renderer.decode(tuple(record.pop("prompt_ids")))
                self.jobs[command.job].files.episode(record)
            case BatchSent():
                job = self.jobs[command.job]
                job.files.batch_sent(command.step + 1, job.incarnation, command.metrics, command.tickets)
            case EvalDone():
                self._on_eval_done(command)
            case Stopping():
                self.jobs[command.job].stop_reason = command.reason
                self.event("stopping", command.job, step=command.step, reason=command.reason)
            case JobDone():
                self.jobs[command.job].files.save_state(used_after=command.used)
                self._on_job_done(self.jobs[command.job])
            case JobGivenUp():
                self._fail_job(self.jobs[command.job], command.kind, command.reason)
            case KillWorker():
                self.event("worker_killed", worker=self._processes.name_of(command.worker_id), reason=command.reason)
                self._last_words[command.worker_id] = command.reason
                self._server.lose(command.worker_id, command.reason)
            case Note():
                self.event(command.kind, command.job, text=command.text)
            case _:
                raise InternalError(f"no rule for command {type(command).__name__}")

    def _on_eval_done(self, done: EvalDone) -> None:
        job = self.jobs[done.job]
        job.evaluated(done)
        if done.phase == "before":  # nothing else ran yet
            job.eval_s = job.active_s(time.monotonic())
        self.event("evaluated", done.job, **figures(done))

    def _on_job_done(self, job: Job) -> None:
        self._note_episodes(job)
        job.finishing()
        self._send(self._device.worker_id, FinishJob(job.name, job.incarnation, str(job.folder / "adapter")))

    def _send(self, worker_id: str, message: Message) -> None:
        """Sends to a worker; one that is gone is noticed by its PeerLost."""
        try:
            self._server.send(worker_id, message)
        except WorkerLost:
            log.info("message dropped type=%s worker_id=%s", type(message).__name__, worker_id)
        except InternalError as error:
            self._server.lose(worker_id, str(error))

    # ---- status and events

    def status(self) -> RunStatus:
        """Returns the live snapshot."""
        now = time.monotonic()
        device = self._device.status
        counters = self._server.counters()
        return RunStatus(
            elapsed_s=now - self._started,
            phase=self.phase,
            jobs=tuple(self._job_status(job, now) for job in self.jobs.values()),
            device_share=self._device.shares(),
            device_counters=device.counters if device else {},
            programs=self._device.programs,
            compiles_since_warmup=device.compiles_since_warmup if device else 0,
            env_workers={name: len(pool.workers) for name, pool in self.orchestrator.pools.items()},
            transport={name: getattr(counters, name) for name in ("sent", "delivered", "in_flight", "failed", "received")},
            loop_lag_s=self._lag_s,
        )

    def job_status(self, name: str) -> JobStatus | None:
        """Returns how a job stands now, None for one that is not here."""
        job = self.jobs.get(name)
        return None if job is None else self._job_status(job, time.monotonic())

    def left(self, name: str) -> Span | None:
        """Returns how long a job still takes, None where that is not known."""
        return self._forecasts.left(self.jobs[name])

    def _job_status(self, job: Job, now: float) -> JobStatus:
        rollout = self.orchestrator.jobs.get(job.name)
        self._note_episodes(job)
        job.device_share = self._device.share_of(job.name)
        job.eta = None if job.is_over or job.state == PAUSED else self._forecasts.left(job)
        told = "" if job.is_over else told_in_one_line(*self._why(job, now))
        return job.status(rollout.queue_lengths() if rollout else {}, told)

    def why(self, name: str) -> tuple[Wait, int] | None:
        """Returns (what a job waits for longest, how many things more it waits for); None for one that is over or not here."""
        job = self.jobs.get(name)
        return None if job is None or job.is_over else self._why(job, time.monotonic())

    def _why(self, job: Job, now: float) -> tuple[Wait, int]:
        if self._waits_for_owner(job):
            name = job.config.env.removeprefix(REMOTE)
            what = f"a worker of its environment: none is connected; start one with `marlaas env-worker --name {name}`"
            return Wait("env worker", what, "its owner", now - job.since, None), 0
        if job.state == RUNNING and job.name in self.orchestrator.jobs:
            return self.orchestrator.why(job.name, now)
        if self._suspects.is_held(job.name):
            return Wait("start", self._suspects.why(), "the controller", now - job.since, START_TIMEOUT_S), 0
        return waiting(job, self._device.programs, now, LIMITS.get(job.state)), 0

    def _note_episodes(self, job: Job) -> None:
        rollout = self.orchestrator.jobs.get(job.name)
        if rollout is not None:
            job.episodes = rollout.tally.as_dict()

    def _publish_status(self) -> None:
        if self._on_status is not None:
            self._on_status(self.status())

    def event(self, kind: str, job: str = "", **fields: Any) -> None:
        """Writes an event down and tells whoever listens."""
        record = {"time": time.time(), "kind": kind, **({"job": job} if job else {}), **fields}
        try:
            self._events.write(record)
        except StorageError as error:  # a job ends over what its own folder cannot take; the run's log alone stops no one
            log.error("event not recorded kind=%s reason=%s", kind, error)
        if self._on_event is not None:
            self._on_event(record)

    @property
    def _runtime_path(self) -> Path:
        return self.folder / "runtime.yaml"

    def _is_current(self, message: Any) -> bool:
        """Whether the message concerns the present incarnation of a job that is not over."""
        job = self.jobs.get(message.job)
        return job is not None and not job.is_over and message.incarnation == job.incarnation
