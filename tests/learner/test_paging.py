"""More jobs than slots: who has a slot, and that a round trip through host memory changes no bit of any update."""

import dataclasses
from collections import defaultdict

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from marlaas_jax.fairness import Shares
from marlaas_jax.learner.paging import Slots
from marlaas_jax.messages import StepDone, TrainBatch
from tests.learner import small

NAMES = "abcdef"
# Micro-batches of one job: what is accumulated in which order does not depend on who else waits, so results may be compared
# bit for bit. Dispatches of one program each leave room for arrivals between any two.
SIZES = dataclasses.replace(
    small.SIZES,
    shapes=tuple(dataclasses.replace(shape, blocks=1) for shape in small.SHAPES),
    update_buckets=(1,),
    max_dispatch_s=1e-12,
)
SECTIONS = {  # of the odd ones: scoring before training, and several optimizer steps in a batch
    "b": {"algorithm": {"kl_weight": 0.2}},
    "d": {"algorithm": {"objective": "decoupled", "minibatches": 2}},
    "e": {"algorithm": {"minibatches": 3, "loss": "dapo"}},
}


def open_job(learner, name, weight=1.0, **options):
    spec = dataclasses.replace(small.SPEC, seed=ord(name))
    weights = None if "state" in options else small.trained_weights(spec, seed=ord(name))
    learner.add_job(name, 0, small.make_job(name, weight=weight, **SECTIONS.get(name, {})), spec, weights=weights, **options)


def batch_of(name, step, **changes):
    return small.make_batch(name, step, seed=ord(name), groups=2, rows=3, **changes)


def assert_same(one, other):
    assert one["counters"] == other["counters"]
    for name in one["arrays"]:
        np.testing.assert_array_equal(one["arrays"][name], other["arrays"][name])


# ---- policy


def test_the_idle_leave_first_then_the_last_of_the_queue():
    slots = Slots(4)
    assert [slots.take(job) for job in "abcd"] == [1, 2, 3, None]
    slots.use("a")
    assert slots.leaving(["d"], []) == "b"  # used least recently
    assert slots.leaving(["d", "b"], []) == "c"  # b waits
    assert slots.leaving(["d", "b", "a"], ["c"]) == "a"  # c is held; a is the last of the queue
    assert slots.admitted(["d", "b", "a"], ["c", "a"]) == ["d", "a"]
    assert slots.admitted(["d", "b"], ["a", "b", "c"]) == ["b"]
    assert slots.release("b") == 2 and slots.release("b") is None
    assert slots.leaving(["d"], []) is None and slots.take("d") == 2
    assert "b" not in slots and slots["d"] == 2 and len(slots) == 3


@hypothesis.given(
    st.integers(2, 5),
    st.lists(st.tuples(st.floats(0.5, 4), st.integers(1, 6)), min_size=2, max_size=8),
    st.lists(st.integers(0, 60), min_size=8, max_size=8),
)
def test_nobody_starves_and_weights_hold(num_slots, kinds, arrivals):
    """Jobs of any weight and batch length, each with a batch at all times once it has arrived.

    What any two were served over their weights differs by two batches at most, and nobody loses its slot within a batch.
    """
    slots, shares = Slots(num_slots), Shares()
    weight = {f"j{i}": kind[0] for i, kind in enumerate(kinds)}
    blocks = {f"j{i}": kind[1] for i, kind in enumerate(kinds)}
    left = dict(blocks)
    arrived: list[str] = []
    for now in range(300):
        for i, job in enumerate(blocks):
            if arrivals[i] == now:
                shares.add(job, weight[job])
                slots.take(job)
                arrived.append(job)
        queue = shares.order(arrived)
        if not queue:
            continue
        held = [job for job in queue if left[job] < blocks[job]]
        admitted = slots.admitted(queue, held)
        head = admitted[0]
        if head not in slots:
            leaving = slots.leaving(queue, held)
            assert leaving not in held
            if leaving is not None:
                slots.release(leaving)
            slots.take(head)
        assert len(slots) <= num_slots - 1 and set(held) <= set(slots._slots)
        shares.charge(head, 1.0)
        left[head] = left[head] - 1 or blocks[head]
        if now > 60:
            most = max(blocks[job] / weight[job] for job in blocks)
            served = [shares.served(job)[0] for job in blocks]
            assert max(served) - min(served) <= 2 * most + 1e-9


# ---- the learner


@pytest.mark.slow
@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(
    st.sampled_from([2, 4]), st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 25)), min_size=8, max_size=16)
)
def test_updates_equal_those_of_a_learner_with_enough_slots(num_slots, arrivals):
    """Random arrivals, one program per dispatch: every batch is trained, every bit is the same, nobody mid-batch moves."""
    learners = [small.make_learner(sizes=SIZES, num_slots=n) for n in (num_slots, len(NAMES) + 1)]
    done = []
    for learner in learners:
        for name in NAMES:
            open_job(learner, name)
        submitted: dict[str, int] = defaultdict(int)
        ended: list = []
        for name, dispatches in arrivals:
            assert learner.submit(batch_of(name, submitted[name]))
            submitted[name] += 1
            for _ in range(dispatches):
                busy = {n for n, job in learner._jobs.items() if job.batches and job.batches[0].has_begun}
                assert all(n not in learner._shelf for n in busy)
                ended += learner.step()
        ended += small.run(learner)
        done.append({(d.job, d.step): d.metrics["learner/loss"] for d in ended})
        assert len(done[-1]) == len(arrivals)
        assert learner.gauges()["learner/resident_jobs"] <= num_slots - 1 or learner is learners[1]
    assert done[0] == done[1]
    for name in NAMES:
        assert_same(learners[0].state(name), learners[1].state(name))
    assert learners[1].counters["page_ins"] == learners[1].counters["page_outs"] == 0


def test_micro_batches_of_many_jobs_give_the_same_updates():
    """As above with blocks of several jobs in a micro-batch, where sums may be taken in another order."""
    few, enough = small.make_learner(num_slots=3), small.make_learner(num_slots=4)
    for learner in (few, enough):
        for name in "abd":
            open_job(learner, name)
        for step in range(2):
            small.run(learner, *(batch_of(name, step) for name in "abd"))
    assert few.counters["page_ins"] >= 2 and enough.counters["page_ins"] == 0
    for name in "abd":
        ours, theirs = few.state(name), enough.state(name)
        assert ours["counters"] == theirs["counters"]
        for array, wanted in theirs["arrays"].items():
            np.testing.assert_allclose(ours["arrays"][array], wanted, atol=1e-5 * np.abs(wanted).max())


def test_what_others_read_is_the_same_without_a_slot():
    """Snapshot, score, state and weights of a paged-out job, even while a job in the middle of a batch has the only slot."""
    few, enough = small.make_learner(sizes=SIZES, num_slots=2), small.make_learner(sizes=SIZES)
    for learner in (few, enough):
        open_job(learner, "a")
        open_job(learner, "b")
        small.run(learner, batch_of("b", 0))
        learner.submit(batch_of("a", 0))
        learner.step()
        learner.step()
    assert "b" in few._shelf and few._jobs["a"].batches[0].has_begun
    ours, theirs = few.snapshot("b"), enough.snapshot("b")
    assert ours.fingerprint == theirs.fingerprint and ours.version == theirs.version == 1
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(ours.weights))
    np.testing.assert_array_equal(few.score("b", [1, 2, 3, 4]), enough.score("b", [1, 2, 3, 4]))
    jax.tree.map(np.testing.assert_array_equal, few.weights("b"), enough.weights("b"))
    assert_same(few.state("b"), enough.state("b"))
    for learner in (few, enough):
        small.run(learner)
    assert_same(few.state("a"), enough.state("a"))
    for stack in jax.tree.leaves(few._executor.masters):
        assert not np.asarray(stack)[0].any(), "slot 0 is the null adapter again"


def test_a_flat_batch_needs_no_slot():
    learner = small.make_learner(num_slots=2)
    open_job(learner, "a")
    open_job(learner, "c")
    before = learner.state("c")["arrays"]
    [done] = small.run(learner, batch_of("c", 0, advantage=0.0))
    assert isinstance(done, StepDone) and done.version == 1 and learner.counters["page_ins"] == 0
    for name, array in learner.state("c")["arrays"].items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("at", [0, 1, 4])
def test_removal_leaves_nothing_behind_h02(at):
    """A job is removed with or without a slot, before and within its batch: who opens under its name starts fresh."""
    learner = small.make_learner(sizes=SIZES, num_slots=2)
    open_job(learner, "a")
    open_job(learner, "b")
    learner.submit(batch_of("b", 0))
    for _ in range(at):
        learner.step()
    assert ("a" not in learner._shelf) == (at == 0)
    learner.remove_job("a")
    learner.remove_job("b")
    for stack in jax.tree.leaves(learner._executor.masters):
        assert not np.asarray(stack).any()
    assert learner.gauges()["learner/open_jobs"] == learner.gauges()["learner/resident_jobs"] == 0
    learner.add_job("a", 1, small.make_job("a"), small.SPEC)
    other = small.make_learner(sizes=SIZES)
    other.add_job("a", 1, small.make_job("a"), small.SPEC)
    sent = TrainBatch("a", 1, 0, batch_of("a", 0).groups, b"", 0.0)
    small.run(learner, sent)
    small.run(other, sent)
    assert_same(learner.state("a"), other.state("a"))


def test_paging_compiles_nothing_after_warm_up_h44():
    learner = small.make_learner(num_slots=3)
    learner.warmup()
    with jax.no_tracing():
        for name in NAMES:
            open_job(learner, name)
            learner.snapshot(name)
            learner.score(name, [1, 2, 3, 4])
        for step in range(2):
            small.run(learner, *(batch_of(name, step) for name in NAMES))
            for name in NAMES:
                learner.snapshot(name)
        saved = learner.state("b")
        learner.remove_job("b")
        open_job(learner, "b", state=saved)
        small.run(learner, batch_of("b", 2))
    assert learner.counters["page_outs"] >= 8


def test_jobs_without_a_slot_get_their_share_by_weight():
    """One usable slot, five jobs that always have a batch, weights 1, 1, 2, 4, 2: batches are trained in that proportion."""
    weights = dict(zip("acdef", (1.0, 1.0, 2.0, 4.0, 2.0), strict=True))
    learner = small.make_learner(sizes=dataclasses.replace(SIZES, shapes=SIZES.shapes[1:], max_dispatch_s=1e9), num_slots=2)
    for name, weight in weights.items():
        learner.add_job(name, 0, small.make_job(name, weight=weight), small.SPEC)
    trained = dict.fromkeys(weights, 0)
    wait = dict.fromkeys(weights, 0)
    batch = lambda name: small.make_batch(name, trained[name], groups=1, rows=4)
    for name in weights:
        learner.submit(batch(name))
    while sum(trained.values()) < 60:
        for done in learner.step():
            trained[done.job] += 1
            learner.submit(batch(done.job))
            wait = {name: 0 if name == done.job else batches + 1 for name, batches in wait.items()}
            assert max(wait.values()) <= 12, "the lightest has a tenth of the learner"
    assert all(abs(trained[name] - 6 * weight) <= 2 for name, weight in weights.items()), trained
