"""The HTTP application: all routes over one service, in the service's own event loop."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from importlib import metadata

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from marlaas_jax.service.api import events, health, info, job_data, jobs, metrics, openai, quotes, sweeps, tenants, usage
from marlaas_jax.service.api.errors import on_error
from marlaas_jax.service.api.route import Api
from marlaas_jax.service.service import Service
from marlaas_jax.store import idempotency

EXPIRE_INTERVAL_S = 3600.0


def create_app(service: Service) -> FastAPI:
    """Returns the application; `service` must be served in the same event loop."""
    api = Api(service)
    app = FastAPI(
        title="marlaas_jax",
        version=metadata.version("marlaas-jax"),
        description='Reinforcement learning of language models as a service. Errors: `{"error": {"kind", "message"}}`.',
        lifespan=_lifespan,
        redoc_url=None,
    )
    app.state.api = api
    for error in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error, on_error)
    parts = (jobs.router, jobs.uploads, job_data.router, events.router, sweeps.router, sweeps.uploads, tenants.router)
    for router in (*parts, usage.router, quotes.router, openai.router, info.router):
        app.include_router(router, prefix="/v1")
    for router in (health.router, metrics.router):
        app.include_router(router)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    api: Api = app.state.api
    await api.store.awrite(idempotency.abandon_all)
    tasks = [asyncio.create_task(api.lag.run()), asyncio.create_task(_expire_forever(api))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _expire_forever(api: Api) -> None:
    while True:
        await asyncio.sleep(EXPIRE_INTERVAL_S)
        await api.store.awrite(idempotency.expire, now=time.time())
