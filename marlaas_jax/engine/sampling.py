"""Draws one token per row by a blocked inverse CDF and reports its log-probability under two distributions.

One uniform number per row and token, `fold_in(seed, completion position)`, so a completion depends on nothing but its own seed
and logits. (`jax.random.categorical` draws V numbers per row: 30 times the cost at a vocabulary of 49k.) The vocabulary is cut
into blocks: the running sum over blocks finds the block, the running sum inside it finds the token. The largest logit is found
by blocks too. Truncation keeps whole ties: top-k keeps every token at least as likely as the k-th, as top-p does for the last
one that it needs. The most likely token is always kept.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """How each row is sampled; every leaf leads with the row."""

    temperature: jax.Array | np.ndarray  # float32; 0, or what has no finite inverse, takes the most likely token
    top_k: jax.Array | np.ndarray  # int32; 0 is off
    top_p: jax.Array | np.ndarray  # float32 in (0, 1]; 1 is off
    min_p: jax.Array | np.ndarray  # float32 in [0, 1); 0 is off; relative to the most likely token
    seed: jax.Array | np.ndarray  # uint32 [..., 2]: high and low half of the seed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """What was drawn for each row."""

    token: jax.Array  # int32
    logprob: jax.Array  # float32: of the model's own distribution (temperature 1, nothing cut off)
    sampled_logprob: jax.Array  # float32: of the distribution drawn from; 0 where greedy
    finite: jax.Array  # bool: the logits were usable


def uniform(seed_S2: jax.Array | np.ndarray, completion_position_S: jax.Array) -> jax.Array:
    """Returns one number in [0, 1) per row, float32 [S]."""

    def one(seed, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position), ())

    return jax.vmap(one)(seed_S2, completion_position_S)


def block_count(vocab_size: int) -> int:
    """Returns into how many blocks a vocabulary is cut: near its square root, a divisor of it where one is near."""
    root = math.isqrt(vocab_size)
    near = [n for n in range(max(1, root // 4), min(vocab_size, root * 4) + 1) if vocab_size % n == 0]
    return min(near, key=lambda n: abs(math.log(n / root)), default=max(1, root))


def _blocks(x_SV: jax.Array, fill: float) -> jax.Array:
    """Returns x as [S, blocks, block], its end filled up where the vocabulary does not divide."""
    num_rows, vocab_size = x_SV.shape
    count = block_count(vocab_size)
    size = -(-vocab_size // count)
    if count * size != vocab_size:
        x_SV = jnp.pad(x_SV, ((0, 0), (0, count * size - vocab_size)), constant_values=fill)
    return x_SV.reshape(num_rows, count, size)


def _pick(x: jax.Array, index_S: jax.Array) -> jax.Array:
    """Returns x[s, index_S[s]] for each row s."""
    return jnp.take_along_axis(x, index_S.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]


def _first_above(mass: jax.Array, target_S: jax.Array) -> jax.Array:
    """Returns per row the first entry with mass whose running sum passes `target_S`, or the last with mass if none does.

    Running sums in float32 need not rise steadily and may end a rounding error below the target: a token of probability zero
    must not be drawn for that.
    """
    has_mass = mass > 0
    passed = (jnp.cumsum(mass, axis=-1) > target_S[:, None]) & has_mass
    last = mass.shape[-1] - 1 - jnp.argmax(has_mass[:, ::-1], axis=-1)
    return jnp.where(passed.any(-1), jnp.argmax(passed, axis=-1), last)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Returns float32 as uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _threshold(key_SV: jax.Array, weight_SV: jax.Array, wanted_S: jax.Array) -> jax.Array:
    """Returns per row the largest key such that entries at or above it weigh at least `wanted_S`; 0 where all weigh less.

    Bit by bit from the top: 32 passes of compare and sum, where a sort of the vocabulary would cost several times as much.
    """

    def body(i, found_S):
        trial = found_S | (jnp.uint32(0x80000000) >> i.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(key_SV >= trial[:, None], weight_SV, 0.0), axis=-1)
        return jnp.where(weight >= wanted_S, trial, found_S)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros(key_SV.shape[:1], jnp.uint32))


def _kept(scaled_SV: jax.Array, rows: SamplingRows) -> jax.Array:
    """Returns which tokens survive top-k, then top-p of what is left, then min-p, bool [S, V]; `scaled` is 0 at the maximum."""
    key = _ordered_bits(scaled_SV)
    mass = jnp.exp(scaled_SV)
    vocab_size = scaled_SV.shape[1]
    top_k = jnp.where(rows.top_k > 0, rows.top_k, vocab_size).astype(jnp.float32)
    kept = key >= _threshold(key, jnp.ones_like(mass), jnp.minimum(top_k, vocab_size))[:, None]
    mass = jnp.where(kept, mass, 0.0)
    wanted = jnp.where(rows.top_p < 1, rows.top_p * mass.sum(-1), jnp.inf)  # off: no threshold is found, all stay
    kept &= key >= _threshold(key, mass, wanted)[:, None]
    kept &= mass >= rows.min_p[:, None]
    return kept | (scaled_SV >= 0)  # whatever rounds to 0 in float32, the most likely token stays


def sample(logits_SV: jax.Array, rows: SamplingRows, completion_position_S: jax.Array, active_S: jax.Array) -> Draw:
    """Returns one draw per row from float32 logits. Settings of rows that are not active cost nothing."""
    logits_SBN = _blocks(logits_SV, -jnp.inf)
    block_max_SB = logits_SBN.max(-1)
    max_S = block_max_SB.max(-1)
    model_SB = jnp.exp(logits_SBN - max_S[:, None, None]).sum(-1)
    total_S = model_SB.sum(-1)
    finite = jnp.isfinite(max_S) & jnp.isfinite(total_S)

    greedy = rows.temperature < jnp.finfo(jnp.float32).tiny
    inverse = 1.0 / jnp.where(greedy, 1.0, rows.temperature)
    cut = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    matters = active_S & ~greedy

    def truncated(_):
        kept_SV = _kept((logits_SV - max_S[:, None]) * inverse[:, None], rows)
        return jnp.where(kept_SV, logits_SV, jnp.inf).min(-1)

    # Which other rows there are decides whether this runs, so no row's own mass may depend on it: with nothing cut off, the
    # least logit that is kept lets the same ones through as minus infinity does.
    least_S = jax.lax.cond((matters & cut).any(), truncated, lambda _: jnp.full_like(max_S, -jnp.inf), None)
    mass_SBN = jnp.exp((logits_SBN - max_S[:, None, None]) * inverse[:, None, None])
    mass_SB = jnp.where(logits_SBN >= least_S[:, None, None], mass_SBN, 0.0).sum(-1)
    mass_S = mass_SB.sum(-1)
    finite &= greedy | (jnp.isfinite(mass_S) & (mass_S > 0))
    target_S = uniform(rows.seed, completion_position_S) * mass_S
    drawn_block_S = _first_above(mass_SB, target_S)
    before_S = _pick(jnp.cumsum(mass_SB, axis=-1) - mass_SB, drawn_block_S)
    block_S = jnp.where(greedy, jnp.argmax(block_max_SB, axis=-1), drawn_block_S)

    logits_SN = _pick(logits_SBN, block_S)
    inside_SN = jnp.where(logits_SN >= least_S[:, None], jnp.exp((logits_SN - max_S[:, None]) * inverse[:, None]), 0.0)
    drawn_S = _first_above(inside_SN, jnp.maximum(target_S - before_S, 0.0))
    inside_S = jnp.where(greedy, jnp.argmax(logits_SN, axis=-1), drawn_S)
    chosen_S = _pick(logits_SN, inside_S) - max_S
    return Draw(
        token=(block_S * logits_SBN.shape[2] + inside_S).astype(jnp.int32),
        logprob=chosen_S - jnp.log(total_S),
        sampled_logprob=jnp.where(greedy, 0.0, chosen_S * inverse - jnp.log(mass_S)),
        finite=finite,
    )
