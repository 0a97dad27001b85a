"""Sweeps and their trials. Functions take a Connection; run them through Store.write and Store.read.

`tenant_id` says who asks, as for jobs. A trial names its job from the transaction on that adds the job.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sqlalchemy as sa

from marlaas_jax.errors import InvalidRequest, NotFound
from marlaas_jax.store import schema
from marlaas_jax.store.jobs import JobRecord

SweepState = Literal["running", "succeeded", "cancelled"]
MAX_LISTED = 200


@dataclass(frozen=True)
class SweepRecord:
    """A sweep as the store keeps it; times in seconds since 1970."""

    id: str
    tenant_id: str
    name: str
    config: dict[str, Any]
    priority: int
    labels: dict[str, str]
    state: SweepState
    num_trials: int
    created: float
    ended: float | None


@dataclass(frozen=True)
class Trial:
    """One variant of a sweep's job."""

    sweep_id: str
    number: int  # from 1
    name: str
    values: dict[str, Any]  # dotted key -> value
    job_id: str | None = None  # None: not queued yet
    rungs: dict[str, float] = field(default_factory=dict)  # steps of a rung -> the metric there
    stopped_at: int | None = None  # the rung at which it was found worse than others
    error: str = ""  # why it could not be queued


def create_sweep(connection: sa.Connection, sweep: SweepRecord, trials: Sequence[Trial]) -> None:
    """Adds a sweep of which no trial is queued."""
    connection.execute(schema.sweeps.insert().values(vars(sweep)))
    connection.execute(schema.trials.insert(), [vars(trial) for trial in trials])


def get_sweep(connection: sa.Connection, sweep_id: str, *, tenant_id: str | None) -> SweepRecord:
    """Returns a sweep. Raises NotFound."""
    row = connection.execute(sa.select(schema.sweeps).where(*_is_sweep(sweep_id, tenant_id))).first()
    if row is None:
        raise NotFound(f"{sweep_id}: no such sweep")
    return SweepRecord(*row)


def list_sweeps(connection: sa.Connection, *, tenant_id: str | None, limit: int = MAX_LISTED) -> list[SweepRecord]:
    """Returns the newest sweeps."""
    table = schema.sweeps
    is_meant = sa.true() if tenant_id is None else table.c.tenant_id == tenant_id
    query = sa.select(table).where(is_meant).order_by(table.c.created.desc(), table.c.id.desc()).limit(limit)
    return [SweepRecord(*row) for row in connection.execute(query)]


def running_sweeps(connection: sa.Connection) -> list[SweepRecord]:
    """Returns every sweep that has not ended, the oldest first."""
    table = schema.sweeps
    query = sa.select(table).where(table.c.state == "running").order_by(table.c.created, table.c.id)
    return [SweepRecord(*row) for row in connection.execute(query)]


def list_trials(connection: sa.Connection, sweep_id: str) -> list[Trial]:
    """Returns the trials of a sweep, by number."""
    table = schema.trials
    query = sa.select(table).where(table.c.sweep_id == sweep_id).order_by(table.c.number)
    return [Trial(*row) for row in connection.execute(query)]


def update_trial(
    connection: sa.Connection,
    sweep_id: str,
    number: int,
    *,
    job_id: str | None = None,
    rungs: Mapping[str, float] | None = None,
    stopped_at: int | None = None,
    error: str | None = None,
) -> None:
    """Changes what is not None."""
    given = {"job_id": job_id, "rungs": rungs, "stopped_at": stopped_at, "error": error}
    changes = {name: value for name, value in given.items() if value is not None}
    is_trial = sa.and_(schema.trials.c.sweep_id == sweep_id, schema.trials.c.number == number)
    connection.execute(schema.trials.update().where(is_trial).values(changes))


def end_sweep(connection: sa.Connection, sweep_id: str, state: SweepState, *, tenant_id: str | None, now: float) -> SweepRecord:
    """Ends a running sweep and returns it. Raises NotFound, or InvalidRequest for one that has ended."""
    statement = schema.sweeps.update().where(*_is_sweep(sweep_id, tenant_id), schema.sweeps.c.state == "running")
    was_ended = connection.execute(statement.values(state=state, ended=now)).rowcount == 1
    sweep = get_sweep(connection, sweep_id, tenant_id=tenant_id)
    if not was_ended:
        raise InvalidRequest(f"{sweep_id}: state={sweep.state!r}; only a sweep that runs can be ended")
    return sweep


def jobs_of_trials(connection: sa.Connection, sweep_id: str) -> dict[str, JobRecord]:
    """Returns the jobs of a sweep's trials that there are, by id."""
    ids = sa.select(schema.trials.c.job_id).where(schema.trials.c.sweep_id == sweep_id)
    query = sa.select(schema.jobs).where(schema.jobs.c.id.in_(ids))
    return {row.id: JobRecord(*row) for row in connection.execute(query)}


def _is_sweep(sweep_id: str, tenant_id: str | None) -> list[sa.ColumnElement[bool]]:
    owner = [] if tenant_id is None else [schema.sweeps.c.tenant_id == tenant_id]
    return [schema.sweeps.c.id == sweep_id, *owner]
