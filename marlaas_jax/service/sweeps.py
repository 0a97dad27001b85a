"""Sweeps: queues each trial as an ordinary job of its tenant, and stops those that others have left behind.

The store is the truth about which trials there are, which job each became, and what was measured at the rungs; so a service
that starts goes on where the one before stopped. Trials beyond a quota wait here until there is room in the queue. Everything
runs in the event loop.
"""

import asyncio
import contextlib
import dataclasses
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from marlaas_jax import sweep as plan
from marlaas_jax.errors import InternalError, InvalidRequest, MarlaasError, QuotaExceeded, StorageError
from marlaas_jax.service.config import check_fits
from marlaas_jax.service.files import check_upload, localized, read_upload, write_upload
from marlaas_jax.store import ids
from marlaas_jax.store import sweeps as sweep_table
from marlaas_jax.store.sweeps import SweepRecord, Trial
from marlaas_jax.store.tenants import Tenant, get_tenant
from marlaas_jax.sweep import SweepConfig
from marlaas_jax.workers.controller_jobs import Job

if TYPE_CHECKING:
    from marlaas_jax.service.service import Service

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
STOPPED = "halving"  # how the reason of a trial that was stopped begins


@dataclasses.dataclass
class _Live:
    """A sweep that runs."""

    record: SweepRecord
    config: SweepConfig
    trials: dict[int, Trial]  # by number

    def replace(self, number: int, **changes: Any) -> Trial:
        """Changes a trial and returns it."""
        self.trials[number] = dataclasses.replace(self.trials[number], **changes)
        return self.trials[number]


class Sweeps:
    """The sweeps of one service."""

    def __init__(self, service: "Service"):
        self._service = service
        self._live: dict[str, _Live] = {}
        self._trial_of: dict[str, tuple[str, int]] = {}  # job id -> sweep id, number; of sweeps that run
        self._wake = asyncio.Event()
        self._queueing = asyncio.Lock()  # held while a trial becomes a job, and while a sweep is cancelled

    async def load(self) -> None:
        """Takes up the sweeps that an earlier process left running."""
        store = self._service.store
        for record in await store.aread(sweep_table.running_sweeps):
            trials = await store.aread(sweep_table.list_trials, record.id)
            self._take_in(_Live(record, SweepConfig.model_validate(record.config), {trial.number: trial for trial in trials}))
        await asyncio.to_thread(self._remove_files_but, set(self._live))

    async def run(self) -> None:
        """Queues trials as there is room, and ends sweeps, for ever."""
        while True:
            for live in list(self._live.values()):
                try:
                    await self._advance(live)
                except MarlaasError as error:  # of the store, say: the next round tries again
                    log.warning("sweep not advanced sweep=%s reason=%s", live.record.id, error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), INTERVAL_S)
            self._wake.clear()

    # ---- what a tenant asks for

    async def submit(
        self,
        tenant: Tenant,
        config: SweepConfig,
        *,
        files: Mapping[str, bytes] = {},
        priority: int = 0,
        labels: Mapping[str, str] = {},
        also: Callable[[sa.Connection, SweepRecord], object] = lambda connection, record: None,
    ) -> SweepRecord:
        """Takes a sweep in and returns it. Raises InvalidConfig or InvalidRequest for a wrong trial; then none is queued.

        `also` runs in the transaction that adds the sweep to the store.
        """
        jobs = plan.jobs_of(config)
        check_upload(files)
        for number, (_, job) in enumerate(jobs, 1):
            try:
                check_fits(job, self._service.controller.runtime)
                localized(job, files, Path("/"))
            except (InvalidRequest, MarlaasError) as error:
                raise type(error)(f"trial {number}: {error}") from None
        now = self._service.now()
        record = SweepRecord(
            ids.new_id("sweep_"), tenant.id, config.name, config.model_dump(mode="json"), priority, dict(labels), "running",
            len(jobs), now, None,
        )  # fmt: skip
        trials = [Trial(record.id, number, job.name, values) for number, (values, job) in enumerate(jobs, 1)]

        def add(connection: sa.Connection) -> None:
            sweep_table.create_sweep(connection, record, trials)
            also(connection, record)

        folder = self._folder(record.id)
        try:  # first the files: a crash leaves files without a sweep, which the next start removes
            await asyncio.to_thread(write_upload, folder, files)
            await self._service.store.awrite(add)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        self._take_in(_Live(record, config, {trial.number: trial for trial in trials}))
        self._wake.set()
        return record

    async def sweep(self, tenant: Tenant, sweep_id: str) -> SweepRecord:
        """Returns a sweep of the tenant. Raises NotFound, also for another tenant's."""
        return await self._service.store.aread(sweep_table.get_sweep, sweep_id, tenant_id=_scope(tenant))

    async def sweeps(self, tenant: Tenant) -> list[SweepRecord]:
        """Returns the tenant's newest sweeps; an admin's are all."""
        return await self._service.store.aread(sweep_table.list_sweeps, tenant_id=_scope(tenant))

    async def cancel(self, tenant: Tenant, sweep_id: str) -> SweepRecord:
        """Ends a sweep and its trials that have not ended; what they trained stays."""
        record = await self.sweep(tenant, sweep_id)
        async with self._queueing:
            for trial in await self._service.store.aread(sweep_table.list_trials, sweep_id):
                if trial.job_id is not None and trial.job_id in self._service.live_ids:
                    with contextlib.suppress(InvalidRequest):  # it ended meanwhile
                        await self._service.cancel(tenant, trial.job_id)
            record = await self._end(record, "cancelled")
        return record

    # ---- what the service tells

    def on_start(self, job_id: str) -> None:
        """A job was given to the controller: one that was found worse before it was interrupted ends at once."""
        if (found := self._find(job_id)) is not None and found[1].stopped_at is not None:
            self._service.controller.stop_early(job_id, _reason(*found))

    def on_step(self, job: Job) -> None:
        """A job has trained a batch: perhaps it reached a rung."""
        found = self._find(job.name)
        if found is None or found[0].config.metric != "train_reward":
            return
        rewards = [row.get("rollout/reward_mean") for row in job.files.metrics]
        for rung in self._missing(*found, job.step):
            known = [reward for reward in rewards[max(0, rung - 3) : rung] if reward is not None]
            if known:
                self._measured(found[0], found[1].number, rung, sum(known) / len(known))

    def on_evaluated(self, job_id: str, done: Mapping[str, Any]) -> None:
        """A job was evaluated."""
        found = self._find(job_id)
        if found is None or found[0].config.metric != "eval_reward" or done["reward_mean"] is None:
            return
        for rung in self._missing(*found, done["step"]):
            self._measured(found[0], found[1].number, rung, done["reward_mean"])

    # ---- inside

    def _take_in(self, live: _Live) -> None:
        self._live[live.record.id] = live
        for trial in live.trials.values():
            if trial.job_id is not None:
                self._trial_of[trial.job_id] = (live.record.id, trial.number)

    def _find(self, job_id: str) -> tuple[_Live, Trial] | None:
        sweep_id, number = self._trial_of.get(job_id, ("", 0))
        live = self._live.get(sweep_id)
        return None if live is None else (live, live.trials[number])

    def _missing(self, live: _Live, trial: Trial, step: int) -> list[int]:
        """Returns the rungs that the trial has reached and was not measured at."""
        if live.config.halving is None:
            return []
        return [rung for rung in plan.rungs(live.config.halving, step + 1) if str(rung) not in trial.rungs]

    def _measured(self, live: _Live, number: int, rung: int, value: float) -> None:
        """Takes a trial's metric at a rung, and stops whom that leaves behind."""
        trial = live.replace(number, rungs=live.trials[number].rungs | {str(rung): value})
        self._keep(live, trial, rungs=trial.rungs)
        assert live.config.halving is not None
        reached = {t.number: t.rungs[str(rung)] for t in live.trials.values() if str(rung) in t.rungs}
        judged = {
            other: value
            for other, value in reached.items()
            if live.trials[other].stopped_at is None
            and max(map(int, live.trials[other].rungs)) == rung
            and live.trials[other].job_id in self._service.live_ids
        }
        for loser in plan.losers(live.config.halving.eta, reached, judged):
            stopped = live.replace(loser, stopped_at=rung)
            self._keep(live, stopped, stopped_at=rung)
            if stopped.job_id in self._service.controller.jobs:
                self._service.controller.stop_early(stopped.job_id, _reason(live, stopped))

    def _keep(self, live: _Live, trial: Trial, **changes: Any) -> None:
        """Writes down what changed of a trial; a write that fails costs no more than this after a crash."""
        self._service.spawn(self._service.store.awrite(sweep_table.update_trial, live.record.id, trial.number, **changes))

    async def _advance(self, live: _Live) -> None:
        """Queues the trials that there is room for; ends the sweep once none is left."""
        tenant = await self._service.store.aread(get_tenant, live.record.tenant_id)
        for number, trial in list(live.trials.items()):
            if trial.job_id is not None or trial.error:
                continue
            async with self._queueing:
                if live.record.id not in self._live or not await self._queue(live, tenant, number):
                    return
        if all(trial.error or trial.job_id not in self._service.live_ids for trial in live.trials.values()):
            async with self._queueing:
                if live.record.id in self._live:
                    await self._end(live.record, "succeeded")

    async def _queue(self, live: _Live, tenant: Tenant, number: int) -> bool:
        """Makes a trial a job; False where there is no room for it now."""
        sweep_id, trial = live.record.id, live.trials[number]
        _, config = plan.jobs_of(live.config)[number - 1]
        files = await asyncio.to_thread(read_upload, self._folder(sweep_id))
        try:
            record = await self._service.submit(
                tenant,
                config,
                files=files,
                priority=live.record.priority,
                labels=live.record.labels | {"sweep": sweep_id, "trial": str(number)},
                also=lambda connection, job: sweep_table.update_trial(connection, sweep_id, number, job_id=job.id),
            )
        except (QuotaExceeded, StorageError, InternalError) as error:
            log.info("trial waits sweep=%s trial=%d reason=%s", sweep_id, number, error)
            return False
        except MarlaasError as error:
            self._keep(live, live.replace(number, error=str(error)), error=str(error))
            return True
        trial = live.replace(number, job_id=record.id)
        self._trial_of[record.id] = (sweep_id, trial.number)
        return True

    async def _end(self, record: SweepRecord, state: sweep_table.SweepState) -> SweepRecord:
        ended = await self._service.store.awrite(
            sweep_table.end_sweep, record.id, state, tenant_id=None, now=self._service.now()
        )
        live = self._live.pop(record.id, None)
        for trial in live.trials.values() if live is not None else ():
            self._trial_of.pop(trial.job_id or "", None)
        await asyncio.to_thread(shutil.rmtree, self._folder(record.id), ignore_errors=True)
        return ended

    def _folder(self, sweep_id: str) -> Path:
        return self._service.data_dir / "sweeps" / sweep_id

    def _remove_files_but(self, kept: set[str]) -> None:
        for folder in (self._service.data_dir / "sweeps").glob("*"):
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def _reason(live: _Live, trial: Trial) -> str:
    rung = trial.stopped_at
    value = trial.rungs[str(rung)]
    return f"{STOPPED}: {live.config.metric} {value:.4g} after {rung} steps; other trials of {live.record.id} did better"


def _scope(tenant: Tenant) -> str | None:
    return None if tenant.is_admin else tenant.id
