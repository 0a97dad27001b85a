"""The decoder: its forms agree (design 13.7), prefill is decode, rotary embedding is the published one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marlaas_jax.model import attention, rope, transformer
from marlaas_jax.model.config import ModelConfig, RopeScaling
from marlaas_jax.model.frequencies import inverse_frequencies
from marlaas_jax.model.load import load
from tests.model.forward import MODELS, expected, logits

NAMES = ("llama3_tied", "mistral_untied", "qwen2_tied", "qwen3_untied")


@pytest.mark.parametrize("name", NAMES)
def test_prefill_then_decode_gives_the_logits_of_one_pass(name):
    config, params = load(MODELS / name)
    reference = expected(MODELS / name)
    tokens = jnp.asarray(reference["tokens_T"][:24])
    num_prompt, capacity = 15, 32
    pad = ((0, 0), (0, 0), (0, capacity - num_prompt), (0, 0))

    @jax.jit
    def prefill(tokens):
        attend = attention.causal(jnp.asarray([num_prompt]), config.sliding_window)
        _, kv = transformer.forward(config, params, tokens[None], jnp.arange(num_prompt)[None], attend)
        return jax.tree.map(lambda x: jnp.pad(x.swapaxes(1, 2), pad), kv)

    @jax.jit
    def decode(token, position, caches):
        attend = attention.cached(position, capacity, config.sliding_window)
        hidden, caches = transformer.forward(config, params, token[:, None], position[:, None], attend, caches)
        return transformer.unembed(params, hidden)[0, 0], caches

    caches = prefill(tokens[:num_prompt])
    for t in range(num_prompt, 24):
        found, caches = decode(tokens[t][None], jnp.asarray([t]), caches)
        assert np.abs(np.asarray(found) - reference["logits_TV"][t]).max() < 2e-4


def test_gradients_of_all_forms_agree():
    config, unrolled = load(MODELS / "qwen3_untied")
    scanned = jax.jit(transformer.stack_layers)(unrolled)
    tokens = jnp.asarray(expected(MODELS / "qwen3_untied")["tokens_T"][None, :16])

    def loss(params, remat):
        attend = attention.causal(jnp.asarray([16]), config.sliding_window)
        hidden, _ = transformer.forward(config, params, tokens, jnp.arange(16)[None], attend, remat=remat)
        logprobs = jax.nn.log_softmax(transformer.unembed(params, hidden))
        return -jnp.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], -1).mean()

    grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    value, wanted = grad(unrolled, False)
    for params, remat in ((unrolled, True), (scanned, False), (scanned, True)):
        found_value, found = grad(params, remat)
        if isinstance(found["layers"], dict):
            found = jax.jit(transformer.unstack_layers)(found)
        assert abs(found_value - value) < 1e-5
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, wanted)


def test_rms_norm_by_hand():
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32) * 5
    weight = np.random.default_rng(1).standard_normal(8).astype(np.float32)
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-2) * weight
    np.testing.assert_allclose(transformer.rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-2), wanted, rtol=1e-5)
    assert transformer.rms_norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight), 1e-2).dtype == jnp.bfloat16


def config_with(scaling=None, head_dim=16, theta=500000.0):
    return ModelConfig("llama", 1, 32, 2, 1, head_dim, 48, 61, theta, 1e-5, 131072, True, rope_scaling=scaling)


def test_rotation_turns_each_pair_by_position_times_speed():
    config = config_with(theta=100.0, head_dim=8)
    x = np.random.default_rng(0).standard_normal((5, 2, 8)).astype(np.float32)
    positions = np.asarray([0, 1, 2, 77, 5000])
    found = np.asarray(rope.rotate(jnp.asarray(x), *rope.angles(config, jnp.asarray(positions))))
    for t, position in enumerate(positions):
        for i in range(4):
            angle = np.float64(np.float32(position) * np.float32(100.0 ** (-i / 4)))
            pair = (x[t, :, i] + 1j * x[t, :, i + 4]) * np.exp(1j * angle)
            np.testing.assert_allclose(found[t, :, i], pair.real, atol=1e-3 if position > 1000 else 1e-5)
            np.testing.assert_allclose(found[t, :, i + 4], pair.imag, atol=1e-3 if position > 1000 else 1e-5)


def test_llama_3_scaling_frequency_by_frequency():
    """Meta's apply_scaling (llama-models, Llama 3.1), as a loop."""
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    plain = inverse_frequencies(config_with(head_dim=128))
    found = inverse_frequencies(config_with(scaling, head_dim=128))
    kinds = set()
    for i, frequency in enumerate(plain.astype(np.float64)):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4.0:
            wanted, kind = frequency, "kept"
        elif wavelength > 8192 / 1.0:
            wanted, kind = frequency / 8.0, "slowed"
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            wanted, kind = (1 - smooth) * frequency / 8.0 + smooth * frequency, "between"
        kinds.add(kind)
        np.testing.assert_allclose(found[i], wanted, rtol=1e-6)
    assert kinds == {"kept", "slowed", "between"}


def test_linear_scaling_divides():
    np.testing.assert_allclose(
        inverse_frequencies(config_with(RopeScaling("linear", 4.0))), inverse_frequencies(config_with()) / 4, rtol=1e-6
    )


def test_logits_are_float32_and_bfloat16_is_close():
    config, half = load(MODELS / "llama3_tied", jnp.bfloat16)
    reference = expected(MODELS / "llama3_tied")
    found = logits(config, half, reference["tokens_T"])
    assert found.dtype == np.float32
    assert np.abs(found - reference["logits_TV"]).mean() < 0.1 * np.abs(reference["logits_TV"]).mean()


def test_random_parameters_follow_the_seed():
    config = config_with()
    first, again, other = (transformer.init_params(config, seed) for seed in (1, 1, 2))
    assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
    assert not np.array_equal(first["embed_VD"], other["embed_VD"])
    assert transformer.init_params(config, 1, jnp.bfloat16)["layers"][0]["q"].dtype == jnp.bfloat16
