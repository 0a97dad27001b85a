"""Whether the service lives and can train; no key needed."""

from fastapi import APIRouter, Request, Response

from marlaas_jax.service.api.json_body import Json

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Response:
    """Says that the event loop answers."""
    return Json({"status": "ok"})


@router.get("/readyz", responses={503: {"description": "The device's process is not there yet."}})
async def readyz(request: Request) -> Response:
    """Says whether the device's process is there; jobs may be submitted before that."""
    is_ready = request.app.state.api.service.controller.has_device
    return Json({"status": "ready" if is_ready else "the device's process is starting"}, 200 if is_ready else 503)
