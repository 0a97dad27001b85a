"""The service: jobs of many tenants under one controller that never ends by itself.

The store is the truth about which jobs there are and in which of six states (queued, running, paused, succeeded, failed,
cancelled); the controller is the truth about how far a running one is. A job enters the controller when admission gives it a
place and leaves it when it ends or is paused; after a crash every job that the store calls running is taken up again from its
last committed step. Everything here runs in the event loop; the store writes in a thread of its own.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from marlaas_jax.config import JobConfig, validate
from marlaas_jax.errors import (
    CorruptFile,
    InvalidConfig,
    InvalidRequest,
    MarlaasError,
    NotFound,
    QuotaExceeded,
    StorageError,
)
from marlaas_jax.fairness import Owner, entitled
from marlaas_jax.messages import DeviceStatus
from marlaas_jax.rollout.records import Wait
from marlaas_jax.service import quotes
from marlaas_jax.service.admission import Admission, QueuedJob, TenantState, reasons
from marlaas_jax.service.config import ServiceConfig, check_fits
from marlaas_jax.service.env_check import EnvChecks
from marlaas_jax.service.events import EventStream
from marlaas_jax.service.fair_share import FairShare
from marlaas_jax.service.files import check_upload, localized, move_upload, write_upload
from marlaas_jax.service.fitting import Fitting
from marlaas_jax.service.metering import Metering
from marlaas_jax.service.quotas import Load, Quotas, is_reached, why_queued, why_refused
from marlaas_jax.service.rates import Rates
from marlaas_jax.service.rollback import LEAVE_S, Rollbacks
from marlaas_jax.service.sampling import SamplingDesk
from marlaas_jax.service.strangers import TenantWorkers
from marlaas_jax.service.sweeps import Sweeps
from marlaas_jax.store import jobs as job_table
from marlaas_jax.store import tenants as tenant_table
from marlaas_jax.store import usage as usage_table
from marlaas_jax.store.engine import Store
from marlaas_jax.store.jobs import LIVE, JobRecord, JobState
from marlaas_jax.store.tenants import Tenant
from marlaas_jax.workers.controller import DEVICE_MODULE, Controller
from marlaas_jax.workers.controller_files import writing
from marlaas_jax.workers.controller_jobs import Job
from marlaas_jax.workers.controller_status import FAILED, PAUSED, RUNNING, STARTING, JobStatus
from marlaas_jax.workers.controller_why import told_in_one_line
from marlaas_jax.workers.remote_worker import REMOTE
from marlaas_jax.workers.sandbox.rules import MIB, Limits
from marlaas_jax.workers.sandbox.sandbox import NO_SANDBOX, Room, Sandbox

log = logging.getLogger(__name__)

ADMIT_INTERVAL_S = 1.0
SETTLE_INTERVAL_S = 5.0
TOLD_BY_STORE = ("job_succeeded", "job_failed", "job_cancelled", "job_paused")  # once that state is durable


class Service:
    """Make it, then run `serve` in an event loop; the other methods are for the API, in the same loop."""

    def __init__(
        self, config: ServiceConfig, store: Store, *, clock: Callable[[], float] = time.time, device_module: str = DEVICE_MODULE
    ):
        self.config = config
        self.store = store
        self.events = EventStream(store, clock)
        self.data_dir = Path(config.data_dir).absolute()
        self._clock = clock
        self._records: dict[str, JobRecord] = {}  # of jobs that have not ended
        self._tenants: dict[str, Tenant] = {}  # of those
        self._admission = Admission()
        self._wake = asyncio.Event()
        self._is_draining = False
        self._submitting: Counter[str] = Counter()  # jobs of a tenant that are about to be queued
        self._uploads = self.data_dir / "uploads"  # until their job is in the store
        self._tasks: set[asyncio.Task[Any]] = set()
        self.metering = Metering(store, clock, config.usage_job_days)
        self.fair_share = FairShare()
        self.rates = Rates()
        self._over_quota: set[str] = set()  # jobs that are being paused to wait in the queue
        self.sweeps = Sweeps(self)
        self.sandbox: Sandbox | None = None  # chosen by `serve`
        self.tenant_workers: TenantWorkers | None = None  # how tenants' own environment workers join; None: they do not
        self._rooms: dict[str, Room] = {}  # of jobs in the controller that run a tenant's file, by id
        self._checks = EnvChecks(config.check_timeout_s, config.checks_at_once)
        self.controller = Controller(
            config.sized_runtime(),
            self.data_dir,
            on_event=self._on_event,
            on_step=self._on_step,
            on_over=self._on_over,
            on_device_status=self._on_device_status,
            device_module=device_module,
        )
        self._fitting = Fitting(self.controller.runtime)
        self._rollbacks = Rollbacks(self.controller, store, self.folder, clock)
        self._admitting = asyncio.Lock()
        self.sampling = SamplingDesk(
            self.controller,
            self.data_dir,
            config.request_timeout_s,
            self.job,
            self.quotas_of,
            self.metering,
        )

    async def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Takes up what an earlier process left, calls `ready`, serves until `drain`. Raises UserError for a bad start."""
        await asyncio.to_thread(shutil.rmtree, self._uploads, ignore_errors=True)
        for record in await self.store.aread(job_table.live_jobs):
            self._records[record.id] = record
        for tenant in await self.store.aread(tenant_table.list_tenants):
            self._tenants[tenant.id] = tenant
        await self.metering.start()
        await self.sweeps.load()

        self.sandbox = self.controller.sandbox = await asyncio.to_thread(choose_sandbox, self.config)
        if self.config.env_workers_at is not None:
            self.tenant_workers = TenantWorkers(self.config.env_workers_at, self.data_dir, self.store)
            self.controller.strangers = self.tenant_workers

        def started() -> None:
            self.controller.event("service_started", worker="service", pid=os.getpid())
            self.controller.start_device()
            for record in [record for record in self._records.values() if record.state == "running"]:
                if fault := self._fitting.fault(record):
                    self._spawn(self._move(record, "queued", ("running",), fault))
                else:
                    self._spawn(self._start(record))
            self._spawn(self._admit_forever())
            self._spawn(self.metering.run())
            self._spawn(self.sweeps.run())
            ready()

        try:
            await self.controller.serve(started)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            try:
                await self.metering.flush()
            except MarlaasError as error:  # jobs are billed when they go on
                log.warning("use not written bills=%d reason=%s", self.metering.num_unwritten, error)
            await self.events.close()
            self._checks.close()
            if self.sandbox is not None:
                await asyncio.to_thread(self.sandbox.close)

    async def drain(self) -> None:
        """Lets running steps end, commits them and ends `serve`; in the store these jobs still run: the next start goes on.

        Sampling requests that are open are answered, new ones refused.
        """
        self._is_draining = True
        self.sampling.close()
        running = [job.name for job in self.controller.jobs.values() if job.is_live]
        for name in running:
            self.controller.pause(name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                while self.sampling.num_open or any(
                    (job := self.controller.jobs.get(name)) is not None and job.is_live for name in running
                ):
                    await asyncio.sleep(0.05)
        self.controller.end()

    # ---- what a tenant asks for

    async def submit(
        self,
        tenant: Tenant,
        config: JobConfig,
        *,
        files: Mapping[str, bytes] = {},
        priority: int = 0,
        parent: str | None = None,
        labels: Mapping[str, str] = {},
        also: Callable[[sa.Connection, JobRecord], object] = lambda connection, record: None,
    ) -> JobRecord:
        """Queues a job and returns it. Raises InvalidConfig, InvalidRequest or QuotaExceeded; then nothing is left behind.

        `also` runs in the transaction that adds the job to the store.
        """
        check_fits(config, self.controller.runtime)
        check_upload(files)
        localized(config, files, Path("/"))
        if config.env.startswith(REMOTE) and self.tenant_workers is None:
            raise InvalidConfig(f"env={config.env!r}: this service takes no environment workers of tenants (env_workers_at)")
        if refused := why_refused(self.quotas_of(tenant), self._load(tenant), jobs=1):
            raise QuotaExceeded(refused)
        self._submitting[tenant.id] += 1
        try:
            tried = await self._checks.check(tenant.id, config, files, self.sandbox)
            self.controller.check_replies(config.env, tried.reply_roles[:8])
            record = await self._add(tenant, config, files, priority, parent, labels, also)
        finally:
            self._submitting[tenant.id] -= 1
        self._tenants[tenant.id] = tenant
        self._records[record.id] = record
        self.events.add("job_queued", record, {})
        self._wake.set()
        return record

    async def quote(self, tenant: Tenant, config: JobConfig, *, files: Mapping[str, bytes] = {}) -> quotes.Quote:
        """Returns what a job would take. Raises as `submit` does for what is wrong with it, and queues nothing."""
        check_fits(config, self.controller.runtime)
        check_upload(files)
        localized(config, files, Path("/"))
        if config.lora.init_from is not None:
            await self._own_adapter(tenant, config.lora.init_from)
        waits_for = why_queued(self.quotas_of(tenant), self._load(tenant), self._free_places())
        return self._quote(tenant, config, waits_for)

    def _quote(self, tenant: Tenant, config: JobConfig, waits_for: str = "") -> quotes.Quote:
        assert self.controller.model is not None, "the service is not served"
        jobs = {job.name: (job.config.weight, job.owner) for job in self.controller.jobs.values() if job.state == RUNNING}
        part = entitled(jobs | {"": (config.weight, _owner(tenant))})[""]
        load = quotes.Load(1.0 / part, self.controller.busy_share, waits_for)
        known = self.rates.known(tenant.id, config)
        return quotes.quote(config, known, self.controller.model, self.controller.runtime.engine.max_context, load)

    async def _add(
        self,
        tenant: Tenant,
        config: JobConfig,
        files: Mapping[str, bytes],
        priority: int,
        parent: str | None,
        labels: Mapping[str, str],
        also: Callable[[sa.Connection, JobRecord], object],
    ) -> JobRecord:
        """Adds a job to the store with its files; these are written first, so that a full disk leaves no job."""
        if config.lora.init_from is not None:
            await self._own_adapter(tenant, config.lora.init_from)
        document = config.model_dump(mode="json")

        def add(connection: sa.Connection) -> JobRecord:
            record = job_table.create_job(
                connection, tenant.id, name=config.name, config=document, steps=config.steps, now=self._clock(),
                priority=priority, parent=parent, labels=labels,
            )  # fmt: skip
            also(connection, record)
            return record

        uploaded = self._uploads / secrets.token_hex(8)
        try:
            await asyncio.to_thread(write_upload, uploaded / "files", files)
            record = await self.store.awrite(add)
            try:
                await asyncio.to_thread(move_upload, uploaded, self.folder(record.id))
            except MarlaasError as error:
                await self.store.awrite(
                    job_table.move_job, record.id, "failed", tenant_id=None, allowed_from=LIVE, now=self._clock(),
                    reason=f"its files could not be written: {error}",
                )  # fmt: skip
                raise
        finally:
            await asyncio.to_thread(shutil.rmtree, uploaded, ignore_errors=True)
        return record

    async def job(self, tenant: Tenant, job_id: str) -> JobRecord:
        """Returns a job of the tenant. Raises NotFound, also for another tenant's."""
        record = self._records.get(job_id)
        if record is not None and (tenant.is_admin or record.tenant_id == tenant.id):
            return record
        return await self.store.aread(job_table.get_job, job_id, tenant_id=self._scope(tenant))

    async def pause(self, tenant: Tenant, job_id: str) -> JobRecord:
        """Pauses a queued or running job; a running one first trains and commits what it has begun."""
        record = await self.job(tenant, job_id)
        if record.state == "running":
            self._over_quota.discard(job_id)
            self.controller.pause(job_id)
            return await self.job(tenant, job_id)
        return await self._move(record, "paused", ("queued",))

    async def resume(self, tenant: Tenant, job_id: str) -> JobRecord:
        """Puts a paused job back into the queue."""
        return await self._move(await self.job(tenant, job_id), "queued", ("paused",))

    async def cancel(self, tenant: Tenant, job_id: str) -> JobRecord:
        """Ends a job for good; what it trained stays."""
        record = await self.job(tenant, job_id)
        if (job := self.controller.jobs.get(record.id)) is not None:
            self.metering.collect(job)
            await self.metering.flush()
        record = await self._move(record, "cancelled", LIVE)
        if (job := self.controller.jobs.get(job_id)) is not None and not job.is_over:
            self.controller.cancel(job_id, "cancelled by its owner")
        return record

    async def rollback(
        self,
        tenant: Tenant,
        job_id: str,
        step: int,
        also: Callable[[sa.Connection, JobRecord], object] = lambda connection, record: None,
    ) -> JobRecord:
        """Takes a job back to a committed step. Raises NotFound, or InvalidRequest with the steps that there are.

        A running job goes on from there; any other waits to be resumed. `also` runs in the transaction that commits it.
        """
        record = await self.job(tenant, job_id)
        with self._rollbacks.claimed(record):
            async with self._admitting:  # nobody is being started from here on who was not seen above
                record = await self.job(tenant, job_id)
            self._tenants[record.tenant_id] = await self.store.aread(tenant_table.get_tenant, record.tenant_id)
            if (job := self.controller.jobs.get(job_id)) is not None:
                self.metering.collect(job)
                await self.metering.flush()

            def commit(connection: sa.Connection, moved: JobRecord) -> None:
                usage_table.reset_billed(connection, job_id, step)  # what is trained anew is billed anew
                also(connection, moved)

            try:
                moved = await self._rollbacks.run(record, step, commit)
            except BaseException:
                asyncio.get_running_loop().call_soon(self._take_up_again, job_id)  # when the claim is given up
                raise
            self._records[job_id] = moved
            self.metering.rolled_back(job_id, step)
        self.events.add("job_rolled_back", moved, {"step": step, "from_step": record.step})
        if moved.state != record.state:
            self.events.add(f"job_{moved.state}", moved, {"reason": moved.reason})
        self._wake.set()
        return moved

    def _take_up_again(self, job_id: str) -> None:
        """Lets a job that ran go on after a roll-back that failed."""
        record, job = self._records.get(job_id), self.controller.jobs.get(job_id)
        if record is None or record.state != "running":
            return
        if job is None or job.state == PAUSED:
            self._spawn(self._start(record))
        elif job.is_over:  # it ended while it was to be taken off the device
            self._on_over(job)

    async def delete(self, tenant: Tenant, job_id: str) -> None:
        """Deletes an ended job and all its files."""
        record = await self.job(tenant, job_id)
        await self.store.awrite(job_table.delete_job, record.id, tenant_id=self._scope(tenant))
        await asyncio.to_thread(shutil.rmtree, self.folder(record.id), ignore_errors=True)

    async def amounts(self, record: JobRecord) -> dict[str, float]:
        """Returns what a job was billed for so far, by meter."""
        if record.id in self._records:
            return self.metering.used_by(record.id)
        return (await self.store.aread(usage_table.used_by_job, [record.id])).get(record.id, {})

    def status(self, job_id: str) -> JobStatus | None:
        """Returns how a job in the controller stands, None for one that is not there."""
        return self.controller.job_status(job_id)

    def why(self, record: JobRecord) -> str:
        """Returns in one line what a job waits for."""
        return record.reason if (found := self.wait(record)) is None else told_in_one_line(*found)

    def wait(self, record: JobRecord) -> tuple[Wait, int] | None:
        """Returns (what a job waits for longest, how many things more it waits for); None for one that is over."""
        since_s = max(0.0, self._clock() - record.updated)
        if record.id in self._rollbacks:
            return Wait("roll-back", "the device closes the job", "the device", since_s, LEAVE_S), 0
        if record.state == "queued":
            why = self._fitting.fault(record) or self._why_queued().get(record.id, "")
            return Wait("queue", why or "a place is free: it starts within a second", "the service", since_s, None), 0
        if record.state == "paused":
            return Wait("pause", "to be resumed", "its owner", since_s, None), 0
        return self.controller.why(record.id)

    def quotas_of(self, tenant: Tenant) -> Quotas:
        """Returns what a tenant may use."""
        return validate(Quotas, self.config.quotas.model_dump() | dict(tenant.quotas))

    def tenant_changed(self, tenant: Tenant) -> None:
        """Takes over a tenant's new weight and quotas."""
        self._tenants[tenant.id] = tenant
        self.fair_share.weigh(_owner(tenant))
        self.controller.reweigh(_owner(tenant))
        self._wake.set()

    @property
    def live_ids(self) -> Collection[str]:
        """Ids of the jobs that have not ended."""
        return self._records.keys()

    def live_jobs(self, tenant: Tenant) -> list[JobRecord]:
        """Returns the tenant's jobs that have not ended; an admin's are all."""
        return [record for record in self._records.values() if tenant.is_admin or record.tenant_id == tenant.id]

    def folder(self, job_id: str) -> Path:
        """Returns where a job's files are."""
        return self.data_dir / "jobs" / job_id

    def now(self) -> float:
        """Returns the time as the store keeps it, in seconds since 1970."""
        return self._clock()

    def spawn(self, work: Any) -> None:
        """Runs a coroutine in the background; a failure is logged."""
        self._spawn(work)

    # ---- admission

    async def _admit_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), ADMIT_INTERVAL_S)
            self._wake.clear()
            if self._is_draining:
                return
            for queued in self._admission.choose(self._queued(), self._tenant_states(), self._free_places()):
                async with self._admitting:
                    await self._admit(queued.id)
            self._stop_beyond_quota()

    async def _admit(self, job_id: str) -> None:
        """Starts a queued job, unless it was paused, cancelled or deleted since it was chosen."""
        record = self._records.get(job_id)
        if record is None or record.state != "queued" or job_id in self._rollbacks:
            return
        try:
            moved = await self._move(record, "running", ("queued",))
        except MarlaasError as error:  # it changed, or the store cannot be written: the next round sees how it stands
            log.warning("job not admitted job=%s reason=%s", job_id, error)
            return
        if self._records.get(job_id) is moved:
            await self._start(moved)

    async def _start(self, record: JobRecord) -> None:
        """Gives a job to the controller: new, or going on from its last committed step."""
        self.metering.open_job(record.id, record.tenant_id)
        tenant = self._tenants[record.tenant_id]
        self.fair_share.open_job(record.id, _owner(tenant))
        job = self.controller.jobs.get(record.id)
        if job is not None and job.state == PAUSED:
            self.controller.unpause(record.id)
            return
        folder = self.folder(record.id)
        try:
            config = JobConfig.model_validate(record.config)
            room, files = None, folder / "files"
            if self.sandbox is not None and config.env.rpartition(":")[0].endswith(".py"):
                room = await asyncio.to_thread(self.sandbox.room, files)
                now = self._records.get(record.id)
                if now is None or now.state != "running" or self._is_draining or record.id in self.controller.jobs:
                    return await asyncio.to_thread(room.close)
                self._close_room(record.id)  # of the job as it was before a roll-back
                self._rooms[record.id], files = room, room.files
            names = {str(path.relative_to(files)): None for path in files.rglob("*") if path.is_file()}
            changes: dict[str, Any] = {"name": record.id}
            if config.lora.init_from is not None:
                changes["lora"] = config.lora.model_copy(update={"init_from": self._adapter_path(config.lora.init_from)})
            config = localized(config, names, files).model_copy(update=changes)
            resume = (folder / "state.json").is_file()
            job = self.controller.add(config, folder, resume, room, _owner(tenant))
            job.quoted_step = self._quote(tenant, JobConfig.model_validate(record.config)).per_step
            if job.is_over:  # it ended before a crash, and the store was not told
                self._on_over(job)
            self.sweeps.on_start(record.id)
        except (MarlaasError, ValueError) as error:
            self._spawn(self._move(record, "failed", ("running",), f"it cannot be started: {error}"))

    def _close_room(self, job_id: str) -> None:
        """Gives back the place where a job's uploaded code ran, if it had one."""
        if (room := self._rooms.pop(job_id, None)) is not None:
            self._spawn(asyncio.to_thread(room.close))

    def _stop_beyond_quota(self) -> None:
        """Puts running jobs back into the queue where their tenant has used its tokens of the day."""
        for record in self._records.values():
            tenant = self._tenants[record.tenant_id]
            if record.state == "running" and is_reached(self.quotas_of(tenant).tokens_per_day, self._load(tenant).tokens_today):
                job = self.controller.jobs.get(record.id)
                if job is not None and job.state in (STARTING, RUNNING):
                    self._over_quota.add(record.id)
                    self.controller.pause(record.id)

    def _queued(self) -> list[QueuedJob]:
        return [
            QueuedJob(record.id, record.tenant_id, record.created, record.priority)
            for record in self._records.values()
            if record.state == "queued" and record.id not in self._rollbacks and not self._fitting.fault(record)
        ]

    def _tenant_states(self) -> dict[str, TenantState]:
        return {
            tenant.id: TenantState(self.quotas_of(tenant), self._load(tenant), tenant.weight)
            for tenant in self._tenants.values()
        }

    def _free_places(self) -> int:
        return self.config.max_running_jobs - sum(record.state == "running" for record in self._records.values())

    def _why_queued(self) -> dict[str, str]:
        return reasons(self._queued(), self._tenant_states(), self._free_places())

    def _load(self, tenant: Tenant) -> Load:
        states = Counter(record.state for record in self._records.values() if record.tenant_id == tenant.id)
        return Load(
            running_jobs=states["running"],
            queued_jobs=states["queued"] + self._submitting[tenant.id],
            resident_adapters=states["running"],
            tokens_today=self.metering.tokens_today(tenant.id),
        )

    # ---- what the controller tells

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["kind"] in TOLD_BY_STORE:
            return
        record = self._records.get(event.get("job", ""))
        data = {name: value for name, value in event.items() if name not in ("time", "kind", "job")}
        if event["kind"] == "evaluated":
            self.sweeps.on_evaluated(event["job"], data)
        self.events.add(event["kind"], record, data)

    def _on_device_status(self, status: DeviceStatus) -> None:
        self.fair_share.report(status, self.controller.orchestrator.waits.take(), time.monotonic())

    def _on_step(self, job: Job, metrics: dict[str, Any]) -> None:
        self.metering.collect(job)
        record = self._records[job.name]
        rows = job.files.metrics
        self.rates.observe(
            record.tenant_id, JobConfig.model_validate(record.config), metrics, rows[-2] if len(rows) > 1 else None
        )
        told = {name: metrics.get(name) for name in ("step", "rollout/reward_mean", "version")}
        if (left := self.controller.left(job.name)) is not None:
            told |= {"eta_s": left.expected_s, "eta_low_s": left.low_s, "eta_high_s": left.high_s}
        self.events.add("step", record, told)
        self._records[record.id] = dataclasses.replace(record, step=job.step, updated=self._clock())
        self._spawn(self.store.awrite(job_table.update_job, record.id, now=self._clock(), step=job.step))
        self.sweeps.on_step(job)

    def _on_over(self, job: Job) -> None:
        self.metering.collect(job)
        record = self._records.get(job.name)
        if self._rollbacks.on_over(job):
            return
        if record is None or record.state != "running":
            return  # cancelled: the store knows
        if job.state == PAUSED:
            if not self._is_draining:
                state = "queued" if job.name in self._over_quota else "paused"
                self._over_quota.discard(job.name)
                self._spawn(self._move(record, state, ("running",)))
            return
        if job.state == FAILED:
            self._spawn(self._settle(record, "failed", f"{job.kind}: {job.reason}"))
        else:
            self._spawn(self._settle(record, "succeeded", job.stop_reason))

    # ---- the store

    async def _settle(self, record: JobRecord, state: JobState, reason: str = "") -> None:
        """Tells the store how a running job ended, again and again while it cannot be written."""
        while True:
            try:
                await self.metering.flush()  # first: nobody looks again what an ended job used
                await self._move(record, state, ("running",), reason)
                return
            except (StorageError, CorruptFile) as error:
                log.warning("end not recorded job=%s reason=%s", record.id, error)
                await asyncio.sleep(SETTLE_INTERVAL_S)

    async def _move(
        self, record: JobRecord, state: JobState, allowed_from: tuple[JobState, ...], reason: str = ""
    ) -> JobRecord:
        """Changes a job's state, in the store first."""
        moved = await self.store.awrite(
            job_table.move_job, record.id, state, tenant_id=None, allowed_from=allowed_from, now=self._clock(), reason=reason
        )
        if state in LIVE:
            self._records[record.id] = moved
        else:
            self._records.pop(record.id, None)
            self._fitting.forget(record.id)
            self._over_quota.discard(record.id)
            self.metering.close_job(record.id)
            self.fair_share.close_job(record.id)
            self._close_room(record.id)
            if (job := self.controller.jobs.get(record.id)) is not None and job.is_over:
                self.controller.forget(record.id)
        self.events.add(f"job_{state}", moved, {"reason": reason} if reason else {})
        self._wake.set()
        return moved

    async def _own_adapter(self, tenant: Tenant, source: str) -> None:
        """Raises NotFound unless `source`, "JOB_ID" or "JOB_ID@STEP", names a job of the tenant."""
        match = re.fullmatch(r"(job_[0-9A-Za-z]+)(@\d+)?", source)
        if match is None:
            raise InvalidRequest(f"lora.init_from={source[:80]!r}: must read JOB_ID or JOB_ID@STEP, of a job of yours")
        try:
            await self.job(tenant, match[1])
        except NotFound:
            raise NotFound(f"lora.init_from={source!r}: no such job") from None

    def _adapter_path(self, source: str) -> str:
        return str(self.data_dir / source)  # device.initial reads RUN_DIR/JOB[@STEP], RUN_DIR/jobs/JOB being the job's folder

    @staticmethod
    def _scope(tenant: Tenant) -> str | None:
        return None if tenant.is_admin else tenant.id

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)


def choose_sandbox(config: ServiceConfig) -> Sandbox | None:
    """Returns where uploaded code will run, and says so in the log. Raises InvalidConfig where it cannot be as asked for."""
    limits = Limits(total_memory_bytes=config.sandbox_memory_mib * MIB, address_space_bytes=config.sandbox_memory_mib * MIB)
    folder = Path(config.data_dir)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # keys, jobs and checkpoints are for this user only
    sandbox = Sandbox.choose(config.sandbox, network=config.sandbox_network, hidden=folder, limits=limits)
    if sandbox is None or sandbox.is_weak:
        log.warning("sandbox=%s: uploaded code runs %s", config.sandbox, NO_SANDBOX if sandbox is None else sandbox.text)
    else:
        log.info("uploaded code runs %s", sandbox.text)
    return sandbox


def _owner(tenant: Tenant) -> Owner:
    return Owner(tenant.id, tenant.weight)
