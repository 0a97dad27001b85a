"""Tickets, seeds, ledger and versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlaas_jax.errors import CorruptFile
from marlaas_jax.rollout.tickets import Ledger, TicketBook, VersionLog, derive_seed


def test_seeds_are_stable_and_in_range():
    """These values must never change: a resumed run draws them again."""
    assert derive_seed(0, 0, 0, 0, 0) == derive_seed(0, 0, 0, 0, 0)
    assert derive_seed(7, 12, 1, 3, 2) == 8863338335339929201
    draws = {derive_seed(0, t, a, s, n) for t in range(4) for a in range(3) for s in range(4) for n in range(3)}
    assert len(draws) == 144 and all(0 <= seed < 2**63 for seed in draws)
    assert derive_seed(0, 1, 0, 0, 0, "eval") != derive_seed(0, 1, 0, 0, 0)


@given(st.permutations(range(12)), st.integers(0, 12))
def test_ledger_round_trip(order, count):
    ledger = Ledger()
    for ticket in order[:count]:
        ledger.add(ticket)
    copy = Ledger.from_bytes(ledger.to_bytes())
    assert (copy.low_water, copy.above) == (ledger.low_water, ledger.above)
    assert {t for t in range(20) if t in copy} == set(order[:count]) and len(copy) == count
    assert copy.low_water == next(t for t in range(13) if t not in order[:count])


def test_ledger_refuses_what_it_cannot_read():
    assert len(Ledger.from_bytes(b"")) == 0
    with pytest.raises(CorruptFile, match="ledger"):
        Ledger.from_bytes(b"nonsense")
    with pytest.raises(AssertionError, match="twice"):
        Ledger(3).add(2)


def test_a_ledger_of_another_batch_size_is_refused():
    with pytest.raises(CorruptFile, match=r"groups_per_batch=3 makes 6"):
        TicketBook(steps=9, groups_per_batch=3, max_staleness=1, max_attempts=3, ledger=Ledger(8), steps_done=2)


def test_versions_are_counted_in_batches():
    """Four optimizer steps per batch: version 8 stands for two batches, 11 (not announced yet) too; a skipped one is newer."""
    log = VersionLog(0, 0)
    log.record(4, 1)
    log.record(8, 2)
    assert [log.batches(v) for v in (0, 3, 4, 7, 8, 11)] == [0, 0, 1, 1, 2, 2]
    log.record(8, 3)  # every step of the third batch was skipped: the same weights
    assert log.batches(8) == 3


@pytest.mark.parametrize(("cap", "started"), [(0, 4), (1, 8), (2, 12)])
def test_what_may_start_follows_the_cap(cap, started):
    book = TicketBook(steps=9, groups_per_batch=4, max_staleness=cap, max_attempts=3)
    tickets = []
    while book.next_startable() is not None:
        tickets.append(book.start()[0])
    assert tickets == list(range(started))


def test_a_ticket_restarted_too_often_holds_the_step_back():
    book = TicketBook(steps=9, groups_per_batch=1, max_staleness=1, max_attempts=2)
    for _ in range(2):
        book.start()
    book.finish(1, 0)
    assert book.take_batch({0: 0}) == [1]
    book.step_done(1)
    book.start()  # ticket 2
    book.finish(2, 1)
    assert book.take_batch({0: 0}) == [2] and book.is_too_old(0)
    book.restart_stale(0)
    book.step_done(2)
    assert book.start() == (0, 1) and book.start() == (3, 0)
    book.finish(3, 2)
    assert book.take_batch({0: 2}) == [3]  # it may still enter the next step
    book.step_done(3)
    assert book.start() == (4, 0)
    book.finish(4, 3)
    assert book.take_batch({0: 2}) is None, "would make ticket 0 too old once more"
    book.finish(0, 2)
    assert book.take_batch({}) == [0], "the oldest tokens go first"


def test_empty_places_are_spread_over_the_steps():
    book = TicketBook(steps=2, groups_per_batch=2, max_staleness=1, max_attempts=1)
    for _ in range(4):
        book.start()
    for ticket in (0, 1):
        assert not book.fail(ticket)
        book.give_up(ticket)
    book.finish(2, 0)
    book.finish(3, 0)
    assert book.take_batch({}) == [0, 2] and book.take_batch({}) == [1, 3]
    assert book.ledger.low_water == 4
