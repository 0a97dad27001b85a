"""An exact job's batches do not depend on the order of answers, on lost workers, or on how often it is interrupted."""

import random

import pytest

from marlaas_jax.rollout.commands import Note
from tests.rollout.world import World, ready, settings


def world(**changes) -> World:
    made = World(turns=2, reward=lambda seed, text: float(int(text) % 3), workers=("w0", "w1"))
    made.add(settings(**{"steps": 4, "max_staleness": 0, "exact": True, "group_size": 3, "max_attempts": 9} | changes))
    return made


def batches(made: World):
    """Returns what was trained, attempt numbers apart."""
    return [[(g.ticket, g.prompt_ids, g.rows) for g in batch.groups] for batch in made.history["job"]]


def shuffled(seed: int, **changes) -> World:
    rng = random.Random(seed)
    made = world(**changes)
    while made.pending:
        made.deliver(rng.randrange(len(made.pending)))
        if rng.random() < 0.02:  # five in a row without an answer would end the job
            made.lose_worker(rng.choice(made.workers))
    made.check()
    return made


def test_neither_order_nor_lost_workers_change_what_is_trained():
    expected = world()
    expected.run()
    restarted = 0
    for seed in range(20):
        made = shuffled(seed)
        restarted += any(attempt for _, attempt in made.resets)
        assert batches(made) == batches(expected), seed
        assert not made.seen[Note] or all(note.kind == "isolation" for note in made.seen[Note])
    assert restarted > 10
    # The same worlds do change a shared job: its lost episodes draw anew.
    shared = world(exact=False)
    shared.run()
    assert any(batches(shuffled(seed, exact=False)) != batches(shared) for seed in range(20))


def test_a_group_that_failed_draws_anew_and_the_same_each_time():
    def run(lose: bool):
        made, failed, first = world(steps=1), [], True
        while made.pending:
            index = next((i for i, (kind, _) in enumerate(made.pending) if kind == "step"), 0)
            kind, what = made.pending[index]
            if kind == "step" and "/train/0/" in what[1].episode_id and len(failed) < 3:
                failed.append(what[1].episode_id)
                made.fail_call(index, "error")
                continue
            made.deliver(index)
            if lose and first and kind == "reset":
                first = False
                made.lose_worker(made.workers[0])
        assert len(failed) == 3
        return batches(made)

    one, other = run(lose=False), run(lose=True)
    assert one == other


@pytest.mark.parametrize("exact", [True, False])
def test_what_the_clock_decides_is_said(exact):
    made = world(steps=1, exact=exact)
    while made.pending and made.pending[0][0] != "step":
        made.deliver()
    made.fail_call(0, "timeout")
    made.run()
    said = [note for note in made.seen[Note] if note.kind == "not_exact"]
    assert len(said) == exact and all("timed out" in note.text and "ticket" in note.text for note in said)


def test_a_second_incarnation_draws_what_the_first_would_have_drawn():
    expected = world()
    expected.run()
    made = world()
    while len(made.history["job"]) < 2:
        made.deliver(len(made.pending) - 1)
    step, ledger = made.steps["job"], made.history["job"][-1].ledger
    made.pending.clear()
    made.add(settings(incarnation=2, steps=4, max_staleness=0, exact=True, group_size=3),
             ready_message=ready("job", 2, step, made.version["job"], ledger))  # fmt: skip
    made.run()
    assert batches(made) == batches(expected)
