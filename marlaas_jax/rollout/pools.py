"""Environment pools: which workers there are, which episodes they hold, which calls they owe an answer to.

A call has its own limit, which its worker enforces. A worker that has answered nothing at all for that long and a grace time
(while it owes answers) is hung in a call that it cannot interrupt, and is given up. The oldest unanswered call is the one to
blame: workers start calls in the order in which they came.
"""

import collections
import dataclasses

from marlaas_jax.messages import EnvReset

EpisodeKey = tuple[str, int]  # episode id, attempt


@dataclasses.dataclass
class Call:
    """A reset or a step that has not been answered."""

    since: float
    timeout_s: float
    stage: str


@dataclasses.dataclass
class Worker:
    """One process of a pool."""

    worker_id: str
    jobs: set[str] = dataclasses.field(default_factory=set)  # whose environment it has loaded
    episodes: set[EpisodeKey] = dataclasses.field(default_factory=set)
    calls: dict[EpisodeKey, Call] = dataclasses.field(default_factory=dict)  # in order of sending
    last_answer: float = 0.0

    def overdue(self, now: float, grace_s: float) -> tuple[EpisodeKey, Call] | None:
        """Returns the oldest call if nothing was answered for longer than it may take."""
        for key, call in self.calls.items():
            if now - max(call.since, self.last_answer) > call.timeout_s + grace_s:
                return key, call
            return None
        return None

    def oldest_call(self) -> EpisodeKey | None:
        """Returns the call to blame when the worker dies."""
        return next(iter(self.calls), None)


@dataclasses.dataclass
class Pool:
    """Workers that run the same trust domain and family of environments."""

    name: str
    max_episodes_per_worker: int
    workers: dict[str, Worker] = dataclasses.field(default_factory=dict)
    jobs: set[str] = dataclasses.field(default_factory=set)
    waiting: collections.deque[EnvReset] = dataclasses.field(default_factory=collections.deque)
    deaths_in_a_row: int = 0  # workers lost since a step was last answered
    last_death: str = ""
    since: float = 0.0  # when a worker came or went last

    @property
    def capacity(self) -> int:
        """Episodes that may run at once."""
        return self.max_episodes_per_worker * len(self.workers)

    def worker_for(self, job: str) -> Worker | None:
        """Returns the least loaded worker that has the job's environment and room for an episode."""
        able = [worker for worker in self.workers.values() if job in worker.jobs]
        return min(able, key=lambda worker: (len(worker.episodes), worker.worker_id), default=None)
