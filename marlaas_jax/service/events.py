"""Events of jobs: numbered and kept by the store in the order in which they happened, handed on to whoever listens.

A listener that knows the last number it saw first reads what came since from the store, then goes on live. One that is too
slow for its bounded queue is let go: it comes back with its last number and misses nothing that is still kept.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from marlaas_jax.errors import MarlaasError
from marlaas_jax.store import events as event_table
from marlaas_jax.store.engine import Store
from marlaas_jax.store.events import EventRecord
from marlaas_jax.store.jobs import JobRecord

log = logging.getLogger(__name__)

MAX_BEHIND = 256  # events that a listener may lag
AT_ONCE = 20  # listeners that are woken before the event loop goes round
MAX_UNWRITTEN = 10_000
KEEP_PER_JOB, KEEP_TOTAL = 2_000, 200_000
TRIM_EVERY = 5_000


@dataclass(eq=False)
class _Listener:
    """Who listens to what; None in the queue ends it."""

    tenant_id: str | None
    job_id: str | None
    queue: asyncio.Queue[EventRecord | None] = field(default_factory=lambda: asyncio.Queue(MAX_BEHIND))

    def is_meant(self, event: EventRecord) -> bool:
        return self.tenant_id in (None, event.tenant_id) and self.job_id in (None, event.job_id)


class EventStream:
    """Writes events in order and hands them on. For the event loop's thread."""

    def __init__(self, store: Store, clock: Callable[[], float]):
        self._store = store
        self._clock = clock
        self._unwritten: asyncio.Queue[tuple[str, str, str, dict[str, Any], float]] = asyncio.Queue(MAX_UNWRITTEN)
        self._listeners: set[_Listener] = set()
        self._writer: asyncio.Task[None] | None = None
        self.num_dropped = 0  # because the store did not keep up

    @property
    def num_listeners(self) -> int:
        """Open streams."""
        return len(self._listeners)

    def add(self, kind: str, job: JobRecord | None, data: Mapping[str, Any]) -> None:
        """Queues an event; a job's belongs to its tenant, the others to nobody."""
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_forever())
        tenant_id, job_id = (job.tenant_id, job.id) if job is not None else ("", "")
        try:
            self._unwritten.put_nowait((kind, tenant_id, job_id, dict(data), self._clock()))
        except asyncio.QueueFull:
            self.num_dropped += 1

    async def listen(
        self, *, tenant_id: str | None, job_id: str | None = None, after: int | None = None
    ) -> AsyncIterator[EventRecord]:
        """Yields events of a tenant (None: all) and of a job (None: all): those behind number `after`, then as they come."""
        async for event in self.listen_or_idle(lambda: None, tenant_id=tenant_id, job_id=job_id, after=after):
            if event is not None:
                yield event

    async def listen_or_idle(
        self,
        patience_s: Callable[[], float | None],
        *,
        tenant_id: str | None,
        job_id: str | None = None,
        after: int | None = None,
    ) -> AsyncGenerator[EventRecord | None, None]:
        """Does as `listen`; yields None whenever nothing came for `patience_s()` seconds."""
        listener = _Listener(tenant_id, job_id)
        self._listeners.add(listener)
        try:
            seen = after if after is not None else await self._store.aread(event_table.last_seq)
            while page := await self._store.aread(event_table.list_events, after=seen, tenant_id=tenant_id, job_id=job_id):
                for event in page:
                    seen = event.seq
                    yield event
            while True:
                try:
                    async with asyncio.timeout(patience_s()):
                        event = await listener.queue.get()
                except TimeoutError:
                    yield None
                    continue
                if event is None:
                    return
                if event.seq > seen:
                    yield event
        finally:
            self._listeners.discard(listener)

    async def close(self) -> None:
        """Writes what is queued and ends all streams."""
        if self._writer is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._unwritten.join(), 5.0)
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        for listener in list(self._listeners):
            self._let_go(listener)

    async def _write_forever(self) -> None:
        written = 0
        while True:
            kind, tenant_id, job_id, data, now = await self._unwritten.get()
            try:
                event = await self._store.awrite(event_table.add_event, kind, data, now=now, tenant_id=tenant_id, job_id=job_id)
                written += 1
                if written % TRIM_EVERY == 0:
                    await self._store.awrite(event_table.trim_events, keep_per_job=KEEP_PER_JOB, keep_total=KEEP_TOTAL)
            except MarlaasError as error:
                log.error("event not kept kind=%s job=%s reason=%s", kind, job_id, error)
                continue
            finally:
                self._unwritten.task_done()
            meant = [listener for listener in self._listeners if listener.is_meant(event)]
            for number, listener in enumerate(meant, 1):
                try:
                    listener.queue.put_nowait(event)
                except asyncio.QueueFull:
                    self._let_go(listener)
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)  # others get their turn between those that are woken

    def _let_go(self, listener: _Listener) -> None:
        self._listeners.discard(listener)
        while not listener.queue.empty():
            listener.queue.get_nowait()
        listener.queue.put_nowait(None)
