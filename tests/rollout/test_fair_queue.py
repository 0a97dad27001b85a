"""Deficit-weighted round robin."""

from collections import Counter

from marlaas_jax.rollout.fair_queue import FairQueue


def shares(weights, costs, rounds=3000):
    queue = FairQueue(quantum=8)
    for job, weight in weights.items():
        queue.add(job, weight)
    served = Counter()
    for _ in range(rounds):
        job = queue.next(costs.get)
        served[job] += costs[job]
    total = sum(served.values())
    return {job: served[job] / total for job in weights}


def test_equal_weights_share_equally_whatever_a_group_costs():
    found = shares({"a": 1, "b": 1, "c": 1}, {"a": 2, "b": 8, "c": 64})
    assert all(abs(share - 1 / 3) < 0.03 for share in found.values())


def test_shares_follow_weights():
    found = shares({"a": 1, "b": 3}, {"a": 8, "b": 8})
    assert abs(found["b"] - 0.75) < 0.02


def test_nothing_to_do_returns_none_and_keeps_no_credit():
    queue = FairQueue(quantum=8)
    queue.add("a", 1)
    queue.add("b", 1)
    assert queue.next(lambda job: None) is None
    for _ in range(50):
        assert queue.next({"a": 8}.get) == "a"
    turns = [queue.next({"a": 8, "b": 8}.get) for _ in range(6)]
    assert turns.count("b") == 3, "the idle job saved nothing up and is not punished"


def test_a_job_can_leave_at_any_time():
    queue = FairQueue()
    for job in "abc":
        queue.add(job, 1)
    assert queue.next({"a": 1, "b": 1, "c": 1}.get) == "a"
    queue.remove("a")
    queue.remove("a")
    assert {queue.next({"b": 8, "c": 8}.get) for _ in range(4)} == {"b", "c"}


def test_a_large_piece_is_not_kept_out_by_small_ones():
    queue = FairQueue(quantum=8)
    queue.add("large", 1)
    queue.add("small", 1)
    costs = {"large": 60, "small": 4}
    running, started = [], Counter()
    for _ in range(200):
        while job := queue.next(costs.get, 64 - sum(running)):
            running.append(costs[job])
            started[job] += 1
        running.pop(0)
    assert started["large"] >= 10
