"""The learner's compiled programs: pure functions over pytrees, jitted at the bottom.

A micro-batch runs as a chain of small programs instead of one large one:

    embed -> forward (k layers) x L/k -> head (a chunk of loss positions) x C -> finish -> backward (k layers) x L/k

`forward` keeps each layer's input and nothing else; `backward` recomputes the layer from it (full rematerialisation). The same
compiled `forward` and `backward` serve every group of k layers, because the layers are arguments: compile time does not grow
with depth, unrolled parameters are shared with the sampler as they are, and a dispatch can end after any link of the chain.
`score` is the chain's first half with a head that returns log-probs only.

Activations travel flat, [N, D] with N the learner's fixed token capacity, so only `forward` and `backward` depend on the
micro-batch's shape. Adapter weights are arguments of every program, never closed over.

    N token of the flat micro-batch    C loss position of a head chunk    B, T row and suffix position, padded to the learner's
    U adapter of an update             M, P, G as in the package legend   largest
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from marlaas_jax.lora.apply import block_project
from marlaas_jax.lora.bank import Bank
from marlaas_jax.model import rope, transformer
from marlaas_jax.model.attention import shared_prefix
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.rl.losses import LossRows, policy_loss
from marlaas_jax.rl.packing import BlockShape

Tree = Any


def embed(params: Tree, token_N: jax.Array) -> jax.Array:
    """Returns the input activations [N, D]."""
    return jnp.take(params["embed_VD"], token_N, axis=0)


def _positions(shape: BlockShape, prompt_length_M: jax.Array) -> jax.Array:
    """Returns each token's position [M, P + G * T]: the prompt from 0, every suffix row from its prompt's length."""
    prompt = jnp.broadcast_to(jnp.arange(shape.prompt, dtype=jnp.int32), (shape.blocks, shape.prompt))
    suffix = prompt_length_M[:, None] + jnp.tile(jnp.arange(shape.suffix, dtype=jnp.int32), shape.rows)[None]
    return jnp.concatenate([prompt, suffix], axis=1)


@functools.partial(jax.jit, static_argnames=("config", "shape"))
def _layer(
    config: ModelConfig,
    shape: BlockShape,
    prompt_length_M: jax.Array,
    scale_M: jax.Array,
    x: jax.Array,
    layer: Tree,
    factors: Tree,
) -> jax.Array:
    """Returns x [M, P + G * T, D] after one layer with the blocks' adapters. Jitted so that all programs share its trace."""
    cos, sin = rope.angles(config, _positions(shape, prompt_length_M))
    attend = shared_prefix(shape.prompt, prompt_length_M, shape.rows, config.sliding_window)
    # The scale is folded into `up` as the sampler folds it; masters are rounded to the dtype that the sampler reads.
    side = {}
    for target, both in factors.items():
        up = both["up"].astype(x.dtype)
        up = (up.astype(jnp.float32) * scale_M[:, None, None]).astype(x.dtype)
        side[target] = {"down": both["down"].astype(x.dtype), "up": up}
    return transformer.block(config, x, layer, side, None, cos, sin, attend, block_project)[0]


def _gather(bank: Bank, adapter_slot_M: jax.Array, layer: jax.Array) -> Tree:
    """Returns the blocks' factors of one layer: target -> {"down": [M, R, D], "up": [M, R, F]}."""
    return jax.tree.map(lambda stack: stack[adapter_slot_M, layer], bank.weights)


def _to_blocks(shape: BlockShape, x_ND: jax.Array) -> jax.Array:
    return x_ND[: shape.num_tokens].reshape(shape.blocks, shape.tokens_per_block, -1)


def _to_flat(x: jax.Array, capacity: int) -> jax.Array:
    flat = x.reshape(-1, x.shape[-1])
    return jnp.pad(flat, ((0, capacity - flat.shape[0]), (0, 0)))


def forward(
    config: ModelConfig,
    shape: BlockShape,
    layers: Tree,
    bank: Bank,
    first_layer: jax.Array,
    adapter_slot_M: jax.Array,
    prompt_length_M: jax.Array,
    x_ND: jax.Array,
) -> tuple[jax.Array, Tree]:
    """Returns (activations [N, D] after these layers, each layer's input). `layers` is a tuple of k layers, or all, stacked."""
    run = functools.partial(_layer, config, shape, prompt_length_M, bank.scale_A[adapter_slot_M])
    x = _to_blocks(shape, x_ND)
    if isinstance(layers, dict):
        num_layers = len(layers["attn_norm_D"])

        def one(x, xs):
            layer, index = xs
            return run(x, layer, _gather(bank, adapter_slot_M, index)), x

        x, kept = jax.lax.scan(one, x, (layers, jnp.arange(num_layers, dtype=jnp.int32)))
    else:
        kept = []
        for i, layer in enumerate(layers):
            kept.append(x)
            x = run(x, layer, _gather(bank, adapter_slot_M, first_layer + i))
        kept = tuple(kept)
    return _to_flat(x, len(x_ND)), kept


def backward(
    config: ModelConfig,
    shape: BlockShape,
    layers: Tree,
    bank: Bank,
    first_layer: jax.Array,
    adapter_slot_M: jax.Array,
    prompt_length_M: jax.Array,
    kept: Tree,
    dx_ND: jax.Array,
    gradients: Tree,
) -> tuple[jax.Array, Tree]:
    """Returns (gradient [N, D] at these layers' input, accumulators [A, L, R, D] with the blocks' gradients added)."""
    run = functools.partial(_layer, config, shape, prompt_length_M, bank.scale_A[adapter_slot_M])
    dx = _to_blocks(shape, dx_ND)

    def one(dx, layer, x, index):
        factors = _gather(bank, adapter_slot_M, index)
        _, pull = jax.vjp(lambda x, factors: run(x, layer, factors), x, factors)
        return pull(dx)

    if isinstance(layers, dict):
        num_layers = len(layers["attn_norm_D"])
        step = lambda dx, xs: one(dx, *xs)
        dx, added = jax.lax.scan(step, dx, (layers, kept, jnp.arange(num_layers, dtype=jnp.int32)), reverse=True)
        gradients = jax.tree.map(lambda total, g: total.at[adapter_slot_M].add(jnp.moveaxis(g, 0, 1)), gradients, added)
    else:
        for i in reversed(range(len(layers))):
            dx, added = one(dx, layers[i], kept[i], first_layer + i)
            index = first_layer + i
            gradients = jax.tree.map(lambda total, g, index=index: total.at[adapter_slot_M, index].add(g), gradients, added)
    return _to_flat(dx, len(dx_ND)), gradients


def _log_softmax_parts(config: ModelConfig, params: Tree, x_CD: jax.Array, target_C: jax.Array):
    hidden_CD = transformer.rms_norm(x_CD, params["final_norm_D"], config.norm_eps)
    logits_CV = transformer.unembed(params, hidden_CD)
    peak_C1 = jnp.max(logits_CV, axis=-1, keepdims=True)
    exp_CV = jnp.exp(logits_CV - peak_C1)
    total_C1 = jnp.sum(exp_CV, axis=-1, keepdims=True)
    log_total_C = (peak_C1 + jnp.log(total_C1))[:, 0]
    logprob_C = jnp.take_along_axis(logits_CV, target_C[:, None], axis=-1)[:, 0] - log_total_C
    return logits_CV, exp_CV / total_C1, log_total_C, logprob_C


def score_head(config: ModelConfig, params: Tree, x_ND: jax.Array, index_C: jax.Array, target_C: jax.Array) -> jax.Array:
    """Returns log-probs [C] of `target_C` at the flat positions `index_C`."""
    return _log_softmax_parts(config, params, x_ND[index_C], target_C)[3]


def head(
    config: ModelConfig,
    params: Tree,
    x_ND: jax.Array,
    index_C: jax.Array,
    target_C: jax.Array,
    logprob_N: jax.Array,
    entropy_N: jax.Array,
    unit_ND: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes log-prob, entropy and d log-prob / d hidden of a chunk of loss positions into the buffers; index N writes nothing.

    The policy-gradient objectives touch the logits through the chosen token's log-prob alone, and its gradient
    W[target] - p @ W needs no loss coefficient: taken here, the projection never has to be recomputed.
    """
    logits_CV, prob_CV, log_total_C, logprob_C = _log_softmax_parts(config, params, x_ND[index_C], target_C)
    entropy_C = log_total_C - jnp.sum(prob_CV * logits_CV, axis=-1)
    weight = params.get("unembed_DV")
    if weight is None:
        weight = params["embed_VD"]
        chosen_CD = weight[target_C]
        mean_CD = jnp.einsum("cv,vd->cd", prob_CV.astype(weight.dtype), weight, preferred_element_type=jnp.float32)
    else:
        chosen_CD = weight[:, target_C].T
        mean_CD = jnp.einsum("cv,dv->cd", prob_CV.astype(weight.dtype), weight, preferred_element_type=jnp.float32)
    return (
        logprob_N.at[index_C].set(logprob_C, mode="drop"),
        entropy_N.at[index_C].set(entropy_C, mode="drop"),
        unit_ND.at[index_C].set(chosen_CD.astype(jnp.float32) - mean_CD, mode="drop"),
    )


def finish(
    config: ModelConfig,
    params: Tree,
    x_ND: jax.Array,
    index_BT: jax.Array,
    rows: LossRows,
    logprob_N: jax.Array,
    entropy_N: jax.Array,
    unit_ND: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (gradient [N, D] at the last layer's output, per-row metric sums [B]) of the rows' objectives.

    `index_BT` is each loss position's place in the flat micro-batch, N where there is none.
    """
    logprob_BT = jnp.where(rows.mask_BT, logprob_N.at[index_BT].get(mode="fill", fill_value=0.0), 0.0)
    entropy_BT = jnp.where(rows.mask_BT, entropy_N.at[index_BT].get(mode="fill", fill_value=0.0), 0.0)

    def total(logprob_BT):
        loss_B, metrics = policy_loss(logprob_BT, rows)
        return jnp.sum(loss_B), metrics

    coefficient_BT, metrics = jax.grad(total, has_aux=True)(logprob_BT)
    metrics["entropy"] = jnp.sum(entropy_BT, axis=1)
    coefficient_N = jnp.zeros_like(logprob_N).at[index_BT].set(coefficient_BT, mode="drop")
    dhidden_ND = jnp.where(coefficient_N[:, None] != 0, coefficient_N[:, None] * unit_ND, 0.0).astype(x_ND.dtype)
    _, pull = jax.vjp(lambda x: transformer.rms_norm(x, params["final_norm_D"], config.norm_eps), x_ND)
    return pull(dhidden_ND)[0], metrics


embed_jit = jax.jit(embed)
forward_jit = jax.jit(forward, static_argnames=("config", "shape"))
backward_jit = jax.jit(backward, static_argnames=("config", "shape"), donate_argnames=("dx_ND", "gradients"))
score_head_jit = jax.jit(score_head, static_argnames=("config",))
head_jit = jax.jit(head, static_argnames=("config",), donate_argnames=("logprob_N", "entropy_N", "unit_ND"))
finish_jit = jax.jit(finish, static_argnames=("config",))
