"""Where workers come in, and what each may say: own processes, confined ones, and (for a service) those of tenants elsewhere.

Own workers use a private socket. Confined ones have a door with small frames and a small window, open to their users; like the
own ones they are known by the token that the supervisor gave to that one start. Whoever it is, a worker is heard only about
the jobs whose environment or data it runs; what a confined or a tenant's worker says is cut to the size that ours would send.
"""

import hmac
import logging
from collections.abc import Mapping

from marlaas_jax.messages import EnvDone, EnvError, EnvLoaded, EnvObservation, Hello, Item, Message, WorkerFailed
from marlaas_jax.transport.flow import PeerLost
from marlaas_jax.transport.server import Server
from marlaas_jax.workers.controller_jobs import Job
from marlaas_jax.workers.controller_processes import Processes
from marlaas_jax.workers.env_answers import cut_to_size
from marlaas_jax.workers.sandbox.sandbox import Sandbox
from marlaas_jax.workers.user_calls import MAX_TRACEBACK_CHARACTERS

log = logging.getLogger(__name__)

WINDOW = 256  # messages under way to or from a confined worker
MAX_FRAME_BYTES = 16 << 20  # the largest item or observation, and what surrounds it
FROM_ENVIRONMENTS = EnvLoaded | EnvObservation | EnvDone | EnvError | Item
_MAX_LOGGED = 20


class Doors:
    """The servers of one controller; `server` is the one to send and receive through.

    With a sandbox, code of others runs on this machine, so own workers must show their token too.
    """

    def __init__(self, jobs: Mapping[str, Job], sandbox: Sandbox | None):
        self.processes: Processes  # to be set before a worker is started
        self.num_refused = 0  # messages about jobs that are not their sender's
        self._jobs = jobs
        self.server = Server("ipc", gate=None if sandbox is None else self._own)
        self._confined = None
        if sandbox is not None:
            self._confined = Server(
                "ipc", joined_to=self.server, gate=self._own_confined, window=WINDOW, max_frame_bytes=MAX_FRAME_BYTES,
                is_open=sandbox.has_users,
            )  # fmt: skip

    async def __aenter__(self) -> "Doors":
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._confined is not None:
            await self._confined.close()
        await self.server.close()

    @property
    def confined_address(self) -> str:
        """Where confined workers connect, "" where there are none."""
        return "" if self._confined is None else self._confined.address

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
