"""What a service is like: its model, where uploaded code runs, how a tenant's own environment workers join."""

from importlib import metadata

from fastapi import APIRouter, Response, Security

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
