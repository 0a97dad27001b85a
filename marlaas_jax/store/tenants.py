"""Tenants and their API keys. Functions take a Connection; run them through Store.write and Store.read."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from marlaas_jax.errors import InvalidRequest, NotFound
from marlaas_jax.store import ids, schema

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PREFIX_CHARACTERS = 8  # of a key that stay readable, so that its owner can tell keys apart


@dataclass(frozen=True)
class Tenant:
    """Who owns jobs, adapters and keys."""

    id: str
    name: str
    is_admin: bool  # sees and does everything
    weight: float  # share of what tenants compete for
    quotas: dict[str, Any]  # fields of service.quotas.Quotas that differ from the service's defaults
    created: float
    is_disabled: bool  # its keys are refused


@dataclass(frozen=True)
class ApiKey:
    """A key without its secret."""

    id: str
    tenant_id: str
    prefix: str
    created: float
    revoked: float | None  # when; None: in force


def create_tenant(
    connection: sa.Connection,
    name: str,
    *,
    now: float,
    is_admin: bool = False,
    weight: float = 1.0,
    quotas: Mapping[str, Any] = {},
) -> Tenant:
    """Adds a tenant. Raises InvalidRequest if the name is taken or a value is not allowed."""
    if not NAME.fullmatch(name):
        raise InvalidRequest(f"name={name!r}: must be 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit")
    tenant = Tenant(ids.new_id("ten_"), name, is_admin, _checked(weight), dict(quotas), now, is_disabled=False)
    if not schema.insert_new(connection, schema.tenants, vars(tenant)):
        raise InvalidRequest(f"name={name!r}: another tenant has this name")
    return tenant


def get_tenant(connection: sa.Connection, id_or_name: str) -> Tenant:
    """Returns a tenant. Raises NotFound."""
    by_either = sa.or_(schema.tenants.c.id == id_or_name, schema.tenants.c.name == id_or_name)
    row = connection.execute(sa.select(schema.tenants).where(by_either)).first()
    if row is None:
        raise NotFound(f"{id_or_name}: no such tenant")
    return Tenant(*row)


def list_tenants(connection: sa.Connection) -> list[Tenant]:
    """Returns all tenants by name."""
    return [Tenant(*row) for row in connection.execute(sa.select(schema.tenants).order_by(schema.tenants.c.name))]


def update_tenant(
    connection: sa.Connection,
    tenant_id: str,
    *,
    weight: float | None = None,
    quotas: Mapping[str, Any] | None = None,
    is_disabled: bool | None = None,
) -> Tenant:
    """Changes what is not None and returns the tenant. Raises NotFound or InvalidRequest."""
    changes: dict[str, Any] = {}
    if weight is not None:
        changes["weight"] = _checked(weight)
    if quotas is not None:
        changes["quotas"] = dict(quotas)
    if is_disabled is not None:
        changes["is_disabled"] = is_disabled
    if changes:
        connection.execute(schema.tenants.update().where(schema.tenants.c.id == tenant_id).values(changes))
    return get_tenant(connection, tenant_id)


def create_key(connection: sa.Connection, tenant_id: str, *, now: float) -> tuple[ApiKey, str]:
    """Adds a key; returns it with its secret, which cannot be had again. Raises NotFound."""
    tenant = get_tenant(connection, tenant_id)
    secret = ids.new_secret()
    key = ApiKey(ids.new_id("key_"), tenant.id, secret[:PREFIX_CHARACTERS], now, revoked=None)
    connection.execute(schema.api_keys.insert().values(vars(key) | {"hash": ids.hash_secret(secret)}))
    return key, secret


def list_keys(connection: sa.Connection, tenant_id: str) -> list[ApiKey]:
    """Returns a tenant's keys, the oldest first, the revoked ones too."""
    table = schema.api_keys
    query = sa.select(*_key_columns()).where(table.c.tenant_id == tenant_id).order_by(table.c.created, table.c.id)
    return [ApiKey(*row) for row in connection.execute(query)]


def revoke_key(connection: sa.Connection, key_id: str, *, tenant_id: str | None, now: float) -> ApiKey:
    """Ends a key of the tenant (None: of any) for good. Raises NotFound."""
    table = schema.api_keys
    is_meant = sa.and_(table.c.id == key_id, sa.true() if tenant_id is None else table.c.tenant_id == tenant_id)
    connection.execute(table.update().where(is_meant, table.c.revoked.is_(None)).values(revoked=now))
    row = connection.execute(sa.select(*_key_columns()).where(is_meant)).first()
    if row is None:
        raise NotFound(f"{key_id}: no such key")
    return ApiKey(*row)


def find_tenant(connection: sa.Connection, secret: str) -> Tenant | None:
    """Returns whose key it is; None: of nobody, revoked, or of a disabled tenant."""
    return find_tenant_by_hash(connection, ids.hash_secret(secret))


def find_tenant_by_hash(connection: sa.Connection, digest: str) -> Tenant | None:
    """Does as `find_tenant` for a key of which only the hash is known."""
    query = (
        sa.select(schema.tenants)
        .join(schema.api_keys, schema.api_keys.c.tenant_id == schema.tenants.c.id)
        .where(schema.api_keys.c.hash == digest, schema.api_keys.c.revoked.is_(None))
        .where(schema.tenants.c.is_disabled.is_(sa.false()))
    )
    row = connection.execute(query).first()
    return None if row is None else Tenant(*row)


def _key_columns() -> list[sa.Column[Any]]:
    return [column for column in schema.api_keys.c if column.name != "hash"]


def _checked(weight: float) -> float:
    if not (math.isfinite(weight) and weight > 0):
        raise InvalidRequest(f"weight={weight}: must be above 0")
    return weight
