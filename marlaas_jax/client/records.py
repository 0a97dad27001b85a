"""What the service answers, as plain values. Fields that a newer service adds are ignored."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

ENDED = ("succeeded", "failed", "cancelled")


class Record:
    """Made from a JSON object."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Returns the record."""
        names = {item.name for item in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
        return cls(**{name: value for name, value in document.items() if name in names})


@dataclass(frozen=True)
class Job(Record):
    """A job; times in seconds since 1970."""

    id: str
    tenant_id: str
    name: str
    state: str  # queued, running, paused, succeeded, failed, cancelled
    reason: str  # why it is in this state
    step: int
    steps: int
    priority: int
    created: float
    started: float | None
    ended: float | None
    updated: float
    parent: str | None  # the job it was cloned from
    labels: dict[str, str]
    config: dict[str, Any]
    status: dict[str, Any] | None = None  # how it stands in this moment; None: not among the running, or from a list
    why: str = ""  # what it waits for
    usage: dict[str, Any] | None = None  # what it used, by meter, and its cost; None: from a list
    stop_reason: str = ""  # why it ended, or ends, well before its last step

    @property
    def is_over(self) -> bool:
        """True once it has succeeded, failed or was cancelled."""
        return self.state in ENDED


@dataclass(frozen=True)
class Trial(Record):
    """One variant of a sweep's job."""

    number: int
    name: str
    values: dict[str, Any]  # dotted key -> value
    job_id: str | None  # None: not queued yet
    state: str  # a job's, or waiting, stopped (others did better), deleted
    step: int
    steps: int | None
    reward: float | None  # the sweep's metric: now, at its end, or at the last rung
    rungs: dict[str, float]  # steps -> the metric there
    stopped_at: int | None  # rung
    reason: str
    is_best: bool


@dataclass(frozen=True)
class Sweep(Record):
    """One job in many variants; times in seconds since 1970."""

    id: str
    tenant_id: str
    name: str
    config: dict[str, Any]
    state: str  # running, succeeded, cancelled
    num_trials: int
    created: float
    ended: float | None
    trials: tuple[Trial, ...] = ()  # empty in a list
    best: int | None = None  # number of a trial

    @property
    def is_over(self) -> bool:
        """True once all trials have ended."""
        return self.state != "running"

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Returns the sweep with its trials, where those were sent."""
        return super().of({**document, "trials": tuple(map(Trial.of, document.get("trials", ())))})


@dataclass(frozen=True)
class Choice(Record):
    """One answer of a model; of a stream, what it grew by."""

    index: int
    text: str
    finish_reason: str | None  # "stop" or "length"; None: it goes on
    token_ids: list[int]  # the one that ended it included
    logprobs: list[float]  # of these, under the model's own distribution


@dataclass(frozen=True)
class Completion(Record):
    """What a model answered."""

    model: str
    version: int | None  # of a running job its optimizer steps, of a committed step its number; None: the base
    choices: list[Choice]
    prompt_tokens: int
    completion_tokens: int

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


@dataclass(frozen=True)
class Event(Record):
    """Something that happened; `seq` rises."""

    seq: int
    time: float
    job_id: str
    kind: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Key(Record):
    """An API key; `secret` is there only in the answer that made it."""

    id: str
    tenant_id: str
    prefix: str
    created: float
    revoked: float | None
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Tenant(Record):
    """Who owns jobs and keys."""

    id: str
    name: str
    is_admin: bool
    weight: float
    quotas: dict[str, Any]
    created: float
    is_disabled: bool
    keys: tuple[Key, ...] = ()

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Returns the tenant with its keys, where those were listed."""
        return super().of({**document, "keys": tuple(map(Key.of, document.get("keys", ())))})
