"""Jobs: what was submitted and how far it is. Functions take a Connection; run them through Store.write and Store.read.

`tenant_id` says who asks: a job of another tenant is as if it did not exist. None is the service itself or an admin.
"""

import base64
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import sqlalchemy as sa

from marlaas_jax.errors import InvalidRequest, NotFound
from marlaas_jax.store import ids, schema

JobState = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]
LIVE: tuple[JobState, ...] = ("queued", "running", "paused")
ENDED: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")
MAX_PAGE = 200
LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_LABEL_CHARACTERS = 256


@dataclass(frozen=True)
class JobRecord:
    """A job as the store keeps it; times in seconds since 1970."""

    id: str
    tenant_id: str
    name: str
    config: dict[str, Any]
    state: JobState
    kind: str  # what sort of work it is
    reason: str  # why it is in this state; "" where that needs no words
    step: int  # optimizer steps that are committed
    steps: int  # of them in all
    priority: int  # among its tenant's jobs; the highest goes first
    created: float
    started: float | None  # when it ran first
    ended: float | None
    updated: float
    parent: str | None  # the job it was cloned from
    labels: dict[str, str]


@dataclass(frozen=True)
class JobFilter:
    """Which jobs are meant; a field left alone excludes none."""

    tenant_id: str | None = None
    states: tuple[JobState, ...] = ()
    name_prefix: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)  # all of them must be there


@dataclass(frozen=True)
class JobPage:
    """A part of a list."""

    jobs: list[JobRecord]
    next_cursor: str | None  # of the page that follows; None: this is the last


def create_job(
    connection: sa.Connection,
    tenant_id: str,
    *,
    name: str,
    config: Mapping[str, Any],
    steps: int,
    now: float,
    kind: str = "train",
    priority: int = 0,
    parent: str | None = None,
    labels: Mapping[str, str] = {},
) -> JobRecord:
    """Adds a queued job. Raises InvalidRequest for labels that are not allowed."""
    _check_labels(labels)
    job = JobRecord(
        id=ids.new_id("job_"),
        tenant_id=tenant_id,
        name=name,
        config=dict(config),
        state="queued",
        kind=kind,
        reason="",
        step=0,
        steps=steps,
        priority=priority,
        created=now,
        started=None,
        ended=None,
        updated=now,
        parent=parent,
        labels=dict(labels),
    )
    connection.execute(schema.jobs.insert().values(vars(job)))
    return job


def get_job(connection: sa.Connection, job_id: str, *, tenant_id: str | None) -> JobRecord:
    """Returns a job. Raises NotFound."""
    row = connection.execute(sa.select(schema.jobs).where(*_is_job(job_id, tenant_id))).first()
    if row is None:
        raise NotFound(f"{job_id}: no such job")
    return JobRecord(*row)


def move_job(
    connection: sa.Connection,
    job_id: str,
    state: JobState,
    *,
    tenant_id: str | None,
    allowed_from: Collection[JobState],
    now: float,
    reason: str = "",
) -> JobRecord:
    """Changes the state and returns the job. Raises NotFound, or InvalidRequest if its state is none of `allowed_from`."""
    changes: dict[str, Any] = {"state": state, "reason": reason, "updated": now, "ended": now if state in ENDED else None}
    if state == "running":
        changes["started"] = sa.func.coalesce(schema.jobs.c.started, now)
    statement = schema.jobs.update().where(*_is_job(job_id, tenant_id), schema.jobs.c.state.in_(allowed_from))
    was_moved = connection.execute(statement.values(changes)).rowcount == 1
    job = get_job(connection, job_id, tenant_id=tenant_id)
    if not was_moved:
        raise InvalidRequest(f"{job_id}: state={job.state!r}; it can become {state} from {', '.join(sorted(allowed_from))}")
    return job


def update_job(
    connection: sa.Connection,
    job_id: str,
    *,
    now: float,
    step: int | None = None,
    reason: str | None = None,
    priority: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Changes what is not None; a job that is gone is no error."""
    given = {"step": step, "reason": reason, "priority": priority, "config": config}
    changes = {name: value for name, value in given.items() if value is not None}
    connection.execute(schema.jobs.update().where(schema.jobs.c.id == job_id).values(updated=now, **changes))


def delete_job(connection: sa.Connection, job_id: str, *, tenant_id: str | None) -> None:
    """Deletes an ended job and its events; its usage stays. Raises NotFound, or InvalidRequest while it is live."""
    job = get_job(connection, job_id, tenant_id=tenant_id)
    if job.state not in ENDED:
        raise InvalidRequest(f"{job_id}: state={job.state!r}; only a job that is {', '.join(ENDED)} can be deleted")
    connection.execute(schema.events.delete().where(schema.events.c.job_id == job_id))
    connection.execute(schema.jobs.delete().where(schema.jobs.c.id == job_id))


def list_jobs(
    connection: sa.Connection, which: JobFilter = JobFilter(), *, limit: int = 50, cursor: str | None = None
) -> JobPage:
    """Returns the newest jobs, or those behind the cursor of an earlier page. Raises InvalidRequest."""
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit={limit}: must be 1 to {MAX_PAGE}")
    table = schema.jobs
    query = sa.select(table).where(*_matches(which)).order_by(table.c.created.desc(), table.c.id.desc()).limit(limit + 1)
    if cursor is not None:
        query = query.where(sa.tuple_(table.c.created, table.c.id) < sa.tuple_(*_parse_cursor(cursor)))
    jobs = [JobRecord(*row) for row in connection.execute(query)]
    has_more = len(jobs) > limit
    jobs = jobs[:limit]
    return JobPage(jobs, _to_cursor(jobs[-1]) if has_more else None)


def live_jobs(connection: sa.Connection) -> list[JobRecord]:
    """Returns every job that has not ended, the oldest first: what a service that starts takes up again."""
    table = schema.jobs
    query = sa.select(table).where(table.c.state.in_(LIVE)).order_by(table.c.created, table.c.id)
    return [JobRecord(*row) for row in connection.execute(query)]


def count_jobs(connection: sa.Connection, *, tenant_id: str | None) -> dict[JobState, int]:
    """Returns the number of jobs by state; a state without jobs is left out."""
    table = schema.jobs
    is_meant = sa.true() if tenant_id is None else table.c.tenant_id == tenant_id
    query = sa.select(table.c.state, sa.func.count()).where(is_meant).group_by(table.c.state)
    return {state: count for state, count in connection.execute(query)}


def _is_job(job_id: str, tenant_id: str | None) -> list[sa.ColumnElement[bool]]:
    owner = [] if tenant_id is None else [schema.jobs.c.tenant_id == tenant_id]
    return [schema.jobs.c.id == job_id, *owner]


def _matches(which: JobFilter) -> list[sa.ColumnElement[bool]]:
    table = schema.jobs
    _check_labels(which.labels)
    wanted = [table.c.labels[key].as_string() == value for key, value in which.labels.items()]
    if which.tenant_id is not None:
        wanted.append(table.c.tenant_id == which.tenant_id)
    if which.states:
        wanted.append(table.c.state.in_(which.states))
    if which.name_prefix:  # LIKE would ignore case in SQLite
        wanted.append(sa.func.substr(table.c.name, 1, len(which.name_prefix)) == which.name_prefix)
    return wanted


def _check_labels(labels: Mapping[str, str]) -> None:
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key):
            raise InvalidRequest(f"labels: key {key!r} must be 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit")
        if len(value) > MAX_LABEL_CHARACTERS or not value.isprintable():
            raise InvalidRequest(f"labels.{key}={value!r}: must be at most {MAX_LABEL_CHARACTERS} printable characters")


def _to_cursor(job: JobRecord) -> str:
    return base64.urlsafe_b64encode(json.dumps([job.created, job.id]).encode()).decode().rstrip("=")


def _parse_cursor(cursor: str) -> tuple[float, str]:
    try:
        created, job_id = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        return float(created), str(job_id)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise InvalidRequest(f"cursor={cursor[:64]!r}: must be one that an earlier page gave") from None
