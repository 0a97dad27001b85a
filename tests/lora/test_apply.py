"""Adapters over the base: every implementation against a NumPy loop over rows (H04), and rows that never touch each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marlaas_jax.errors import InvalidConfig
from marlaas_jax.lora import apply
from marlaas_jax.lora import bank as banks
from marlaas_jax.lora.adapter import AdapterSpec, init_weights
from marlaas_jax.model.config import ModelConfig

CONFIG = ModelConfig("llama", 2, 12, 4, 2, 6, 20, 30, 1e4, 1e-5, 64, True)
MAX_RANK = 8
ALL = ("q", "k", "v", "o", "gate", "up", "down")
SPECS = {  # adapter slot -> spec: ranks of 2 to 8, different scales and targets
    1: AdapterSpec(2, 4.0, ALL, seed=1),
    2: AdapterSpec(8, 24.0, ALL, seed=2),
    3: AdapterSpec(5, 2.5, ("q", "down"), seed=3),
}
SCALES = np.asarray([0.0, 2.0, 3.0, 0.5, 0.0])


def random_weights(spec):
    rng = np.random.default_rng(spec.seed)
    weights = init_weights(CONFIG, spec, MAX_RANK)
    for target in spec.targets:
        for factor in weights[target].values():
            factor[:, : spec.rank] = rng.standard_normal(factor[:, : spec.rank].shape).astype(np.float32) * 0.3
    return weights


write, read = jax.jit(banks.write), jax.jit(banks.read)
gather_blocks = jax.jit(apply.gather_blocks, static_argnums=2)
gather_all = jax.jit(apply.gather_all, static_argnums=1)
update_blocks = jax.jit(apply.update_blocks, static_argnums=5)


def filled(specs=SPECS, dtype=jnp.float32):
    bank = banks.empty(CONFIG, 5, MAX_RANK, dtype)
    for slot, spec in specs.items():
        bank = write(bank, slot, random_weights(spec), spec.scale)
    return bank


def reference(x, weight, target, layer, slots):
    """W x + alpha / rank * up^T (down x), row by row, in float64, from the adapters themselves."""
    out = []
    for row, slot in zip(x, slots, strict=True):
        y = row.astype(np.float64) @ weight
        if slot in SPECS and target in SPECS[slot].targets:
            spec, factors = SPECS[slot], random_weights(SPECS[slot])[target]
            down, up = (factors[f][layer, : spec.rank].astype(np.float64) for f in ("down", "up"))
            y = y + SCALES[slot] * ((row @ down.T) @ up)
        out.append(y)
    return np.stack(out)


def of_layer(sides, layer):
    """Returns one layer's side, whatever the form of the layers, as NumPy."""
    return jax.tree.map(
        np.asarray, sides[layer] if isinstance(sides, tuple) else jax.tree.map(lambda x: np.asarray(x)[layer], sides)
    )


@functools.partial(jax.jit, static_argnums=0)
def block_project(target, x, weight, side):
    return apply.block_project(target, x, weight, side)


@functools.partial(jax.jit, static_argnums=1)
def onehot_project(slots, target, x, weight, side):
    return apply.onehot_project(slots)(target, x, weight, side)


def block_form(bank, slots, layer, unrolled=True):
    """Returns (project, side of the layer) with one block per row."""
    return block_project, of_layer(gather_blocks(bank, np.asarray(slots), unrolled), layer)


def onehot_form(bank, slots, layer, unrolled=True):
    """Returns the same for rows in any order."""
    return functools.partial(onehot_project, np.asarray(slots)), of_layer(gather_all(bank, unrolled), layer)


def updated_form(bank, slots, layer, unrolled=True):
    """Returns the same with blocks put in place one after another, each row's old adapter overwritten."""
    num_rows = len(slots)
    sides = apply.empty_blocks(bank, num_rows, unrolled)
    order = np.arange(num_rows)[::-1]
    for adapters in (np.full(num_rows, 2), np.asarray(slots)[order]):
        sides = update_blocks(bank, sides, order, adapters, num_rows, unrolled)
    return block_project, of_layer(sides, layer)


FORMS = {"block": block_form, "onehot": onehot_form, "updated": updated_form}


@pytest.mark.parametrize("unrolled", [True, False])
@pytest.mark.parametrize("form", list(FORMS))
def test_each_row_gets_its_own_adapter(form, unrolled):
    """H04: mixed ranks, scales and targets in one batch; slot 0 and a free slot are the base."""
    rng = np.random.default_rng(0)
    slots = [2, 0, 1, 3, 1, 4, 2]
    bank = filled()
    for target in ALL:
        width_in, width_out = CONFIG.projection_dims()[target]
        weight = rng.standard_normal((width_in, width_out)).astype(np.float32)
        x = rng.standard_normal((len(slots), 3, width_in)).astype(np.float32)
        for layer in range(2):
            project, side = FORMS[form](bank, slots, layer, unrolled)
            found = project(target, x, weight, side)
            np.testing.assert_allclose(found, reference(x, weight, target, layer, slots), atol=2e-5)


def test_blocks_of_several_rows():
    rng = np.random.default_rng(0)
    weight, x = (rng.standard_normal(s).astype(np.float32) for s in ((12, 24), (6, 2, 12)))
    side = gather_blocks(filled(), np.asarray([3, 0, 2]), True)[1]
    found = block_project("q", x, weight, side)
    np.testing.assert_allclose(found, reference(x, weight, "q", 1, [3, 3, 0, 0, 2, 2]), atol=2e-5)


@pytest.mark.parametrize("form", list(FORMS))
def test_null_adapter_is_the_base_exactly(form):
    rng = np.random.default_rng(0)
    weight, x = (rng.standard_normal(s).astype(np.float32) for s in ((12, 24), (3, 2, 12)))
    project, side = FORMS[form](filled(), [0, 1, 0], 0)
    found, base = project("q", x, weight, side), jax.jit(jnp.matmul)(x, weight)
    assert np.array_equal(found[0], base[0]) and np.array_equal(found[2], base[2]) and not np.array_equal(found[1], base[1])


@pytest.mark.parametrize("form", list(FORMS))
def test_other_rows_keep_their_bits_when_one_adapter_changes(form):
    rng = np.random.default_rng(0)
    weight, x = (rng.standard_normal(s).astype(np.float32) for s in ((12, 24), (4, 2, 12)))
    slots = [1, 2, 3, 2]
    before, after = filled(), filled({**SPECS, 2: AdapterSpec(4, 99.0, ALL, seed=9)})
    found = []
    for bank in (before, after):
        project, side = FORMS[form](bank, slots, 0)
        found.append(np.asarray(project("q", x, weight, side)))
    assert np.array_equal(found[0][[0, 2]], found[1][[0, 2]])
    assert not np.array_equal(found[0][1], found[1][1]) and not np.array_equal(found[0][3], found[1][3])


@pytest.mark.parametrize("form", ["block", "onehot"])
@pytest.mark.parametrize("broken", ["down", "up"])
def test_broken_adapter_spoils_only_its_own_rows(form, broken):
    """Design 13.9: a nan in one adapter is nobody else's."""
    rng = np.random.default_rng(0)
    weight, x = (rng.standard_normal(s).astype(np.float32) for s in ((12, 24), (3, 2, 12)))
    weights = random_weights(SPECS[2])
    weights["q"][broken][0, 0, 0] = np.nan
    sound = filled()
    bank = write(sound, 2, weights, 3.0)
    project, side = FORMS[form](bank, [1, 2, 3], 0)
    found = np.asarray(project("q", x, weight, side))
    project, side = FORMS[form](sound, [1, 2, 3], 0)
    assert np.array_equal(found[[0, 2]], np.asarray(project("q", x, weight, side))[[0, 2]])
    assert np.isnan(found[1]).any()


def test_update_touches_the_named_blocks_only():
    bank = filled()
    sides = gather_blocks(bank, np.asarray([1, 2, 3]), True)
    found = update_blocks(bank, sides, np.asarray([1, 0, 0]), np.asarray([3, 1, 2]), 1, True)
    wanted = gather_blocks(bank, np.asarray([1, 3, 3]), True)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, wanted))


@pytest.mark.parametrize("form", ["block", "onehot"])
def test_padding_and_strangers_get_exactly_zero_gradient(form):
    """Ranks above the adapter's own, targets that it left out, and adapters without a row stay where they are."""
    rng = np.random.default_rng(0)
    x = {t: rng.standard_normal((2, 3, CONFIG.projection_dims()[t][0])).astype(np.float32) for t in ALL}
    slots = jnp.asarray([3, 1])

    def loss(weights):
        bank = banks.Bank(weights, jnp.asarray(SCALES, jnp.float32))
        if form == "block":
            project, sides = apply.block_project, apply.gather_blocks(bank, slots, True)
        else:
            project, sides = apply.onehot_project(slots), apply.gather_all(bank, True)
        return sum(jnp.sum(project(t, x[t], jnp.zeros(CONFIG.projection_dims()[t]), sides[0]) ** 3) for t in ALL)

    grads = jax.jit(jax.grad(loss))(filled().weights)
    for target in ALL:
        for factor in ("down", "up"):
            found = np.asarray(grads[target][factor])
            assert not found[[0, 2, 4]].any() and not found[:, 1].any()  # nobody's rows; the other layer
            assert not found[1, :, 2:].any() and not found[3, :, 5:].any()
            assert found[1, 0, :2].any()
            assert found[3, 0, :5].any() == (target in SPECS[3].targets)


def test_write_and_read_round_trip_and_touch_one_slot():
    bank = filled()
    before = jax.tree.map(np.array, bank)  # copies: the bank is donated
    weights = random_weights(AdapterSpec(3, 6.0, ("v",), seed=8))
    after = jax.jit(banks.write, donate_argnums=0)(bank, 2, weights, 2.0)
    found, scale = read(after, 2)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, weights)) and scale == 2.0
    others = np.asarray([0, 1, 3, 4])
    assert jax.tree.all(
        jax.tree.map(lambda a, b: np.array_equal(a[others], np.asarray(b)[others]), before.weights, after.weights)
    )
    assert before.scale_A[others].tolist() == np.asarray(after.scale_A)[others].tolist()


def test_slot_reused_by_a_smaller_rank_keeps_nothing_of_the_larger():
    """H04: rank 8 leaves, rank 2 comes to the same slot."""
    bank = filled()
    small = random_weights(SPECS[1])
    bank = write(bank, 2, small, 2.0)
    assert jax.tree.all(jax.tree.map(np.array_equal, read(bank, 2)[0], small))


def test_scale_survives_any_number_of_evictions():
    """H03: in and out of the bank, in rotation, the numbers stay the same."""
    rng = np.random.default_rng(0)
    weight, x = (rng.standard_normal(s).astype(np.float32) for s in ((12, 24), (1, 2, 12)))
    bank = filled()

    def outputs(bank, slot):
        return np.asarray(block_project("q", x, weight, gather_blocks(bank, np.asarray([slot]), True)[0]))

    wanted = {slot: outputs(bank, slot) for slot in SPECS}
    host = {slot: jax.device_get(read(bank, slot)) for slot in SPECS}
    small = banks.empty(CONFIG, 3, MAX_RANK)
    for turn in range(9):
        slot, place = 1 + turn % 3, 1 + turn % 2
        small = write(small, place, *host[slot])
        assert np.array_equal(outputs(small, place), wanted[slot])
        host[slot] = jax.device_get(read(small, place))


def test_empty_bank_is_all_zero():
    bank = banks.empty(CONFIG, 4, MAX_RANK, jnp.bfloat16)
    assert bank.num_slots == 4 and bank.scale_A.dtype == jnp.float32
    assert all(x.dtype == jnp.bfloat16 and not np.asarray(x).any() for x in jax.tree.leaves(bank.weights))


def test_half_precision_bank_is_close():
    rng = np.random.default_rng(0)
    weight, x = (rng.standard_normal(s).astype(np.float32) for s in ((12, 24), (2, 3, 12)))
    project, side = block_form(filled(dtype=jnp.bfloat16), [1, 2], 0)
    found = project("q", jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16), side)
    assert found.dtype == jnp.bfloat16
    wanted = reference(x, weight, "q", 0, [1, 2])
    assert np.abs(np.asarray(found, np.float32) - wanted).max() < 0.03 * np.abs(wanted).max()


def test_fresh_adapter_changes_nothing_and_follows_its_seed():
    spec = AdapterSpec(3, 6.0, ("q", "up"), seed=5)
    weights = init_weights(CONFIG, spec, MAX_RANK)
    assert not any(f["up"].any() for f in weights.values())
    for target in ALL:
        down = weights[target]["down"]
        assert not down[:, 3:].any() and down[:, :3].any() == (target in spec.targets)
        assert np.abs(down).max() <= CONFIG.projection_dims()[target][0] ** -0.5
    again, other = (init_weights(CONFIG, AdapterSpec(3, 6.0, ("q", "up"), seed=s), MAX_RANK) for s in (5, 6))
    assert np.array_equal(weights["q"]["down"], again["q"]["down"]) and not np.array_equal(
        weights["q"]["down"], other["q"]["down"]
    )


def test_fresh_adapter_does_not_depend_on_the_bank_or_on_other_targets():
    wide = init_weights(CONFIG, AdapterSpec(3, 6.0, ("q", "up"), seed=5), 32)["up"]["down"]
    narrow = init_weights(CONFIG, AdapterSpec(3, 6.0, ("up",), seed=5), 3)["up"]["down"]
    assert np.array_equal(wide[:, :3], narrow)


@pytest.mark.parametrize("rank", [0, 9])
def test_rank_outside_the_bank_is_refused_with_the_limit(rank):
    """H04."""
    with pytest.raises(InvalidConfig, match=rf"lora\.rank={rank}.*1 to 8"):
        init_weights(CONFIG, AdapterSpec(rank, 6.0, ALL), MAX_RANK)
