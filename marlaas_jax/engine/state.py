"""What lives on the device between dispatches: the decode state, the result of a prefill, the rows to insert.

A cache [S, K, C, H] is held in pieces along C that end where attention may end (the context buckets), because attention reads
a whole array in place but copies the beginning of a longer one. `kv` follows the form of params["layers"]: a tuple of
(k pieces, v pieces) per layer, or one such pair whose arrays lead with L.
Whatever stands in a cache is finite: keys and values that are not are stored as zeros and their row ends with an error, so
that what a broken adapter left behind cannot reach the slot's next owner through a masked position (0 * nan is nan).
"""

# NumPy arrays are given where JAX arrays are named.
# pyright: reportArgumentType=false

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.engine.sampling import SamplingRows
from marlaas_jax.model.config import ModelConfig

# Codes of `finish_S`.
RUNNING, STOP, LENGTH, CONTEXT, ERROR = range(5)
FINISH_REASONS = ("", "stop", "length", "context", "error")

NUM_STOP_IDS = 8  # watched on the device per row; the host watches any further ones
NO_TOKEN = -1  # pads stop ids: no token has this id


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All decode slots. Steps donate it."""

    kv: Any  # caches, see above
    token_S: jax.Array  # int32: next input, not yet in the cache
    position_S: jax.Array  # int32: where `token` goes in the cache
    generated_S: jax.Array  # int32: tokens sampled so far; the next one's completion position
    remaining_S: jax.Array  # int32: tokens that may still be sampled
    adapter_slot_S: jax.Array  # int32: adapter slot of the bank; 0 is the base model
    stop_ids_SJ: jax.Array  # int32: sampling one of these ends the row; padded with NO_TOKEN
    sampling: SamplingRows  # per slot: temperature, top-k, top-p, min-p, seed
    active_S: jax.Array  # bool: the slot has a running row
    finish_S: jax.Array  # int32: code of how the slot's last row ended

    @property
    def is_unrolled(self) -> bool:
        """Whether the caches of the layers are separate arrays."""
        return jax.tree.leaves(self.kv)[0].ndim == 4

    @property
    def capacity(self) -> int:
        """C: how many positions a cache has."""
        return sum(piece.shape[-2] for piece in (self.kv[0][0] if self.is_unrolled else self.kv[0]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """Prompts run through the model under their adapters. A prompt's last token is kept back: it is the first decode input."""

    kv: Any  # (k, v) per layer, each [B, T, K, H], or with a leading L
    length_B: jax.Array  # int32: tokens in the cache: the prompt's length - 1
    token_B: jax.Array  # int32: the prompt's last token
    adapter_slot_B: jax.Array  # int32
    finite_B: jax.Array  # bool: no value overflowed or was not a number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InsertRows:
    """Which rows to start, one entry each; every leaf leads with the entry, only the first `count` are used."""

    count: jax.Array | np.int32
    slot: jax.Array | np.ndarray  # int32: decode slot to overwrite
    source: jax.Array | np.ndarray  # int32: row of the prefix
    max_tokens: jax.Array | np.ndarray  # int32
    stop_ids: jax.Array | np.ndarray  # int32 [entries, J]
    sampling: SamplingRows


def empty_state(config: ModelConfig, num_slots: int, context_lengths: Sequence[int], dtype: Any, unrolled: bool) -> DecodeState:
    """Returns a state without rows, whose caches are cut at `context_lengths` (rising; the last one is C)."""
    sizes = np.diff([0, *context_lengths]).tolist()

    def pieces(*lead: int) -> tuple[jax.Array, ...]:
        shape = (*lead, num_slots, config.num_kv_heads)
        return tuple(jnp.zeros((*shape, size, config.head_dim), dtype) for size in sizes)

    if unrolled:
        kv: Any = tuple((pieces(), pieces()) for _ in range(config.num_layers))
    else:
        kv = (pieces(config.num_layers), pieces(config.num_layers))

    def ints(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    return DecodeState(
        kv=kv,
        token_S=ints(num_slots),
        position_S=ints(num_slots),
        generated_S=ints(num_slots),
        remaining_S=ints(num_slots),
        adapter_slot_S=ints(num_slots),
        stop_ids_SJ=jnp.full((num_slots, NUM_STOP_IDS), NO_TOKEN, jnp.int32),
        sampling=SamplingRows(
            temperature=jnp.ones((num_slots,), jnp.float32),
            top_k=ints(num_slots),
            top_p=jnp.ones((num_slots,), jnp.float32),
            min_p=jnp.zeros((num_slots,), jnp.float32),
            seed=jnp.zeros((num_slots, 2), jnp.uint32),
        ),
        active_S=jnp.zeros((num_slots,), bool),
        finish_S=ints(num_slots),
    )


@dataclasses.dataclass(frozen=True)
class RowSettings:
    """How one row is to be sampled, as plain numbers."""

    max_tokens: int
    seed: int = 0  # in [0, 2**63)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()  # the first NUM_STOP_IDS are watched


def insert_rows(entries: list[tuple[int, int, RowSettings]], num_entries: int) -> InsertRows:
    """Returns (decode slot, prefix row, settings) entries as NumPy arrays, padded to `num_entries`."""
    assert len(entries) <= num_entries, f"{len(entries)} rows to insert, room for {num_entries}"

    def column(get: Any, dtype: Any, *shape: int, fill: float = 0) -> np.ndarray:
        out = np.full((num_entries, *shape), fill, dtype)
        for i, entry in enumerate(entries):
            out[i] = get(*entry)
        return out

    def stops(slot: int, source: int, row: RowSettings) -> list[int]:
        ids = list(row.stop_ids[:NUM_STOP_IDS])
        return ids + [NO_TOKEN] * (NUM_STOP_IDS - len(ids))

    return InsertRows(
        count=np.int32(len(entries)),
        slot=column(lambda slot, source, row: slot, np.int32),
        source=column(lambda slot, source, row: source, np.int32),
        max_tokens=column(lambda slot, source, row: row.max_tokens, np.int32),
        stop_ids=column(stops, np.int32, NUM_STOP_IDS, fill=NO_TOKEN),
        sampling=SamplingRows(
            temperature=column(lambda slot, source, row: row.temperature, np.float32, fill=1),
            top_k=column(lambda slot, source, row: min(row.top_k, 2**31 - 1), np.int32),
            top_p=column(lambda slot, source, row: row.top_p, np.float32, fill=1),
            min_p=column(lambda slot, source, row: row.min_p, np.float32),
            seed=column(lambda slot, source, row: (row.seed >> 32, row.seed & 0xFFFFFFFF), np.uint32, 2),
        ),
    )
