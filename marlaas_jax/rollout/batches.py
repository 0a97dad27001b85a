"""From ended episodes to what the learner trains: rewards to advantages, episodes to rows, groups to a batch's figures.

Rules (H23, H24): an episode without a reward leaves its group's statistics and is not trained. A group in which nobody has a
reward is dropped and replaced. Equal rewards give advantage 0; such groups are kept and counted: `live` is the share of
groups whose rewards differ. An episode in which the policy sampled nothing counts in the statistics and has no row.
"""

import dataclasses
from collections.abc import Callable, Mapping

from marlaas_jax.messages import TrainGroup, TrainRow
from marlaas_jax.rl.advantages import group_advantages
from marlaas_jax.rollout import meters
from marlaas_jax.rollout.episodes import Episode
from marlaas_jax.rollout.groups import Group


@dataclasses.dataclass(frozen=True)
class ScoredGroup:
    """A group that is ready for a batch."""

    group: TrainGroup
    rewards: tuple[float | None, ...]
    is_live: bool
    oldest_version: int
    token_counts: tuple[int, ...]  # sampled tokens per episode
    num_truncated: int
    versions: dict[int, int]  # sampled tokens per version
    metrics: dict[str, float]  # the environment's own, mean over the episodes that gave them
    duration_s: float
    used: dict[str, float]  # by meter


def score(group: Group, *, normalize_std: bool, now: float) -> ScoredGroup | None:
    """Returns the group with its advantages, or None where nothing in it can be trained."""
    rewards = [episode.reward for episode in group.episodes]
    scored = [episode for episode in group.episodes if episode.reward is not None]
    trained = [episode for episode in scored if episode.num_sampled]
    if not trained:
        return None
    advantages = group_advantages(rewards, normalize_std)
    prompt = common_prefix([episode.prompt_ids for episode in trained])
    rows = tuple(_row(episode, len(prompt), float(advantages[episode.sample])) for episode in trained)
    versions: dict[int, int] = {}
    for episode in trained:
        for version in episode.versions:
            if version >= 0:
                versions[version] = versions.get(version, 0) + 1
    known = [reward for reward in rewards if reward is not None]
    return ScoredGroup(
        group=TrainGroup(ticket=group.ticket, attempt=group.attempt, prompt_ids=prompt, rows=rows),
        rewards=tuple(rewards),
        is_live=max(known) > min(known),
        oldest_version=min(versions),
        token_counts=tuple(episode.num_sampled for episode in scored),
        num_truncated=sum(episode.is_truncated for episode in scored),
        versions=versions,
        metrics=_mean_metrics(scored),
        duration_s=now - group.started_at,
        used=meters.of_group(group),
    )


def common_prefix(prompts: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the longest run of ids that all prompts start with."""
    first, last = min(prompts), max(prompts)
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]


def _row(episode: Episode, shared: int, advantage: float) -> TrainRow:
    """Returns the tokens after the first `shared` of the prompt; a prompt's own remainder is outside the loss."""
    own = episode.prompt_ids[shared:]
    return TrainRow(
        token_ids=own + tuple(episode.token_ids),
        loss_mask=bytes(len(own)) + bytes(episode.loss_mask),
        logprobs=bytes(4 * len(own)) + bytes(episode.logprobs),
        versions=b"\xff" * (4 * len(own)) + episode.versions.tobytes(),
        advantage=advantage,
        truncated=episode.is_truncated,
    )


def batch_metrics(
    groups: list[ScoredGroup],
    *,
    step: int,
    batches_of: Callable[[int], int],
    num_empty: int,
    running_s: float,
    beside: Mapping[str, float] = {},
) -> dict[str, float]:
    """Returns a batch's figures, all finite. Staleness is in batches, per sampled token.

    beside: what was used for other things since the last batch, such as evaluations; it is metered with this one.
    """
    rewards = [reward for group in groups for reward in group.rewards if reward is not None]
    missing = sum(reward is None for group in groups for reward in group.rewards)
    counts = [count for group in groups for count in group.token_counts]
    tokens = staleness_sum = staleness_max = 0
    for group in groups:
        for version, count in group.versions.items():
            staleness = step - batches_of(version)
            tokens += count
            staleness_sum += staleness * count
            staleness_max = max(staleness_max, staleness)
    mean = sum(rewards) / len(rewards)
    metrics = {
        "rollout/reward_mean": mean,
        "rollout/reward_std": (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5,
        "rollout/num_groups": len(groups),
        "rollout/num_empty_places": num_empty,
        "rollout/num_episodes": len(rewards),
        "rollout/num_missing_rewards": missing,
        "rollout/live_share": sum(group.is_live for group in groups) / len(groups),
        "rollout/truncated_share": sum(group.num_truncated for group in groups) / len(rewards),
        "rollout/num_tokens": tokens,
        "rollout/tokens_per_episode": sum(counts) / len(counts),
        "rollout/staleness_mean": staleness_sum / tokens,
        "rollout/staleness_max": staleness_max,
        "rollout/running_s": running_s,
        "rollout/group_s": sum(group.duration_s for group in groups) / len(groups),
    }
    used = meters.total([*(group.used for group in groups), beside])
    metrics |= {meters.PREFIX + meter: amount for meter, amount in used.items()}
    names = {name for group in groups for name in group.metrics}
    for name in sorted(names):
        values = [group.metrics[name] for group in groups if name in group.metrics]
        metrics[f"env/{name}"] = sum(values) / len(values)
    return {name: float(value) for name, value in metrics.items()}


def _mean_metrics(episodes: list[Episode]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            if abs(value) < 1e300:  # false for NaN and infinities, which no mean survives
                values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}
