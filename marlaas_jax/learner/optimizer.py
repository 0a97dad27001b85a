"""AdamW for the adapters that are due: gathered from the bank, updated by one vmapped optimizer, scattered back.

Adapters that are not due are neither read nor written. A gradient that is not finite leaves its adapter and moments as they
are. The accumulators of all named slots are cleared either way.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from marlaas_jax.lora.bank import Bank

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """Per adapter of the update, [U]."""

    learning_rate: jax.Array  # float32, the schedule applied
    beta1: jax.Array  # float32
    beta2: jax.Array  # float32
    eps: jax.Array  # float32
    weight_decay: jax.Array  # float32
    max_norm: jax.Array  # float32: of the whole gradient; inf does not clip
    count: jax.Array  # int32: updates applied so far
    is_due: jax.Array  # bool: False for the padding of the bucket


def adamw(weights: Tree, first: Tree, second: Tree, gradient: Tree, hyper: Hyperparameters):
    """Returns (weights, first, second, gradient norm) of one adapter after one step (Loshchilov & Hutter 2019, algorithm 2).

    The learning rate multiplies the decay too, as in torch and optax.
    """
    norm = optax.tree.norm(gradient)
    shrink = jnp.minimum(1.0, hyper.max_norm / jnp.maximum(norm, 1e-30))
    gradient = jax.tree.map(lambda g: g * shrink, gradient)
    adam = optax.scale_by_adam(hyper.beta1, hyper.beta2, hyper.eps)
    with jax.numpy_dtype_promotion("standard"):
        step, state = adam.update(gradient, optax.ScaleByAdamState(hyper.count, first, second))
    assert isinstance(state, optax.ScaleByAdamState)
    move = lambda w, s: w - hyper.learning_rate * (s + hyper.weight_decay * w)
    return jax.tree.map(move, weights, step), state.mu, state.nu, norm


def update(
    bank: Bank, first: Tree, second: Tree, gradients: Tree, adapter_slot_U: jax.Array, hyper: Hyperparameters
) -> tuple[Bank, Tree, Tree, Tree, jax.Array]:
    """Returns (bank, first, second, gradients, norm [U]) with the due adapters stepped and their accumulators zero.

    All arguments but the last two are donated. `adapter_slot_U` names each due slot once; padding names the null adapter. A
    norm that is not finite says that the adapter was left as it was.
    """
    gather = lambda tree: jax.tree.map(lambda stack: stack[adapter_slot_U], tree)
    before = (gather(bank.weights), gather(first), gather(second))
    *after, norm_U = jax.vmap(adamw)(*before, gather(gradients), hyper)
    applied_U = hyper.is_due & jnp.isfinite(norm_U)

    def scatter(stack, new, old):
        keep = applied_U.reshape(-1, *[1] * (new.ndim - 1))
        return stack.at[adapter_slot_U].set(jnp.where(keep, new, old))

    weights, first, second = (
        jax.tree.map(scatter, stack, new, old)
        for stack, new, old in zip((bank.weights, first, second), after, before, strict=True)
    )
    gradients = jax.tree.map(lambda stack: stack.at[adapter_slot_U].set(0.0), gradients)
    return Bank(weights, bank.scale_A), first, second, gradients, norm_U


update_jit = jax.jit(update, donate_argnames=("bank", "first", "second", "gradients"))
