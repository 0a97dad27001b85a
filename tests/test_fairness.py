"""Start-time fair queueing: shares follow weights whatever a turn costs, and idling earns nothing."""

import hypothesis
import hypothesis.strategies as st

from marlaas_jax.fairness import Owner, Shares, entitled


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


@hypothesis.given(
    st.lists(st.tuples(st.floats(0.1, 10), st.lists(st.floats(0.1, 10), min_size=1, max_size=4)), min_size=2, max_size=4),
    st.integers(1, 300),
)
def test_owners_get_what_their_weights_say_however_many_jobs_they_have_and_whatever_weighs_each(owners, turns):
    """Goyal et al. 1996, section 3: the bound of the flat queue holds between owners, and within each between its jobs."""
    shares, weights = Shares(), {}
    for i, (weight, jobs) in enumerate(owners):
        for j, own in enumerate(jobs):
            shares.add(f"{i}/{j}", own, Owner(str(i), weight))
            weights[f"{i}/{j}"] = own
    served = serve(shares, dict.fromkeys(weights, 8.0), turns)
    together = [sum(served[f"{i}/{j}"] for j in range(len(jobs))) for i, (_, jobs) in enumerate(owners)]
    for i, (weight, jobs) in enumerate(owners):
        for other, (other_weight, _) in zip(together, owners, strict=True):
            assert abs(together[i] / weight - other / other_weight) <= max(8 / weight, 8 / other_weight) + 1e-6
        for j, own in enumerate(jobs):
            for k, other in enumerate(jobs):
                bound = max(8 / own, 8 / other)
                assert abs(served[f"{i}/{j}"] / own - served[f"{i}/{k}"] / other) <= bound + 1e-6


def test_more_jobs_and_heavier_jobs_get_an_owner_no_more():
    """The tenant with four jobs of weight 1000 against the one with a single job of weight 1."""
    shares = Shares()
    for i in range(4):
        shares.add(f"greedy{i}", 1000.0, Owner("greedy", 1.0))
    shares.add("small", 1.0, Owner("small", 1.0))
    served = serve(shares, {f"greedy{i}": 8 for i in range(4)} | {"small": 8}, 80)
    assert served == {f"greedy{i}": 80 for i in range(4)} | {"small": 320}


def test_what_an_owners_idle_jobs_leave_goes_to_its_others():
    shares = Shares()
    for job, owner in {"a1": "a", "a2": "a", "b": "b"}.items():
        shares.add(job, 1.0, Owner(owner, 1.0))
    assert serve(shares, {"a1": 8, "b": 8}, 20) == {"a1": 80, "b": 80}
    assert serve(shares, {"a1": 8, "a2": 8, "b": 8}, 40) == {"a1": 80, "a2": 80, "b": 160}, "idling earned a2 nothing"
    shares.remove("a1")
    assert serve(shares, {"a2": 8, "b": 8}, 20) == {"a2": 80, "b": 80}
    shares.remove("a2")
    assert shares.order(["b"]) == ["b"] and "a2" not in shares


def test_an_owners_weight_changes_for_all_of_its_jobs_at_once():
    shares = Shares()
    for job, owner in {"a1": "a", "a2": "a", "b": "b"}.items():
        shares.add(job, 1.0, Owner(owner, 1.0))
    shares.reweigh(Owner("a", 3.0))
    shares.reweigh(Owner("nobody", 9.0))
    served = serve(shares, {"a1": 8, "a2": 8, "b": 8}, 80)
    assert served == {"a1": 240, "a2": 240, "b": 160}
    assert shares.order(["b"]) == ["b"]


def test_jobs_with_and_without_an_owner_stand_beside_each_other_and_names_do_not_collide():
    shares = Shares()
    shares.add("x", 2.0)
    shares.add("y", 1.0, Owner("x", 1.0))
    assert serve(shares, {"x": 8, "y": 8}, 30) == {"x": 160, "y": 80}
    shares.add("y", 2.0)
    assert serve(shares, {"x": 8, "y": 8}, 20) == {"x": 80, "y": 80}, "a job may lose its owner"


@hypothesis.given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.floats(0.1, 10)), min_size=1, max_size=6))
def test_what_each_job_is_entitled_to_is_what_it_is_served(jobs):
    owners = {"": None, "a": Owner("a", 1.0), "b": Owner("b", 3.0)}
    parts = entitled({str(i): (weight, owners[owner]) for i, (owner, weight) in enumerate(jobs)})
    assert abs(sum(parts.values()) - 1.0) < 1e-9
    shares = Shares()
    for i, (owner, weight) in enumerate(jobs):
        shares.add(str(i), weight, owners[owner])
    served = serve(shares, dict.fromkeys(parts, 1.0), 2000)
    for job, part in parts.items():
        assert abs(served[job] / 2000 - part) < 0.01
