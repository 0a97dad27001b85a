"""Lays the adapters of a bank over the base model through the transformer's projection hook.

Block-gather: rows come in `NB` equal blocks, each block under one adapter (a GRPO group; several groups of one job; or
single rows). The blocks' adapters are copied out of the bank once, the scale folded in there and nowhere else; a sampler keeps
the copy and replaces the blocks whose adapter changes.

One-hot: rows come in any order, all adapters of the bank are multiplied with every row and a mask keeps each row's own.
Floating point work grows with A * R, so it is for matrix units while A * R is a few hundred. Both give the same numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp

from marlaas_jax.lora.bank import Bank
from marlaas_jax.model.transformer import Project

ONEHOT_MAX_WIDTH = 256  # A * R up to which a matrix unit takes all adapters in one or two tiles

LayerSides = dict[str, dict[str, jax.Array]]
Sides = Any  # per layer: target -> {"down": [NB, R, D], "up": [NB, R, F], scaled}; a tuple, or arrays with a leading L


def _num_layers(bank: Bank) -> int:
    return next(iter(bank.weights.values()))["down"].shape[1]


def gather_layer(bank: Bank, adapter_slot_NB: jax.Array, layer: jax.Array | int) -> LayerSides:
    """Returns one layer's entry of `gather_blocks`; `layer` may be traced, so that one program serves every layer."""
    scale = bank.scale_A[adapter_slot_NB][:, None, None]

    def pick(factor: str, stack: jax.Array) -> jax.Array:
        blocks = stack[adapter_slot_NB, layer]
        return (blocks * scale).astype(blocks.dtype) if factor == "up" else blocks

    return {t: {f: pick(f, stack) for f, stack in factors.items()} for t, factors in bank.weights.items()}


def gather_blocks(bank: Bank, adapter_slot_NB: jax.Array, unrolled: bool) -> Sides:
    """Returns the `sides` of `transformer.forward` for blocks under the given adapters."""
    sides = tuple(gather_layer(bank, adapter_slot_NB, i) for i in range(_num_layers(bank)))
    return sides if unrolled else jax.tree.map(lambda *xs: jnp.stack(xs), *sides)


def empty_blocks(bank: Bank, num_blocks: int, unrolled: bool) -> Sides:
    """Returns sides of zeros: every block under the null adapter."""
    lead = () if unrolled else (_num_layers(bank),)
    zeros = lambda: jax.tree.map(lambda stack: jnp.zeros((*lead, num_blocks, *stack.shape[2:]), stack.dtype), bank.weights)
    return tuple(zeros() for _ in range(_num_layers(bank))) if unrolled else zeros()


def update_blocks(
    bank: Bank, sides: Sides, block: jax.Array, adapter_slot: jax.Array, count: jax.Array, unrolled: bool
) -> Sides:
    """Returns the sides with blocks `block[:count]` put under adapters `adapter_slot[:count]`.

    Jit with the sides donated: only those blocks are written. Copying all of 32 adapters of a 135M model takes as long as
    several decode steps, and from one dispatch to the next few blocks change hands.
    """

    def place(i: jax.Array, sides: Sides) -> Sides:
        one = gather_blocks(bank, adapter_slot[i][None], unrolled)
        put = lambda all_blocks, new: jax.lax.dynamic_update_slice_in_dim(all_blocks, new, block[i], axis=0 if unrolled else 1)
        return jax.tree.map(put, sides, one)

    return jax.lax.fori_loop(0, count, place, sides)


def update_layer(
    bank: Bank, layer: jax.Array, side: LayerSides, block: jax.Array, adapter_slot: jax.Array, count: jax.Array
) -> LayerSides:
    """Returns one layer's entry of `update_blocks`; `layer` may be traced. Jit with the side donated."""

    def place(i: jax.Array, side: LayerSides) -> LayerSides:
        one = gather_layer(bank, adapter_slot[i][None], layer)
        put = lambda all_blocks, new: jax.lax.dynamic_update_slice_in_dim(all_blocks, new, block[i], 0)
        return jax.tree.map(put, side, one)

    return jax.lax.fori_loop(0, count, place, side)


def gather_all(bank: Bank, unrolled: bool) -> Sides:
    """Returns the sides for `onehot_project`: `gather_blocks` of all adapters in order, safe to multiply with any row.

    Zero times nan is nan, so an adapter with a broken `up` gets it zeroed and its `down` made nan: its own rows still show it.
    """

    def safe(factors: dict[str, jax.Array]) -> dict[str, jax.Array]:
        is_sound = jnp.isfinite(factors["up"]).all(axis=(-2, -1), keepdims=True)
        return {"down": jnp.where(is_sound, factors["down"], jnp.nan), "up": jnp.where(is_sound, factors["up"], 0)}

    sound = Bank({target: safe(factors) for target, factors in bank.weights.items()}, bank.scale_A)
    return gather_blocks(sound, jnp.arange(bank.num_slots), unrolled)


def block_project(name: str, x: jax.Array, weight: jax.Array, side: LayerSides) -> jax.Array:
    """Returns x @ weight plus each block's low-rank update, accumulated in float32; x [B, ..., D] with B a multiple of NB."""
    down, up = side[name]["down"], side[name]["up"]
    blocks = x.reshape(down.shape[0], -1, x.shape[-1])
    low = jnp.einsum("nsd,nrd->nsr", blocks, down, preferred_element_type=jnp.float32)
    delta = jnp.einsum("nsr,nrf->nsf", low.astype(up.dtype), up, preferred_element_type=jnp.float32)
    y = x @ weight
    return y + delta.reshape(y.shape).astype(y.dtype)


def onehot_project(adapter_slot_B: jax.Array) -> Project:
    """Returns the projection for rows in any order, x [B, ..., D], with the sides of `gather_all`."""

    def project(name: str, x: jax.Array, weight: jax.Array, side: LayerSides) -> jax.Array:
        down, up = side[name]["down"], side[name]["up"]
        is_own_BA = adapter_slot_B[:, None] == jnp.arange(down.shape[0])
        rows = x.reshape(x.shape[0], -1, x.shape[-1])
        low = jnp.einsum("btd,ard->btar", rows, down, preferred_element_type=jnp.float32)
        low = jnp.where(is_own_BA[:, None, :, None], low, 0.0)
        delta = jnp.einsum("btar,arf->btf", low.astype(up.dtype), up, preferred_element_type=jnp.float32)
        y = x @ weight
        return y + delta.reshape(y.shape).astype(y.dtype)

    return project


def choose_form(backend: str, num_adapter_slots: int, max_rank: int) -> str:
    """Returns "blocks" or "onehot".

    Measured on CPU, 32 rows of 32 adapters of rank 8, against the base model's step: blocks 1.5, one-hot 3.1 on a model of
    width 128; ragged_dot 10. On TPU (reasoned, not measured) one-hot spares permuting rows while it fits a tile or two.
    """
    return "onehot" if backend == "tpu" and num_adapter_slots * max_rank <= ONEHOT_MAX_WIDTH else "blocks"
