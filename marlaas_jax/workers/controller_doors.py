"""Where workers come in, and what each may say: own processes, confined ones, and (for a service) those of tenants elsewhere.

Own workers use a private socket. Confined ones have a door with small frames and a small window, open to their users; like the
own ones they are known by the token that the supervisor gave to that one start. Whoever it is, a worker is heard only about
the jobs whose environment or data it runs; what a confined or a tenant's worker says is cut to the size that ours would send.
"""

import asyncio
import hmac
import logging
import re
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from marlaas_jax.errors import MarlaasError
from marlaas_jax.messages import EnvDone, EnvError, EnvLoaded, EnvObservation, Hello, Item, Message, WorkerFailed
from marlaas_jax.transport.flow import PeerLost
from marlaas_jax.transport.server import Server
from marlaas_jax.workers.controller_jobs import Job, remote_group
from marlaas_jax.workers.controller_processes import Processes
from marlaas_jax.workers.env_answers import cut_to_size
from marlaas_jax.workers.remote_worker import REMOTE_NAME
from marlaas_jax.workers.sandbox.sandbox import Sandbox
from marlaas_jax.workers.user_calls import MAX_TRACEBACK_CHARACTERS

log = logging.getLogger(__name__)

WINDOW = 256  # messages under way to or from a confined worker
MAX_FRAME_BYTES = 16 << 20  # the largest item or observation, and what surrounds it
FROM_ENVIRONMENTS = EnvLoaded | EnvObservation | EnvDone | EnvError | Item
MAX_STRANGERS_PER_TENANT = 128  # connections; a worker has two
MAX_KEY_CHARACTERS = 200
STRANGER_LOST_AFTER_S = 20.0  # without a heartbeat
LOOK_INTERVAL_S = 5.0
_STRANGER_ID = re.compile(r"remote-[A-Za-z0-9._-]{8,80}")
_MAX_LOGGED = 20


class Strangers(Protocol):
    """Who may join from elsewhere; a service answers from its store."""

    @property
    def address(self) -> str:
        """Where to listen, as tcp://HOST:PORT."""
        ...

    @property
    def key_pair(self) -> tuple[bytes, bytes]:
        """The server's CURVE keys, public and secret, in Z85."""
        ...

    async def identify(self, api_key: str) -> tuple[str, str] | None:
        """Returns (the tenant's id, what `still_valid` takes), None for a key that is unknown or revoked."""
        ...

    async def still_valid(self, credential: str) -> bool:
        """Whether a key that was good still is."""
        ...


class Doors:
    """The servers of one controller; `server` is the one to send and receive through.

    With a sandbox, code of others runs on this machine, so own workers must show their token too.
    """

    def __init__(self, jobs: Mapping[str, Job], sandbox: Sandbox | None, strangers: Strangers | None = None):
        self.processes: Processes  # to be set before a worker is started
        self.num_refused = 0  # messages about jobs that are not their sender's
        self._jobs = jobs
        self._strangers = strangers
        self._credentials: dict[str, tuple[str, str]] = {}  # worker id -> tenant, credential; of strangers
        self._looking: asyncio.Task[None] | None = None
        self.server = Server("ipc", gate=None if sandbox is None else self._own)
        self._confined = None
        if sandbox is not None:
            self._confined = Server(
                "ipc", joined_to=self.server, gate=self._own_confined, window=WINDOW, max_frame_bytes=MAX_FRAME_BYTES,
                is_open=sandbox.has_users,
            )  # fmt: skip

        self._remote = None
        if strangers is not None:
            self._remote = Server(
                strangers.address, joined_to=self.server, gate=self._stranger, window=WINDOW, max_frame_bytes=MAX_FRAME_BYTES,
                key_pair=strangers.key_pair, lost_after_s=STRANGER_LOST_AFTER_S,
            )  # fmt: skip

    async def __aenter__(self) -> "Doors":
        if self._strangers is not None:
            self._looking = asyncio.create_task(self._look_forever(self._strangers))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        for door in (self._remote, self._confined, self.server):
            if door is not None:
                await door.close()

    @property
    def remote_address(self) -> str:
        """Where tenants' own workers connect, "" where they do not."""
        return "" if self._remote is None else self._remote.address

    @property
    def confined_address(self) -> str:
        """Where confined workers connect, "" where there are none."""
        return "" if self._confined is None else self._confined.address

    def connected(self, owner: str) -> dict[str, int]:
        """Returns how many environment workers a tenant has connected, by the name of the environment."""
        prefix = remote_group(owner, "", "environment")
        groups = [self.processes.group_of(self.processes.name_of(worker_id)) for worker_id in self._credentials]
        return dict(Counter(group.removeprefix(prefix) for group in groups if group.startswith(prefix)))

    def heard(self, worker_id: str, message: Message) -> Message | None:
        """Returns what is to be handled of a message, None for one that its sender may not send."""
        if isinstance(message, Hello | PeerLost):
            return message  # from the server itself
        processes = self.processes
        name = processes.name_of(worker_id)
        if name == processes.DEVICE:
            return None if isinstance(message, FROM_ENVIRONMENTS) else message
        if isinstance(message, WorkerFailed):
            return WorkerFailed(worker_id, message.kind[:80], message.text[:MAX_TRACEBACK_CHARACTERS])
        job = self._jobs.get(job_of(message))
        group = processes.group_of(name)
        if isinstance(message, FROM_ENVIRONMENTS) and job is not None and group and group in (job.pool, job.data_worker):
            return cut_to_size(message) if processes.is_strange(name) else message
        if job is not None:  # else it is over: a late answer
            self.num_refused += 1
            if self.num_refused <= _MAX_LOGGED or self.num_refused % 1000 == 0:
                what = f"{type(message).__name__} of job {job.name}"
                log.warning("message refused worker=%s count=%d what=%s", name or worker_id[:80], self.num_refused, what)
        return None

    async def _stranger(self, hello: Hello) -> str:
        """The gate of the tcp door: a tenant's API key, a name for the environment, a role that may come from elsewhere."""
        assert self._strangers is not None
        name, secret = hello.info.get("environment"), hello.info.get("api_key")
        if hello.role not in ("environment", "data"):
            return f"role={hello.role[:20]!r}: only environment and data workers join from elsewhere"
        if not isinstance(name, str) or not REMOTE_NAME.fullmatch(name):
            return "name: must be 1 to 64 letters, digits, dots, dashes and underscores"
        if not _STRANGER_ID.fullmatch(hello.worker_id) or hello.worker_id in self._credentials:
            return "its worker id is not one that a worker from elsewhere may have"
        found = None
        if isinstance(secret, str) and len(secret) <= MAX_KEY_CHARACTERS:
            found = await self._strangers.identify(secret)
        if found is None:
            return "the API key is unknown or revoked"
        tenant, _ = found
        if hello.worker_id in self._credentials:
            return "its worker id is in use"
        if sum(owner == tenant for owner, _ in self._credentials.values()) >= MAX_STRANGERS_PER_TENANT:
            return f"{MAX_STRANGERS_PER_TENANT} connections of this tenant are open already"
        self._credentials[hello.worker_id] = found
        self.processes.adopt(hello.worker_id, remote_group(tenant, name, hello.role), is_pool=hello.role == "environment")
        return ""

    async def _look_forever(self, strangers: Strangers) -> None:
        """Ends the connections whose key was revoked since they were made, and forgets those that are gone."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            for worker_id, (_, credential) in list(self._credentials.items()):
                try:
                    reason = "" if await strangers.still_valid(credential) else "its API key was revoked"
                except MarlaasError as error:  # the store cannot be read for the moment
                    log.warning("keys not looked at reason=%s", error)
                    break
                if reason:
                    self.server.lose(worker_id, reason)
                if worker_id not in self.server.peers:
                    del self._credentials[worker_id]
                    self.processes.abandon(worker_id)

    async def _own(self, hello: Hello) -> str:
        return self._fault(hello, is_confined=False)

    async def _own_confined(self, hello: Hello) -> str:
        return self._fault(hello, is_confined=True)

    def _fault(self, hello: Hello, *, is_confined: bool) -> str:
        known = self.processes.credentials(hello.worker_id)
        token = hello.info.get("token")
        if known is None or not isinstance(token, str) or not hmac.compare_digest(known.token.encode(), token.encode()):
            return "this controller did not start this worker"
        if (known.role, known.is_confined) != (hello.role, is_confined):
            return f"this worker was not started as one of role {hello.role[:20]!r} here"
        return ""


def job_of(message: Message) -> str:
    """Returns the job that a message concerns, "" for none."""
    named = getattr(message, "job", "") or getattr(message, "episode_id", "") or getattr(message, "request_id", "")
    return named.partition("/")[0]
