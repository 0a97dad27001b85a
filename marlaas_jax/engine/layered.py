"""The same programs as `steps`, one layer per call, for deep models whose layers are separate arrays.

A program that holds 30 unrolled layers takes 10 to 20 s to compile, for every bucket; a single layer takes less than one, and
all layers share it because their arrays are arguments. A call costs about 50 microseconds on the host, which a layer that runs
for milliseconds does not feel. The numbers are those of `steps`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.engine import steps
from marlaas_jax.engine.state import DecodeState, Prefix
from marlaas_jax.lora import apply
from marlaas_jax.lora.bank import Bank
from marlaas_jax.model import attention, rope, transformer
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.transformer import Params

MIN_LAYERS = 9  # shallower models run as one program: their layers are too short for a call of their own

Layer = dict[str, jax.Array]


def suits(config: ModelConfig, params: Params, form: str) -> bool:
    """Returns whether a model runs layer by layer."""
    return steps.is_unrolled(params) and config.num_layers >= MIN_LAYERS and form == "blocks"


def prefill(
    config: ModelConfig,
    num_prefix_rows: int,
    params: Params,
    bank: Bank,
    tokens_BT: jax.Array,
    prompt_length_B: jax.Array,
    adapter_slot_B: jax.Array,
) -> Prefix:
    """Returns what `steps.prefill` returns."""
    _, kv = _run_layers(config, params, bank, tokens_BT, prompt_length_B, adapter_slot_B)
    return _as_prefix(num_prefix_rows, True, kv, tokens_BT, prompt_length_B, adapter_slot_B)


def score(
    config: ModelConfig, params: Params, bank: Bank, tokens_T: jax.Array, length: jax.Array, adapter_slot: jax.Array
) -> jax.Array:
    """Returns what `steps.score` returns."""
    x, _ = _run_layers(config, params, bank, tokens_T[None], length[None], adapter_slot[None])
    return _score_head(config, params, x, tokens_T)


def gather_blocks(bank: Bank, adapter_slot_NB: jax.Array, num_layers: int) -> apply.Sides:
    """Returns what `apply.gather_blocks` returns."""
    return tuple(_gather_layer(bank, adapter_slot_NB, np.int32(i)) for i in range(num_layers))


def update_blocks(bank: Bank, sides: apply.Sides, block: Any, adapter_slot: Any, count: Any) -> apply.Sides:
    """Returns what `apply.update_blocks` returns; donates the sides."""
    return tuple(_update_layer(bank, np.int32(i), side, block, adapter_slot, count) for i, side in enumerate(sides))


def decode_chunk(
    config: ModelConfig,
    num_steps: int,
    num_context: int,
    params: Params,
    sides: apply.Sides,
    state: DecodeState,
    order_R: jax.Array,
    keep_S: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """Returns what `steps.decode_chunk` returns in the form "blocks" or without sides; caches are donated layer by layer."""
    kv, small = list(state.kv), dataclasses.replace(state, kv=())
    rows, now = _begin(num_steps, small, order_R, keep_S)
    capacity = kv[0][0].shape[-2]
    for _ in range(num_steps):
        x = _embed(params["embed_VD"], now.token_R[:, None])
        for i, layer in enumerate(params["layers"]):
            side = None if sides is None else sides[i]
            x, kv[i] = _decode_layer(config, num_context, layer, side, kv[i], x, now.position_R, order_R, now.active_R)
        now = _advance(config, capacity, params, rows, now, x)
        if not np.asarray(now.active_R).any():
            break
    small, packed = _finish(small, now, order_R, keep_S)
    return dataclasses.replace(small, kv=tuple(kv)), packed


def _run_layers(config, params, bank, tokens_BT, length_B, adapter_slot_B):
    x = _embed(params["embed_VD"], tokens_BT)
    kv = []
    for i, layer in enumerate(params["layers"]):
        x, layer_kv = _prefill_layer(config, layer, bank, np.int32(i), adapter_slot_B, length_B, x)
        kv.append(layer_kv)
    return x, tuple(kv)


def _prefill_layer_fn(config: ModelConfig, layer: Layer, bank: Bank, index, adapter_slot_B, length_B, x_BTD):
    cos, sin = rope.angles(config, jnp.broadcast_to(jnp.arange(x_BTD.shape[1]), x_BTD.shape[:2]))
    side = apply.gather_layer(bank, adapter_slot_B, index)
    attend = attention.causal(length_B, config.sliding_window)
    return transformer.block(config, x_BTD, layer, side, None, cos, sin, attend, apply.block_project)


def _decode_layer_fn(config: ModelConfig, num_context: int, layer: Layer, side, kv, x, position_R, order_R, active_R):
    cos, sin = rope.angles(config, position_R[:, None])
    attend = attention.cached(position_R, num_context, config.sliding_window, order_R, active_R)
    project = transformer.plain_project if side is None else apply.block_project
    return transformer.block(config, x, layer, side, kv, cos, sin, attend, project)


def _advance_fn(config: ModelConfig, capacity: int, params: Params, rows: steps.Rows, now: steps.Progress, x) -> steps.Progress:
    hidden = transformer.rms_norm(x[:, 0], params["final_norm_D"], config.norm_eps)
    return steps.advance(params, rows, now, hidden, capacity)


def _score_head_fn(config: ModelConfig, params: Params, x_1TD: jax.Array, tokens_T: jax.Array) -> jax.Array:
    return steps.logprobs_of(params, transformer.rms_norm(x_1TD[0], params["final_norm_D"], config.norm_eps), tokens_T)


_embed = jax.jit(lambda embed_VD, tokens: jnp.take(embed_VD, tokens, axis=0))
_prefill_layer = jax.jit(_prefill_layer_fn, static_argnames=("config",))
_decode_layer = jax.jit(_decode_layer_fn, static_argnames=("config", "num_context"), donate_argnames=("kv",))
_gather_layer = jax.jit(apply.gather_layer)
_update_layer = jax.jit(apply.update_layer, donate_argnames=("side",))
_begin = jax.jit(steps.begin, static_argnames=("num_steps",))
_advance = jax.jit(_advance_fn, static_argnames=("config", "capacity"), donate_argnames=("now",))
_finish = jax.jit(steps.finish)
_as_prefix = jax.jit(steps.as_prefix, static_argnames=("num_prefix_rows", "unrolled"))
_score_head = jax.jit(_score_head_fn, static_argnames=("config",))
