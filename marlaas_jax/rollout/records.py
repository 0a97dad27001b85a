"""What the episode log keeps of an episode, and the names of what a job waits for."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from marlaas_jax.rollout import settings as limits
from marlaas_jax.rollout.episodes import OUTCOMES, Episode
from marlaas_jax.rollout.groups import Group
from marlaas_jax.rollout.settings import RolloutSettings

OWNERS = {
    "env worker": "the environment workers, all busy",
    "reset": "an environment worker",
    "step": "an environment worker",
    "render": "the controller",
    "generate": "the device",
}
STAGES = ("item", "reset", "render", "gather", "generate", "step")


@dataclasses.dataclass(frozen=True)
class Wait:
    """One thing that waits: the stage, the object, who owes the answer, how long already and how long at most."""

    stage: str
    what: str
    owner: str
    since_s: float
    limit_s: float | None  # None: somebody must act, and there is no deadline for that

    def __str__(self) -> str:
        limit = "no limit" if self.limit_s is None else f"limit {self.limit_s:.0f} s"
        return f"{self.stage}: {self.what}, by {self.owner}, since {self.since_s:.1f} s ({limit})"


class Tally:
    """Counts episodes so that sent = done + running + failed holds at all times."""

    def __init__(self) -> None:
        self.sent = 0
        self.late_answers = 0
        self.restarts = 0
        self.outcomes: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """Episodes that have started and not ended."""
        return self.sent - sum(self.outcomes.values())

    def as_dict(self) -> dict[str, int]:
        """Returns all counts; done = finished + truncated, failed = timed_out + failed + cancelled."""
        counts = {outcome: self.outcomes[outcome] for outcome in OUTCOMES}
        return {
            "sent": self.sent,
            "running": self.running,
            "done": counts["finished"] + counts["truncated"],
            **counts,
            "restarts": self.restarts,
            "late_answers": self.late_answers,
        }


def episode_record(group: Group, episode: Episode) -> dict[str, Any]:
    """Returns the episode as the log keeps it; the verifier saw the turns' `text`. Prompt ids are decoded by the shell."""
    return {
        "split": group.split,
        "ticket": group.ticket,
        "sample": episode.sample,
        "attempt": episode.attempt,
        "outcome": episode.outcome,
        "reward": episode.reward,
        "note": episode.note,
        "metrics": {name: value if math.isfinite(value) else None for name, value in episode.metrics.items()},
        "first_observation": episode.first_observation,
        "prompt_ids": list(episode.prompt_ids),
        "turns": [dataclasses.asdict(turn) for turn in episode.turns],
        "num_sampled_tokens": episode.num_sampled,
        "mean_logprob": episode.mean_logprob(),
        "own_s": episode.used_s,
        "total_s": episode.since - group.started_at,
    }


def episode_waits(groups: Iterable[Group], settings: RolloutSettings, now: float) -> list[Wait]:
    """Returns what a job's groups and episodes wait for. Episodes that wait for their group's first prompts are left out:
    the sibling that is late is in the list."""
    limit = {
        "reset": settings.step_timeout_s,
        "step": settings.step_timeout_s,
        "render": limits.RENDER_TIMEOUT_S,
        "generate": limits.GENERATE_TIMEOUT_S,
    }
    found = []
    for group in groups:
        if group.item_request:
            what = f"{group.split} item {group.ticket}"
            found.append(Wait("item", what, "the data worker", now - group.since, limits.ITEM_TIMEOUT_S))
        for episode in group.episodes:
            if episode.stage in limit:
                stage = "env worker" if episode.stage == "reset" and not episode.on_worker else episode.stage
                what = f"episode {episode.episode_id} attempt {episode.attempt} turn {episode.turn}"
                found.append(Wait(stage, what, OWNERS[stage], now - episode.since, limit[episode.stage]))
    return found


def stage_counts(groups: Iterable[Group]) -> dict[str, int]:
    """Returns how many episodes are in each stage."""
    counts = Counter(episode.stage for group in groups for episode in group.episodes)
    return {stage: counts[stage] for stage in STAGES}
