"""API keys: whose they are, remembered for a few seconds, and how many requests a tenant may send."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

from marlaas_jax.store import tenants
from marlaas_jax.store.engine import Store
from marlaas_jax.store.tenants import Tenant

REMEMBERED_S = 5.0  # what another process changes in the store counts after that
MAX_REMEMBERED = 10_000


class Keys:
    """Finds the tenant of a key. Unknown keys are never remembered: each costs one look into the store's index of hashes."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic):
        self._store = store
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[Tenant, float]] = OrderedDict()  # by hash; the oldest first
        self._num_cleared = 0

    async def tenant(self, secret: str) -> Tenant | None:
        """Returns whose key it is; None: of nobody, revoked, or of a disabled tenant."""
        digest = hashlib.sha256(secret.encode("utf-8", "replace")).digest()
        if (found := self._known.get(digest)) is not None and self._clock() < found[1]:
            return found[0]
        num_cleared = self._num_cleared
        tenant = await self._store.aread(tenants.find_tenant, secret)
        self._known.pop(digest, None)
        if tenant is not None and num_cleared == self._num_cleared:  # else what was read may be out of date
            self._known[digest] = tenant, self._clock() + REMEMBERED_S
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        return tenant

    def clear(self) -> None:
        """Forgets all, after a key was revoked or a tenant changed."""
        self._known.clear()
        self._num_cleared += 1


def secret_of(authorization: str) -> str:
    """Returns the key in an Authorization header, "" if there is none."""
    scheme, _, secret = authorization.partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""
