"""Metered use by tenant, job, UTC day and meter. Functions take a Connection; run them through Store.write and Store.read."""

import datetime
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from marlaas_jax.store import schema


@dataclass(frozen=True)
class UsageRecord:
    """What was used; the meter's name says the unit, as `sampled_tokens` or `device_s`."""

    tenant_id: str
    job_id: str  # "": of no job
    day: str  # of UTC, as 2026-12-01
    meter: str
    amount: float


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
    rows = [vars(UsageRecord(*key[:2], day, key[2], amount)) for key, amount in sorted(amounts.items())]
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
    bounds = [
        *([table.c.tenant_id == tenant_id] if tenant_id is not None else []),
        *([table.c.job_id == job_id] if job_id is not None else []),
        *([table.c.day >= first_day] if first_day is not None else []),
        *([table.c.day <= last_day] if last_day is not None else []),
    ]
    query = sa.select(table).where(*bounds).order_by(table.c.day, table.c.tenant_id, table.c.job_id, table.c.meter)
    return [UsageRecord(*row) for row in connection.execute(query)]


def used_on_day(connection: sa.Connection, *, day: str, meters: Collection[str]) -> dict[str, float]:
    """Returns each tenant's sum over the meters on a day: where a daily quota stands after a restart."""
    table = schema.usage
    query = (
        sa.select(table.c.tenant_id, sa.func.sum(table.c.amount))
        .where(table.c.day == day, table.c.meter.in_(meters))
        .group_by(table.c.tenant_id)
    )
    return {tenant_id: amount for tenant_id, amount in connection.execute(query)}
