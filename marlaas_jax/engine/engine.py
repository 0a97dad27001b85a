"""The generation engine: JetStream's Engine interface over the programs of `steps`, with many adapters.

Stateless but for the programs: parameters, bank and decode state come in as arguments and go out as results. What JetStream's
interface has no word for - adapter, seed, temperature, stop ids - travels in the prefix and lives in the decode state.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.engine import buckets, layered, steps
from marlaas_jax.engine.jetstream import EngineBase, ResultTokens
from marlaas_jax.engine.plan import Plan
from marlaas_jax.engine.state import DecodeState, InsertRows, Prefix, RowSettings, empty_state, insert_rows
from marlaas_jax.errors import InvalidRequest
from marlaas_jax.lora import apply
from marlaas_jax.lora import bank as banks
from marlaas_jax.lora.adapter import Weights
from marlaas_jax.lora.bank import Bank
from marlaas_jax.lora.snapshot import as_text, checksum
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.transformer import Params


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Fixed sizes of an engine."""

    num_decode_slots: int
    max_context: int  # tokens of prompt and answer together
    num_adapter_slots: int  # of the bank, the null adapter included
    max_rank: int
    decode_steps: int = 8  # tokens per row and dispatch
    prefill_batch: int = 4
    context_buckets: tuple[int, ...] = ()
    prefill_buckets: tuple[int, ...] = ()
    dtype: str = "float32"  # of caches and adapters
    max_device_snapshots: int = 32  # kept as device arrays beside the resident ones; others wait in host memory
    max_loaded_snapshots: int = 8  # kept in host memory beside those of jobs
    reserved_slots: int = 0  # decode slots that no rollout takes: they are for requests that somebody waits for
    form: str = "auto"  # of applying adapters while decoding: "blocks", "onehot", or chosen by lora.apply.choose_form

    def resolved_form(self) -> str:
        """Returns the form, chosen for the backend where it is "auto"."""
        if self.form != "auto":
            return self.form
        return apply.choose_form(jax.default_backend(), self.num_adapter_slots, self.max_rank)

    def buckets(self) -> buckets.Buckets:
        """Returns the shapes that these sizes make."""
        return buckets.choose(
            self.num_decode_slots,
            self.max_context,
            self.prefill_batch,
            self.context_buckets,
            self.prefill_buckets,
            in_blocks=self.resolved_form() == "blocks",
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineParams:
    """What JetStream's interface calls params: the base model and the adapters beside it."""

    base: Params
    bank: Bank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupPrefix:
    """One prompt ready to be inserted, once per sample."""

    prefix: Prefix
    rows: InsertRows  # one per sample; their slots are filled in on insertion
    num_samples: int = dataclasses.field(metadata={"static": True})


def _checksum_of_slot(bank: Bank, slot: jax.Array) -> jax.Array:
    return checksum(*banks.read(bank, slot))


_jit_write = jax.jit(banks.write, donate_argnames=("bank",))
# A program of its own: fused with the write, the compiler might sum up what came in instead of what stands in the bank.
_jit_checksum_of_slot = jax.jit(_checksum_of_slot)
_jit_empty_blocks = jax.jit(apply.empty_blocks, static_argnames=("num_blocks", "unrolled"))


class MarlaasEngine(EngineBase):
    """One base model, one bank of adapters, `num_decode_slots` rows at once."""

    def __init__(
        self,
        config: ModelConfig,
        settings: EngineSettings,
        tokenizer: Any = None,
        end_ids: Sequence[int] = (),
        mesh: jax.sharding.Mesh | None = None,
    ):
        """`tokenizer` is what `build_tokenizer` returns to JetStream's Driver; `end_ids` stop rows that say nothing else."""
        self.config = config
        self.settings = settings
        self.form = settings.resolved_form()
        self.buckets = settings.buckets()
        self.end_ids = tuple(end_ids)
        self._tokenizer = tokenizer
        self._mesh = mesh or jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
        self._unrolled = True
        self._layered = False

    # ---- JetStream's interface

    def load_params(self, base: Params, bank: Bank | None = None) -> EngineParams:
        """Returns the engine's parameters for a loaded base; without a bank, an empty one."""
        self._unrolled = steps.is_unrolled(base)
        self._layered = layered.suits(self.config, base, self.form)
        if bank is None:
            settings = self.settings
            bank = banks.empty(self.config, settings.num_adapter_slots, settings.max_rank, jnp.dtype(settings.dtype))
        return EngineParams(base, bank)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        """Returns a state without rows."""
        settings = self.settings
        dtype = jnp.dtype(settings.dtype)
        return empty_state(self.config, settings.num_decode_slots, self.buckets.context_lengths, dtype, self._unrolled)

    def prefill(
        self,
        *,
        params: EngineParams,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
        adapter_slot: int = 0,
        settings: RowSettings | None = None,
        **kwargs: Any,
    ) -> GroupPrefix:
        """Returns the prefix of one prompt for one sample, by default the base model's greedy answer."""
        settings = settings or RowSettings(self.settings.max_context, temperature=0.0, stop_ids=self.end_ids)
        return self._group_prefix(params, existing_prefix, padded_tokens, true_length, adapter_slot, [settings])

    def prefill_multisampling(
        self,
        *,
        params: EngineParams,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
        num_samples: int = 1,
        rng: Any = None,
        adapter_slot: int = 0,
        settings: RowSettings | None = None,
        **kwargs: Any,
    ) -> GroupPrefix:
        """Returns the prefix of one prompt for several samples; sample i draws with seed `settings.seed + i`.

        rng: a key or a number that gives the first seed, where `settings` is absent.
        """
        if settings is None:
            seed = 0 if rng is None else int(np.asarray(jax.random.key_data(rng) if _is_key(rng) else rng).ravel()[-1])
            settings = RowSettings(self.settings.max_context, seed=seed, stop_ids=self.end_ids)
        each = [dataclasses.replace(settings, seed=settings.seed + i) for i in range(num_samples)]
        return self._group_prefix(params, existing_prefix, padded_tokens, true_length, adapter_slot, each)

    def insert(self, prefix: GroupPrefix, decode_state: DecodeState, slot: int, **kwargs: Any) -> DecodeState:
        """Returns the state with the prefix's first sample started in `slot`."""
        return self.bulk_insert(prefix, decode_state, [slot])

    def bulk_insert(self, prefix: GroupPrefix, decode_state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """Returns the state with one sample of the prefix started in each slot."""
        if len(slots) > prefix.num_samples:
            raise ValueError(f"slots={list(slots)}: the prefix was made for {prefix.num_samples} samples")
        padded = np.zeros(self.settings.num_decode_slots, np.int32)
        padded[: len(slots)] = slots
        rows = dataclasses.replace(prefix.rows, slot=padded, count=np.int32(len(slots)))
        return steps.jit_insert(decode_state, prefix.prefix, rows)

    def generate(self, params: EngineParams, decode_state: DecodeState, **kwargs: Any) -> tuple[DecodeState, Any]:
        """Returns (state, result) after the next token of every slot, whatever adapters they use."""
        every = np.arange(self.settings.num_decode_slots, dtype=np.int32)
        sides = self.all_adapters(params) if self.form == "onehot" else self._gather(params, decode_state.adapter_slot_S)
        state, packed = self._decode(params, decode_state, sides, every, every >= 0, 1, self.settings.max_context, self.form)
        return state, as_result(packed)

    def free_resource(self, slot: int, **kwargs: Any) -> None:
        """Does nothing: a slot's memory is its own, and its next row overwrites everything."""

    def get_prefix_destination_sharding(self) -> Any:
        """Returns the sharding of a prefix: on every device of the mesh."""
        return jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec())

    def get_tokenizer(self) -> Any:
        """Returns what was given as the tokenizer."""
        return self._tokenizer

    def build_tokenizer(self, metadata: Any) -> Any:
        """Returns the tokenizer."""
        return metadata

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of decode slots."""
        return self.settings.num_decode_slots

    @property
    def samples_per_slot(self) -> int:
        """One: a group takes several slots."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Most tokens of a prompt that leaves room for an answer."""
        return self.buckets.prefill_lengths[-1]

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices."""
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        """None: nothing runs on them."""
        return None

    # ---- what our own loop uses besides

    def prefill_rows(self, params: EngineParams, prompts: Sequence[Sequence[int]], adapter_slots: Sequence[int]) -> Prefix:
        """Returns one prefix of several prompts, each under its own adapter."""
        rows = self.buckets.prefill_row_count(len(prompts))
        length = self.buckets.prefill_length(max(map(len, prompts)))
        tokens = np.zeros((rows, length), np.int32)
        lengths, adapters = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        for i, (prompt, slot) in enumerate(zip(prompts, adapter_slots, strict=True)):
            tokens[i, : len(prompt)] = prompt
            lengths[i], adapters[i] = len(prompt), slot
        return self._prefill(params, tokens, lengths, adapters)

    def insert_rows(self, state: DecodeState, prefix: Prefix, entries: Sequence[tuple[int, int, RowSettings]]) -> DecodeState:
        """Returns the state with (decode slot, row of the prefix, settings) entries started."""
        return steps.jit_insert(state, prefix, insert_rows(list(entries), self.settings.num_decode_slots))

    def empty_blocks(self, params: EngineParams, num_blocks: int) -> apply.Sides:
        """Returns blocks under the null adapter."""
        return _jit_empty_blocks(params.bank, num_blocks, self._unrolled)

    def place_blocks(self, params: EngineParams, sides: apply.Sides, changes: dict[int, int]) -> apply.Sides:
        """Returns the sides, which are donated, with block -> adapter slot `changes` made."""
        num_blocks = jax.tree.leaves(sides)[0].shape[0 if self._unrolled else 1]
        block, slot = np.zeros(num_blocks, np.int32), np.zeros(num_blocks, np.int32)
        block[: len(changes)], slot[: len(changes)] = list(changes), list(changes.values())
        count = np.int32(len(changes))
        if self._layered:
            return layered.update_blocks(params.bank, sides, block, slot, count)
        return steps.jit_update_blocks(params.bank, sides, block, slot, count, self._unrolled)

    def all_adapters(self, params: EngineParams) -> apply.Sides:
        """Returns the sides of the form "onehot": every adapter of the bank."""
        return steps.jit_gather_all(params.bank, self._unrolled)

    def decode(
        self,
        params: EngineParams,
        state: DecodeState,
        sides: apply.Sides,
        plan: Plan,
        num_context: int,
        keep: np.ndarray,
        in_blocks: bool = False,
    ) -> tuple[DecodeState, Any]:
        """Returns (state, result) after `decode_steps` tokens of the running rows, arranged as `plan` says.

        in_blocks: `sides` are those of blocks, whatever the engine's own form is.
        """
        order = np.asarray(plan.order, np.int32)
        form = "blocks" if in_blocks else self.form
        state, packed = self._decode(params, state, sides, order, keep, self.settings.decode_steps, num_context, form)
        return state, as_result(packed)

    def score(self, params: EngineParams, token_ids: Sequence[int], adapter_slot: int) -> np.ndarray:
        """Returns the log-probabilities of token_ids[1:] under one adapter, float32."""
        if not 1 <= len(token_ids) <= self.settings.max_context:
            raise InvalidRequest(
                f"token_ids: {len(token_ids)} tokens to score; 1 to max_context={self.settings.max_context} are allowed"
            )
        padded = np.zeros(self.buckets.score_length(len(token_ids)), np.int32)
        padded[: len(token_ids)] = token_ids
        run: Any = layered.score if self._layered else steps.jit_score
        out = run(self.config, params.base, params.bank, padded, np.int32(len(token_ids)), np.int32(adapter_slot))
        return np.asarray(out)[1 : len(token_ids)]

    def write_adapter(self, params: EngineParams, slot: int, weights: Weights, scale: float) -> EngineParams:
        """Returns the parameters, whose bank is donated, with an adapter in `slot`."""
        return dataclasses.replace(params, bank=_jit_write(params.bank, np.int32(slot), weights, np.float32(scale)))

    def fingerprint(self, params: EngineParams, slot: int) -> str:
        """Returns the fingerprint of what stands in an adapter slot of the bank."""
        return as_text(_jit_checksum_of_slot(params.bank, np.int32(slot)))

    def _gather(self, params: EngineParams, adapter_slot_NB: jax.Array) -> apply.Sides:
        if self._layered:
            return layered.gather_blocks(params.bank, adapter_slot_NB, self.config.num_layers)
        return steps.jit_gather(params.bank, adapter_slot_NB, self._unrolled)

    def _decode(
        self,
        params: EngineParams,
        state: DecodeState,
        sides: apply.Sides,
        order: Any,
        keep: Any,
        num_steps: int,
        num_context: int,
        form: str,
    ) -> tuple[DecodeState, jax.Array]:
        if self._layered:
            return layered.decode_chunk(self.config, num_steps, num_context, params.base, sides, state, order, keep)
        return steps.jit_decode_chunk(self.config, num_steps, num_context, form, params.base, sides, state, order, keep)

    def _prefill(self, params: EngineParams, tokens: Any, lengths: Any, adapters: Any) -> Prefix:
        run = layered.prefill if self._layered else steps.jit_prefill
        return run(self.config, self.buckets.prefill_rows[-1], params.base, params.bank, tokens, lengths, adapters)

    def _group_prefix(
        self,
        params: EngineParams,
        existing_prefix: Any,
        padded_tokens: Any,
        true_length: int,
        adapter_slot: int,
        settings: list[RowSettings],
    ) -> GroupPrefix:
        if existing_prefix is not None:
            raise InvalidRequest("existing_prefix: keys and values are not carried from one prefix to another; give None")
        tokens = np.asarray(padded_tokens, np.int32)[None]
        prefix = self._prefill(params, tokens, np.asarray([true_length], np.int32), np.asarray([adapter_slot], np.int32))
        rows = insert_rows([(0, 0, each) for each in settings], self.settings.num_decode_slots)
        return GroupPrefix(prefix, rows, len(settings))


def as_result(packed: jax.Array) -> Any:
    """Returns the array that `decode_chunk` packed as JetStream's result; `steps.unpack` reads the log-probs beside."""
    num_steps = (packed.shape[1] - 2) // 4
    return ResultTokens(
        data=packed,
        tokens_idx=(0, num_steps),
        valid_idx=(num_steps, 2 * num_steps),
        length_idx=(4 * num_steps, 4 * num_steps + 1),
        samples_per_slot=1,
    )


def _is_key(rng: Any) -> bool:
    return isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
