"""What a job leaves: metrics, episodes, checkpoints, the adapter. Files are read in threads."""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response, Security
from fastapi.responses import StreamingResponse

from marlaas_jax.service import job_folder
from marlaas_jax.service.api.json_body import Json
from marlaas_jax.service.api.route import Caller, KeyRoute, TheApi, bearer
from marlaas_jax.service.job_folder import EpisodeFilter

router = APIRouter(tags=["jobs"], route_class=KeyRoute, dependencies=[Security(bearer)])

Step = Annotated[int | None, Query(ge=0, le=2**53)]
Reward = Annotated[float | None, Query(allow_inf_nan=False)]


@router.get("/jobs/{job_id}/metrics", response_class=StreamingResponse)
async def metrics(
    api: TheApi,
    caller: Caller,
    job_id: str,
    first_step: Annotated[int, Query(alias="from", ge=0, le=2**53)] = 0,
    last_step: Annotated[int | None, Query(alias="to", ge=0, le=2**53)] = None,
) -> Response:
    """Returns a line of JSON per trained batch between two steps, inclusive."""
    record = await api.service.job(caller, job_id)
    lines = job_folder.metrics_lines(api.service.folder(record.id), first_step, last_step)
    return StreamingResponse(lines, media_type="application/x-ndjson")


@router.get("/jobs/{job_id}/episodes")
async def episodes(
    api: TheApi,
    caller: Caller,
    job_id: str,
    step: Step = None,
    min_reward: Reward = None,
    max_reward: Reward = None,
    outcome: Literal["finished", "truncated", "failed", "timed_out", "cancelled"] | None = None,
    split: Literal["train", "eval"] | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.")] = None,
) -> Response:
    """Lists episodes, the oldest first. A page may be short and not the last: go on while `next_cursor` is not null."""
    record = await api.service.job(caller, job_id)
    groups = record.config["rollout"]["groups_per_batch"]
    which = EpisodeFilter(step, min_reward, max_reward, outcome, split)
    folder = api.service.folder(record.id)
    found, next_cursor = await asyncio.to_thread(job_folder.episodes, folder, which, groups, limit, cursor)
    return Json({"episodes": found, "next_cursor": next_cursor})


@router.get("/jobs/{job_id}/evaluations")
async def evaluations(api: TheApi, caller: Caller, job_id: str) -> Response:
    """Lists the evaluations on held-out items: step, version, reward_mean, reward_std_error, num_items."""
    record = await api.service.job(caller, job_id)
    found = await asyncio.to_thread(job_folder.evaluations, api.service.folder(record.id))
    return Json({"evaluations": found})


@router.get("/jobs/{job_id}/checkpoints")
async def checkpoints(api: TheApi, caller: Caller, job_id: str) -> Response:
    """Lists the committed steps that are kept, the oldest first."""
    record = await api.service.job(caller, job_id)
    found = await asyncio.to_thread(job_folder.checkpoints, api.service.folder(record.id))
    return Json({"checkpoints": found})


@router.get("/jobs/{job_id}/adapter", response_class=StreamingResponse)
async def adapter(api: TheApi, caller: Caller, job_id: str) -> Response:
    """Downloads the adapter of a job that has succeeded: a PEFT folder as a zip archive."""
    record = await api.service.job(caller, job_id)
    folder = api.service.folder(record.id)
    files = await asyncio.to_thread(job_folder.adapter_files, folder)
    named = {"Content-Disposition": f'attachment; filename="{record.name}.zip"'}
    return StreamingResponse(job_folder.zipped(files, folder / "adapter"), media_type="application/zip", headers=named)
