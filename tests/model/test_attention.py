"""The three forms of attention against one NumPy loop over queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marlaas_jax.model import attention

NUM_HEADS, NUM_KV, WIDTH = 4, 2, 6


def reference(q_TNH, k_TKH, v_TKH, window=None):
    """Softmax over the keys at or before each query, in float64, head by head."""
    out = np.zeros((len(q_TNH), NUM_HEADS, WIDTH))
    for t in range(len(q_TNH)):
        first = 0 if window is None else max(0, t - window + 1)
        for n in range(NUM_HEADS):
            keys, values = k_TKH[first : t + 1, n // (NUM_HEADS // NUM_KV)], v_TKH[first : t + 1, n // (NUM_HEADS // NUM_KV)]
            scores = keys.astype(np.float64) @ q_TNH[t, n] / np.sqrt(WIDTH)
            weights = np.exp(scores - scores.max())
            out[t, n] = weights / weights.sum() @ values
    return out.reshape(len(q_TNH), -1)


def draw(seed, *lead):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((*lead, heads, WIDTH)).astype(np.float32) * 2 for heads in (NUM_HEADS, NUM_KV, NUM_KV))


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_causal_is_the_loop_and_padding_is_not_seen(window):
    q, k, v = draw(0, 3, 9)
    length = np.asarray([9, 5, 1])
    out, (kept_k, kept_v) = jax.jit(attention.causal(jnp.asarray(length), window))(q, k, v, None)
    for b in range(3):
        wanted = reference(q[b, : length[b]], k[b, : length[b]], v[b, : length[b]], window)
        np.testing.assert_allclose(out[b, : length[b]], wanted, atol=2e-6)
    assert np.array_equal(kept_k, k) and np.array_equal(kept_v, v)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("window", [None, 3])
def test_decoding_one_by_one_is_the_loop(window):
    """Each slot at a position of its own; the whole cache row is garbage at first."""
    num_slots, capacity, steps = 3, 16, 12
    q, k, v = draw(1, num_slots, steps)
    decode = jax.jit(lambda q, k, v, position, cache: attention.cached(position, 12, window)(q, k, v, cache))
    cache = tuple(jnp.full((num_slots, NUM_KV, capacity, WIDTH), 9e3, jnp.float32) for _ in range(2))
    wanted = [reference(q[s], k[s], v[s], window) for s in range(num_slots)]
    for t in range(steps):
        position = jnp.full((num_slots,), t)
        out, cache = decode(*(x[:, t : t + 1] for x in (q, k, v)), position, cache)
        for s in range(num_slots):
            np.testing.assert_allclose(out[s, 0], wanted[s][t], atol=2e-6)
    np.testing.assert_array_equal(cache[0][:, :, :steps], k.swapaxes(1, 2))
    assert (np.asarray(cache[0][:, :, steps:]) == 9e3).all()


def test_slots_at_different_positions_and_prefilled_caches():
    num_slots, capacity = 3, 10
    length = np.asarray([7, 2, 9])
    q, k, v = draw(2, num_slots, capacity)
    k_cache, v_cache = (jnp.asarray(x.swapaxes(1, 2)) for x in (k, v))
    at = [x[np.arange(num_slots), length][:, None] for x in (q, k, v)]
    out, _ = attention.cached(jnp.asarray(length), capacity)(*map(jnp.asarray, at), (k_cache, v_cache))
    for s in range(num_slots):
        rows = [x[s, : length[s] + 1] for x in (q, k, v)]
        np.testing.assert_allclose(out[s, 0], reference(*rows)[-1], atol=2e-6)


def test_pieces_that_nobody_reaches_are_skipped_and_change_no_bit():
    """The same row beside one that reaches the last piece, beside one that stands there but is not written, and beside none."""
    q, k, v = draw(8, 2, 12)
    pieces = tuple(tuple(jnp.asarray(x.swapaxes(1, 2)[:, :, a:b]) for a, b in ((0, 4), (4, 7), (7, 12))) for x in (k, v))

    @jax.jit
    def run(position, is_written):
        at = (jnp.asarray(x[np.arange(2), [2, 9]][:, None]) for x in (q, k, v))
        attend = attention.cached(position, 12, None, None, is_written, skip_unreached=True)
        return attend(*at, pieces)

    cases = [([2, 9], [True, True]), ([2, 9], [True, False]), ([2, 3], [True, True]), ([2, 5], [True, True])]
    outs = [run(jnp.asarray(position), jnp.asarray(is_written)) for position, is_written in cases]
    assert len({np.asarray(out[0]).tobytes() for out, _ in outs}) == 1
    np.testing.assert_allclose(outs[0][0][0, 0], reference(q[0, :3], k[0, :3], v[0, :3])[-1], atol=2e-6)
    np.testing.assert_allclose(outs[0][0][1, 0], reference(q[1, :10], k[1, :10], v[1, :10])[-1], atol=2e-6)


def test_position_beyond_the_cache_writes_nothing():
    q, k, v = (jnp.asarray(x) for x in draw(3, 2, 1))
    cache = tuple(jnp.zeros((2, NUM_KV, 4, WIDTH)) for _ in range(2))
    _, kept = attention.cached(jnp.asarray([4, 1]), 4)(q, k, v, cache)
    assert not np.asarray(kept[0][0]).any() and np.asarray(kept[0][1, :, 1]).any()


@pytest.mark.parametrize("window", [None, 1, 4])
def test_shared_prompt_is_each_row_alone(window):
    """Prompts of different lengths, padded; every row equals prompt + suffix run by itself."""
    num_blocks, num_prompt, num_rows, num_suffix = 2, 6, 3, 4
    q, k, v = draw(4, num_blocks, num_prompt + num_rows * num_suffix)
    length = np.asarray([6, 3])
    attend = attention.shared_prefix(num_prompt, jnp.asarray(length), num_rows, window)
    out, _ = jax.jit(attend)(q, k, v, None)
    for m in range(num_blocks):
        prompt = np.arange(length[m])
        for g in range(num_rows):
            suffix = num_prompt + g * num_suffix + np.arange(num_suffix)
            index = np.concatenate([prompt, suffix])
            wanted = reference(q[m, index], k[m, index], v[m, index], window)
            np.testing.assert_allclose(out[m, suffix], wanted[length[m] :], atol=2e-6)
            np.testing.assert_allclose(out[m, prompt], wanted[: length[m]], atol=2e-6)


def test_gradients_of_the_shared_prompt_are_those_of_the_rows():
    num_prompt, num_rows, num_suffix = 4, 2, 3
    q, k, v = (jnp.asarray(x) for x in draw(5, 1, num_prompt + num_rows * num_suffix))
    weight = jnp.asarray(np.random.default_rng(6).standard_normal((num_rows, num_suffix, NUM_HEADS * WIDTH)).astype(np.float32))

    def shared(q, k, v):
        out, _ = attention.shared_prefix(num_prompt, jnp.asarray([num_prompt]), num_rows)(q, k, v, None)
        return jnp.sum(out[0, num_prompt:].reshape(weight.shape) * weight)

    def alone(q, k, v):
        total = 0.0
        for g in range(num_rows):
            first = num_prompt + g * num_suffix
            rows = [jnp.concatenate([x[:, :num_prompt], x[:, first : first + num_suffix]], axis=1) for x in (q, k, v)]
            out, _ = attention.causal(jnp.asarray([num_prompt + num_suffix]))(*rows, None)
            total += jnp.sum(out[0, num_prompt:] * weight[g])
        return total

    for a, b in zip(*(jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v) for f in (shared, alone)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_softmax_of_half_precision_inputs_is_computed_in_float32():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in draw(7, 1, 8))
    out, _ = jax.jit(attention.causal(jnp.asarray([8])))(q, k, v, None)
    assert out.dtype == jnp.bfloat16
    rows = [np.asarray(x[0], np.float32) for x in (q, k, v)]
    assert np.abs(np.asarray(out[0], np.float32) - reference(*rows)).max() < 0.1
