"""What `marlaas serve` finds or makes before it serves: a data folder of its own, an admin and that admin's first key."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from marlaas_jax.errors import InvalidConfig, StorageError
from marlaas_jax.store import tenants
from marlaas_jax.store.engine import Store

ADMIN = "admin"


@contextlib.contextmanager
def data_folder(path: Path) -> Iterator[Path]:
    """Makes the folder and keeps other services out of it. Raises StorageError or InvalidConfig."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "service.lock").open("w")
    except OSError as error:
        raise StorageError(f"data_dir={str(path)!r}: cannot be written ({error.strerror})") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidConfig(f"data_dir={str(path)!r}: another service uses it; stop that or name another folder") from None
        yield path


def admin_key(store: Store, folder: Path) -> Path | None:
    """Makes an admin tenant and writes its key, readable by this user only; returns the file, None if there was an admin.

    The empty file comes first: where a crash left it so, the key that it was meant for is made anew.
    """
    path = folder / "admin.key"
    admins = [tenant for tenant in store.read(tenants.list_tenants) if tenant.is_admin]
    was_cut_short = path.is_file() and not path.stat().st_size
    if admins and not was_cut_short:
        return None
    try:
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            if not admins:
                admins = [store.write(tenants.create_tenant, ADMIN, now=time.time(), is_admin=True).result()]
            _, secret = store.write(tenants.create_key, admins[0].id, now=time.time()).result()
            file.write(secret + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from None
    return path
