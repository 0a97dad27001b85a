"""What the rollout core asks its shell to do, beside the plain messages (GetItem, Generate, CancelGenerate, TrainBatch)."""

import dataclasses
from typing import Any

from marlaas_jax.messages import EnvClose, EnvObservation, EnvReset, EnvStep, Message

TurnKey = tuple[str, int, int]  # episode id, attempt, turn: names one answer of the environment or of the policy


@dataclasses.dataclass(frozen=True)
class Render:
    """Turn an observation into ids: a whole prompt (`first`) or what follows a sampled turn. Answered by on_rendered."""

    key: TurnKey
    job: str
    observation: EnvObservation
    first: bool
    last_id: int = -1  # last sampled id of the turn before; -1: nothing was sampled


@dataclasses.dataclass(frozen=True)
class ToEnv:
    """Give a message to the worker that holds the episode; the orchestrator chooses one for an EnvReset."""

    job: str
    message: EnvReset | EnvStep | EnvClose


@dataclasses.dataclass(frozen=True)
class Send:
    """Send a message to one worker."""

    worker_id: str
    message: Message


@dataclasses.dataclass(frozen=True)
class KillWorker:
    """End a worker that does not answer; it already counts as lost."""

    worker_id: str
    reason: str


@dataclasses.dataclass(frozen=True)
class EpisodeEnded:
    """For the episode log: everything a person wants to read about one episode."""

    job: str
    record: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BatchSent:
    """A batch left for the learner; `metrics` are finite, `tickets` its (ticket, attempt) pairs, empty places left out."""

    job: str
    step: int
    metrics: dict[str, float]
    tickets: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class EvalDone:
    """An evaluation of the snapshot after `step` batches ended; `reward_mean` is None when nothing could be scored.

    `phase` is "before", "during" or "after" training; `reward_std_error` is None for fewer than two rewards. `is_held`: its
    snapshot was kept for it.
    """

    job: str
    phase: str
    step: int
    reward_mean: float | None
    num_scored: int
    num_items: int
    version: int = -1  # the one snapshot that all of it was sampled from
    reward_std_error: float | None = None
    is_held: bool = False


@dataclasses.dataclass(frozen=True)
class Stopping:
    """The job ends after `step` batches, before all that it was to train, for this reason."""

    job: str
    step: int
    reason: str


@dataclasses.dataclass(frozen=True)
class JobDone:
    """All batches are trained and the last evaluation is over: the job may be finished.

    used: by meter, what no batch has told of.
    """

    job: str
    step: int
    used: dict[str, float]


@dataclasses.dataclass(frozen=True)
class JobGivenUp:
    """The job's own rule or its environment ends it; the others go on. `kind` is an exception class of errors.py."""

    job: str
    kind: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Note:
    """Something a person may want to know; goes to the event log."""

    job: str
    kind: str
    text: str


Command = (
    Message | Render | ToEnv | Send | KillWorker | EpisodeEnded | BatchSent | EvalDone | Stopping | JobDone | JobGivenUp | Note
)  # fmt: skip
