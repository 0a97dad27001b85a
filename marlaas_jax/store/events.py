"""What happened, in order. Functions take a Connection; run them through Store.write and Store.read.

The number of an event rises and is never used twice, so a reader that knows the last one it saw goes on behind it. Trimming
drops the oldest; a reader that was away for longer than that finds them gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from marlaas_jax.store import schema

MAX_EVENTS = 1000  # of one read


@dataclass(frozen=True)
class EventRecord:
    """One event; `tenant_id` and `job_id` are "" where it concerns none."""

    seq: int
    time: float
    tenant_id: str
    job_id: str
    kind: str
    data: dict[str, Any]


def add_event(
    connection: sa.Connection, kind: str, data: Mapping[str, Any] = {}, *, now: float, tenant_id: str = "", job_id: str = ""
) -> EventRecord:
    """Appends an event and returns it with its number."""
    values = {"time": now, "tenant_id": tenant_id, "job_id": job_id, "kind": kind, "data": dict(data)}
    seq = connection.execute(schema.events.insert().values(values).returning(schema.events.c.seq)).scalar_one()
    return EventRecord(seq=seq, **values)


def list_events(
    connection: sa.Connection, *, after: int = 0, tenant_id: str | None, job_id: str | None = None, limit: int = MAX_EVENTS
) -> list[EventRecord]:
    """Returns the first events behind number `after`, of a tenant and of a job (None: of all), in order."""
    table = schema.events
    query = sa.select(table).where(table.c.seq > min(after, 2**63 - 1)).order_by(table.c.seq).limit(min(limit, MAX_EVENTS))
    if tenant_id is not None:
        query = query.where(table.c.tenant_id == tenant_id)
    if job_id is not None:
        query = query.where(table.c.job_id == job_id)
    return [EventRecord(*row) for row in connection.execute(query)]


def last_seq(connection: sa.Connection) -> int:
    """Returns the number of the newest event; 0: there is none."""
    return connection.execute(sa.select(sa.func.max(schema.events.c.seq))).scalar() or 0


def trim_events(connection: sa.Connection, *, keep_per_job: int, keep_total: int) -> int:
    """Deletes all but the newest events of each job and of all together; returns how many went."""
    table = schema.events
    crowded = sa.select(table.c.job_id).where(table.c.job_id != "").group_by(table.c.job_id)
    num_deleted = 0
    for job_id in connection.execute(crowded.having(sa.func.count() > keep_per_job)).scalars().all():
        num_deleted += _delete_but_newest(connection, keep_per_job, table.c.job_id == job_id)
    return num_deleted + _delete_but_newest(connection, keep_total, sa.true())


def _delete_but_newest(connection: sa.Connection, keep: int, which: sa.ColumnElement[bool]) -> int:
    seq = schema.events.c.seq
    newest_to_go = connection.execute(sa.select(seq).where(which).order_by(seq.desc()).limit(1).offset(keep)).scalar()
    if newest_to_go is None:
        return 0
    return connection.execute(schema.events.delete().where(which, seq <= newest_to_go)).rowcount
