"""Lays the adapters of a bank over the base model through the transformer's projection hook.

Block-gather: rows come in `NB` equal blocks, each block under one adapter (a GRPO group; several groups of one job; or
single rows). The blocks' adapters are gathered once per dispatch, the scale folded in there and nowhere else.
"""

from typing import Any

import jax
import jax.numpy as jnp

from marlaas_jax.lora.bank import Bank


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
