"""A POST with an Idempotency-Key is done once; a repeat is answered as the first was, also after a restart."""

import json
import time
from collections.abc import Awaitable, Callable

import sqlalchemy as sa
from fastapi import Response

from marlaas_jax.errors import InvalidRequest
from marlaas_jax.service.api.errors import Refused
from marlaas_jax.service.api.json_body import Json
from marlaas_jax.store import idempotency
from marlaas_jax.store.engine import Store

MAX_KEY_CHARACTERS = 255
UNDER_WAY_RETRY_S = 1.0


async def once(
    store: Store, tenant_id: str, key: str, route: str, digest: str, act: Callable[[], Awaitable[Response]]
) -> Response:
    """Returns what `act` answers, or what it answered before. A request that failed left nothing and may be tried again."""
    if not (0 < len(key) <= MAX_KEY_CHARACTERS and key.isascii() and key.isprintable()):
        raise InvalidRequest(f"Idempotency-Key={key[:80]!r}: must be 1 to {MAX_KEY_CHARACTERS} printable ASCII characters")
    match await store.awrite(idempotency.begin, tenant_id, key, route, digest, now=time.time()):
        case idempotency.Replay(status, response):
            answer = Json(response, status)
            answer.headers["Idempotency-Replayed"] = "true"
            return answer
        case idempotency.Conflict():
            raise Refused(409, InvalidRequest, f"Idempotency-Key={key!r}: was used for another request")
        case idempotency.InProgress():
            raise Refused(409, InvalidRequest, f"Idempotency-Key={key!r}: its request is under way", UNDER_WAY_RETRY_S)
    try:
        response = await act()
    except BaseException:
        store.write(idempotency.abandon, tenant_id, key)
        raise
    await store.awrite(idempotency.finish, tenant_id, key, status=response.status_code, response=_kept(response))
    return response


def keep(connection: sa.Connection, tenant_id: str, key: str | None, status: int, response: object) -> None:
    """Keeps the answer in the transaction of what it tells of, so that a crash leaves both or neither."""
    if key is not None:
        idempotency.finish(connection, tenant_id, key, status=status, response=response)


def _kept(response: Response) -> object:
    """Returns the body without a new API key: the store keeps only hashes of those."""
    body = json.loads(bytes(response.body))
    return body | {"secret": None} if isinstance(body, dict) and "secret" in body else body
