"""Evaluations beside the training: their own share, one snapshot each, none twice, none for ever."""

import math
import statistics

import pytest

from marlaas_jax.rollout.commands import EvalDone, JobDone, Note
from marlaas_jax.rollout.evaluation import standard_error
from marlaas_jax.rollout.stopping import Past
from tests.rollout.world import World, ready, settings


def is_eval(kind, what):
    if kind == "generated":
        return what[0].sampling.temperature == 0.0
    return "eval" in str(what)


def train_first(world):
    """Delivers everything but the evaluations' answers, until only those are left."""
    while (i := next((i for i, entry in enumerate(world.pending) if not is_eval(*entry)), None)) is not None:
        world.deliver(i)


def done_of(world):
    return [(done.phase, done.step, done.version) for done in world.seen[EvalDone]]


def test_an_evaluation_every_two_steps_is_of_that_steps_snapshot_and_the_last_is_the_after_one():
    world = World(minibatches=3)
    world.add(settings(steps=6, group_size=3, groups_per_batch=4, eval_items=3, eval_every_steps=2), eval_before=True)
    world.run()
    assert done_of(world) == [("before", 0, 0), ("during", 2, 6), ("during", 4, 12), ("after", 6, 18)]
    asked = [g.version for g in world.generates if g.sampling.temperature == 0.0]
    assert asked == [0] * 3 + [6] * 3 + [12] * 3 + [18] * 3
    assert not +world.held, "every snapshot that was held is let go"
    assert all(g.version == -1 for g in world.generates if g.sampling.temperature != 0.0)


def test_training_goes_on_while_an_evaluation_answers_nothing():
    """H32: the queues are independent. All batches are trained first; what is due meanwhile is left out, and that is said."""
    world = World()
    world.add(settings(steps=8, eval_items=5, eval_every_steps=2))
    train_first(world)
    assert len(world.history["job"]) == 8 and not world.seen[EvalDone]
    skipped = [note.text for note in world.seen[Note] if note.kind == "evaluation_skipped"]
    assert len(skipped) == 2 and "the evaluation of step 4 is left out: that of step 2 still runs" in skipped[0]
    world.run()
    assert done_of(world) == [("during", 2, 2), ("after", 8, 8)], "it ends, of the snapshot that it began with"
    assert len(world.seen[JobDone]) == 1 and not +world.held


def test_few_episodes_of_an_evaluation_run_beside_training_and_all_of_them_after_it():
    world = World()
    world.add(settings(steps=4, group_size=4, groups_per_batch=4, eval_items=40, eval_every_steps=1))
    rollout = world.orchestrator.jobs["job"]
    most = 0
    while world.pending and not rollout.book.finished:
        running = sum(group.split == "eval" for group in rollout.runner.groups.values())
        most = max(most, running)
        world.deliver()
    assert most == 4, "a quarter of a batch's 16 episodes"
    train_first(world)
    assert sum(group.split == "eval" for group in rollout.runner.groups.values()) > 4


def test_a_small_share_of_the_starts_and_never_none():
    """The pool takes one group at a time, and training always has another: the evaluation still gets its share."""
    world = World()
    world.orchestrator.max_episodes_per_worker = 1
    world.add(settings(steps=60, group_size=1, groups_per_batch=8, eval_items=12, eval_every_steps=1, max_staleness=4))
    while len(world.seen[EvalDone]) < 1:
        world.deliver()
    first_due = 8
    trained = sum(len(batch.groups) for batch in world.history["job"])
    assert 12 / 0.25 * 0.7 <= trained - first_due <= 12 / 0.25 * 1.5 + 40, trained


def test_another_jobs_share_is_not_touched_by_evaluations():
    world = World()
    world.orchestrator.max_episodes_per_worker = 1
    same = {"group_size": 1, "groups_per_batch": 4, "steps": 60, "max_staleness": 4}
    world.add(settings("plain", **same))
    world.add(settings("evaluated", **same, eval_items=30, eval_every_steps=1))
    while len(world.history["plain"]) < 40:
        world.deliver()
    assert 24 <= len(world.history["evaluated"]) <= 36, "it pays for its evaluations itself"


@pytest.mark.parametrize(
    ("done", "step", "expected"),
    [
        ((("before", 0), ("during", 2)), 2, [("during", 4, 4), ("after", 6, 6)]),  # it was evaluated: not again
        ((("before", 0),), 2, [("during", 2, 2), ("during", 4, 4), ("after", 6, 6)]),  # a crash cut it off: once more
        ((("before", 0),), 3, [("during", 3, 3), ("after", 6, 6)]),  # its weights are gone: that of now, once; 4 is left out
        ((("before", 0), ("during", 4), ("after", 6)), 6, []),
        ((("before", 0), ("during", 4)), 6, [("after", 6, 6)]),
    ],
)
def test_a_resumed_job_evaluates_what_was_not(done, step, expected):
    full = World()
    full.add(settings(steps=6))
    full.run()
    ledger = full.history["job"][step - 1].ledger
    past = Past(
        rewards=(0.5,) * step,
        evaluations=tuple(EvalDone("job", phase, at, 0.5, 2, 2, at, 0.1) for phase, at in done),
    )
    world = World()
    message = ready(incarnation=2, step=step, version=step, ledger=ledger)
    world.add(settings(steps=6, incarnation=2, eval_items=2, eval_every_steps=2), ready_message=message, past=past)
    if expected and expected[0] == ("during", 3, 3):
        train_first(world)
        assert next(note.text for note in world.seen[Note]).startswith("the evaluation of step 4 is left out")
    world.run()
    assert done_of(world) == expected
    assert len(world.seen[JobDone]) == 1 and not +world.held


def test_figures_of_an_evaluation_with_a_missing_reward():
    world = World()
    answers = iter([1.0, None, 0.0, 0.25])
    world.reward = lambda seed, text: next(answers)
    world.add(settings(steps=1, eval_items=4), eval_before=True)
    while not world.seen[EvalDone]:
        world.deliver()
    (done,) = world.seen[EvalDone]
    known = [1.0, 0.0, 0.25]
    assert (done.num_scored, done.num_items, done.reward_mean) == (3, 4, sum(known) / 3)
    assert done.reward_std_error == pytest.approx(statistics.stdev(known) / math.sqrt(3))
    assert standard_error([1.0]) is None and standard_error([]) is None
