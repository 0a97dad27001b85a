"""Lays the adapters of a bank over the base model through the transformer's projection hook.

Block-gather: rows come in `NB` equal blocks, each block under one adapter (a GRPO group; several groups of one job; or
single rows). The blocks' adapters are gathered once per dispatch, the scale folded in there and nowhere else.

One-hot: rows come in any order, all adapters of the bank are multiplied with every row and a mask keeps each row's own. Floating
point work grows with A * R, so it is for matrix units while A * R is a few hundred. Both give the same numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp

from marlaas_jax.lora.bank import Bank
from marlaas_jax.model.transformer import Project


def gather_blocks(bank: Bank, adapter_slot_NB: jax.Array, unrolled: bool) -> Any:
    """Returns the `sides` of `transformer.forward`: per layer, target -> {"down": [NB, R, D], "up": [NB, R, F], scaled}."""
    scale = bank.scale_A[adapter_slot_NB][:, None, None]

    def of_layer(layer: int) -> dict[str, dict[str, jax.Array]]:
        side = {}
        for target, factors in bank.weights.items():
            up = factors["up"][adapter_slot_NB, layer]
            side[target] = {"down": factors["down"][adapter_slot_NB, layer], "up": (up * scale).astype(up.dtype)}
        return side

    num_layers = next(iter(bank.weights.values()))["down"].shape[1]
    sides = tuple(of_layer(i) for i in range(num_layers))
    return sides if unrolled else jax.tree.map(lambda *xs: jnp.stack(xs), *sides)


def block_project(name: str, x: jax.Array, weight: jax.Array, side: dict[str, dict[str, jax.Array]]) -> jax.Array:
    """Returns x @ weight plus each block's low-rank update, accumulated in float32; x [B, ..., D] with B a multiple of NB."""
    down, up = side[name]["down"], side[name]["up"]
    blocks = x.reshape(down.shape[0], -1, x.shape[-1])
    low = jnp.einsum("nsd,nrd->nsr", blocks, down, preferred_element_type=jnp.float32)
    delta = jnp.einsum("nsr,nrf->nsf", low.astype(up.dtype), up, preferred_element_type=jnp.float32)
    y = x @ weight
    return y + delta.reshape(y.shape).astype(y.dtype)


def gather_all(bank: Bank, unrolled: bool) -> Any:
    """Returns the sides for `onehot_project`: `gather_blocks` of all adapters in order, safe to multiply with any row.

    Zero times nan is nan, so an adapter with a broken `up` gets it zeroed and its `down` made nan: its own rows still show it.
    """

    def safe(factors: dict[str, jax.Array]) -> dict[str, jax.Array]:
        is_sound = jnp.isfinite(factors["up"]).all(axis=(-2, -1), keepdims=True)
        return {"down": jnp.where(is_sound, factors["down"], jnp.nan), "up": jnp.where(is_sound, factors["up"], 0)}

    sound = Bank({target: safe(factors) for target, factors in bank.weights.items()}, bank.scale_A)
    return gather_blocks(sound, jnp.arange(bank.num_slots), unrolled)


def onehot_project(adapter_slot_B: jax.Array) -> Project:
    """Returns the projection for rows in any order, x [B, ..., D], with the sides of `gather_all`."""

    def project(name: str, x: jax.Array, weight: jax.Array, side: dict[str, dict[str, jax.Array]]) -> jax.Array:
        down, up = side[name]["down"], side[name]["up"]
        is_own_BA = adapter_slot_B[:, None] == jnp.arange(down.shape[0])
        rows = x.reshape(x.shape[0], -1, x.shape[-1])
        low = jnp.einsum("btd,ard->btar", rows, down, preferred_element_type=jnp.float32)
        low = jnp.where(is_own_BA[:, None, :, None], low, 0.0)
        delta = jnp.einsum("btar,arf->btf", low.astype(up.dtype), up, preferred_element_type=jnp.float32)
        y = x @ weight
        return y + delta.reshape(y.shape).astype(y.dtype)

    return project
