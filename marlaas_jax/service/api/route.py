"""What every route with a key shares: whose request it is, its limits, doing a POST once, and answers to what fails."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any

import pydantic
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from marlaas_jax.errors import InvalidRequest, NotAllowed, QuotaExceeded
from marlaas_jax.service.api.auth import Keys, secret_of
from marlaas_jax.service.api.errors import Refused, respond
from marlaas_jax.service.api.idempotency import once
from marlaas_jax.service.api.json_body import JsonRequest
from marlaas_jax.service.api.lag import LagMeter
from marlaas_jax.service.files import MAX_BYTES
from marlaas_jax.service.quotas import RateLimiter
from marlaas_jax.service.service import Service
from marlaas_jax.store.events import EventRecord
from marlaas_jax.store.tenants import Tenant

MAX_JSON_BYTES = 1 << 20
MAX_UPLOAD_BYTES = MAX_BYTES * 4 // 3 + MAX_JSON_BYTES  # files travel in base64
MAX_LARGE_BODIES = 4  # of one tenant at once
BODY_S = 120.0  # for all of a body to arrive
WITH_BODY = ("POST", "PATCH")
bearer = HTTPBearer(auto_error=False, description="An API key: `Authorization: Bearer mj-...`")


class Api:
    """What the routes work on."""

    def __init__(self, service: Service):
        self.service = service
        self.store = service.store
        self.keys = Keys(service.store)
        self.limiter = RateLimiter()
        self.lag = LagMeter()
        self.num_streams = 0
        self.last_sent: tuple[EventRecord, str] | None = None  # the newest event, and how streams send it
        self._receiving: Counter[str] = Counter()  # by tenant

    async def admit(self, request: Request) -> Tenant:
        """Returns whose request it is. Raises Refused without a good key or beyond the tenant's rate."""
        secret = secret_of(request.headers.get("authorization", ""))
        tenant = await self.keys.tenant(secret)
        if tenant is None:
            what = "is unknown or revoked" if secret else "is missing"
            raise Refused(401, NotAllowed, f"the API key {what}; send it as `Authorization: Bearer KEY`")
        quotas = self.service.quotas_of(tenant)
        wait_s = self.limiter.admit(tenant.id, quotas, time.monotonic())
        if wait_s is not None:
            message = f"requests_per_second={quotas.requests_per_second}: this tenant sends more"
            raise Refused(429, QuotaExceeded, message, wait_s)
        return tenant

    @contextlib.asynccontextmanager
    async def receiving(self, request: Request, tenant: Tenant) -> AsyncIterator[None]:
        """Bounds how long a body may take, and how many large ones of a tenant are in memory at once."""
        length = request.headers.get("content-length", "")
        size = int(length[:20]) if length.isdecimal() else 0
        is_large = size > MAX_JSON_BYTES or "transfer-encoding" in request.headers
        if is_large and self._receiving[tenant.id] >= MAX_LARGE_BODIES:
            raise Refused(429, QuotaExceeded, f"{MAX_LARGE_BODIES} large requests of this tenant are being received", 1.0)
        self._receiving[tenant.id] += is_large
        try:
            async with asyncio.timeout(BODY_S):
                yield
        except TimeoutError:
            raise Refused(408, InvalidRequest, f"body: was not complete after {BODY_S:.0f} s") from None
        finally:
            self._receiving[tenant.id] -= is_large
            if not self._receiving[tenant.id]:
                del self._receiving[tenant.id]


class KeyRoute(APIRoute):
    """A route that takes an API key."""

    max_bytes = MAX_JSON_BYTES

    def refusal(self, error: Exception, body_model: type[pydantic.BaseModel] | None) -> Response:
        """Returns how a failure is answered."""
        return respond(error, body_model)

    def is_done_once(self, request: JsonRequest) -> bool:
        """Whether an Idempotency-Key counts: an answer that comes bit by bit is not kept."""
        return request.method == "POST"

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the handler with everything that comes before and after it."""
        handle = super().get_route_handler()
        body_model = _body_model(self)

        async def answer(request: Request) -> Response:
            api: Api = request.app.state.api
            checked = JsonRequest(request.scope, request.receive)
            try:
                tenant = checked.state.tenant = await api.admit(checked)
                if request.method in WITH_BODY:
                    async with api.receiving(checked, tenant):
                        await checked.load(self.max_bytes)
                key = checked.headers.get("idempotency-key")
                checked.state.idempotency_key = key
                if key is None or not self.is_done_once(checked):
                    return await handle(checked)
                route = f"POST {request.url.path}"
                return await once(api.store, tenant.id, key, route, checked.digest, lambda: handle(checked))
            except Exception as error:  # the one broad catch: a fault of one request is that request's
                return self.refusal(error, body_model)

        return answer


class UploadRoute(KeyRoute):
    """A route that takes files too."""

    max_bytes = MAX_UPLOAD_BYTES


def _body_model(route: APIRoute) -> type[pydantic.BaseModel] | None:
    annotation = route.body_field.field_info.annotation if route.body_field is not None else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel) else None


def _api(request: Request) -> Api:
    return request.app.state.api


def _tenant(request: Request) -> Tenant:
    return request.state.tenant


def _once_key(request: Request) -> str | None:
    return request.state.idempotency_key


def _admin(tenant: "Caller") -> Tenant:
    if not tenant.is_admin:
        raise NotAllowed("this takes an admin's API key")
    return tenant


TheApi = Annotated[Api, Depends(_api)]
OnceKey = Annotated[str | None, Depends(_once_key)]
Caller = Annotated[Tenant, Depends(_tenant)]
Admin = Annotated[Tenant, Depends(_admin)]
