"""The same programs as `steps`, a few layers per call, for deep models whose layers are separate arrays.

A program that holds 30 unrolled layers takes 8 to 16 s to compile, for every bucket; one layer takes less than one, and all
layers share it because their arrays are arguments. Each call costs the host time, about a microsecond per argument, so
decoding runs several layers per call: six of SmolLM2's 30 compile in 2 s and decode 32 rows as fast as all in one (1.01 by CPU
time; 1.05 with one layer per call; a single row 1.1 and 1.17). The numbers are those of `steps`.
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

DECODE_GROUPS = (6, 5, 4, 3, 2, 1)  # layers per call while decoding: the largest that divides the model's depth
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
    return _score_head(config, _head(params), x, tokens_T)


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
    ends = np.cumsum([piece.shape[2] for piece in state.kv[0][0]])
    used = int(np.searchsorted(ends, num_context)) + 1  # pieces of the caches that a call need be handed
    kv = [(k[:used], v[:used]) for k, v in state.kv]
    small = dataclasses.replace(state, kv=())
    rows, now = _begin(num_steps, small, order_R, keep_S)
    capacity = state.capacity
    head = _head(params)
    group = next(size for size in DECODE_GROUPS if len(kv) % size == 0)
    for step in range(num_steps):
        x, cos, sin = _embed_rows(config, params["embed_VD"], now.token_R, now.position_R)
        for start in range(0, len(kv), group):
            part = slice(start, start + group)
            side = None if sides is None else sides[part]
            x, kv[part] = _decode_layers(
                config, num_context, num_context == capacity, params["layers"][part], side, kv[part], x, cos, sin,
                now.position_R, order_R, now.active_R,
            )  # fmt: skip
        now = _advance(config, capacity, head, rows, now, x)
        if step + 1 < num_steps and not np.asarray(now.active_R).any():
            break
    small, packed = _finish(small, now, order_R, keep_S)
    whole = tuple((k + old_k[used:], v + old_v[used:]) for (k, v), (old_k, old_v) in zip(kv, state.kv, strict=True))
    return dataclasses.replace(small, kv=whole), packed


def _head(params: Params) -> Params:
    """Returns what the last layer's output still goes through; handing over the layers as well would cost time in each call."""
    return {name: value for name, value in params.items() if name != "layers"}


def _run_layers(config, params, bank, tokens_BT, length_B, adapter_slot_B):
    positions = np.broadcast_to(np.arange(tokens_BT.shape[1], dtype=np.int32), tokens_BT.shape)
    x, cos, sin = _embed(config, params["embed_VD"], tokens_BT, positions)
    kv = []
    for i, layer in enumerate(params["layers"]):
        x, layer_kv = _prefill_layer(config, layer, bank, np.int32(i), adapter_slot_B, length_B, x, cos, sin)
        kv.append(layer_kv)
    return x, tuple(kv)


def _embed_fn(config: ModelConfig, embed_VD: jax.Array, tokens: jax.Array, positions: jax.Array):
    return (jnp.take(embed_VD, tokens, axis=0), *rope.angles(config, positions))


def _embed_rows_fn(config: ModelConfig, embed_VD: jax.Array, token_R: jax.Array, position_R: jax.Array):
    return _embed_fn(config, embed_VD, token_R[:, None], position_R[:, None])


def _prefill_layer_fn(config: ModelConfig, layer: Layer, bank: Bank, index, adapter_slot_B, length_B, x_BTD, cos, sin):
    side = apply.gather_layer(bank, adapter_slot_B, index)
    attend = attention.causal(length_B, config.sliding_window)
    return transformer.block(config, x_BTD, layer, side, None, cos, sin, attend, apply.block_project)


def _decode_layers_fn(
    config: ModelConfig, num_context: int, whole: bool, layers, sides, kv, x, cos, sin, position_R, order_R, active_R
) -> tuple[jax.Array, list]:
    attend = attention.cached(position_R, num_context, config.sliding_window, order_R, active_R, whole)
    kept = []
    for i, layer in enumerate(layers):
        side, project = (None, transformer.plain_project) if sides is None else (sides[i], apply.block_project)
        x, layer_kv = transformer.block(config, x, layer, side, kv[i], cos, sin, attend, project)
        kept.append(layer_kv)
    return x, kept


def _advance_fn(config: ModelConfig, capacity: int, params: Params, rows: steps.Rows, now: steps.Progress, x) -> steps.Progress:
    hidden = transformer.rms_norm(x[:, 0], params["final_norm_D"], config.norm_eps)
    return steps.advance(params, rows, now, hidden, capacity)


def _score_head_fn(config: ModelConfig, params: Params, x_1TD: jax.Array, tokens_T: jax.Array) -> jax.Array:
    return steps.logprobs_of(params, transformer.rms_norm(x_1TD[0], params["final_norm_D"], config.norm_eps), tokens_T)


_embed = jax.jit(_embed_fn, static_argnames=("config",))
_embed_rows = jax.jit(_embed_rows_fn, static_argnames=("config",))
_prefill_layer = jax.jit(_prefill_layer_fn, static_argnames=("config",))
_decode_layers = jax.jit(_decode_layers_fn, static_argnames=("config", "num_context", "whole"), donate_argnames=("kv",))
_gather_layer = jax.jit(apply.gather_layer)
_update_layer = jax.jit(apply.update_layer, donate_argnames=("side",))
_begin = jax.jit(steps.begin, static_argnames=("num_steps",))
_advance = jax.jit(_advance_fn, static_argnames=("config", "capacity"), donate_argnames=("now",))
_finish = jax.jit(steps.finish)
_as_prefix = jax.jit(steps.as_prefix, static_argnames=("num_prefix_rows", "unrolled"))
_score_head = jax.jit(_score_head_fn, static_argnames=("config",))
