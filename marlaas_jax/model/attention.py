"""Attention in the three forms that sampling and training need; all masks and softmax in float32.

An attention form is a function `attend(q, k, v, kv) -> (out, kv)` handed to `transformer.forward`, which knows no cache:
q [..., N, H], k and v [..., K, H] of this layer's tokens, `kv` whatever the layer keeps, out [..., N * H].
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

MASKED = -1e30


def _grouped(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """Returns q [..., N, H] as [..., K, Q, H], scaled by H**-0.5."""
    *rest, num_heads, head_dim = q.shape
    return q.reshape(*rest, num_kv_heads, num_heads // num_kv_heads, head_dim) * jnp.asarray(head_dim**-0.5, q.dtype)


def causal(length_B: jax.Array, sliding_window: int | None = None) -> Attend:
    """Attention of whole right-padded sequences [B, T]; keeps (k, v), each [B, T, K, H]."""

    def attend(q, k, v, kv):
        del kv
        num_tokens, num_kv_heads = k.shape[1], k.shape[2]
        scores = jnp.einsum("btkqh,bskh->bkqts", _grouped(q, num_kv_heads), k).astype(jnp.float32)
        query, key = jnp.arange(num_tokens)[:, None], jnp.arange(num_tokens)[None, :]
        seen = key <= query
        if sliding_window is not None:
            seen &= key > query - sliding_window
        seen = seen[None] & (key[None] < length_B[:, None, None])
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1).astype(v.dtype)
        out = jnp.einsum("bkqts,bskh->btkqh", weights, v)
        return out.reshape(*q.shape[:2], -1), (k, v)

    return attend


def shared_prefix(num_prompt: int, prompt_length_M: jax.Array, num_rows: int, sliding_window: int | None = None) -> Attend:
    """Attention of training blocks: tokens [M, P + G * T], the prompt once, then G suffixes of T tokens that all attend to it.

    Suffix token t of a row sits at position prompt_length + t. Equal to running each row as prompt + suffix.
    """

    def attend(q, k, v, kv):
        del kv
        num_blocks, num_tokens, num_kv_heads, head_dim = k.shape
        suffix = (num_blocks, num_rows, (num_tokens - num_prompt) // num_rows)
        prompt_out, _ = causal(prompt_length_M, sliding_window)(q[:, :num_prompt], k[:, :num_prompt], v[:, :num_prompt], None)
        q_MGTKQH = _grouped(q[:, num_prompt:], num_kv_heads).reshape(*suffix, num_kv_heads, -1, head_dim)
        k_MGTKH = k[:, num_prompt:].reshape(*suffix, num_kv_heads, head_dim)
        v_MGTKH = v[:, num_prompt:].reshape(*suffix, num_kv_heads, head_dim)
        to_prompt = jnp.einsum("mgtkqh,mpkh->mkqgtp", q_MGTKQH, k[:, :num_prompt]).astype(jnp.float32)
        to_own = jnp.einsum("mgtkqh,mgskh->mkqgts", q_MGTKQH, k_MGTKH).astype(jnp.float32)
        time = jnp.arange(suffix[2])
        key = jnp.arange(num_prompt)
        seen_prompt = key < prompt_length_M[:, None]  # [M, P]
        seen_prompt = jnp.broadcast_to(seen_prompt[:, None], (num_blocks, suffix[2], num_prompt))  # [M, T, P]
        seen_own = time[None, :] <= time[:, None]
        if sliding_window is not None:
            query = prompt_length_M[:, None] + time  # [M, T]
            seen_prompt &= key > query[:, :, None] - sliding_window
            seen_own &= time[None, :] > time[:, None] - sliding_window
        to_prompt = jnp.where(seen_prompt[:, None, None, None], to_prompt, MASKED)
        to_own = jnp.where(seen_own, to_own, MASKED)
        weights = jax.nn.softmax(jnp.concatenate([to_prompt, to_own], axis=-1), axis=-1).astype(v.dtype)
        out = jnp.einsum("mkqgtp,mpkh->mgtkqh", weights[..., :num_prompt], v[:, :num_prompt])
        out = out + jnp.einsum("mkqgts,mgskh->mgtkqh", weights[..., num_prompt:], v_MGTKH)
        return jnp.concatenate([prompt_out, out.reshape(num_blocks, num_tokens - num_prompt, -1)], axis=1), None

    return attend


def cached(
    position_R: jax.Array,
    num_context: int,
    sliding_window: int | None = None,
    slot_R: jax.Array | None = None,
    is_written_R: jax.Array | None = None,
    skip_unreached: bool = False,
) -> Attend:
    """Attention of one new token per row, q [R, 1, N, H], against the first `num_context` positions of its slot's cache.

    kv is (k_cache, v_cache), each an array [S, K, C, H] or its pieces along C, as a tuple. Reading whole pieces copies nothing,
    where the beginning of a longer array is copied first: half of the time of this function. The new key and value are written
    at `position_R` before, where `is_written_R` says so and the position is below `num_context`. Row r belongs to slot
    `slot_R[r]`, by default to slot r; with as many rows as slots `slot_R` is a permutation. Values that are not finite are
    stored as zeros: a cache must never hold a nan (see engine/state.py).

    skip_unreached: pieces after the first that no written row reaches are not read. A row's result is the same to the bit: what
    a piece beyond its position gives is masked scores and zeros either way.
    """

    def attend(q, k, v, kv):
        k_pieces, v_pieces = (cache if isinstance(cache, tuple) else (cache,) for cache in kv)
        num_rows, num_slots = q.shape[0], k_pieces[0].shape[0]
        slots = jnp.arange(num_rows) if slot_R is None else slot_R
        is_written = jnp.ones((num_rows,), bool) if is_written_R is None else is_written_R
        q_RKQH, position = _grouped(q[:, 0], k.shape[2]), position_R
        is_permuted = slot_R is not None and num_rows == num_slots
        if is_permuted:  # the queries are far smaller than the caches, so they move
            row_S = jnp.zeros_like(slots).at[slots].set(jnp.arange(num_rows, dtype=slots.dtype))
            q_RKQH, position = q_RKQH[row_S], position[row_S]

        def read(piece: jax.Array, length: int) -> jax.Array:
            piece = piece[:, :, :length].astype(q.dtype)
            return piece if slot_R is None or is_permuted else piece[slots]

        k_kept, v_kept, scores, values = list(k_pieces), list(v_pieces), [], []
        offset = 0
        for i, size in enumerate(piece.shape[2] for piece in k_pieces):
            length = min(size, num_context - offset)
            if length <= 0:
                break
            inside = is_written & (position_R >= offset) & (position_R < offset + length)
            index = (slots[:, None], jnp.arange(k.shape[2])[None, :], jnp.where(inside, position_R - offset, size)[:, None])
            k_kept[i] = k_pieces[i].at[index].set(finite(k[:, 0]).astype(k_pieces[i].dtype), mode="drop")
            v_kept[i] = v_pieces[i].at[index].set(finite(v[:, 0]).astype(v_pieces[i].dtype), mode="drop")
            k_read, v_read = read(k_kept[i], length), read(v_kept[i], length)
            is_reached = (is_written & (position_R >= offset)).any() if skip_unreached and offset else None
            score = lambda k_read: jnp.einsum("rkqh,rkch->rkqc", q_RKQH, k_read).astype(jnp.float32)
            scores.append(_only(is_reached, score, k_read, MASKED))
            values.append((is_reached, v_read))
            offset += length

        key = jnp.arange(offset)
        seen = key <= position[:, None]
        if sliding_window is not None:
            seen &= key > position[:, None] - sliding_window
        scores = jnp.where(seen[:, None, None], jnp.concatenate(scores, axis=-1), MASKED)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        ends = np.cumsum([piece.shape[2] for _, piece in values])[:-1]
        out = jnp.zeros((), v.dtype)
        for part, (is_reached, piece) in zip(jnp.split(weights, ends, axis=-1), values, strict=True):
            out = out + _only(is_reached, lambda v_read, part=part: jnp.einsum("rkqc,rkch->rkqh", part, v_read), piece, 0.0)
        if is_permuted:
            out = out[slots]
        kept = tuple(
            tuple(new) if isinstance(cache, tuple) else new[0] for cache, new in zip(kv, (k_kept, v_kept), strict=True)
        )
        return out.reshape(num_rows, 1, -1), kept

    return attend


def _only(condition: jax.Array | None, function: Callable[[jax.Array], jax.Array], x: jax.Array, otherwise: float) -> jax.Array:
    """Returns function(x), or an array full of `otherwise` where a condition is given that does not hold."""
    if condition is None:
        return function(x)
    shape = jax.eval_shape(function, x)
    return jax.lax.cond(condition, function, lambda _: jnp.full(shape.shape, otherwise, shape.dtype), x)


def finite(x: jax.Array) -> jax.Array:
    """Returns x with zeros in place of what is not finite."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))
