"""Rotary position embedding (Su et al. 2021) in the rotate-half form."""

import jax
import jax.numpy as jnp

from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.frequencies import inverse_frequencies


def angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin), each [..., H/2] float32, for integer `positions` [...]."""
    phase = positions[..., None].astype(jnp.float32) * inverse_frequencies(config)
    return jnp.cos(phase), jnp.sin(phase)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns `x` [..., heads, H] rotated by its position; `cos`, `sin` [..., H/2]. Computed in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
