"""Early stop: what decides, when, and that it is the same after a resume."""

import pytest

from marlaas_jax.config import JobConfig, validate
from marlaas_jax.errors import InvalidConfig
from marlaas_jax.rollout.commands import BatchSent, EvalDone, JobDone, Stopping
from marlaas_jax.rollout.stopping import Past, StopRule, StopSettings
from tests.rollout.world import World, ready, settings


def first_stop(rewards, **rule):
    """Returns (step, reason) at which batches with these rewards end a job, None if they do not."""
    stop = StopRule(StopSettings(**rule), Past())
    for step, reward in enumerate(rewards, 1):
        if reason := stop.batch(reward, 100):
            return step, reason.partition(":")[0]
    return None


@pytest.mark.parametrize(
    ("rewards", "rule", "expected"),
    [
        ([0.1, 0.9, 0.9, 0.9, 0.9], {"target": 0.9}, (4, "target")),  # the mean of three
        ([0.1, 0.9, 0.1], {"target": 0.9, "window": 1}, (2, "target")),
        ([0.9, 0.9], {"target": 0.5}, None),  # no window is full
        ([0.5] * 9, {"patience": 4, "window": 1}, (5, "patience")),  # best at 1
        ([0.1, 0.2, 0.3, 0.3, 0.3, 0.3], {"patience": 3, "window": 1}, (6, "patience")),
        ([0.1, 0.15, 0.2, 0.25, 0.3, 0.35], {"patience": 3, "window": 1, "min_delta": 0.12}, None),  # 0.25 is the next best
        ([0.1, 0.15, 0.2, 0.2, 0.2], {"patience": 3, "window": 1, "min_delta": 0.12}, (4, "patience")),
        ([-5.0] * 4, {"patience": 2, "window": 1}, (3, "patience")),  # rewards may be negative
        ([0.0] * 9, {"max_tokens": 450}, (5, "max_tokens")),
        ([1.0] * 9, {"target": 1.0, "max_tokens": 300}, (3, "target")),  # both at once: the good news
    ],
)
def test_the_rules(rewards, rule, expected):
    assert first_stop(rewards, **rule) == expected


def test_a_history_decides_as_it_did_batch_by_batch():
    rewards = [0.1, 0.4, 0.4, 0.35, 0.4, 0.38, 0.2]
    rule = StopSettings(patience=4, window=2)
    one_by_one = StopRule(rule, Past())
    for cut in range(len(rewards)):
        reason = one_by_one.batch(rewards[cut], 10)
        again = StopRule(rule, Past(rewards=tuple(rewards[: cut + 1]), tokens=10 * (cut + 1)))
        assert again.reason == one_by_one.reason, cut
        if reason:
            break
    assert one_by_one.reason


def test_a_target_ends_the_job_right_after_the_batch_that_reached_it_and_what_ran_is_not_trained():
    world = World(reward=lambda seed, text: 1.0)
    world.add(settings(steps=50, max_staleness=3, eval_items=2, stop=StopSettings(target=1.0)))
    world.run()
    assert len(world.history["job"]) == len(world.seen[BatchSent]) == 3
    (stopping,) = world.seen[Stopping]
    assert stopping.step == 3 and stopping.reason.startswith("target: train reward 1 (mean of 3 batches) at step 3")
    assert [(done.phase, done.step) for done in world.seen[EvalDone]] == [("after", 3)] and len(world.seen[JobDone]) == 1
    world.check()
    assert not world.orchestrator.jobs["job"].runner.groups


@pytest.mark.parametrize("at", range(1, 4))
def test_a_resume_does_not_change_where_it_ends(at):
    rule = StopSettings(target=1.0)
    world = World(reward=lambda seed, text: 1.0)
    world.add(settings(steps=50, stop=rule))
    world.run()
    ledger = world.history["job"][at - 1].ledger
    again = World(reward=lambda seed, text: 1.0)
    message = ready(incarnation=2, step=at, version=at, ledger=ledger)
    again.add(settings(steps=50, incarnation=2, stop=rule), ready_message=message, past=Past(rewards=(1.0,) * at))
    again.run()
    assert at + len(again.history["job"]) == 3 and len(again.seen[JobDone]) == 1
    assert again.seen[Stopping][0].reason == world.seen[Stopping][0].reason


def test_an_evaluation_that_reaches_the_target_ends_the_job():
    world = World(reward=lambda seed, text: 0.75)
    rule = StopSettings(metric="eval_reward", target=0.75)
    world.add(settings(steps=50, eval_items=2, eval_every_steps=4, stop=rule), eval_before=True)
    world.run()
    assert world.seen[Stopping], "the one before the first step counts too"
    assert world.seen[Stopping][0].step == 0 and world.history["job"] == []
    world = World(reward=lambda seed, text: 0.75)
    world.add(settings(steps=50, eval_items=2, eval_every_steps=4, stop=rule))
    world.run()
    (stopping,) = world.seen[Stopping]
    assert "held-out reward 0.75 at step 4" in stopping.reason and 4 <= stopping.step < 8
    assert [done.phase for done in world.seen[EvalDone]] == ["during", "after"] and not +world.held


def test_running_time_ends_a_job_also_where_no_batch_is_complete():
    world = World()
    world.add(settings(steps=50, stop=StopSettings(max_time_s=100.0), step_timeout_s=1e6, episode_timeout_s=1e6))
    while len(world.history["job"]) < 2:
        world.deliver()
    waiting, world.pending = world.pending, []
    world.tick(99.0)
    assert not world.seen[Stopping]
    world.tick(1.0)
    (stopping,) = world.seen[Stopping]
    assert stopping.reason == "max_time_s: it has run for 100 s, and stop.max_time_s=100"
    world.pending = [entry for entry in waiting if entry[0] == "train"]
    world.run()
    assert len(world.history["job"]) == stopping.step and len(world.seen[JobDone]) == 1


def test_time_counts_from_the_committed_step():
    message = ready(incarnation=2)
    world = World()
    rule = StopSettings(max_time_s=100.0)
    world.add(settings(incarnation=2, stop=rule), ready_message=message, past=Past(running_s=60.0))
    world.tick(39.0)
    assert not world.seen[Stopping]
    world.tick(2.0)
    assert world.seen[Stopping]


def test_somebody_ends_a_job_early_and_it_is_not_evaluated():
    world = World()
    world.add(settings(steps=9, eval_items=3, eval_every_steps=2))
    while len(world.history["job"]) < 3:
        world.deliver()
    world.orchestrator.stop_job("job", "halving: others did better", world.now)
    world.collect()
    world.run()
    assert world.seen[Stopping][0].reason == "halving: others did better" and len(world.history["job"]) < 9
    assert len(world.seen[JobDone]) == 1 and "after" not in {done.phase for done in world.seen[EvalDone]}
    assert not +world.held
    world.orchestrator.stop_job("job", "again", world.now)
    world.orchestrator.stop_job("nobody", "again", world.now)
    assert len(world.seen[Stopping]) == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"eval": {"every_steps": 2, "num_items": 0}}, r"eval\.every_steps=2: eval\.num_items=0 .* at least 1"),
        ({"eval": {"every_steps": -1}}, r"eval\.every_steps=-1: input should be greater than or equal to 0"),
        ({"stop": {"min_delta": 0.1}}, r"stop\.min_delta=0\.1: .* together with stop\.patience"),
        ({"stop": {"min_delta": -0.1, "patience": 2}}, r"stop\.min_delta=-0\.1: input should be"),
        ({"stop": {"patience": 20}}, r"stop\.patience=20: must be less than steps=20"),
        ({"stop": {"patience": 0}}, r"stop\.patience=0: input should be"),
        ({"stop": {"target": 0.5, "window": 21}}, r"stop\.window=21: must be at most steps=20"),
        ({"stop": {"metric": "eval_reward", "target": 0.5}}, r"eval\.every_steps=0 must be 1 to 19"),
        ({"stop": {"metric": "loss"}}, r"stop\.metric='loss': input should be 'train_reward' or 'eval_reward'"),
        ({"stop": {"target": float("nan")}}, r"stop\.target=nan: must be a finite number"),
        ({"stop": {"max_tokens": 0}}, r"stop\.max_tokens=0: input should be"),
        ({"stop": {"max_time_s": 0}}, r"stop\.max_time_s=0: input should be"),
        ({"stop": {"patince": 3}}, r"stop\.patince: unknown key; allowed here: max_time_s, max_tokens, metric"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(changes, sentence):
    with pytest.raises(InvalidConfig, match=sentence) as error:
        validate(JobConfig, {"name": "a", "env": "tiny:upper"} | changes)
    assert "\n" not in str(error.value)
