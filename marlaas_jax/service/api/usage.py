"""What was used, what it costs, and how evenly the service was shared. A tenant sees its own; an admin all."""

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response, Security

from marlaas_jax.errors import InvalidRequest
from marlaas_jax.service.api.json_body import Json
from marlaas_jax.service.api.route import Caller, KeyRoute, TheApi, bearer
from marlaas_jax.service.fair_share import MAX_WINDOW_S, WINDOW_S
from marlaas_jax.service.prices import bill
from marlaas_jax.store import usage as usage_table
from marlaas_jax.store.tenants import Tenant, list_tenants

router = APIRouter(tags=["usage"], route_class=KeyRoute, dependencies=[Security(bearer)])

MAX_ROWS = 10_000
Day = Annotated[str | None, Query(pattern=r"^\d{4}-\d{2}-\d{2}$", description="Of UTC, as 2026-12-01; inclusive.")]
By = Annotated[
    list[Literal["day", "job", "tenant"]] | None, Query(description="What is told apart; may be given more than once.")
]


@router.get("/usage")
async def usage(
    api: TheApi,
    caller: Caller,
    first_day: Day = None,
    last_day: Day = None,
    job: str | None = None,
    by: By = None,
) -> Response:
    """Adds up what was used and its cost by the present price list, by day and job (an admin's: by tenant) unless told else.

    Of what was used in the last second or two, some may be missing.
    """
    dimensions = tuple(by or (("tenant",) if caller.is_admin else ("day", "job")))

    def read(connection: Any) -> tuple[list[usage_table.UsageTotal], dict[str, str]]:
        found = usage_table.sum_usage(
            connection, dimensions, tenant_id=None if caller.is_admin else caller.id, job_id=job, first_day=first_day,
            last_day=last_day, limit=MAX_ROWS,
        )  # fmt: skip
        return found, names_of(connection, caller)

    found, names = await api.store.aread(read)
    if len(found) > MAX_ROWS:
        raise InvalidRequest(f"by={','.join(dimensions)}: gives more than {MAX_ROWS} rows; ask for fewer days or dimensions")
    return Json(statement(api, found, names, dimensions))


@router.get("/fairness")
async def fairness(
    api: TheApi,
    caller: Caller,
    window_s: Annotated[float, Query(ge=1, le=MAX_WINDOW_S, description="Of the shares and the index.")] = WINDOW_S,
) -> Response:
    """Says how long a tenant's work waited in each stage and what it was given, and how even the shares of all were.

    Shares are of the device's seconds, among the tenants that had something waiting for it all through the window.
    """
    names = await api.store.aread(names_of, caller)
    scope = None if caller.is_admin else caller.id
    return Json(api.service.fair_share.document(time.monotonic(), scope, names, window_s))


def names_of(connection: Any, caller: Tenant) -> dict[str, str]:
    """Returns the names of the tenants that the caller may see, by id."""
    return {tenant.id: tenant.name for tenant in (list_tenants(connection) if caller.is_admin else [caller])}


def statement(
    api: Any, found: Sequence[usage_table.UsageTotal], names: dict[str, str], dimensions: Sequence[str]
) -> dict[str, Any]:
    """Returns rows and their sum as they are shown."""
    prices = api.service.config.prices
    rows, total = [], dict[str, float]()
    for row in found:
        shown: dict[str, Any] = {}
        if "day" in dimensions:
            shown["day"] = row.day
        if "tenant" in dimensions and row.tenant_id is not None:
            shown |= {"tenant_id": row.tenant_id, "tenant": names.get(row.tenant_id, row.tenant_id)}
        if "job" in dimensions:
            shown["job_id"] = row.job_id
        rows.append(shown | bill(prices, row.amounts))
        for meter, amount in row.amounts.items():
            total[meter] = total.get(meter, 0.0) + amount
    shown_prices = None if prices is None else prices.model_dump(mode="json")
    return {"usage": rows, "total": bill(prices, total), "prices": shown_prices}
