"""Sweeps: submit, list, show, cancel. The trials are ordinary jobs, and everything that holds for jobs holds for them."""

import asyncio
from dataclasses import asdict

import sqlalchemy as sa
from fastapi import APIRouter, Response, Security
from pydantic import Field

from marlaas_jax.service.api.idempotency import keep
from marlaas_jax.service.api.jobs import Priority, decoded
from marlaas_jax.service.api.json_body import Json
from marlaas_jax.service.api.route import Caller, KeyRoute, OnceKey, TheApi, UploadRoute, bearer
from marlaas_jax.service.sweep_table import shown
from marlaas_jax.store.sweeps import SweepRecord
from marlaas_jax.sweep import SweepConfig

router = APIRouter(tags=["sweeps"], route_class=KeyRoute, dependencies=[Security(bearer)])
uploads = APIRouter(tags=["sweeps"], route_class=UploadRoute, dependencies=[Security(bearer)])


class SweepSubmission(SweepConfig):
    """A sweep file's fields, and what a service needs beside them."""

    priority: Priority = 0
    labels: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)  # relative path -> content in base64; paths in the job lead to these


@uploads.post("/sweeps", status_code=201)
async def submit(api: TheApi, caller: Caller, key: OnceKey, body: SweepSubmission) -> Response:
    """Takes a sweep in. Every trial is checked first; one that is wrong refuses the whole, in one sentence."""
    config = SweepConfig.model_construct(**{name: getattr(body, name) for name in SweepConfig.model_fields})
    files = await asyncio.to_thread(decoded, body.files)

    def also(connection: sa.Connection, record: SweepRecord) -> None:
        keep(connection, caller.id, key, 201, asdict(record) | {"trials": [], "best": None})

    record = await api.service.sweeps.submit(caller, config, files=files, priority=body.priority, labels=body.labels, also=also)
    return Json(await shown(api.service, record), 201)


@router.get("/sweeps")
async def list_sweeps(api: TheApi, caller: Caller) -> Response:
    """Lists the newest 200 sweeps without their trials; to an admin those of all tenants."""
    return Json({"sweeps": [asdict(record) for record in await api.service.sweeps.sweeps(caller)]})


@router.get("/sweeps/{sweep_id}")
async def show(api: TheApi, caller: Caller, sweep_id: str) -> Response:
    """Shows a sweep: each trial with what it changes, its job, step, state and metric, and which is the best."""
    return Json(await shown(api.service, await api.service.sweeps.sweep(caller, sweep_id)))


@router.post("/sweeps/{sweep_id}/cancel")
async def cancel(api: TheApi, caller: Caller, sweep_id: str) -> Response:
    """Ends a sweep and its trials that have not ended; what they trained stays."""
    return Json(await shown(api.service, await api.service.sweeps.cancel(caller, sweep_id)))
