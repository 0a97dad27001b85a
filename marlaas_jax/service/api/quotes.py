"""What a job would take and cost."""

import asyncio

from fastapi import APIRouter, Response, Security

from marlaas_jax.config import JobConfig
from marlaas_jax.service.api.jobs import Submission, decoded
from marlaas_jax.service.api.json_body import Json
from marlaas_jax.service.api.route import Caller, TheApi, UploadRoute, bearer

router = APIRouter(tags=["usage"], route_class=UploadRoute, dependencies=[Security(bearer)])


@router.post("/quotes")
async def quote(api: TheApi, caller: Caller, body: Submission) -> Response:
    """Estimates time and cost of a job, each with a band, without queueing anything; takes what `POST /v1/jobs` takes.

    Refuses what that would refuse, quotas apart. `basis` is "default" where this service has measured too little.
    """
    config = JobConfig.model_construct(**{name: getattr(body, name) for name in JobConfig.model_fields})
    files = await asyncio.to_thread(decoded, body.files)
    found = await api.service.quote(caller, config, files=files)
    return Json(found.document(api.service.config.prices))
