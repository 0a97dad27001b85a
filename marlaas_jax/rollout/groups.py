"""One group: the episodes of one prompt, from its item to its rewards."""

import dataclasses
import json
from collections.abc import Callable

from marlaas_jax.messages import EnvObservation
from marlaas_jax.rollout.episodes import Episode, observation_record


@dataclasses.dataclass
class Group:
    """Episodes that share an item. `split` is "train", or "eval" with one episode per item."""

    split: str
    ticket: int  # the item's index for "eval"
    attempt: int
    since: float
    episodes: list[Episode]
    item: bytes = b""
    item_request: str = ""
    item_requests: int = 0
    prompts: dict[str, tuple[int, ...] | None] = dataclasses.field(default_factory=dict)  # None: being rendered
    waiting_for_prompt: dict[str, list[Episode]] = dataclasses.field(default_factory=dict)
    is_gathered: bool = False  # the first requests have left
    started_at: float = 0.0
    draw: int | None = None  # the attempt that all seeds are of; None: every attempt of an episode draws anew
    waited_s: float = 0.0  # it could have started so much earlier
    version: int = -1  # that its turns are sampled from; -1: the newest when a turn starts

    @property
    def ended(self) -> bool:
        """True once every episode has ended."""
        return all(episode.ended for episode in self.episodes)

    @property
    def may_gather(self) -> bool:
        """True when no first prompt is missing any more, so that equal prompts can be sent as one request."""
        return not self.is_gathered and all(e.stage in ("gather", "ended") for e in self.episodes)

    def gathered(self) -> dict[tuple[tuple[int, ...], tuple[str, ...]], list[Episode]]:
        """Returns the episodes that wait for their first completion, by (prompt, stop strings)."""
        by_prompt: dict[tuple[tuple[int, ...], tuple[str, ...]], list[Episode]] = {}
        for episode in self.episodes:
            if episode.stage == "gather":
                by_prompt.setdefault((episode.prompt_ids, episode.stop), []).append(episode)
        return by_prompt

    def next_attempt(self) -> int:
        """Returns an attempt number that none of its episodes has used."""
        return 1 + max(episode.attempt for episode in self.episodes)

    def floor(self, batches_of: Callable[[int], int], batches_now: int) -> int:
        """Returns the batch count of the oldest token that is, or can become, part of the group's training rows."""
        floors = [batches_now]
        for episode in self.episodes:
            if episode.ended and episode.reward is None:
                continue  # not trained
            oldest = episode.oldest_version()
            if oldest is not None:
                floors.append(batches_of(oldest))
            if episode.sent_at_batch is not None:
                floors.append(episode.sent_at_batch)
        return min(floors)


def prompt_key(observation: EnvObservation) -> str:
    """Returns a key that equal observations share."""
    return json.dumps(observation_record(observation), sort_keys=True)
