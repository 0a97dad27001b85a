"""The learner's device arrays, and one job's part of them as flat float32 vectors for checkpoints.

Everything a job owns on the device lives under its adapter slot: master weights, both Adam moments, the gradient accumulator.
Memory grows with the number of adapters, not with its square. A slot is wiped whole when it changes hands (H02).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.errors import CorruptFile
from marlaas_jax.lora import bank as banks
from marlaas_jax.lora.adapter import AdapterSpec, Weights, weight_shapes
from marlaas_jax.lora.bank import Bank
from marlaas_jax.model.config import ModelConfig

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Masters:
    """What the learner's programs donate and give back. Trees: target -> {"down": [A, L, R, D], "up": [A, L, R, F]}."""

    bank: Bank  # float32 masters
    first: Tree  # float32: Adam's first moment
    second: Tree  # float32: Adam's second moment
    gradients: Tree  # float32: accumulated since the adapter's last update


def empty(config: ModelConfig, num_slots: int, max_rank: int) -> Masters:
    """Returns masters of zeros."""
    zeros = lambda: banks.empty(config, num_slots, max_rank).weights
    return Masters(banks.empty(config, num_slots, max_rank), zeros(), zeros(), zeros())


def place(masters: Masters, slot: jax.Array, weights: Tree, first: Tree, second: Tree, scale: jax.Array) -> Masters:
    """Returns the masters with one adapter in `slot` and its accumulator zero. Donates: only that slot is written."""
    put = lambda stack, one: jax.lax.dynamic_update_index_in_dim(stack, one, slot, 0)
    wipe = lambda stack: jax.lax.dynamic_update_index_in_dim(stack, jnp.zeros_like(stack[0]), slot, 0)
    return Masters(
        banks.write(masters.bank, slot, weights, scale),
        jax.tree.map(put, masters.first, first),
        jax.tree.map(put, masters.second, second),
        jax.tree.map(wipe, masters.gradients),
    )


def published(bank: Bank, slot: jax.Array, dtype: Any) -> Weights:
    """Returns a copy of one adapter in the sampler's dtype."""
    return jax.tree.map(lambda stack: stack[slot].astype(dtype), bank.weights)


def extract(masters: Masters, slot: jax.Array) -> tuple[Weights, Tree, Tree]:
    """Returns copies of one adapter's (weights, first, second)."""
    return jax.tree.map(lambda stack: stack[slot], (masters.bank.weights, masters.first, masters.second))


def zeros_of(config: ModelConfig, max_rank: int) -> Weights:
    """Returns one adapter of zeros, NumPy."""
    shapes = weight_shapes(config, max_rank)
    return {target: {name: np.zeros(shape, np.float32) for name, shape in both.items()} for target, both in shapes.items()}


def flatten(weights: Mapping[str, Mapping[str, Any]], spec: AdapterSpec) -> np.ndarray:
    """Returns the adapter's own numbers as one float32 vector: its targets in order, `down` then `up`, its own ranks only.

    What it leaves out is zero by construction, so the vector does not depend on the bank it came from.
    """
    parts = [np.asarray(weights[t][name])[:, : spec.rank].reshape(-1) for t in spec.targets for name in ("down", "up")]
    return np.concatenate(parts).astype(np.float32)


def unflatten(vector: np.ndarray, config: ModelConfig, spec: AdapterSpec, max_rank: int, what: str) -> Weights:
    """Returns the adapter of `flatten`'s vector in a bank of rank `max_rank`. Raises CorruptFile on a wrong length."""
    weights = zeros_of(config, max_rank)
    arrays = [weights[target][name][:, : spec.rank] for target in spec.targets for name in ("down", "up")]
    wanted = sum(array.size for array in arrays)
    if vector.shape != (wanted,):
        raise CorruptFile(
            f"checkpoint array {what!r}: shape {vector.shape}, but rank {spec.rank} over {', '.join(spec.targets)} "
            f"needs ({wanted},)"
        )
    start = 0
    for array in arrays:
        array[...] = vector[start : start + array.size].reshape(array.shape)
        start += array.size
    return weights


place_jit = jax.jit(place, donate_argnames=("masters",))
published_jit = jax.jit(published, static_argnames=("dtype",))
extract_jit = jax.jit(extract)
