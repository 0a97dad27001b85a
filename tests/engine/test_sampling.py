"""The blocked inverse CDF against NumPy, token by token and in distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marlaas_jax.engine import sampling
from marlaas_jax.engine.sampling import SamplingRows

sample = jax.jit(sampling.sample)


def rows(count: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, first_seed: int = 0) -> SamplingRows:
    seeds = np.stack([np.zeros(count), first_seed + np.arange(count)], axis=1).astype(np.uint32)
    fill = lambda value, dtype: jnp.full((count,), value, dtype)
    return SamplingRows(
        fill(temperature, jnp.float32), fill(top_k, jnp.int32), fill(top_p, jnp.float32), fill(min_p, jnp.float32), seeds
    )


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def numpy_support(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Returns the distribution that is drawn from: temperature, then top-k, then top-p of what is left, then min-p."""
    p = softmax(logits / temperature)
    order = np.argsort(-p)
    if top_k:
        order = order[:top_k]
    mass = p[order] / p[order].sum()
    if top_p < 1:
        order = order[: int((np.cumsum(mass) < top_p).sum()) + 1]
    order = [t for t in order if p[t] >= min_p * p.max()]
    out = np.zeros_like(p)
    out[order] = p[order] / p[order].sum()
    return out


@pytest.mark.parametrize("vocab_size", [2, 61, 256, 1009])
def test_distribution(vocab_size):
    """Chi-square of 20,000 draws against the softmax, for vocabularies that blocks divide and that they do not."""
    rng = np.random.default_rng(vocab_size)
    logits = rng.standard_normal(vocab_size).astype(np.float32) * 2
    count = 20_000
    draw = sample(
        jnp.broadcast_to(logits, (count, vocab_size)), rows(count), jnp.zeros(count, jnp.int32), jnp.ones(count, bool)
    )
    p = softmax(logits)
    seen = np.bincount(np.asarray(draw.token), minlength=vocab_size)
    expected = p * count
    keep = expected >= 5
    chi2 = ((seen - expected)[keep] ** 2 / expected[keep]).sum() + (seen[~keep].sum() - expected[~keep].sum()) ** 2 / max(
        expected[~keep].sum(), 1.0
    )
    degrees = keep.sum()
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees)
    np.testing.assert_allclose(draw.logprob, np.log(p)[np.asarray(draw.token)], atol=2e-5)


@pytest.mark.parametrize("settings", [(0.7, 0, 1.0, 0.0), (1.5, 5, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (0.9, 30, 0.9, 0.05)])
def test_truncated_distribution(settings):
    """H17: tokens outside the support are never drawn; the rest follows the renormalised distribution."""
    rng = np.random.default_rng(1)
    vocab_size, count = 97, 10_000
    logits = rng.standard_normal(vocab_size).astype(np.float32) * 2
    draw = sample(
        jnp.broadcast_to(logits, (count, 97)), rows(count, *settings), jnp.zeros(count, jnp.int32), jnp.ones(count, bool)
    )
    p = numpy_support(logits, *settings)
    tokens = np.asarray(draw.token)
    assert (p[tokens] > 0).all()
    assert 0.5 * np.abs(np.bincount(tokens, minlength=97) / count - p).sum() < 0.04
    np.testing.assert_allclose(draw.sampled_logprob, np.log(p[tokens]), atol=2e-5)
    np.testing.assert_allclose(draw.logprob, np.log(softmax(logits))[tokens], atol=2e-5)


def test_greedy_and_ties():
    logits = np.zeros((3, 50), np.float32)
    logits[0, [20, 30]] = 5
    logits[1, 49] = 1e-3
    draw = sample(logits, rows(3, temperature=0.0), jnp.zeros(3, jnp.int32), jnp.ones(3, bool))
    assert np.asarray(draw.token).tolist() == [20, 49, 0]
    assert np.isfinite(draw.logprob).all() and not np.asarray(draw.sampled_logprob).any()


@pytest.mark.parametrize("settings", [(1.0, 0, 1e-50, 0.0), (1.0, 0, 1e-39, 0.0), (1e-50, 0, 1.0, 0.0), (1e-39, 5, 0.9, 0.0)])
def test_settings_that_float32_rounds_to_zero_take_the_most_likely_token(settings):
    logits = np.random.default_rng(3).standard_normal((64, 131)).astype(np.float32)
    draw = sample(logits, rows(64, *settings), jnp.zeros(64, jnp.int32), jnp.ones(64, bool))
    assert np.array_equal(draw.token, logits.argmax(-1)) and np.asarray(draw.finite).all()
    np.testing.assert_array_equal(draw.sampled_logprob, np.zeros(64))


@pytest.mark.parametrize(
    ("settings", "num_kept"), [((1.0, 0, 1.0, 0.99999999999), 2), ((1.0, 2**31 - 1, 0.999999999, 0.0), 131), ((1e6,), 131)]
)
def test_settings_that_float32_rounds_to_their_end(settings, num_kept):
    """A tie at the top is kept whole; a limit beyond the vocabulary is none."""
    logits = np.random.default_rng(4).standard_normal(131).astype(np.float32)
    logits[[7, 90]] = 4.0
    count = 20_000
    draw = sample(np.tile(logits, (count, 1)), rows(count, *settings), jnp.zeros(count, jnp.int32), jnp.ones(count, bool))
    assert len(np.unique(draw.token)) == num_kept and np.asarray(draw.finite).all() and np.isfinite(draw.sampled_logprob).all()


def test_a_row_that_keeps_no_token_is_not_finite(monkeypatch):
    monkeypatch.setattr(sampling, "_kept", lambda scaled, rows: jnp.zeros(scaled.shape, bool))
    logits = np.zeros((2, 9), np.float32)
    draw = sampling.sample(logits, rows(2, top_p=0.5), jnp.zeros(2, jnp.int32), jnp.ones(2, bool))
    assert not np.asarray(draw.finite).any()


def test_a_draw_depends_on_seed_and_position_alone():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.standard_normal((8, 300)), jnp.float32)
    alike = jnp.broadcast_to(logits[0], (8, 300))
    active = jnp.ones(8, bool)
    one = sample(alike, rows(8), jnp.full(8, 3), active)
    other = sample(alike[::-1], jax.tree.map(lambda x: x[::-1], rows(8)), jnp.full(8, 3), active)
    np.testing.assert_array_equal(one.token, np.asarray(other.token)[::-1])
    assert len(set(np.asarray(one.token).tolist())) > 3
    assert (np.asarray(sample(alike, rows(8), jnp.full(8, 4), active).token) != np.asarray(one.token)).any()


def test_high_bits_of_the_seed_count():
    from marlaas_jax.engine.state import RowSettings, insert_rows

    seeds = [5, 5 + 2**32, 5 + 2**62]
    packed = insert_rows([(i, 0, RowSettings(1, seed=seed)) for i, seed in enumerate(seeds)], 4)
    numbers = np.asarray(sampling.uniform(jnp.asarray(packed.sampling.seed[:3]), jnp.zeros(3, jnp.int32)))
    assert len(set(numbers.tolist())) == 3


def test_logits_that_are_not_finite_are_flagged_per_row():
    logits = np.zeros((4, 64), np.float32)
    logits[1, 7] = np.nan
    logits[2, 9] = np.inf
    logits[3] = -np.inf
    draw = sample(logits, rows(4), jnp.zeros(4, jnp.int32), jnp.ones(4, bool))
    assert np.asarray(draw.finite).tolist() == [True, False, False, False]


def test_a_token_without_probability_is_never_drawn():
    """Zeros at both ends of blocks and of the vocabulary, and draws at both ends of [0, 1)."""
    mass = jnp.asarray([[0.0, 0.0, 1e-7, 0.3, 0.0, 0.7, 0.0]] * 4)
    index = sampling._first_above(mass, jnp.asarray([0.0, 1e-7, 0.99999994, 1.5]))
    assert np.asarray(index).tolist() == [2, 3, 5, 5]


def test_idle_rows_do_not_choose_the_slow_path():
    """Settings left in a slot by an earlier row change nothing for rows that run."""
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.standard_normal((2, 200)), jnp.float32)
    plain = rows(2)
    mixed = SamplingRows(
        jnp.asarray([1.0, 0.5]), jnp.asarray([0, 3]), jnp.asarray([1.0, 0.5]), jnp.asarray([0.0, 0.1]), plain.seed
    )
    a = sample(logits, plain, jnp.zeros(2, jnp.int32), jnp.asarray([True, False]))
    b = sample(logits, mixed, jnp.zeros(2, jnp.int32), jnp.asarray([True, False]))
    assert a.token[0] == b.token[0] and a.sampled_logprob[0] == b.sampled_logprob[0]
