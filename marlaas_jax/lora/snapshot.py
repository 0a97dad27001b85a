"""A published snapshot of one adapter and the fingerprint that proves, by value, which weights a sampler holds."""

import dataclasses

import jax
import jax.numpy as jnp

from marlaas_jax.lora.adapter import Weights


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Immutable weights under the name (job, incarnation, version); version counts optimizer steps."""

    job: str
    incarnation: int
    version: int
    weights: Weights  # target -> {"down": [L, R, D], "up": [L, R, F]}, in the sampler's dtype
    scale: float
    fingerprint: str  # as computed by its publisher


@jax.jit
def checksum(weights: Weights, scale: jax.Array) -> jax.Array:
    """Returns two uint32 sums over every bit of the arrays, each element weighted by its position and its array's name."""
    total = jnp.zeros((2,), jnp.uint32)
    for i, leaf in enumerate([*jax.tree.leaves(weights), scale.astype(jnp.float32)[None]]):
        width = jnp.uint32 if leaf.dtype.itemsize == 4 else jnp.uint16
        bits = jax.lax.bitcast_convert_type(leaf, width).astype(jnp.uint32).reshape(-1)
        index = jnp.arange(bits.size, dtype=jnp.uint32) + jnp.uint32(0x9E3779B9 * (i + 1) & 0xFFFFFFFF)
        # The finaliser of MurmurHash3 spreads (index, bits); the wrapping sum makes the result independent of reduction order.
        for seed in (0x85EBCA6B, 0xC2B2AE35):
            h = (bits ^ (index * jnp.uint32(seed))) * jnp.uint32(0xCC9E2D51)
            h = (h ^ (h >> 15)) * jnp.uint32(0x1B873593)
            h = h ^ (h >> 13)
            total = total.at[0 if seed == 0x85EBCA6B else 1].add(jnp.sum(h, dtype=jnp.uint32))
    return total


def fingerprint(weights: Weights, scale: jax.Array | float) -> str:
    """Returns 16 hex digits that change with any bit of the weights or the scale, equal on every backend and layout."""
    return as_text(checksum(weights, jnp.asarray(scale, jnp.float32)))


def as_text(sums: jax.Array) -> str:
    """Returns what `checksum` gave as a fingerprint."""
    high, low = jax.device_get(sums)
    return f"{int(high):08x}{int(low):08x}"
