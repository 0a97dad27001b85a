"""Jobs: submit, list, show, pause, resume, cancel, clone, delete."""

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Query, Response, Security
from pydantic import Field

from marlaas_jax.config import JobConfig, Section, validate
from marlaas_jax.errors import InvalidRequest
from marlaas_jax.service.api.idempotency import keep
from marlaas_jax.service.api.json_body import Json
from marlaas_jax.service.api.route import Api, Caller, KeyRoute, OnceKey, TheApi, UploadRoute, bearer
from marlaas_jax.service.files import read_upload
from marlaas_jax.service.prices import bill
from marlaas_jax.store import jobs as job_table
from marlaas_jax.store.jobs import JobFilter, JobRecord, JobState
from marlaas_jax.store.tenants import Tenant, get_tenant

router = APIRouter(tags=["jobs"], route_class=KeyRoute, dependencies=[Security(bearer)])
uploads = APIRouter(tags=["jobs"], route_class=UploadRoute, dependencies=[Security(bearer)])

Priority = Annotated[int, Field(ge=-1000, le=1000)]  # among the tenant's own jobs; the highest goes first


class Submission(JobConfig):
    """A job file's fields, and what a service needs beside them."""

    priority: Priority = 0
    labels: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)  # relative path -> content in base64; paths in the job lead to these


class Clone(Section):
    """What differs from the job that is cloned."""

    changes: dict[str, Any] = Field(default_factory=dict)  # fields of the job, nested as in its file
    priority: Priority | None = None  # None: that of the job
    labels: dict[str, str] | None = None
    files: dict[str, str] = Field(default_factory=dict)  # beside or instead of the job's own


class Rollback(Section):
    """Where a job goes back to."""

    step: Annotated[int, Field(ge=0, le=2**53)]  # one of those that GET /v1/jobs/{job_id}/checkpoints lists


@uploads.post("/jobs", status_code=201)
async def submit(api: TheApi, caller: Caller, key: OnceKey, body: Submission) -> Response:
    """Queues a job. Everything that can be known to be wrong with it is refused now, in one sentence."""
    config = JobConfig.model_construct(**{name: getattr(body, name) for name in JobConfig.model_fields})
    files = await asyncio.to_thread(decoded, body.files)
    record = await api.service.submit(
        caller, config, files=files, priority=body.priority, labels=body.labels, also=_keeping(caller, key)
    )
    return Json(document(api, record), 201)


@router.get("/jobs")
async def list_jobs(
    api: TheApi,
    caller: Caller,
    state: Annotated[list[JobState] | None, Query(description="May be given more than once.")] = None,
    name: Annotated[str, Query(description="Beginning of the name.")] = "",
    label: Annotated[list[str] | None, Query(description="KEY=VALUE; may be given more than once: all must be there.")] = None,
    limit: Annotated[int, Query(ge=1, le=job_table.MAX_PAGE)] = 50,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.")] = None,
) -> Response:
    """Lists jobs, the newest first; to an admin those of all tenants."""
    labels = dict(_label(text) for text in label or ())
    scope = None if caller.is_admin else caller.id
    which = JobFilter(tenant_id=scope, states=tuple(state or ()), name_prefix=name, labels=labels)
    page = await api.store.aread(job_table.list_jobs, which, limit=limit, cursor=cursor)
    shown = [asdict(record) | {"status": _brief(api, record)} for record in page.jobs]
    return Json({"jobs": shown, "next_cursor": page.next_cursor})


@router.get("/jobs/{job_id}")
async def show(api: TheApi, caller: Caller, job_id: str) -> Response:
    """Shows a job: its record, how it stands (`status`), what it waits for (`why`), what it used and its cost (`usage`)."""
    record = await api.service.job(caller, job_id)
    amounts = await api.service.amounts(record)
    return Json(document(api, record) | {"usage": bill(api.service.config.prices, amounts)})


@router.get("/jobs/{job_id}/why")
async def why(api: TheApi, caller: Caller, job_id: str) -> Response:
    """Says in one line what a job waits for; `wait` has its parts: stage, object, who owes it, since when, at most how long."""
    record = await api.service.job(caller, job_id)
    found = api.service.wait(record)
    wait = None if found is None else asdict(found[0]) | {"others": found[1]}
    return Json({"id": record.id, "state": record.state, "why": api.service.why(record), "wait": wait})


@router.post("/jobs/{job_id}/pause")
async def pause(api: TheApi, caller: Caller, job_id: str) -> Response:
    """Pauses a queued or running job; a running one first trains and commits what it has begun."""
    return Json(document(api, await api.service.pause(caller, job_id)))


@router.post("/jobs/{job_id}/resume")
async def resume(api: TheApi, caller: Caller, job_id: str) -> Response:
    """Puts a paused job back into the queue; it goes on from its committed step."""
    return Json(document(api, await api.service.resume(caller, job_id)))


@router.post("/jobs/{job_id}/cancel")
async def cancel(api: TheApi, caller: Caller, job_id: str) -> Response:
    """Ends a job for good; what it trained stays."""
    return Json(document(api, await api.service.cancel(caller, job_id)))


@router.post("/jobs/{job_id}/rollback")
async def rollback(api: TheApi, caller: Caller, key: OnceKey, job_id: str, body: Rollback) -> Response:
    """Takes a job back to a committed step. A running job goes on from there; any other waits to be resumed."""
    return Json(document(api, await api.service.rollback(caller, job_id, body.step, also=_keeping(caller, key, 200))))


@uploads.post("/jobs/{job_id}/clone", status_code=201)
async def clone(api: TheApi, caller: Caller, key: OnceKey, job_id: str, body: Clone) -> Response:
    """Queues a new job with the same fields and files, but for the changes; it starts from step 0."""
    parent = await api.service.job(caller, job_id)
    config = validate(JobConfig, merged(parent.config, body.changes))
    files = await asyncio.to_thread(read_upload, api.service.folder(parent.id) / "files")
    files |= await asyncio.to_thread(decoded, body.files)
    record = await api.service.submit(
        await _owner(api, caller, parent),
        config,
        files=files,
        priority=parent.priority if body.priority is None else body.priority,
        labels=parent.labels if body.labels is None else body.labels,
        parent=parent.id,
        also=_keeping(caller, key),
    )
    return Json(document(api, record), 201)


@router.delete("/jobs/{job_id}")
async def delete(api: TheApi, caller: Caller, job_id: str) -> Response:
    """Deletes an ended job and all its files; what it used stays on the bill."""
    await api.service.delete(caller, job_id)
    return Json({"id": job_id, "deleted": True})


def document(api: Api, record: JobRecord) -> dict[str, Any]:
    """Returns a job as it is shown."""
    status = api.service.status(record.id)
    stop_reason = record.reason if record.state == "succeeded" else "" if status is None else status.stop_reason
    shown = asdict(record) | {"status": None if status is None else asdict(status), "why": api.service.why(record)}
    return shown | {"stop_reason": stop_reason}


def _brief(api: Api, record: JobRecord) -> dict[str, Any] | None:
    """Returns what a list tells of how a job stands: when it will be done."""
    status = api.service.status(record.id)
    return (
        None if status is None else {name: getattr(status, name) for name in ("eta_s", "eta_low_s", "eta_high_s", "eta_basis")}
    )


def decoded(files: Mapping[str, str]) -> dict[str, bytes]:
    """Returns the files' contents. Raises InvalidRequest for one that is not base64."""
    found = {}
    for name, text in files.items():
        try:
            found[name] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidRequest(f"files.{name[:80]}: must be base64") from None
    return found


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with the changes; sections are changed field by field."""
    out = dict(base)
    for key, value in changes.items():
        before = out.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and key != "env_args":
            value = merged(before, value)
        out[key] = value
    return out


def _keeping(caller: Tenant, key: str | None, status: int = 201) -> Callable[[sa.Connection, JobRecord], None]:
    def also(connection: sa.Connection, record: JobRecord) -> None:
        keep(connection, caller.id, key, status, asdict(record) | {"status": None, "why": ""})

    return also


async def _owner(api: Api, caller: Tenant, record: JobRecord) -> Tenant:
    """Returns whose the clone is: the job's owner's, also where an admin asks for it."""
    if caller.id == record.tenant_id:
        return caller
    return await api.store.aread(get_tenant, record.tenant_id)


def _label(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise InvalidRequest(f"label={text[:80]!r}: must read KEY=VALUE")
    return key, value
