"""Idempotency keys: a POST that a client repeats is done once. Functions take a Connection; run them through Store.write.

A request calls `begin`, acts on Fresh, and ends with `finish` or `abandon`. What it changes in the store belongs into the
transaction of its `finish`, or of its `begin` and `finish` both: then a crash leaves all of it or nothing. A service that
starts calls `abandon_all`, since the requests that were under way died with the process before it.
"""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from marlaas_jax.store import schema

KEPT_S = 24 * 3600.0


@dataclass(frozen=True)
class Fresh:
    """The key is new: act on the request."""


@dataclass(frozen=True)
class Replay:
    """The request was done: this is what it was answered."""

    status: int
    response: Any


@dataclass(frozen=True)
class InProgress:
    """The same request is being worked on."""


@dataclass(frozen=True)
class Conflict:
    """The key was used for another request."""


def begin(
    connection: sa.Connection, tenant_id: str, key: str, route: str, request_hash: str, *, now: float
) -> Fresh | Replay | InProgress | Conflict:
    """Says what to do with a request, and takes the key if it is new. A key is its tenant's own and counts for all routes."""
    table = schema.idempotency
    is_key = _is_key(tenant_id, key)
    connection.execute(table.delete().where(is_key, _is_expired(now)))
    values = {"tenant_id": tenant_id, "key": key, "route": route, "request_hash": request_hash, "created": now}
    if schema.insert_new(connection, table, values):
        return Fresh()
    row = connection.execute(sa.select(table).where(is_key)).one()
    if (row.route, row.request_hash) != (route, request_hash):
        return Conflict()
    return InProgress() if row.status is None else Replay(row.status, row.response)


def finish(connection: sa.Connection, tenant_id: str, key: str, *, status: int, response: Any) -> None:
    """Keeps the answer for whoever repeats the request; `response` is anything JSON can hold."""
    table = schema.idempotency
    connection.execute(table.update().where(_is_key(tenant_id, key)).values(status=status, response=response))


def abandon(connection: sa.Connection, tenant_id: str, key: str) -> None:
    """Gives the key of a request that failed back, so that it may be tried again."""
    connection.execute(schema.idempotency.delete().where(_is_key(tenant_id, key), schema.idempotency.c.status.is_(None)))


def abandon_all(connection: sa.Connection) -> int:
    """Gives back the keys of all requests under way; returns how many there were."""
    return connection.execute(schema.idempotency.delete().where(schema.idempotency.c.status.is_(None))).rowcount


def expire(connection: sa.Connection, *, now: float) -> int:
    """Deletes keys older than a day; returns how many there were."""
    return connection.execute(schema.idempotency.delete().where(_is_expired(now))).rowcount


def _is_key(tenant_id: str, key: str) -> sa.ColumnElement[bool]:
    return sa.and_(schema.idempotency.c.tenant_id == tenant_id, schema.idempotency.c.key == key)


def _is_expired(now: float) -> sa.ColumnElement[bool]:
    created = schema.idempotency.c.created
    return sa.or_(created < now - KEPT_S, created > now + KEPT_S)  # the latter after a clock was set back
