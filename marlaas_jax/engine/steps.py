"""The device programs of generation: prefill, insert, decode a few tokens, score. Pure functions, jitted at the bottom.

Decoding runs its rows in *block order*: blocks of equal size whose rows share an adapter, so that an adapter is read once per
block. Hidden states stay in block order through all layers; only queries and attention outputs visit slot order, and new keys
and values are scattered to their slots. Rows that no one waits for fill the blocks up.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.engine.sampling import SamplingRows, sample
from marlaas_jax.engine.state import CONTEXT, ERROR, LENGTH, RUNNING, STOP, DecodeState, InsertRows, Prefix
from marlaas_jax.lora import apply
from marlaas_jax.lora.bank import Bank
from marlaas_jax.model import attention, transformer
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.transformer import Params

SCORE_CHUNK = 64  # positions whose logits exist at once while scoring


def is_unrolled(params: Params) -> bool:
    """Returns whether the layers are separate arrays."""
    return not isinstance(params["layers"], dict)


def _map_layers(function: Any, *kvs: Any, unrolled: bool) -> Any:
    """Returns `function` mapped over corresponding arrays of caches; for scanned layers it is mapped over L."""
    return jax.tree.map(function if unrolled else jax.vmap(function), *kvs)


def prefill(
    config: ModelConfig,
    num_prefix_rows: int,
    params: Params,
    bank: Bank,
    tokens_BT: jax.Array,
    prompt_length_B: jax.Array,
    adapter_slot_B: jax.Array,
) -> Prefix:
    """Returns the prefix of right-padded prompts of 1 to T tokens, each under its own adapter.

    Its rows are filled up to `num_prefix_rows` with empty ones, so that one insert program serves any number of prompts.
    """
    unrolled = is_unrolled(params)
    positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    sides = apply.gather_blocks(bank, adapter_slot_B, unrolled)
    attend = attention.causal(prompt_length_B, config.sliding_window)
    _, kv = transformer.forward(config, params, tokens_BT, positions, attend, project=apply.block_project, sides=sides)
    return as_prefix(num_prefix_rows, unrolled, kv, tokens_BT, prompt_length_B, adapter_slot_B)


def as_prefix(
    num_prefix_rows: int, unrolled: bool, kv: Any, tokens_BT: jax.Array, prompt_length_B: jax.Array, adapter_slot_B: jax.Array
) -> Prefix:
    """Returns the prefix made of the keys and values that all layers left, each [B, T, K, H]."""
    length_B = prompt_length_B - 1
    # What goes wrong in a layer reaches the keys or values of the last one, at the same token.
    is_used_BT = jnp.arange(tokens_BT.shape[1]) < length_B[:, None]
    last = kv[-1] if unrolled else jax.tree.map(lambda x: x[-1], kv)
    bad_BT = jax.tree.reduce(jnp.logical_or, jax.tree.map(lambda x: ~jnp.isfinite(x).all(axis=(2, 3)), last))
    fill = num_prefix_rows - tokens_BT.shape[0]
    rows_first = lambda x: jnp.pad(x, ((0, fill), *[(0, 0)] * (x.ndim - 1)))
    kv = jax.tree.map(attention.finite, kv)
    return Prefix(
        kv=_map_layers(rows_first, kv, unrolled=unrolled),
        length_B=rows_first(length_B),
        token_B=rows_first(jnp.take_along_axis(tokens_BT, length_B[:, None], axis=1)[:, 0]),
        adapter_slot_B=rows_first(adapter_slot_B),
        finite_B=rows_first(~(bad_BT & is_used_BT).any(-1)),
    )


def insert(state: DecodeState, prefix: Prefix, rows: InsertRows) -> DecodeState:
    """Returns the state with `rows.count` rows started in their slots. Everything that a slot holds is overwritten.

    A row whose prefix is not finite is marked as ended by an error at once.
    """
    unrolled = state.is_unrolled

    def place(i: jax.Array, state: DecodeState) -> DecodeState:
        slot, source = rows.slot[i], rows.source[i]

        def copy(pieces: tuple[jax.Array, ...], prefix_BTKH: jax.Array) -> tuple[jax.Array, ...]:
            one_1KTH = jax.lax.dynamic_index_in_dim(prefix_BTKH, source, keepdims=True).swapaxes(1, 2)
            kept, offset = [], 0
            for piece_SKCH in pieces:
                part = one_1KTH[:, :, offset : offset + piece_SKCH.shape[2]].astype(piece_SKCH.dtype)
                kept.append(jax.lax.dynamic_update_slice(piece_SKCH, part, (slot, 0, 0, 0)) if part.shape[2] else piece_SKCH)
                offset += piece_SKCH.shape[2]
            return tuple(kept)

        if unrolled:
            pairs = zip(state.kv, prefix.kv, strict=True)
            kv: Any = tuple((copy(k, k_BTKH), copy(v, v_BTKH)) for (k, v), (k_BTKH, v_BTKH) in pairs)
        else:
            kv = tuple(jax.vmap(copy)(pieces, x) for pieces, x in zip(state.kv, prefix.kv, strict=True))
        finite = prefix.finite_B[source]
        put = lambda column, value: column.at[slot].set(value)
        return DecodeState(
            kv=kv,
            token_S=put(state.token_S, prefix.token_B[source]),
            position_S=put(state.position_S, prefix.length_B[source]),
            generated_S=put(state.generated_S, 0),
            remaining_S=put(state.remaining_S, rows.max_tokens[i]),
            adapter_slot_S=put(state.adapter_slot_S, prefix.adapter_slot_B[source]),
            stop_ids_SJ=put(state.stop_ids_SJ, rows.stop_ids[i]),
            sampling=jax.tree.map(lambda column, new: put(column, new[i]), state.sampling, rows.sampling),
            active_S=put(state.active_S, finite),
            finish_S=put(state.finish_S, jnp.where(finite, RUNNING, ERROR)),
        )

    return jax.lax.fori_loop(0, rows.count, place, state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What a decode chunk reads of its rows, in block order R."""

    sampling: SamplingRows
    stop_ids_RJ: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """What a decode chunk carries from step to step besides the caches; R is the row in block order."""

    step: jax.Array  # int32 scalar
    token_R: jax.Array
    position_R: jax.Array
    generated_R: jax.Array
    remaining_R: jax.Array
    active_R: jax.Array
    finish_R: jax.Array
    tokens_NR: jax.Array  # N counts the chunk's steps
    logprobs_NR: jax.Array
    sampled_logprobs_NR: jax.Array
    is_sampled_NR: jax.Array


def decode_chunk(
    config: ModelConfig,
    num_steps: int,
    num_context: int,
    form: str,
    params: Params,
    sides: Any,
    state: DecodeState,
    order_R: jax.Array,
    keep_S: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """Returns the state after up to `num_steps` tokens of every running row of `order_R`, and what was sampled.

    order_R: decode slots in block order, each at most once; all of them, or fewer. sides: the adapters of the blocks of rows
    (form "blocks") or of the whole bank in order (form "onehot", from `gather_all`); None is the base model. keep_S: False
    ends a row without an answer. num_context must pass every position that a running row can reach. The loop ends early when
    no row runs. The result is read by `unpack`, in slot order.
    """
    project = apply.block_project if sides is not None else transformer.plain_project
    if form == "onehot":
        project = apply.onehot_project(state.adapter_slot_S[order_R])
    rows, start = begin(num_steps, state, order_R, keep_S)

    def step(carry: tuple[Any, Progress]) -> tuple[Any, Progress]:
        kv, now = carry
        whole = num_context == state.capacity  # of which exact rows read what somebody needs
        attend = attention.cached(now.position_R, num_context, config.sliding_window, order_R, now.active_R, whole)
        tokens, positions = now.token_R[:, None], now.position_R[:, None]
        hidden, kv = transformer.forward(config, params, tokens, positions, attend, kv, project=project, sides=sides)
        return kv, advance(params, rows, now, hidden[:, 0], state.capacity)

    more = lambda carry: (carry[1].step < num_steps) & carry[1].active_R.any()
    kv, end = jax.lax.while_loop(more, step, (state.kv, start))
    return finish(dataclasses.replace(state, kv=kv), end, order_R, keep_S)


def begin(num_steps: int, state: DecodeState, order_R: jax.Array, keep_S: jax.Array) -> tuple[Rows, Progress]:
    """Returns what a chunk of `num_steps` reads of its rows and what it carries, both in block order."""
    emitted = (num_steps, order_R.shape[0])
    start = Progress(
        step=jnp.zeros((), jnp.int32),
        token_R=state.token_S[order_R],
        position_R=state.position_S[order_R],
        generated_R=state.generated_S[order_R],
        remaining_R=state.remaining_S[order_R],
        active_R=(state.active_S & keep_S)[order_R],
        finish_R=state.finish_S[order_R],
        tokens_NR=jnp.zeros(emitted, jnp.int32),
        logprobs_NR=jnp.zeros(emitted, jnp.float32),
        sampled_logprobs_NR=jnp.zeros(emitted, jnp.float32),
        is_sampled_NR=jnp.zeros(emitted, bool),
    )
    return Rows(jax.tree.map(lambda x: x[order_R], state.sampling), state.stop_ids_SJ[order_R]), start


def logits(params: Params, hidden_RD: jax.Array) -> jax.Array:
    """Returns logits [R, V] in float32 of a few rows.

    On a CPU the vocabulary goes first in the product with a tied embedding, which lies that way: 83 GFLOP/s against 57 with
    32 rows, 42 against 27 with 8; the same with one row, less with 128. The barrier keeps the compiler from turning it around.
    """
    is_better = "unembed_DV" not in params and 2 <= hidden_RD.shape[0] <= 64 and jax.default_backend() == "cpu"
    if not is_better:
        return transformer.unembed(params, hidden_RD)
    logits_VR = jnp.einsum("vd,rd->vr", params["embed_VD"], hidden_RD, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(logits_VR).T


def advance(params: Params, rows: Rows, now: Progress, hidden_RD: jax.Array, capacity: int) -> Progress:
    """Returns the progress after one more token of every running row, drawn from its last hidden state."""
    draw = sample(logits(params, hidden_RD), rows.sampling, now.generated_R, now.active_R)
    sampled_R = now.active_R & draw.finite
    remaining_R = now.remaining_R - sampled_R
    finish_R = jnp.where(now.position_R + 2 >= capacity, CONTEXT, RUNNING)
    finish_R = jnp.where(remaining_R <= 0, LENGTH, finish_R)
    finish_R = jnp.where((draw.token[:, None] == rows.stop_ids_RJ).any(-1), STOP, finish_R)
    finish_R = jnp.where(draw.finite, finish_R, ERROR)
    finish_R = jnp.where(now.active_R, finish_R, now.finish_R)
    return Progress(
        step=now.step + 1,
        token_R=jnp.where(sampled_R, draw.token, now.token_R),
        position_R=now.position_R + sampled_R,
        generated_R=now.generated_R + sampled_R,
        remaining_R=remaining_R,
        active_R=now.active_R & (finish_R == RUNNING),
        finish_R=finish_R,
        tokens_NR=now.tokens_NR.at[now.step].set(draw.token),
        logprobs_NR=now.logprobs_NR.at[now.step].set(draw.logprob),
        sampled_logprobs_NR=now.sampled_logprobs_NR.at[now.step].set(draw.sampled_logprob),
        is_sampled_NR=now.is_sampled_NR.at[now.step].set(sampled_R),
    )


def finish(state: DecodeState, end: Progress, order_R: jax.Array, keep_S: jax.Array) -> tuple[DecodeState, jax.Array]:
    """Returns the state after a chunk whose caches it already has, and what was sampled, packed for `unpack`."""
    put = lambda column_S, value_R: column_S.at[order_R].set(value_R)
    state = dataclasses.replace(
        state,
        token_S=put(state.token_S, end.token_R),
        position_S=put(state.position_S, end.position_R),
        generated_S=put(state.generated_S, end.generated_R),
        remaining_S=put(state.remaining_S, end.remaining_R),
        active_S=put(state.active_S & keep_S, end.active_R),
        finish_S=put(state.finish_S, end.finish_R),
    )
    as_bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
    columns = (end.tokens_NR, end.is_sampled_NR.astype(jnp.int32), as_bits(end.logprobs_NR), as_bits(end.sampled_logprobs_NR))
    joined_NR = jnp.concatenate(columns)
    packed = jnp.zeros((state.token_S.shape[0], joined_NR.shape[0]), jnp.int32).at[order_R].set(joined_NR.T)
    return state, jnp.concatenate([packed, state.generated_S[:, None], state.finish_S[:, None]], axis=1)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one dispatch sampled, on the host, by decode slot; N counts the dispatch's steps."""

    tokens_SN: np.ndarray  # int32
    is_sampled_SN: np.ndarray  # bool: the row was running at that step
    logprobs_SN: np.ndarray  # float32
    sampled_logprobs_SN: np.ndarray  # float32
    generated_S: np.ndarray  # int32: tokens that the slot's row has sampled in all
    finish_S: np.ndarray  # int32: code of how the row ended


def unpack(packed: np.ndarray) -> Chunk:
    """Returns the parts of what `decode_chunk` packed into one int32 array, which travels to the host in one copy."""
    steps = (packed.shape[1] - 2) // 4
    tokens, is_sampled, logprobs, sampled_logprobs = (packed[:, i * steps : (i + 1) * steps] for i in range(4))
    floats = lambda bits: np.ascontiguousarray(bits).view(np.float32)
    return Chunk(tokens, is_sampled.astype(bool), floats(logprobs), floats(sampled_logprobs), packed[:, -2], packed[:, -1])


def score(config: ModelConfig, params: Params, bank: Bank, tokens_T: jax.Array, length: jax.Array, adapter_slot: jax.Array):
    """Returns log-probabilities [T] of the untempered model: entry t is that of token t given those before; entry 0 is 0."""
    sides = apply.gather_blocks(bank, adapter_slot[None], is_unrolled(params))
    attend = attention.causal(length[None], config.sliding_window)
    positions = jnp.arange(tokens_T.shape[0])[None]
    hidden, _ = transformer.forward(config, params, tokens_T[None], positions, attend, project=apply.block_project, sides=sides)
    return logprobs_of(params, hidden[0], tokens_T)


def logprobs_of(params: Params, hidden_TD: jax.Array, tokens_T: jax.Array) -> jax.Array:
    """Returns log-probabilities [T] of the tokens given those before, from the final hidden states; entry 0 is 0."""
    following_T = jnp.roll(tokens_T, -1)

    def of_chunk(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits_TV = transformer.unembed(params, chunk[0])
        chosen = jnp.take_along_axis(logits_TV, chunk[1][:, None], axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(logits_TV, axis=-1)

    size = SCORE_CHUNK if tokens_T.shape[0] % SCORE_CHUNK == 0 else tokens_T.shape[0]
    chunks = (hidden_TD.reshape(-1, size, hidden_TD.shape[-1]), following_T.reshape(-1, size))
    logprobs_T = jax.lax.map(of_chunk, chunks).reshape(-1)
    return jnp.concatenate([jnp.zeros((1,), jnp.float32), logprobs_T[:-1]])


jit_prefill = jax.jit(prefill, static_argnames=("config", "num_prefix_rows"))
jit_insert = jax.jit(insert, donate_argnames=("state",))
jit_gather = jax.jit(apply.gather_blocks, static_argnames=("unrolled",))
jit_update_blocks = jax.jit(apply.update_blocks, static_argnames=("unrolled",), donate_argnames=("sides",))
jit_gather_all = jax.jit(apply.gather_all, static_argnames=("unrolled",))
jit_decode_chunk = jax.jit(
    decode_chunk, static_argnames=("config", "num_steps", "num_context", "form"), donate_argnames=("state",)
)
jit_score = jax.jit(score, static_argnames=("config",))
