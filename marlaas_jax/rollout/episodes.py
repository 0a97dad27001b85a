"""One episode: a token-in, token-out conversation of the policy with an environment.

Sampled ids are kept exactly as the sampler returned them; only the environment's text is tokenized, and its ids carry loss
mask 0 (H20). An episode ends exactly once, as one of OUTCOMES. A lost worker restarts it as a new attempt: nothing of the old
attempt is kept, and answers to it are ignored because they name (episode id, attempt, turn).

Its clock (`used_s`) runs while the environment or the tokenizer works, not while it waits for the sampler or for its group:
those waits have their own limits, and a crowded sampler is not the environment's fault.
"""

import dataclasses
import struct
from array import array
from typing import Any

from marlaas_jax.messages import EnvObservation, Generated
from marlaas_jax.rollout.commands import TurnKey

OUTCOMES = ("finished", "truncated", "timed_out", "failed", "cancelled")
CLOCKED = ("reset", "render", "step")  # stages that use up the episode's own time
TRUNCATING = ("length", "context")  # finish reasons of a turn that did not end by itself


@dataclasses.dataclass
class Turn:
    """What one turn of the policy was, for the episode log."""

    text: str
    num_tokens: int
    finish_reason: str
    version: int
    latest_version: int
    fingerprint: str
    generate_s: float
    num_context_tokens: int  # prompt and earlier turns: the ids that it was asked with
    env_s: float | None = None
    observation: dict[str, Any] | None = None  # what the environment said after it


@dataclasses.dataclass
class Episode:
    """State of one episode; the job moves it along."""

    episode_id: str
    sample: int
    env_seed: int
    attempt: int
    since: float
    stage: str = "item"  # item, reset, render, gather, generate, step, ended
    on_worker: bool = False  # a worker knows this attempt
    lost_attempts: int = 0  # of these, how many are blamed on this episode
    used_s: float = 0.0
    reset_s: float = 0.0  # the environment's start took
    turn: int = 0
    prompt_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    first_observation: dict[str, Any] | None = None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    loss_mask: bytearray = dataclasses.field(default_factory=bytearray)
    logprobs: bytearray = dataclasses.field(default_factory=bytearray)
    versions: array = dataclasses.field(default_factory=lambda: array("i"))
    turns: list[Turn] = dataclasses.field(default_factory=list)
    request_id: str = ""
    sent_at_batch: int | None = None  # batches trained when the running request left: its snapshot is at least that new
    outcome: str = ""
    reward: float | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""
    is_hopeless: bool = False  # no other attempt can do better

    @property
    def key(self) -> TurnKey:
        """Names the answer that this episode waits for."""
        return (self.episode_id, self.attempt, self.turn)

    @property
    def ended(self) -> bool:
        """True once it has an outcome."""
        return self.stage == "ended"

    @property
    def is_truncated(self) -> bool:
        """True where a turn was cut off, or the conversation was."""
        return self.outcome == "truncated"

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return self.loss_mask.count(1)

    def enter(self, stage: str, now: float) -> None:
        """Moves to a stage; the time of the one before is charged where it counts."""
        self.used_s = self.clock(now)
        self.stage = stage
        self.since = now

    def clock(self, now: float) -> float:
        """Returns the seconds used of the episode's own time."""
        counts = self.stage in CLOCKED and (self.on_worker or self.stage == "render")
        return self.used_s + (now - self.since if counts else 0.0)

    def restart(self, attempt: int, now: float) -> None:
        """Forgets everything and starts again as a new attempt."""
        assert attempt > self.attempt and not self.ended
        self.attempt = attempt
        self.turn = 0
        self.prompt_ids = ()
        self.stop = ()
        self.first_observation = None
        self.token_ids = []
        self.loss_mask = bytearray()
        self.logprobs = bytearray()
        self.versions = array("i")
        self.turns = []
        self.request_id = ""
        self.sent_at_batch = None
        self.on_worker = False
        self.used_s = 0.0
        self.reset_s = 0.0
        self.stage = "reset"
        self.since = now

    def add_sampled(self, generated: Generated, now: float) -> None:
        """Appends a completion as it was sampled."""
        count = len(generated.token_ids)
        num_context_tokens = len(self.prompt_ids) + len(self.token_ids)
        self.token_ids.extend(generated.token_ids)
        self.loss_mask.extend(b"\x01" * count)
        self.logprobs.extend(generated.logprobs)
        self.versions.extend([generated.version] * count)
        self.turns.append(
            Turn(
                text=generated.text,
                num_tokens=count,
                finish_reason=generated.finish_reason,
                version=generated.version,
                latest_version=generated.latest_version,
                fingerprint=generated.fingerprint,
                generate_s=now - self.since,
                num_context_tokens=num_context_tokens,
            )
        )
        self.request_id = ""
        self.sent_at_batch = None

    def add_observed(self, token_ids: list[int] | tuple[int, ...]) -> None:
        """Appends the environment's tokens, outside the loss."""
        count = len(token_ids)
        self.token_ids.extend(token_ids)
        self.loss_mask.extend(bytes(count))
        self.logprobs.extend(bytes(4 * count))
        self.versions.extend([-1] * count)

    def drop_trailing_observation(self) -> None:
        """Removes what follows the last sampled token: nothing was sampled after it."""
        last = self.loss_mask.rfind(1) + 1
        del self.token_ids[last:], self.loss_mask[last:], self.logprobs[4 * last :], self.versions[last:]

    def end(self, outcome: str, now: float, *, reward: float | None = None, note: str = "") -> None:
        """Gives the episode its one outcome."""
        assert outcome in OUTCOMES and not self.ended, (outcome, self.stage)
        self.enter("ended", now)
        self.outcome = outcome
        self.reward = reward
        if note:
            self.note = note

    def oldest_version(self) -> int | None:
        """Returns the oldest snapshot among the sampled tokens, None where there is none yet."""
        return min((version for version in self.versions if version >= 0), default=None)

    def mean_logprob(self) -> float | None:
        """Returns the mean log-probability of the sampled tokens."""
        count = self.num_sampled
        if not count:
            return None
        return sum(struct.unpack(f"<{len(self.token_ids)}f", bytes(self.logprobs))) / count


def observation_record(observation: EnvObservation) -> dict[str, Any]:
    """Returns what the environment said, for the episode log and to tell equal observations."""
    record: dict[str, Any] = {}
    if observation.text is not None:
        record["text"] = observation.text
    if observation.messages is not None:
        record["messages"] = list(observation.messages)
    if observation.tools:
        record["tools"] = list(observation.tools)
    if observation.stop:
        record["stop"] = list(observation.stop)
    return record
