"""Attention in the three forms that sampling and training need; all masks and softmax in float32.

An attention form is a function `attend(q, k, v, kv) -> (out, kv)` handed to `transformer.forward`, which knows no cache:
q [..., N, H], k and v [..., K, H] of this layer's tokens, `kv` whatever the layer keeps, out [..., N * H].
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

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


def cached(position_S: jax.Array, num_context: int, sliding_window: int | None = None) -> Attend:
    """Attention of one new token per decode slot, q [S, 1, N, H], against the first `num_context` positions of its cache.

    kv is (k_cache, v_cache), each [S, K, C, H]; the new key and value are written at `position_S` first. A position at or
    beyond C writes nothing.
    """

    def attend(q, k, v, kv):
        k_cache_SKCH, v_cache_SKCH = kv
        slot, head = jnp.arange(k.shape[0])[:, None], jnp.arange(k.shape[2])[None, :]
        k_cache_SKCH = k_cache_SKCH.at[slot, head, position_S[:, None]].set(k[:, 0].astype(k_cache_SKCH.dtype), mode="drop")
        v_cache_SKCH = v_cache_SKCH.at[slot, head, position_S[:, None]].set(v[:, 0].astype(v_cache_SKCH.dtype), mode="drop")
        keys, values = k_cache_SKCH[:, :, :num_context], v_cache_SKCH[:, :, :num_context]
        q_SKQH = _grouped(q[:, 0], k.shape[2])
        scores = jnp.einsum("skqh,skch->skqc", q_SKQH, keys.astype(q.dtype)).astype(jnp.float32)
        key = jnp.arange(num_context)
        seen = key <= position_S[:, None]
        if sliding_window is not None:
            seen &= key > position_S[:, None] - sliding_window
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1).astype(v.dtype)
        out = jnp.einsum("skqc,skch->skqh", weights, values.astype(v.dtype))
        return out.reshape(q.shape[0], 1, -1), (k_cache_SKCH, v_cache_SKCH)

    return attend
