"""Start-time fair queueing: shares follow weights whatever a turn costs, and idling earns nothing."""

import hypothesis
import hypothesis.strategies as st

from marlaas_jax.fairness import Shares


def serve(shares: Shares, costs: dict[str, float], turns: int) -> dict[str, float]:
    """Gives turns to the first of the jobs named in `costs`; returns what each was served."""
    served = dict.fromkeys(costs, 0.0)
    for _ in range(turns):
        job = shares.order(costs)[0]
        shares.charge(job, costs[job])
        served[job] += costs[job]
    return served


@hypothesis.given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(1, 100)), min_size=2, max_size=6), st.integers(1, 300))
def test_service_per_weight_differs_by_at_most_one_turn_each(jobs, turns):
    shares, costs, weights = Shares(), {}, {}
    for i, (weight, cost) in enumerate(jobs):
        shares.add(f"job{i}", weight)
        costs[f"job{i}"], weights[f"job{i}"] = cost, weight
    served = serve(shares, costs, turns)
    for a in costs:
        for b in costs:
            bound = max(costs[a] / weights[a], costs[b] / weights[b])
            assert abs(served[a] / weights[a] - served[b] / weights[b]) <= bound + 1e-6


def test_idling_earns_nothing_and_costs_nothing():
    shares = Shares()
    for job in "ab":
        shares.add(job, 1.0)
    serve(shares, {"a": 8, "b": 8}, 10)
    assert serve(shares, {"a": 8}, 50) == {"a": 400}
    assert serve(shares, {"a": 8, "b": 8}, 6) == {"a": 24, "b": 24}
    assert shares.order([]) == []
    assert serve(shares, {"b": 8}, 5) == {"b": 40}
    assert serve(shares, {"a": 8, "b": 8}, 6)["a"] <= 32, "a comes back level, not five turns ahead"


def test_a_new_job_starts_level_and_one_that_left_is_forgotten():
    shares = Shares()
    shares.add("a", 1.0)
    serve(shares, {"a": 8}, 100)
    shares.add("late", 1.0)
    assert serve(shares, {"a": 8, "late": 8}, 10) == {"a": 40, "late": 40}
    shares.remove("a")
    shares.remove("a")
    assert "a" not in shares and shares.order(["late"]) == ["late"]


def test_a_weight_may_change_and_an_estimate_be_taken_back():
    shares = Shares()
    for job in "ab":
        shares.add(job, 1.0)
    shares.add("b", 3.0)
    served = serve(shares, {"a": 8, "b": 8}, 400)
    assert abs(served["b"] - 3 * served["a"]) <= 32
    shares.charge("a", 80)
    shares.charge("a", -80)
    assert abs(serve(shares, {"a": 8, "b": 8}, 4)["b"] - 24) <= 8


def test_what_was_served_while_nobody_else_waited_is_no_debt():
    """As a queue sees it that is emptied between two turns: each job ran alone for a while, one of them much longer."""
    shares = Shares()
    for job, turns in {"a": 100, "b": 300}.items():
        shares.add(job, 1.0)
        for _ in range(turns):
            assert shares.order([job]) == [job]
            shares.charge(job, 8)
            shares.order([])
    shares.add("new", 1.0)
    assert serve(shares, {"a": 8, "b": 8, "new": 8}, 60) == {"a": 160, "b": 160, "new": 160}


def test_counting_is_exact_after_any_amount_and_at_the_smallest_and_largest_weights():
    shares = Shares()
    for job, weight in {"a": 0.001, "b": 0.001, "heavy": 1000.0}.items():
        shares.add(job, weight)
    shares.order(["heavy"])
    shares.charge("heavy", 1e20)
    served = serve(shares, {"a": 1, "b": 1}, 1000)
    assert served == {"a": 500, "b": 500}
