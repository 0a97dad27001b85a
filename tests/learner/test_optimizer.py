"""The gathered, vmapped AdamW against optax's own and against torch's (frozen in fixtures/adamw.npz by make_adamw.py)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from marlaas_jax.learner.optimizer import Hyperparameters, update_jit
from marlaas_jax.lora.bank import Bank

FIXTURE = Path(__file__).parents[1] / "fixtures" / "adamw.npz"
SHAPES = {"down": (2, 3, 5), "up": (2, 3, 7)}


def hyper(*rows: tuple, count: int = 0, is_due: tuple[bool, ...] | None = None) -> Hyperparameters:
    columns = np.array(rows, np.float32).T
    n = len(rows)
    return Hyperparameters(*columns, count=np.full(n, count, np.int32), is_due=np.array(is_due or [True] * n))


def stacks(seed: int, num_slots: int = 5) -> dict:
    rng = np.random.default_rng(seed)
    return {"q": {name: jnp.asarray(rng.normal(0, 0.1, (num_slots, *shape)), jnp.float32) for name, shape in SHAPES.items()}}


def run(bank, first, second, gradients, slots, settings):
    copies = jax.tree.map(jnp.copy, (bank, first, second, gradients))
    return jax.device_get(update_jit(*copies, np.array(slots, np.int32), settings))


def start(seed=0):
    weights, first, second = stacks(seed), stacks(seed + 1), jax.tree.map(jnp.square, stacks(seed + 2))
    return Bank(weights, jnp.ones(5, jnp.float32)), first, second, stacks(seed + 3)


SETTING = (1e-2, 0.9, 0.95, 1e-8, 0.1, jnp.inf)


def test_ten_steps_equal_torchs_for_three_adapters_with_their_own_settings():
    fixture = np.load(FIXTURE)
    zeros = lambda: {"q": {name: jnp.zeros((5, *shape), jnp.float32) for name, shape in SHAPES.items()}}
    weights, first, second = zeros(), zeros(), zeros()
    slots = [3, 1, 4]
    for i, slot in enumerate(slots):
        for j, name in enumerate(SHAPES):
            weights["q"][name] = weights["q"][name].at[slot].set(fixture[f"start_{i}_{j}"])
    bank = Bank(weights, jnp.ones(5, jnp.float32))
    for step in range(10):
        gradients = zeros()
        for i, slot in enumerate(slots):
            for j, name in enumerate(SHAPES):
                gradients["q"][name] = gradients["q"][name].at[slot].set(fixture[f"gradients_{i}_{j}"][step])
        # the bucket of four: the last entry is padding
        settings = hyper(*fixture["settings"], SETTING, count=step, is_due=(True, True, True, False))
        bank, first, second, gradients, norms = update_jit(bank, first, second, gradients, np.array([*slots, 0]), settings)
        np.testing.assert_allclose(norms[:3], [fixture[f"norms_{i}"][step] for i in range(3)], rtol=1e-5)
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(gradients))
    for i, slot in enumerate(slots):
        for j, name in enumerate(SHAPES):
            np.testing.assert_allclose(bank.weights["q"][name][slot], fixture[f"end_{i}_{j}"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_norm", [jnp.inf, 0.3])
def test_one_step_equals_optax(max_norm):
    bank, first, second, gradients = start()
    got, got_first, got_second, *_ = run(bank, first, second, gradients, [2], hyper((*SETTING[:5], max_norm), count=7))
    one = lambda tree: jax.tree.map(lambda stack: stack[2], tree)
    clip = optax.identity() if max_norm == jnp.inf else optax.clip_by_global_norm(max_norm)
    chain = optax.chain(clip, optax.adamw(1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1))
    state = chain.init(one(bank.weights))
    adam = optax.ScaleByAdamState(jnp.asarray(7, jnp.int32), one(first), one(second))
    state = (state[0], (adam, *state[1][1:]))
    updates, state = chain.update(one(gradients), state, one(bank.weights))
    expected = optax.apply_updates(one(bank.weights), updates)
    for mine, theirs in ((got.weights, expected), (got_first, state[1][0].mu), (got_second, state[1][0].nu)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[2], b, rtol=1e-6, atol=1e-8), mine, theirs)


def test_adapters_not_due_are_bit_identical_with_weight_decay_on():
    before = start()
    after = run(*before, [2, 4, 0, 0], hyper(*[SETTING] * 4, is_due=(True, True, False, False)))
    for old, new in zip(jax.tree.leaves(before[:3]), jax.tree.leaves(after[:3]), strict=True):
        if new.ndim > 1:
            np.testing.assert_array_equal(new[[0, 1, 3]], old[jnp.array([0, 1, 3])])
            assert (new[2] != old[2]).any() and (new[4] != old[4]).any()
    for old, new in zip(jax.tree.leaves(before[3]), jax.tree.leaves(after[3]), strict=True):
        np.testing.assert_array_equal(new[[1, 3]], old[jnp.array([1, 3])])
        assert not new[[0, 2, 4]].any()


def test_a_gradient_that_is_not_finite_changes_nothing_and_shows_in_its_norm():
    bank, first, second, gradients = start()
    gradients["q"]["up"] = gradients["q"]["up"].at[2, 0, 0, 0].set(jnp.nan)
    after = run(bank, first, second, gradients, [2, 4], hyper(SETTING, SETTING))
    for old, new in zip(jax.tree.leaves((bank, first, second)), jax.tree.leaves(after[:3]), strict=True):
        np.testing.assert_array_equal(new[2], old[2])
    assert not any(x[2].any() for x in jax.tree.leaves(after[3]))
    assert np.isnan(after[4][0]) and np.isfinite(after[4][1])
    alone = run(*start(), [4], hyper(SETTING))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[4], b[4], rtol=1e-6), after[0].weights, alone[0].weights)


def test_zero_stays_zero_h04():
    """Ranks and targets that an adapter does not use: zero weight, zero gradient, zero moments."""
    bank, first, second, gradients = jax.tree.map(lambda x: x.at[2, :, 1:].set(0.0) if x.ndim > 1 else x, start())
    after = run(bank, first, second, gradients, [2], hyper(SETTING))
    for stack in jax.tree.leaves(after[0].weights):
        assert not stack[2, :, 1:].any() and stack[2, :, :1].any()
