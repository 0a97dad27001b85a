"""Metered use by tenant, job, UTC day and meter. Functions take a Connection; run them through Store.write and Store.read."""

import datetime
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa

from marlaas_jax.store import schema

Dimension = Literal["day", "tenant", "job"]
MAX_PARAMETERS = 500  # of one statement


@dataclass(frozen=True)
class UsageRecord:
    """What was used; the meter's name says the unit, as `sampled_tokens` or `device_s`."""

    tenant_id: str
    job_id: str  # "": of no job
    day: str  # of UTC, as 2026-12-01
    meter: str
    amount: float


@dataclass(frozen=True)
class Bill:
    """What one source used: a job's step, or some requests of a process. Bills of a source are numbered upwards."""

    source: str
    seq: int
    amounts: Mapping[tuple[str, str, str], float]  # by (tenant id, job id, meter)
    time: float


@dataclass(frozen=True)
class UsageTotal:
    """What was used, all meters together; a field that was not asked to be told apart is None."""

    tenant_id: str | None
    job_id: str | None
    day: str | None
    amounts: Mapping[str, float]


def utc_day(now: float) -> str:
    """Returns the UTC day of a time, as 2026-12-01."""
    return datetime.datetime.fromtimestamp(now, datetime.UTC).date().isoformat()


def add_usage(connection: sa.Connection, amounts: Mapping[tuple[str, str, str], float], *, now: float) -> None:
    """Adds amounts by (tenant id, job id, meter) to the day of `now`; a negative one takes back. Raises ValueError.

    Belongs into the transaction that commits what was metered, so that neither is counted without the other.
    """
    for (tenant_id, job_id, meter), amount in amounts.items():
        if not math.isfinite(amount):
            raise ValueError(f"{meter}={amount} of job {job_id!r}, tenant {tenant_id!r}: must be finite")
    if not amounts:
        return
    day = utc_day(now)
    _add(connection, [UsageRecord(*key[:2], day, key[2], amount) for key, amount in sorted(amounts.items())])


def add_metered(connection: sa.Connection, bills: Sequence[Bill]) -> int:
    """Adds the bills whose number is beyond the last of their source and returns how many; the others were added before.

    A bill and the number that says so are written in one transaction, so none is doubled and none is half there. Raises
    ValueError for an amount that is not finite.
    """
    added = 0
    for bill in bills:
        statement = schema.insert(connection, schema.metered).values(source=bill.source, seq=bill.seq)
        changes = {"seq": statement.excluded.seq}
        is_newer = schema.metered.c.seq < statement.excluded.seq
        statement = statement.on_conflict_do_update(index_elements=["source"], set_=changes, where=is_newer)
        if connection.execute(statement.returning(schema.metered.c.seq)).first() is not None:
            add_usage(connection, bill.amounts, now=bill.time)
            added += 1
    return added


def billed_steps(connection: sa.Connection) -> dict[str, int]:
    """Returns the last step billed of each job that has not ended."""
    table = schema.metered
    is_live = sa.and_(schema.jobs.c.id == table.c.source, schema.jobs.c.ended.is_(None))
    return {
        source: seq for source, seq in connection.execute(sa.select(table.c.source, table.c.seq).join(schema.jobs, is_live))
    }


def reset_billed(connection: sa.Connection, job_id: str, step: int) -> None:
    """Lets a job's steps behind `step` be billed again."""
    table = schema.metered
    connection.execute(table.update().where(table.c.source == job_id, table.c.seq > step).values(seq=step))


def fold_usage(connection: sa.Connection, *, before_day: str, own_source: str) -> None:
    """Adds up the use of jobs before a day under their tenant, so that the table grows by tenants, not by jobs, for ever.

    Forgets also how far deleted jobs and other processes than `own_source` were billed.
    """
    table = schema.usage
    is_old = sa.and_(table.c.day < before_day, table.c.job_id != "")
    columns = (table.c.tenant_id, table.c.day, table.c.meter)
    query = sa.select(*columns, sa.func.sum(table.c.amount)).where(is_old).group_by(*columns)
    folded = [UsageRecord(tenant, "", day, meter, amount) for tenant, day, meter, amount in connection.execute(query)]
    if folded:
        connection.execute(table.delete().where(is_old))
        _add(connection, folded)
    source = schema.metered.c.source
    is_job = source.in_(sa.select(schema.jobs.c.id))
    connection.execute(schema.metered.delete().where(~is_job, source != own_source))


def _add(connection: sa.Connection, records: Sequence[UsageRecord]) -> None:
    rows = [vars(record) for record in records]
    statement = schema.insert(connection, schema.usage)
    total = schema.usage.c.amount + statement.excluded.amount
    connection.execute(
        statement.on_conflict_do_update(index_elements=list(schema.usage.primary_key), set_={"amount": total}), rows
    )


def list_usage(
    connection: sa.Connection,
    *,
    tenant_id: str | None,
    job_id: str | None = None,
    first_day: str | None = None,
    last_day: str | None = None,
) -> list[UsageRecord]:
    """Returns what a tenant used (None: all tenants) between two days inclusive (None: open), by day, tenant, job, meter."""
    table = schema.usage
    bounds = _bounds(tenant_id, job_id, first_day, last_day)
    query = sa.select(table).where(*bounds).order_by(table.c.day, table.c.tenant_id, table.c.job_id, table.c.meter)
    return [UsageRecord(*row) for row in connection.execute(query)]


def sum_usage(
    connection: sa.Connection,
    by: Collection[Dimension],
    *,
    tenant_id: str | None,
    job_id: str | None = None,
    first_day: str | None = None,
    last_day: str | None = None,
    limit: int,
) -> list[UsageTotal]:
    """Returns use added up, told apart by the dimensions in `by`, in their order: day, tenant, job; the bounds as above.

    At most `limit` totals and one more, which says that there are more.
    """
    table = schema.usage
    columns = {"day": table.c.day, "tenant": table.c.tenant_id, "job": table.c.job_id}
    chosen = [column for name, column in columns.items() if name in by]
    where = _bounds(tenant_id, job_id, first_day, last_day)
    query = sa.select(*chosen, table.c.meter, sa.func.sum(table.c.amount)).where(*where)
    query = query.group_by(*chosen, table.c.meter).order_by(*chosen, table.c.meter)
    totals: dict[tuple[str, ...], dict[str, float]] = {}
    for row in connection.execute(query):
        values = tuple(row)
        key, meter, amount = values[:-2], values[-2], values[-1]
        if key not in totals and len(totals) > limit:
            break
        totals.setdefault(key, {})[meter] = amount
    names = [name for name in columns if name in by]
    found = [(dict(zip(names, key, strict=True)), amounts) for key, amounts in totals.items()]
    return [UsageTotal(key.get("tenant"), key.get("job"), key.get("day"), amounts) for key, amounts in found]


def used_by_job(connection: sa.Connection, job_ids: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns what each of the jobs used so far, by meter; one without use is left out."""
    table, found = schema.usage, dict[str, dict[str, float]]()
    for start in range(0, len(job_ids), MAX_PARAMETERS):
        some = job_ids[start : start + MAX_PARAMETERS]
        query = sa.select(table.c.job_id, table.c.meter, sa.func.sum(table.c.amount)).where(table.c.job_id.in_(some))
        for job_id, meter, amount in connection.execute(query.group_by(table.c.job_id, table.c.meter)):
            found.setdefault(job_id, {})[meter] = amount
    return found


def used_on_day(connection: sa.Connection, *, day: str, meters: Collection[str]) -> dict[str, float]:
    """Returns each tenant's sum over the meters on a day: where a daily quota stands after a restart."""
    table = schema.usage
    query = (
        sa.select(table.c.tenant_id, sa.func.sum(table.c.amount))
        .where(table.c.day == day, table.c.meter.in_(meters))
        .group_by(table.c.tenant_id)
    )
    return {tenant_id: amount for tenant_id, amount in connection.execute(query)}


def _bounds(
    tenant_id: str | None, job_id: str | None, first_day: str | None, last_day: str | None
) -> list[sa.ColumnElement[bool]]:
    table = schema.usage
    return [
        *([table.c.tenant_id == tenant_id] if tenant_id is not None else []),
        *([table.c.job_id == job_id] if job_id is not None else []),
        *([table.c.day >= first_day] if first_day is not None else []),
        *([table.c.day <= last_day] if last_day is not None else []),
    ]
