"""What is metered of rollouts: the closed form of what was trained and evaluated, whatever was lost and sampled again."""

import hypothesis
import hypothesis.strategies as st
import pytest

from marlaas_jax.rollout.commands import BatchSent, JobDone
from marlaas_jax.rollout.meters import METERS, PREFIX, total
from marlaas_jax.rollout.orchestrator import MAX_DEATHS_IN_A_ROW
from tests.rollout.world import World, settings

STEPS, GROUPS = 3, 2
MAX_LOSSES = MAX_DEATHS_IN_A_ROW - 1  # with as many, and nothing answered in between, the job would be given up


def metered(world):
    """All batches' meters and what came after them."""
    batches = [
        {name.removeprefix(PREFIX): value for name, value in sent.metrics.items() if name.startswith(PREFIX)}
        for sent in world.seen[BatchSent]
    ]
    assert all(set(batch) == set(METERS) for batch in batches)
    (done,) = world.seen[JobDone]
    return total([*batches, done.used])


def expected(turns, size, num_eval):
    """In this world a prompt has 2 ids, a completion 2, what the environment says after it 2."""
    later = sum(2 + 4 * turn for turn in range(1, turns))
    groups = STEPS * GROUPS
    return {
        "prompt_tokens": groups * (2 + size * later) + num_eval * (2 + later),
        "sampled_tokens": (groups * size + num_eval) * 2 * turns,
        "trained_tokens": groups * size * 2 * turns,
    }


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
    st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.lists(st.integers(1, 30), max_size=MAX_LOSSES), st.booleans()
)
def test_episodes_that_were_lost_and_sampled_again_are_metered_once(turns, size, eval_items, losses, is_eval_first):
    world = World(turns=turns)
    spec = settings(
        steps=STEPS, group_size=size, groups_per_batch=GROUPS, max_attempts=1000, eval_items=eval_items, max_turns=turns
    )
    world.add(spec, eval_before=is_eval_first)
    for number in losses:
        for _ in range(number):
            if world.pending:
                world.deliver(len(world.pending) // 2)
        world.lose_worker(world.workers[0])
    world.run()
    found = metered(world)
    num_eval = eval_items * (1 + is_eval_first)
    assert {meter: found[meter] for meter in ("prompt_tokens", "sampled_tokens", "trained_tokens")} == expected(
        turns, size, num_eval
    )


def test_the_environments_seconds_are_those_between_a_call_and_its_answer():
    world = World(turns=1)
    world.add(settings(steps=1, group_size=1, groups_per_batch=1))
    while world.pending:
        world.now += {"reset": 0.25, "step": 0.5}.get(world.pending[0][0], 100.0)  # waiting for others costs nothing
        world.deliver()
    assert metered(world)["env_s"] == pytest.approx(0.25 + 0.5)


def test_a_group_that_earned_nothing_is_not_billed_but_an_episode_without_reward_is_sampled():
    world = World(turns=1, reward=lambda seed, text: None)
    world.add(settings(steps=1, group_size=1, groups_per_batch=1, max_attempts=2))
    world.run()
    assert not world.seen[BatchSent]
    rewards = iter([1.0, None])
    world = World(turns=1, reward=lambda seed, text: next(rewards))
    world.add(settings(steps=1, group_size=2, groups_per_batch=1))
    world.run()
    found = metered(world)
    assert (found["prompt_tokens"], found["sampled_tokens"], found["trained_tokens"]) == (2.0, 4.0, 2.0)
