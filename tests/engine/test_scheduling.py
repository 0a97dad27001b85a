"""Pure bookkeeping: residency, the fair queue, block arrangement, buckets."""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from marlaas_jax.engine import buckets, plan
from marlaas_jax.engine.queue import FairQueue
from marlaas_jax.engine.residency import Residency
from marlaas_jax.engine.snapshots import SnapshotKey, SnapshotStore
from marlaas_jax.errors import InvalidConfig
from marlaas_jax.lora.snapshot import Snapshot


def test_residency_drops_the_least_recently_used_and_keeps_pins():
    residency = Residency(5)
    assert residency.pin("a") == (1, True)
    assert [residency.place(k)[0] for k in "bcd"] == [2, 3, 4]
    assert residency.place("b") == (2, False)
    assert residency.place("e") == (3, True)  # c was used least recently; a is pinned
    assert residency.slot_of("c") is None and residency.slot_of("a") == 1
    residency.unpin("a")
    residency.drop("a")
    assert residency.place("f") == (1, True)


@hypothesis.given(
    st.integers(3, 6), st.lists(st.tuples(st.sampled_from(["pin", "unpin", "place"]), st.integers(0, 8)), max_size=60)
)
def test_a_publish_always_finds_a_slot(num_slots, actions):
    """The inequality: slots >= versions that may run at once + 1 for publishing, the null adapter not counted."""
    residency = Residency(num_slots)
    pins: list[int] = []
    for action, key in actions:
        if action == "pin" and residency.can_pin(key):
            slot, _ = residency.pin(key)
            pins.append(key)
        elif action == "unpin" and pins:
            residency.unpin(pins.pop(key % len(pins)))
        elif action == "place":
            slot, _ = residency.place(key)
            assert slot >= 1
        assert residency.num_pinned == len(set(pins)) <= num_slots - 2
        assert all(residency.slot_of(k) is not None for k in pins)
        assert len(set(residency.resident.values())) == len(residency.resident) <= num_slots - 1


def test_a_bank_without_room_to_publish_is_refused():
    with pytest.raises(ValueError, match="num_slots=2"):
        Residency(2)


def test_snapshots_die_with_their_last_user():
    store = SnapshotStore(8)
    make = lambda version: Snapshot("j", 0, version, {}, 1.0, "")
    key = lambda version: SnapshotKey("j", 0, version)
    assert store.publish(make(0)) == []
    store.use(key(0))
    assert store.publish(make(1)) == [] and len(store) == 2
    assert store.publish(make(2)) == [key(1)]
    assert store.release(key(0)) == [key(0)] and store.get(key(0)) is None
    assert store.latest("j").version == 2
    assert store.forget("j") == [key(2)] and len(store) == 0


def test_what_has_no_slot_leaves_the_device_longest_unused_first():
    store = SnapshotStore(1)
    keys = [SnapshotKey(job, 0, 0) for job in "abcd"]
    on_host = lambda: {key.job for key, kept in store._snapshots.items() if isinstance(kept.weights["x"], np.ndarray)}
    for key in keys[:3]:
        store.publish(Snapshot(key.job, 0, 0, {"x": jnp.zeros(1)}, 1.0, ""))
        store.touch(key, keys[:3])
    store.touch(keys[0], keys[:3])  # a is used again
    assert not on_host() and store.num_on_device == 3
    store.publish(Snapshot("d", 0, 0, {"x": jnp.zeros(1)}, 1.0, ""))
    store.touch(keys[3], keys[2:])
    assert on_host() == {"b"} and store.num_on_device == 3
    assert store.forget("b") == [keys[1]] and store.forget("d") == [keys[3]] and store.num_on_device == 2
    assert store.forget("a") == [keys[0]] and store.forget("c") == [keys[2]] and store.num_on_device == 0


def serve(queue: FairQueue, rounds: int, cost: dict[str, float], fits=lambda item: True) -> dict[str, float]:
    """Serves one item a round to the job whose turn it is; all jobs always have more."""
    served = dict.fromkeys(cost, 0.0)
    for _ in range(rounds):
        found = queue.next(fits, lambda item: False)
        if found is None:
            break
        job, item = found
        queue.remove(job, item)
        queue.charge(job, cost[job])
        served[job] += cost[job]
        queue.push(job, object(), 1.0)
    return served


def test_tokens_are_shared_by_weight_not_by_requests():
    queue: FairQueue[object] = FairQueue(1e9)
    cost = {"long": 100.0, "short": 5.0, "heavy": 20.0}
    for job in cost:
        queue.push(job, object(), 3.0 if job == "heavy" else 1.0)
    served = dict.fromkeys(cost, 0.0)
    for _ in range(2000):
        job, item = queue.next(lambda item: True, lambda item: False)
        queue.remove(job, item)
        queue.charge(job, cost[job])
        served[job] += cost[job]
        queue.push(job, object(), 3.0 if job == "heavy" else 1.0)
    assert abs(served["long"] - served["short"]) <= 105
    assert abs(served["heavy"] - 3 * served["long"]) <= 320


@hypothesis.given(st.lists(st.floats(1, 50), min_size=2, max_size=5), st.integers(50, 300))
def test_shares_differ_by_at_most_two_requests(costs, rounds):
    cost = {f"job{i}": c for i, c in enumerate(costs)}
    queue: FairQueue[object] = FairQueue(1e9)
    for job in cost:
        queue.push(job, object())
    served = serve(queue, rounds, cost)
    assert max(served.values()) - min(served.values()) <= 2 * max(costs) + 1e-6


def test_idling_earns_nothing():
    queue: FairQueue[int] = FairQueue(1e9)
    for i in range(101):
        queue.push("a", i)
        assert queue.next(lambda item: True, lambda item: False) == ("a", 0)
        queue.charge("a", 10.0)
    queue.push("b", 0)
    turns = []
    for i in range(10):
        job, item = queue.next(lambda item: True, lambda item: False)
        turns.append(job)
        queue.remove(job, item)
        queue.charge(job, 10.0)
        queue.push(job, 1000 + i)
    assert turns.count("b") == 5


def test_a_blocked_job_is_overtaken_within_a_bound_and_what_has_begun_goes_on():
    queue: FairQueue[str] = FairQueue(30.0)
    for job in "abc":
        queue.push(job, job)
    fits = lambda item: item != "a"
    served = 0
    while (found := queue.next(fits, lambda item: False)) is not None:
        queue.remove(*found)
        queue.charge(found[0], 10.0)
        queue.push(found[0], found[1])
        served += 10
    assert 30 <= served <= 60
    assert queue.next(fits, lambda item: item == "c") == ("c", "c")
    assert queue.next(lambda item: True, lambda item: False) == ("a", "a")
    assert queue.lengths() == {"a": 1, "b": 1, "c": 1} and len(queue) == 3
    assert queue.forget("a") == ["a"] and queue.forget("a") == []


FORMS = buckets.choose(16, 64).forms


@hypothesis.given(st.dictionaries(st.integers(0, 15), st.integers(0, 5), min_size=1), st.lists(st.integers(0, 5), min_size=40))
def test_arrangement_puts_each_row_in_a_block_of_its_adapter(adapters, noise):
    held = {count: noise[:count] for count in (1, 4, 16)}
    made = plan.arrange(FORMS, adapters, 16, held, 0)
    assert len(set(made.order)) == len(made.order) == made.form.num_rows
    assert set(adapters) <= set(made.order)
    for i, slot in enumerate(made.order):
        if slot in adapters:
            assert made.adapters[i // made.form.block] == adapters[slot]
    again = plan.arrange(FORMS, adapters, 16, held | {made.form.num_blocks: made.adapters}, 0)
    assert again.adapters == made.adapters  # nothing moves while the rows stay


def test_forms_follow_what_is_in_use():
    sixteen = dict.fromkeys(range(16), "a")
    assert plan.choose_form(FORMS, {"a": 16}) == buckets.Form(16, 16)
    assert plan.choose_form(FORMS, {"a": 8, "b": 7}) == buckets.Form(16, 4)
    assert plan.choose_form(FORMS, {"a": 13, "b": 1, "c": 1}) == buckets.Form(16, 1)
    assert plan.choose_form(FORMS, {"a": 2, "b": 2}) == buckets.Form(4, 1)
    assert plan.arrange(FORMS, sixteen, 16, {}, "null").adapters == ("a",)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 8, 32, 128])
@pytest.mark.parametrize("max_context", [8, 24, 96, 256, 2048])
def test_buckets_cover_everything_in_at_most_24_programs(num_slots, max_context):
    made = buckets.choose(num_slots, max_context)
    assert len(made.programs()) <= 24
    for tokens in (1, max_context // 2 or 1, max_context):
        assert tokens <= made.prefill_length(tokens) <= max_context
        assert tokens <= made.context_length(tokens) <= max_context
        assert tokens <= made.score_length(tokens) <= max_context
    assert made.context_length(max_context + 9) == max_context
    for rows in range(1, num_slots + 1):
        plan.choose_form(made.forms, {i: 1 for i in range(rows)})


def test_buckets_that_make_too_many_programs_are_refused():
    with pytest.raises(InvalidConfig, match="at most 24"):
        buckets.choose(32, 256, context_lengths=(32, 64, 96, 128, 160))
    with pytest.raises(InvalidConfig, match="512"):
        buckets.choose(32, 256, prefill_lengths=(512,))
    assert buckets.choose(32, 256, prefill_lengths=(48,)).prefill_lengths == (48, 256)
