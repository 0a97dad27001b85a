"""What a sweep file means: its trials, what is refused, and who is stopped at a rung."""

import itertools
import math
import random
import statistics

import hypothesis.strategies as st
import pytest
from hypothesis import given

from marlaas_jax.config import validate
from marlaas_jax.errors import InvalidConfig
from marlaas_jax.sweep import HalvingConfig, SweepConfig, described, jobs_of, losers, rungs, variants

BASE = {"env": "tiny:upper", "steps": 40}


def sweep(**fields):
    return validate(SweepConfig, {"name": "rate", "job": dict(BASE)} | fields)


def test_a_grid_is_every_combination_in_the_order_written():
    found = jobs_of(sweep(grid={"optimizer.learning_rate": [1e-4, 1e-3], "lora.rank": [2, 4, 8], "algorithm.loss": ["gspo"]}))
    expected = list(itertools.product([1e-4, 1e-3], [2, 4, 8]))
    assert [(config.optimizer.learning_rate, config.lora.rank) for _, config in found] == expected
    assert {config.algorithm.loss for _, config in found} == {"gspo"} and {config.steps for _, config in found} == {40}
    assert [config.name for _, config in found] == [f"rate-{i:03}" for i in range(1, 7)]
    assert described(found[0][0]) == "learning_rate=0.0001 rank=2 loss='gspo'"


def test_a_list_is_taken_as_it_is():
    listed = [{"lora.rank": 4, "lora.alpha": 8.0}, {"env_args.level": 2}, {"rollout.group_size": 4}]
    configs = [config for _, config in jobs_of(sweep(trials=listed))]
    assert (configs[0].lora.rank, configs[0].lora.alpha) == (4, 8.0)
    assert configs[1].env_args == {"level": 2} and configs[1].lora.rank == 8 and configs[2].rollout.group_size == 4


def test_random_trials_come_from_their_seed_within_their_ranges():
    space = {
        "optimizer.learning_rate": {"log_uniform": [1e-6, 1e-2]},
        "lora.rank": {"integers": [1, 8]},
        "optimizer.beta1": {"uniform": [0.8, 0.95]},
        "algorithm.loss": {"choice": ["grpo", "gspo"]},
    }
    draw = lambda seed: variants(sweep(random={"count": 200, "seed": seed, "space": space}))
    found = draw(3)
    assert found == draw(3) and found != draw(4)
    rates = [trial["optimizer.learning_rate"] for trial in found]
    assert all(1e-6 <= rate <= 1e-2 for rate in rates)
    assert abs(statistics.mean(map(math.log10, rates)) - -4.0) < 0.3, "even on a logarithmic scale"
    assert {trial["lora.rank"] for trial in found} == set(range(1, 9))
    assert {trial["algorithm.loss"] for trial in found} == {"grpo", "gspo"}
    assert len(jobs_of(sweep(random={"count": 200, "seed": 3, "space": space}))) == 200


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "none given: a sweep has exactly one of grid, trials, random"),
        ({"grid": {"lora.rank": [1]}, "trials": [{"lora.rank": 1}]}, "grid and trials given"),
        ({"grid": {}}, r"grid=\{\}: .*at least 1"),
        ({"grid": {"lora.rank": []}}, r"lora\.rank=\(?\[?\]?\)?: .*at least 1"),
        ({"grid": {"optimizer.lerning_rate": [1e-3]}}, r"trial 1 .*lerning_rate: unknown key; allowed here: beta1"),
        ({"grid": {"optimiser.learning_rate": [1e-3]}}, r"optimiser: unknown key; allowed here: algorithm"),
        ({"grid": {"lora.rank": [4, 1000]}}, r"trial 2 \(rank=1000\): lora\.rank=1000: .*less than or equal to 256"),
        ({"grid": {"lora.rank": [4, 8, 4]}}, r"grid: two trials are both \{'lora\.rank': 4\}"),
        ({"grid": {"name": ["a"]}}, "name: cannot be swept"),
        ({"grid": {"steps.more": [1]}}, r"steps\.more: 'steps' holds 40, which has no keys"),
        ({"grid": {"seed": list(range(257))}}, "grid: makes 257 trials; at most 256 are allowed"),
        ({"random": {"count": 300, "space": {"seed": {"integers": [0, 9]}}}}, r"random\.count=300: .*256"),
        ({"random": {"count": 3, "space": {}}}, r"random\.space=\{\}"),
        ({"random": {"count": 3, "space": {"seed": {"integers": [9, 0]}}}}, r"integers=\[9, 0\]: the first must be less"),
        ({"random": {"count": 3, "space": {"seed": {}}}}, "nothing given: name exactly one of log_uniform"),
        (
            {"random": {"count": 3, "space": {"lora.alpha": {"log_uniform": [0, 1]}}}},
            r"log_uniform=\[0, 1\]: both must be more",
        ),
        (
            {"grid": {"seed": [1, 2]}, "halving": {"min_steps": 40}},
            r"halving\.min_steps=40: must be less than trial 1's steps=40",
        ),
        ({"grid": {"seed": [1, 2]}, "halving": {"min_steps": 4, "eta": 1}}, r"halving\.eta=1: "),
        ({"grid": {"seed": [1, 2]}, "halving": {"eta": 2}}, r"halving\.min_steps: missing"),
        ({"grid": {"seed": [1, 2]}, "metric": "eval_reward"}, "trial 1: metric='eval_reward' takes eval.every_steps"),
        ({"grid": {"seed": [1]}, "name": "x" * 61}, "name="),
        ({"grid": {"seed": [1]}, "job": {"steps": 3}}, r"job\.env: missing"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(fields, sentence):
    with pytest.raises(InvalidConfig, match=sentence) as error:
        jobs_of(sweep(**fields))
    assert "\n" not in str(error.value)


def test_rungs_are_powers_of_eta_below_the_last_step():
    assert rungs(HalvingConfig(min_steps=4, eta=3), 100) == [4, 12, 36]
    assert rungs(HalvingConfig(min_steps=4, eta=2), 16) == [4, 8]
    assert rungs(HalvingConfig(min_steps=20), 20) == []


@pytest.mark.parametrize(
    ("eta", "reached", "expected"),
    [
        (2, {1: 0.5}, []),  # alone: nobody to compare with
        (2, {1: 0.5, 2: 0.6}, [1]),  # the earlier one too, while it has not reached the next rung
        (2, {1: 0.5, 2: 0.6, 3: 0.4}, [3]),  # the best two of three
        (2, {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5}, []),  # nothing is known yet: all go on
        (2, {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.9}, [2, 3]),  # of equals the first
        (3, {1: 0.1, 2: 0.9}, []),  # two are too few for eta 3
        (3, {1: 0.1, 2: 0.9, 3: 0.5}, [1, 3]),
        (2, {1: -3.0, 2: -1.0}, [1]),
    ],
)
def test_who_is_stopped(eta, reached, expected):
    assert losers(eta, reached, reached) == expected


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40, unique=True), st.integers(2, 5), st.randoms())
def test_whatever_the_order_the_best_survives_and_no_more_than_its_share(values, eta, source: random.Random):
    order = list(enumerate(values))
    source.shuffle(order)
    reached: dict[int, float] = {}
    alive: dict[int, float] = {}
    for trial, value in order:
        reached[trial] = alive[trial] = value
        for loser in losers(eta, reached, alive):
            del alive[loser]
    best = max(range(len(values)), key=values.__getitem__)
    assert best in alive
    assert len(values) < eta or len(alive) <= math.ceil(len(values) / eta)
