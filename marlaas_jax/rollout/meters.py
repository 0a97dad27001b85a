"""What ended groups used, as their tenant is billed for it. Pure.

Counted is the last attempt of each group that reaches a batch, and each evaluation that ended. An attempt that was replaced,
for whatever reason (a worker or the device died, its tokens became too old, its environment failed), is never counted; nor is
waiting.

    prompt_tokens   the first prompt once per group and distinct prompt, since that is how often it is prefilled; for every
                    later turn all ids that stood before it, since a new turn is prefilled whole
    sampled_tokens  what the policy sampled, all turns
    trained_tokens  of those, the ones that were given to the learner: the episodes that have a reward
    env_s           seconds between an environment call and its answer, `reset` included; calls without an answer are free
"""

from collections.abc import Iterable, Mapping

from marlaas_jax.rollout.groups import Group

PREFIX = "meter/"  # of these figures among a batch's metrics
METERS = ("prompt_tokens", "sampled_tokens", "trained_tokens", "env_s")


def of_group(group: Group) -> dict[str, float]:
    """Returns what the present attempts of a group's episodes used, by meter."""
    sampled = [episode for episode in group.episodes if episode.turns]
    first = sum(len(prompt) for prompt in {episode.prompt_ids for episode in sampled})
    later = sum(turn.num_context_tokens for episode in sampled for turn in episode.turns[1:])
    trained = [episode for episode in sampled if episode.reward is not None and group.split == "train"]
    env_s = sum(episode.reset_s + sum(turn.env_s or 0.0 for turn in episode.turns) for episode in group.episodes)
    return {
        "prompt_tokens": float(first + later),
        "sampled_tokens": float(sum(episode.num_sampled for episode in sampled)),
        "trained_tokens": float(sum(episode.num_sampled for episode in trained)),
        "env_s": env_s,
    }


def total(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the sums by meter; all of them are there."""
    sums: dict[str, float] = dict.fromkeys(METERS, 0.0)
    for part in parts:
        for meter in METERS:
            sums[meter] += part.get(meter, 0.0)
    return sums
