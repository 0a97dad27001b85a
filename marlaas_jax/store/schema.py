"""The tables. Times are float seconds since 1970 by the caller's clock; JSON is strict.

A tenant is never deleted, only disabled: what it used stays on the bill. Events and usage name tenants and jobs without a
foreign key, since they may concern neither (then "") and outlive a deleted job.
"""

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from marlaas_jax.errors import InvalidConfig

VERSION = 1


class Text(sa.TypeDecorator[str]):
    """Text that every database takes: a NUL or half a surrogate pair becomes U+FFFD or "?"."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else value.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


METADATA = sa.MetaData()
JSON = sa.JSON(none_as_null=True)
SEQUENCE = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite counts up only in a column of type INTEGER

schema_version = sa.Table("schema_version", METADATA, sa.Column("version", sa.Integer, primary_key=True))

tenants = sa.Table(
    "tenants",
    METADATA,
    sa.Column("id", Text, primary_key=True),
    sa.Column("name", Text, nullable=False, unique=True),
    sa.Column("is_admin", sa.Boolean, nullable=False),
    sa.Column("weight", sa.Double, nullable=False),
    sa.Column("quotas", JSON, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("is_disabled", sa.Boolean, nullable=False),
)

api_keys = sa.Table(
    "api_keys",
    METADATA,
    sa.Column("id", Text, primary_key=True),
    sa.Column("tenant_id", Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
    sa.Column("hash", Text, nullable=False, unique=True),
    sa.Column("prefix", Text, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("revoked", sa.Double),
)

jobs = sa.Table(
    "jobs",
    METADATA,
    sa.Column("id", Text, primary_key=True),
    sa.Column("tenant_id", Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("name", Text, nullable=False),
    sa.Column("config", JSON, nullable=False),
    sa.Column("state", Text, nullable=False, index=True),
    sa.Column("kind", Text, nullable=False),
    sa.Column("reason", Text, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("steps", sa.BigInteger, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("started", sa.Double),
    sa.Column("ended", sa.Double),
    sa.Column("updated", sa.Double, nullable=False),
    sa.Column("parent", Text),
    sa.Column("labels", JSON, nullable=False),
    sa.Index("jobs_newest_of_tenant", "tenant_id", "created", "id"),
    sa.Index("jobs_newest", "created", "id"),
)

sweeps = sa.Table(
    "sweeps",
    METADATA,
    sa.Column("id", Text, primary_key=True),
    sa.Column("tenant_id", Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("name", Text, nullable=False),
    sa.Column("config", JSON, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("labels", JSON, nullable=False),
    sa.Column("state", Text, nullable=False, index=True),
    sa.Column("num_trials", sa.Integer, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("ended", sa.Double),
    sa.Index("sweeps_newest_of_tenant", "tenant_id", "created", "id"),
)

trials = sa.Table(  # a job's is named without a foreign key: it outlives a deleted job
    "trials",
    METADATA,
    sa.Column("sweep_id", Text, sa.ForeignKey("sweeps.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("name", Text, nullable=False),
    sa.Column("values", JSON, nullable=False),
    sa.Column("job_id", Text),
    sa.Column("rungs", JSON, nullable=False),
    sa.Column("stopped_at", sa.BigInteger),
    sa.Column("error", Text, nullable=False),
)

events = sa.Table(
    "events",
    METADATA,
    sa.Column("seq", SEQUENCE, primary_key=True, autoincrement=True),
    sa.Column("time", sa.Double, nullable=False),
    sa.Column("tenant_id", Text, nullable=False),
    sa.Column("job_id", Text, nullable=False),
    sa.Column("kind", Text, nullable=False),
    sa.Column("data", JSON, nullable=False),
    sa.Index("events_of_tenant", "tenant_id", "seq"),
    sa.Index("events_of_job", "job_id", "seq"),
    sqlite_autoincrement=True,  # the number of a trimmed event is never given to another
)

idempotency = sa.Table(
    "idempotency",
    METADATA,
    sa.Column("tenant_id", Text, primary_key=True),
    sa.Column("key", Text, primary_key=True),
    sa.Column("route", Text, nullable=False),
    sa.Column("request_hash", Text, nullable=False),
    sa.Column("status", sa.Integer),  # NULL while the request runs
    sa.Column("response", JSON),
    sa.Column("created", sa.Double, nullable=False, index=True),
)

usage = sa.Table(
    "usage",
    METADATA,
    sa.Column("tenant_id", Text, primary_key=True),
    sa.Column("job_id", Text, primary_key=True),
    sa.Column("day", Text, primary_key=True),  # of UTC, as 2026-12-01
    sa.Column("meter", Text, primary_key=True),
    sa.Column("amount", sa.Double, nullable=False),
    sa.Index("usage_of_day", "day", "meter"),
)

metered = sa.Table(
    "metered",
    METADATA,
    sa.Column("source", Text, primary_key=True),  # a job, or a process that bills requests
    sa.Column("seq", sa.BigInteger, nullable=False),  # of its last bill in `usage`
)


def to_json(value: Any) -> str:
    """Returns strict JSON; a number that is not finite becomes null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), separators=(",", ":"))


def insert(connection: sa.Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """Returns the database's own INSERT, which can say what happens on a conflict."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


def insert_new(connection: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> bool:
    """Adds a row unless one with the same key or unique value is there; says whether it did."""
    statement = insert(connection, table).values(values).on_conflict_do_nothing().returning(*table.primary_key)
    return connection.execute(statement).first() is not None


def prepare(connection: sa.Connection, place: str) -> None:
    """Makes the tables in an empty database, and those that came later in an older one.

    Raises InvalidConfig for one that this version cannot use. A table that is only added leaves VERSION as it is.
    """
    if connection.dialect.name == "postgresql":  # two services that start at once; SQLite has BEGIN IMMEDIATE for that
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(0x6D61726C616173)))
    found = set(sa.inspect(connection).get_table_names()) & set(METADATA.tables)
    if not found:
        METADATA.create_all(connection)
        connection.execute(schema_version.insert().values(version=VERSION))
    elif schema_version.name not in found:
        raise InvalidConfig(f"db={place}: holds a table {min(found)!r} of something else; name an empty database")
    elif (version := connection.execute(sa.select(sa.func.max(schema_version.c.version))).scalar()) != VERSION:
        raise InvalidConfig(f"db={place}: its schema is version {version}; this marlaas_jax reads version {VERSION}")
    else:
        METADATA.create_all(connection)  # tables that were added since; what a table looks like changes with the version only
