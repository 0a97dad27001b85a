"""Events as they happen (SSE). Each has a number as its id: a client that comes back with the last one misses nothing.

    id: 17
    event: step
    data: {"seq": 17, "time": ..., "job_id": "job_...", "kind": "step", "data": {...}}

A job's stream ends with `event: end` once the job is over; one that ends without it was cut off and should be opened again.
A comment line every 15 s shows that the connection lives.
"""

import contextlib
import math
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response, Security
from fastapi.responses import StreamingResponse

from marlaas_jax.errors import InvalidRequest, MarlaasError, NotFound
from marlaas_jax.service.api.auth import secret_of
from marlaas_jax.service.api.errors import Refused
from marlaas_jax.service.api.json_body import to_json
from marlaas_jax.service.api.route import Api, Caller, KeyRoute, TheApi, bearer
from marlaas_jax.store.events import EventRecord, last_seq
from marlaas_jax.store.jobs import ENDED
from marlaas_jax.store.tenants import Tenant

router = APIRouter(tags=["events"], route_class=KeyRoute, dependencies=[Security(bearer)])

HEARTBEAT_S = 15.0
LAST_EVENTS_S = 1.0  # for the last events of a job that is over to be written
MAX_STREAMS = 5000
OVER = tuple(f"job_{state}" for state in ENDED)

After = Annotated[int | None, Query(ge=0, le=2**63 - 1, description="Number of the last event seen; 0: all that are kept.")]
LastId = Annotated[str | None, Header(alias="Last-Event-ID", description="As `after`, and goes before it.")]


@router.get("/jobs/{job_id}/events", response_class=StreamingResponse)
async def job_events(
    api: TheApi, caller: Caller, request: Request, job_id: str, after: After = None, last_event_id: LastId = None
) -> Response:
    """Streams a job's events, all that are kept unless it is said which were seen, until the job is over."""
    await api.service.job(caller, job_id)
    return _streaming(api, _Stream(api, caller, request, job_id), _seen(last_event_id, after) or 0)


@router.get("/events", response_class=StreamingResponse)
async def events(api: TheApi, caller: Caller, request: Request, after: After = None, last_event_id: LastId = None) -> Response:
    """Streams the events of all jobs of the tenant, from now on unless it is said which were seen; to an admin all."""
    return _streaming(api, _Stream(api, caller, request, None), _seen(last_event_id, after))


def _seen(last_event_id: str | None, after: int | None) -> int | None:
    if not last_event_id:
        return after
    if not (last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) <= 18):
        raise InvalidRequest(f"Last-Event-ID={last_event_id[:40]!r}: must be the id of an event")
    return int(last_event_id)


def _streaming(api: Api, stream: "_Stream", after: int | None) -> Response:
    if api.num_streams >= MAX_STREAMS:
        raise Refused(503, InvalidRequest, f"{MAX_STREAMS} event streams are open; no more are allowed", HEARTBEAT_S)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(stream.text(after), media_type="text/event-stream", headers=headers)


class _Stream:
    """One open stream."""

    def __init__(self, api: Api, tenant: Tenant, request: Request, job_id: str | None):
        self._api = api
        self._tenant = tenant
        self._secret = secret_of(request.headers.get("authorization", ""))
        self._job_id = job_id
        self._checked = time.monotonic()

    async def text(self, after: int | None) -> AsyncIterator[str]:
        """Yields what is sent."""
        scope = None if self._tenant.is_admin else self._tenant.id
        if after is None:
            after = await self._api.store.aread(last_seq)
        source = self._api.service.events.listen_or_idle(self._patience_s, tenant_id=scope, job_id=self._job_id, after=after)
        self._api.num_streams += 1
        try:
            yield f"id: {after}\n: open\n\n"  # one that is cut off before the first event knows where it was
            async with contextlib.aclosing(source) as events:
                async for event in events:
                    if event is not None:
                        yield _text(self._api, event)
                    if (
                        event is not None
                        and self._job_id is not None
                        and event.kind in OVER
                        and await self._is_over(event.time)
                    ):
                        break
                    if event is None or time.monotonic() - self._checked > HEARTBEAT_S:
                        if await self._is_over():
                            break
                        if not await self._may_stay():
                            return
                        yield ": still here\n\n"
                else:
                    return  # cut off: too slow, or the service ends
            yield "event: end\ndata: {}\n\n"
        except MarlaasError as error:  # of the store: the client comes back
            yield f": {error}\n\n"
        finally:
            self._api.num_streams -= 1

    def _patience_s(self) -> float:
        """Returns how long to wait for the next event before something else is done."""
        return HEARTBEAT_S if self._job_id is None or self._is_live() else LAST_EVENTS_S

    def _is_live(self) -> bool:
        return self._job_id in self._api.service.live_ids

    async def _is_over(self, at: float = math.inf) -> bool:
        """Whether the job is over for good with what happened `at` that time: it may have been rolled back since."""
        if self._job_id is None or self._is_live():
            return False
        try:
            record = await self._api.service.job(self._tenant, self._job_id)
        except NotFound:
            return True
        return record.state in ENDED and at >= (record.ended or 0.0)

    async def _may_stay(self) -> bool:
        """Whether the key is still good."""
        self._checked = time.monotonic()
        return await self._api.keys.tenant(self._secret) is not None


def _text(api: Api, event: EventRecord) -> str:
    """Returns an event as it is sent; of the newest, which many streams send, it is made once."""
    if api.last_sent is None or api.last_sent[0] is not event:
        shown = {name: value for name, value in vars(event).items() if name != "tenant_id"}
        api.last_sent = event, f"id: {event.seq}\nevent: {event.kind}\ndata: {to_json(shown)}\n\n"
    return api.last_sent[1]
