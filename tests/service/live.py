"""A service with its HTTP server in a thread, on a free port of the loopback, with a fake device."""

import asyncio
import contextlib
import os
import threading
import time

import pytest

from marlaas_jax.client.blocking import Client
from marlaas_jax.config import validate
from marlaas_jax.service.api import serving
from marlaas_jax.service.config import ServiceConfig
from marlaas_jax.service.service import Service
from marlaas_jax.store import tenants
from marlaas_jax.store.engine import Store
from tests.workers.faked import REWARDS, ROOT, job

FILES = {"rewards.py": REWARDS.encode()}
UNLIMITED = {"requests_per_second": None}


class Live:
    """What tests see of it."""

    def __init__(self, service, loop, url):
        self.service = service
        self.loop = loop
        self.url = url
        self.clients = []

    def run(self, work):
        """Returns what the coroutine does in the service's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def key(self, name, **changes):
        """Returns a key of a tenant, which is made if need be."""
        store = self.service.store
        with contextlib.suppress(Exception):
            store.write(tenants.create_tenant, name, now=time.time(), quotas=UNLIMITED, **changes).result()
        return store.write(tenants.create_key, store.read(tenants.get_tenant, name).id, now=time.time()).result()[1]

    def client(self, name, **changes):
        """Returns a client of a tenant."""
        client = Client(self.url, self.key(name, **changes), patience_s=10)
        self.clients.append(client)
        return client


@contextlib.contextmanager
def live(folder, *, device_module="tests.workers.fakes", **changes):
    """Serves until the block ends."""
    document = {"runtime": {"model": "tiny"}, "data_dir": str(folder / "data"), "port": 0, "sandbox": "none"} | changes
    settings = validate(ServiceConfig, document)
    made: dict = {}
    is_up = threading.Event()

    def serve():
        async def main():
            stop = asyncio.Event()
            service = Service(settings, store, device_module=device_module)
            made.update(service=service, loop=asyncio.get_running_loop(), stop=stop)
            with serving.bind(settings.host, settings.port) as listening:
                await serving.serve(service, listening, lambda url: (made.update(url=url), is_up.set()), stop)

        try:
            with Store.open(settings.db_url) as store:
                asyncio.run(main())
        except BaseException as error:
            made["error"] = error
        is_up.set()

    thread = threading.Thread(target=serve)
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "envs"), os.environ.get("PYTHONPATH", "")]))
    patch.setenv("JAX_PLATFORMS", "cpu")
    thread.start()
    is_up.wait(60)
    try:
        if "error" in made:
            raise made["error"]
        found = Live(made["service"], made["loop"], made["url"])
        yield found
        for client in found.clients:
            client.close()
    finally:
        if "stop" in made and not made["loop"].is_closed():
            made["loop"].call_soon_threadsafe(made["stop"].set)
        thread.join(100)
        patch.undo()
    if "error" in made:
        raise made["error"]


def of(name, **changes):
    """Returns a job whose reward is a file that is sent along."""
    return job(name, "rewards.py:good", **changes)
