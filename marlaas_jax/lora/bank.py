"""A bank: many adapters of one base, stacked along the adapter slot axis A. Slot 0 is the null adapter and stays zero."""

import dataclasses

import jax
import jax.numpy as jnp

from marlaas_jax.lora.adapter import Weights, weight_shapes
from marlaas_jax.model.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bank:
    """Adapters by slot."""

    weights: Weights  # target -> {"down": [A, L, R, D], "up": [A, L, R, F]}
    scale_A: jax.Array  # float32: alpha / rank of the slot's adapter; 0 in slot 0 and in free slots

    @property
    def num_slots(self) -> int:
        """Number of adapter slots, the null adapter included."""
        return self.scale_A.shape[0]


def empty(config: ModelConfig, num_slots: int, max_rank: int, dtype=jnp.float32) -> Bank:
    """Returns a bank of zeros."""
    shapes = weight_shapes(config, max_rank)
    weights = {t: {f: jnp.zeros((num_slots, *s), dtype) for f, s in factors.items()} for t, factors in shapes.items()}
    return Bank(weights, jnp.zeros((num_slots,), jnp.float32))


def write(bank: Bank, slot: jax.Array, weights: Weights, scale: jax.Array) -> Bank:
    """Returns the bank with one adapter in `slot`. Jit with the bank donated: only that slot is written."""
    put = lambda stack, one: jax.lax.dynamic_update_index_in_dim(stack, one.astype(stack.dtype), slot, 0)
    return Bank(jax.tree.map(put, bank.weights, weights), bank.scale_A.at[slot].set(scale))


def read(bank: Bank, slot: jax.Array) -> tuple[Weights, jax.Array]:
    """Returns (weights, scale) of one slot."""
    return jax.tree.map(lambda stack: stack[slot], bank.weights), bank.scale_A[slot]
