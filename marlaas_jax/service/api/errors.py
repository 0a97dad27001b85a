"""How a failure is answered: one JSON shape, `{"error": {"kind", "message"}}`; `kind` names a class of marlaas_jax.errors."""

import logging
import math
import secrets
from typing import Any

import pydantic
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from marlaas_jax.config import explain
from marlaas_jax.errors import (
    CorruptFile,
    InvalidConfig,
    InvalidRequest,
    MarlaasError,
    NotAllowed,
    NotFound,
    QuotaExceeded,
    StorageError,
    UserError,
)
from marlaas_jax.service.api.json_body import Json, TooLarge
from marlaas_jax.service.sampling import NotServed

log = logging.getLogger(__name__)

QUOTA_RETRY_S = 60.0  # where waiting alone may not help
STATUSES: dict[type[MarlaasError], int] = {
    NotFound: 404,
    InvalidConfig: 422,
    InvalidRequest: 400,
    QuotaExceeded: 429,
    NotAllowed: 403,
    StorageError: 507,
    CorruptFile: 500,
}


class Refused(Exception):
    """A request that is answered with a status of HTTP's own."""

    def __init__(self, status: int, kind: type[UserError], message: str, retry_after_s: float | None = None):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.retry_after_s = retry_after_s


def respond(error: Exception, body_model: type[pydantic.BaseModel] | None = None) -> Response:
    """Returns the answer to a request that failed; what nobody foresaw is logged and told by a number only."""
    match error:
        case Refused():
            return _answer(error.status, error.kind.__name__, str(error), error.retry_after_s)
        case QuotaExceeded():
            wait_s = QUOTA_RETRY_S if error.retry_after_s is None else error.retry_after_s
            return _answer(429, "QuotaExceeded", str(error), wait_s)
        case NotServed():
            return _answer(error.status, "NotServed", str(error), error.retry_after_s)
        case RequestValidationError():
            return _invalid(error, body_model)
        case HTTPException():
            response = _answer(error.status_code, "NotFound" if error.status_code == 404 else "InvalidRequest", error.detail)
            response.headers.update(error.headers or {})
            return response
        case TooLarge():
            return _answer(413, "InvalidRequest", str(error))
        case UserError():
            status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 400)
            return _answer(status, type(error).__name__, str(error))
    number = secrets.token_hex(6)
    log.error("request failed number=%s", number, exc_info=error)
    return _answer(500, "InternalError", f"the service failed; its log tells more under number {number}")


async def on_error(request: Request, error: Exception) -> Response:
    """Answers what was raised outside of a route."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        error.detail = f"{request.method} {request.url.path}: no such route; /docs lists them"
    return respond(error)


def _invalid(error: RequestValidationError, body_model: type[pydantic.BaseModel] | None) -> Response:
    problem: dict[str, Any] = dict(error.errors()[0])
    place, *rest = problem["loc"]
    if place == "body" and body_model is not None:
        return _answer(422, "InvalidConfig", explain(body_model, problem | {"loc": tuple(rest) or ("body",)}))
    return _answer(422, "InvalidRequest", explain(pydantic.BaseModel, problem | {"loc": tuple(rest) or (place,)}))


def _answer(status: int, kind: str, message: str, retry_after_s: float | None = None) -> Response:
    response = Json({"error": {"kind": kind, "message": message}}, status)
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    return response
