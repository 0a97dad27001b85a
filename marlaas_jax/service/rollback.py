"""Rolls a job back to a committed step: off the device first, then its folder, then the store, which is the commit.

A running job goes back into the queue; a queued or paused one stays what it is; one that had ended is paused. What is
newer than the step is removed only when the job goes on (workers.roll_back), so a failure here leaves everything as it was.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import sqlalchemy as sa

from marlaas_jax.errors import InvalidRequest, MarlaasError, StorageError
from marlaas_jax.store import jobs as job_table
from marlaas_jax.store.engine import Store
from marlaas_jax.store.jobs import JobRecord, JobState
from marlaas_jax.workers import roll_back
from marlaas_jax.workers.controller import Controller
from marlaas_jax.workers.controller_jobs import Job

log = logging.getLogger(__name__)

LEAVE_S = 120.0  # for the device to end its dispatch and close a job
BECOMES: dict[JobState, JobState] = {"running": "queued", "queued": "queued", "paused": "paused"}  # those that ended: paused


class Also(Protocol):
    """What is written in the transaction that commits the roll-back."""

    def __call__(self, connection: sa.Connection, record: JobRecord, /) -> object: ...


class Rollbacks:
    """The roll-backs under way. For the event loop's thread."""

    def __init__(self, controller: Controller, store: Store, folder: Callable[[str], Path], clock: Callable[[], float]):
        self._controller = controller
        self._store = store
        self._folder = folder
        self._clock = clock
        self._leaving: dict[str, asyncio.Event] = {}  # of jobs being rolled back; set once one is off the device

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._leaving

    def on_over(self, job: Job) -> bool:
        """Takes note of a job that has left the device; False if it is none that is being rolled back."""
        if (leaving := self._leaving.get(job.name)) is not None:
            leaving.set()
        return leaving is not None

    @contextlib.contextmanager
    def claimed(self, record: JobRecord) -> Iterator[None]:
        """Keeps the job from being started or rolled back by somebody else meanwhile. Raises InvalidRequest."""
        if record.id in self._leaving:
            raise InvalidRequest(f"{record.id}: is being rolled back already")
        self._leaving[record.id] = asyncio.Event()
        try:
            yield
        finally:
            del self._leaving[record.id]

    async def run(self, record: JobRecord, step: int, also: Also) -> JobRecord:
        """Rolls a claimed job back and returns it. Raises InvalidRequest, which names the steps there are, or StorageError."""
        folder = self._folder(record.id)
        kept = await asyncio.to_thread(roll_back.committed, folder)
        if step not in kept:
            steps = ", ".join(map(str, kept)) or "none yet"
            raise InvalidRequest(f"step={step}: {record.id} has no such committed step; it has {steps}")
        try:
            await asyncio.to_thread(roll_back.hold, folder, kept[step])
            await self._leave(record.id)
            await asyncio.to_thread(roll_back.put_back, folder)
            return await self._commit(record, folder, step, also)
        finally:
            await asyncio.to_thread(roll_back.release, folder)

    async def _leave(self, job_id: str) -> None:
        """Takes the job out of the controller."""
        job = self._controller.jobs.get(job_id)
        if job is None:
            return
        if job.is_live:
            self._controller.halt(job_id)
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._leaving[job_id].wait()
            except TimeoutError:
                raise StorageError(f"{job_id}: the device did not close it within {LEAVE_S:.0f} s; try again") from None
        self._controller.forget(job_id)

    async def _commit(self, record: JobRecord, folder: Path, step: int, also: Also) -> JobRecord:
        before = await asyncio.to_thread(roll_back.intend, folder, step, self._clock())

        def write(connection: sa.Connection) -> JobRecord:
            becomes = BECOMES.get(record.state, "paused")
            reason = f"rolled back to step {step}" + ("; resume it to go on" if becomes == "paused" else "")
            job_table.move_job(
                connection, record.id, becomes, tenant_id=None, allowed_from=(record.state,), now=self._clock(), reason=reason
            )
            job_table.update_job(connection, record.id, now=self._clock(), step=step)
            moved = job_table.get_job(connection, record.id, tenant_id=None)
            also(connection, moved)
            return moved

        try:
            return await self._store.awrite(write)
        except MarlaasError:
            try:
                await asyncio.to_thread(roll_back.withdraw, folder, before)
            except StorageError as error:  # the same disk; what was asked for happens when the job goes on next
                log.error("roll-back not withdrawn job=%s reason=%s", record.id, error)
            raise
