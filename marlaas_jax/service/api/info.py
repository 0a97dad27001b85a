"""What a service is like: its model, where uploaded code runs, how a tenant's own environment workers join."""

from importlib import metadata

from fastapi import APIRouter, Response, Security

from marlaas_jax.errors import NotFound
from marlaas_jax.service.api.json_body import Json
from marlaas_jax.service.api.route import Caller, KeyRoute, TheApi, bearer
from marlaas_jax.workers.sandbox.sandbox import NO_SANDBOX

router = APIRouter(tags=["service"], route_class=KeyRoute, dependencies=[Security(bearer)])


@router.get("/info")
async def info(api: TheApi, caller: Caller) -> Response:
    """Shows the model and where uploaded code runs (`sandbox`): its mode, whether it has the network, and in words."""
    sandbox = api.service.sandbox
    runtime = api.service.controller.runtime
    return Json(
        {
            "version": metadata.version("marlaas-jax"),
            "model": runtime.model,
            "max_context": runtime.engine.max_context,
            "sandbox": {
                "mode": "none" if sandbox is None else sandbox.mode,
                "network": sandbox is None or sandbox.network,
                "text": NO_SANDBOX if sandbox is None else sandbox.text,
            },
        }
    )


@router.get("/env-workers")
async def env_workers(api: TheApi, caller: Caller) -> Response:
    """Shows how a tenant's own environment workers join: the address, the service's public key (CURVE, Z85); and who has."""
    service = api.service
    if service.tenant_workers is None:
        raise NotFound("this service takes no environment workers of tenants (env_workers_at)")
    address, connected = service.controller.env_workers(caller.id)
    return Json({"address": address, "server_key": service.tenant_workers.public_key, "connected": connected})
