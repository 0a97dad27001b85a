"""Tenants and their keys; for admins."""

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Response, Security
from pydantic import Field

from marlaas_jax.config import Section
from marlaas_jax.service.api.json_body import Json
from marlaas_jax.service.api.route import Admin, KeyRoute, TheApi, bearer
from marlaas_jax.service.quotas import Quotas
from marlaas_jax.store import tenants as tenant_table

router = APIRouter(tags=["tenants"], route_class=KeyRoute, dependencies=[Security(bearer)])

Weight = Annotated[float, Field(gt=0, le=1e6)]


class NewTenant(Section):
    """A tenant to add."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    is_admin: bool = False
    weight: Weight = 1.0  # share of what tenants compete for
    quotas: Quotas = Quotas()  # what differs from the service's own


class TenantChanges(Section):
    """What to change of a tenant; what is left out stays."""

    weight: Weight | None = None
    quotas: Quotas | None = None  # replaces all that was set before
    is_disabled: bool | None = None  # its keys are refused; its jobs go on


def _set_of(quotas: Quotas | None) -> dict[str, Any] | None:
    return None if quotas is None else quotas.model_dump(mode="json", exclude_unset=True)


@router.post("/tenants", status_code=201)
async def create_tenant(api: TheApi, admin: Admin, body: NewTenant) -> Response:
    """Adds a tenant; it has no key yet."""
    tenant = await api.store.awrite(
        tenant_table.create_tenant, body.name, now=time.time(), is_admin=body.is_admin, weight=body.weight,
        quotas=_set_of(body.quotas) or {},
    )  # fmt: skip
    return Json(asdict(tenant), 201)


@router.get("/tenants")
async def list_tenants(api: TheApi, admin: Admin) -> Response:
    """Lists all tenants by name, with their keys' readable beginnings."""

    def read(connection: Any) -> list[dict[str, Any]]:
        return [
            asdict(tenant) | {"keys": [asdict(key) for key in tenant_table.list_keys(connection, tenant.id)]}
            for tenant in tenant_table.list_tenants(connection)
        ]

    return Json({"tenants": await api.store.aread(read)})


@router.patch("/tenants/{tenant_id}")
async def change_tenant(api: TheApi, admin: Admin, tenant_id: str, body: TenantChanges) -> Response:
    """Changes a tenant's weight or quotas, or refuses its keys."""
    tenant = await api.store.awrite(
        tenant_table.update_tenant, tenant_id, weight=body.weight, quotas=_set_of(body.quotas), is_disabled=body.is_disabled
    )
    api.keys.clear()
    api.service.tenant_changed(tenant)
    return Json(asdict(tenant))


@router.post("/tenants/{tenant_id}/keys", status_code=201)
async def create_key(api: TheApi, admin: Admin, tenant_id: str) -> Response:
    """Makes an API key; `secret` is shown this once, also not to a repeat with the same Idempotency-Key."""
    key, secret = await api.store.awrite(tenant_table.create_key, tenant_id, now=time.time())
    return Json(asdict(key) | {"secret": secret}, 201)


@router.delete("/keys/{key_id}")
async def revoke_key(api: TheApi, admin: Admin, key_id: str) -> Response:
    """Ends a key at once and for good."""
    key = await api.store.awrite(tenant_table.revoke_key, key_id, tenant_id=None, now=time.time())
    api.keys.clear()
    return Json(asdict(key))
