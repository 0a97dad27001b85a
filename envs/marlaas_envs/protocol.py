"""What an environment is: text or messages in, text or messages out, and a reward at the end.

An *item* is one task, a plain dict that JSON can hold. A *family* makes environments and offers items to try them on; it is
what a name such as `words:last_word` stands for. An environment lives for one episode, in a worker process of its family's
pool, and its methods may be plain or async: a plain one runs in a thread. Each call has a time limit; `step` is never retried.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

Item = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the policy sees next: raw text, appended as it is, or messages, rendered by the model's chat template.

    `tools` are JSON schemas for the template; `stop` are stop strings for the turn that follows, besides the job's own.
    """

    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    stop: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Done:
    """The end of the episode. `reward` None: it cannot be told, so the episode counts for nothing.

    `note` is kept beside the reward for people: usually what the verifier compared.
    """

    reward: float | None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Action:
    """The policy's turn. `text` is trimmed at the stop string; finish_reason: "stop", "length" or "context"."""

    text: str
    finish_reason: str = "stop"
    num_tokens: int = 0

    @property
    def stopped(self) -> bool:
        """Whether the policy ended the turn itself, by an end token or a stop string."""
        return self.finish_reason == "stop"


class Env(Protocol):
    """One episode; both methods may be `async def`. An optional `close()` is called at its end, whatever the end was.

    An optional attribute `reply_roles` names the roles of the messages that `step` may answer with, such as ("tool",): a model
    whose chat template cannot append them to a sampled turn is then refused before the job starts.
    """

    def reset(self, item: Item, seed: int) -> Observation | Awaitable[Observation]:
        """Starts the episode on an item; everything random derives from `seed`."""
        ...

    def step(self, action: Action) -> Observation | Done | Awaitable[Observation | Done]:
        """Answers the policy's turn."""
        ...


class Source(Protocol):
    """Items by index. A generator without end says a length of `UNLIMITED`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...


class EnvFamily(Protocol):
    """What a name stands for. `env_args` of a job go to `dataset` and `make`, to each those that it names.

    prompt_once: every episode of an item starts with the same prompt, so a group's prompt is computed once.
    retry (optional): "never" where an episode has effects outside that must not happen twice; when its worker dies it fails
    instead of starting again.
    """

    prompt_once: bool

    @property
    def dataset(self) -> Callable[..., Source]:
        """`dataset(split, seed, **args)`: the items of "train" or "eval".

        The two never share a prompt; "eval" does not depend on the seed.
        """
        ...

    @property
    def make(self) -> Callable[..., Env]:
        """`make(**args)`: a new environment for one episode."""
        ...


UNLIMITED = 1 << 31


class EnvLookupError(Exception):
    """A name, an argument or a file that gives no environment; its text is one sentence for the job's owner."""
