"""How tenants' own environment workers join a service: its key pair, and whose API key is whose."""

import json
import os
from pathlib import Path

import zmq

from marlaas_jax.errors import CorruptFile, StorageError
from marlaas_jax.store import tenants
from marlaas_jax.store.engine import Store
from marlaas_jax.store.ids import hash_secret

KEY_FILE = "workers.key"


class TenantWorkers:
    """Answers the controller's door (workers.controller_doors.Strangers) from the store."""

    def __init__(self, address: str, data_dir: Path, store: Store):
        self.address = address
        self.key_pair = key_pair(data_dir / KEY_FILE)
        self._store = store

    @property
    def public_key(self) -> str:
        """What a worker must know of this service, in Z85."""
        return self.key_pair[0].decode()

    async def identify(self, api_key: str) -> tuple[str, str] | None:
        """Returns (the tenant's id, the key's hash), None for a key that is unknown or revoked."""
        digest = hash_secret(api_key)
        tenant = await self._store.aread(tenants.find_tenant_by_hash, digest)
        return None if tenant is None else (tenant.id, digest)

    async def still_valid(self, credential: str) -> bool:
        """Whether a key that was good still is."""
        return await self._store.aread(tenants.find_tenant_by_hash, credential) is not None


def key_pair(path: Path) -> tuple[bytes, bytes]:
    """Returns the service's CURVE keys, public and secret, in Z85; makes them at the first start, for this user only.

    Raises CorruptFile or StorageError.
    """
    try:
        if not path.exists():
            public, secret = zmq.curve_keypair()
            temporary = path.with_suffix(".tmp")
            temporary.unlink(missing_ok=True)
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump({"public": public.decode(), "secret": secret.decode()}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        found = json.loads(path.read_text())
        public, secret = found["public"].encode(), found["secret"].encode()
        if zmq.curve_public(secret) != public:
            raise ValueError("the two keys do not belong together")
    except OSError as error:
        raise StorageError(f"{path}: cannot be used ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        told = f"{path}: holds no key pair ({error}); delete it to make another, which workers must then be told"
        raise CorruptFile(told) from None
    return public, secret
