"""The fingerprint tells any two sets of weights apart, and is the same wherever it is computed (H09, H10)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marlaas_jax.lora.adapter import AdapterSpec, init_weights
from marlaas_jax.lora.snapshot import fingerprint
from marlaas_jax.model.config import ModelConfig

CONFIG = ModelConfig("llama", 2, 12, 4, 2, 6, 20, 30, 1e4, 1e-5, 64, True)


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    shapes = init_weights(CONFIG, AdapterSpec(4, 8.0, ("q",)), 4)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), shapes)


def changed(weights, target, factor, change):
    copy = {t: dict(factors) for t, factors in weights.items()}
    copy[target][factor] = change(copy[target][factor].copy())
    return copy


def flip_bit(index, bit):
    def change(array):
        array.reshape(-1).view(np.uint32)[index] ^= np.uint32(1 << bit)
        return array

    return change


def test_same_weights_have_one_fingerprint(weights):
    first = fingerprint(weights, 2.0)
    assert first == fingerprint(jax.tree.map(jnp.asarray, weights), jnp.asarray(2.0))
    assert first == fingerprint({t: weights[t] for t in reversed(weights)}, 2)
    assert len(first) == 16 and int(first, 16) > 0


@pytest.mark.parametrize("bit", [0, 12, 23, 31])
@pytest.mark.parametrize("index", [0, 1, 95])
def test_any_bit_of_any_weight_counts(weights, index, bit):
    first = fingerprint(weights, 2.0)
    assert fingerprint(changed(weights, "down", "up", flip_bit(index, bit)), 2.0) != first


@pytest.mark.parametrize(
    "change",
    [
        np.zeros_like,
        lambda x: -x,
        lambda x: x[:, ::-1].copy(),
        lambda x: np.roll(x, 1, -1),
        lambda x: x[::-1].copy(),
        lambda x: x * np.float32(2),
    ],
    ids=["zeroed", "negated", "ranks reversed", "rolled", "layers swapped", "scaled"],
)
def test_what_goes_wrong_in_publishing_is_seen(weights, change):
    first = fingerprint(weights, 2.0)
    for factor in ("down", "up"):
        assert fingerprint(changed(weights, "q", factor, change), 2.0) != first


def test_scale_and_swapped_targets_count(weights):
    first = fingerprint(weights, 2.0)
    assert fingerprint(weights, 4.0) != first
    swapped = weights | {"k": weights["v"], "v": weights["k"]}
    assert weights["k"]["down"].shape == weights["v"]["down"].shape
    assert fingerprint(swapped, 2.0) != first


def test_half_precision_has_a_fingerprint_of_its_own_bits(weights):
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), weights)
    first = fingerprint(half, 2.0)
    assert first != fingerprint(weights, 2.0)
    again = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float32), jnp.bfloat16), half)
    assert fingerprint(again, 2.0) == first


def test_many_small_changes_give_many_fingerprints(weights):
    found = {fingerprint(changed(weights, "q", "down", flip_bit(i, i % 23)), 2.0) for i in range(96)}
    assert len(found) == 96
