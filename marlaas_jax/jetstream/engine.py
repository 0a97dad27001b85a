"""Our engine as JetStream's Driver holds it: parameters and adapters are its own, and a prompt brings its adapter along.

The Driver passes `padded_tokens` on without looking at it, so a prompt's adapter and its number of tokens travel there. It
reads results slot by slot and ends a row at a token that is not valid; `RowResult` shows one in the step in which a row ends.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from marlaas_jax.engine.engine import EngineParams, EngineSettings, GroupPrefix, MarlaasEngine
from marlaas_jax.engine.jetstream import ResultTokens, SlotData
from marlaas_jax.engine.state import ERROR, RUNNING, DecodeState, RowSettings
from marlaas_jax.lora.adapter import AdapterSpec, Weights
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.transformer import Params

NOT_FINITE_ID = -1  # stands where a token would, for a row that an overflow ended; no client is ever sent it


@dataclasses.dataclass(frozen=True)
class PaddedPrompt:
    """What the Driver hands to `prefill` as `padded_tokens`."""

    token_ids: np.ndarray  # int32 [T], T one of the engine's prefill lengths
    adapter_slot: int
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class StopTokens:
    """All of a tokenizer that the Driver needs: clients are sent ids, and text is made where requests are answered."""

    stop_tokens: frozenset[int]


class RowResult(ResultTokens):
    """One step of all slots [slots, 6], as `steps.finish` packs it: a row that has ended shows a second, invalid token."""

    def convert_to_numpy(self) -> "RowResult":
        """Returns the same on the host."""
        return dataclasses.replace(self, data=np.asarray(self.data))

    def get_result_at_slot(self, slot: int) -> SlotData:
        """Returns tokens and valid, each [1, 1 or 2], and lengths [1]."""
        token, is_sampled, _, _, generated, finish = self.data[slot]
        tokens, valid = [token], [is_sampled]
        if finish == ERROR:
            tokens, valid = [NOT_FINITE_ID], [1]
        if finish != RUNNING:
            tokens, valid = [*tokens, 0], [*valid, 0]
        return SlotData(np.asarray([tokens], np.int32), np.asarray([valid], np.int32), np.asarray([generated], np.int32))


class ServedEngine(MarlaasEngine):
    """A base model and a fixed set of adapters, greedy. Two threads of the Driver use it: one prefills, one generates."""

    def __init__(
        self,
        config: ModelConfig,
        settings: EngineSettings,
        base: Params,
        adapters: Sequence[tuple[AdapterSpec, Weights]],
        end_ids: Sequence[int],
    ):
        """adapters: those of slots 1, 2, ..., each padded to `settings.max_rank`."""
        super().__init__(config, settings, StopTokens(frozenset(end_ids)), end_ids)
        params = super().load_params(base)
        for slot, (spec, weights) in enumerate(adapters, start=1):
            params = self.write_adapter(params, slot, weights, spec.scale)
        self._params = params
        self._sides: Any = None  # the adapters of all decode slots, gathered; None after an insert

    def load_params(self, *args: Any, **kwargs: Any) -> EngineParams:
        """Returns the parameters that it was made with."""
        return self._params

    def prefill(
        self, *, params: EngineParams, existing_prefix: Any = None, padded_tokens: PaddedPrompt, true_length: int, **kwargs: Any
    ) -> GroupPrefix:
        """Returns the prefix of one prompt under its own adapter, for its greedy answer."""
        return super().prefill(
            params=params,
            existing_prefix=existing_prefix,
            padded_tokens=padded_tokens.token_ids,
            true_length=true_length,
            adapter_slot=padded_tokens.adapter_slot,
            settings=RowSettings(padded_tokens.max_tokens, temperature=0.0, stop_ids=self.end_ids),
        )

    def insert(self, prefix: GroupPrefix, decode_state: DecodeState, slot: int, **kwargs: Any) -> DecodeState:
        """Returns the state with the prefix started in `slot`."""
        self._sides = None
        return super().insert(prefix, decode_state, slot)

    def generate(self, params: EngineParams, decode_state: DecodeState, **kwargs: Any) -> tuple[DecodeState, RowResult]:
        """Returns (state, result) after the next token of every slot."""
        state, result = super().generate(params, decode_state)
        return state, RowResult(**{field.name: getattr(result, field.name) for field in dataclasses.fields(result)})

    def all_adapters(self, params: EngineParams) -> Any:
        """Returns every adapter of the bank, gathered once."""
        if self._sides is None:
            self._sides = super().all_adapters(params)
        return self._sides

    def _gather(self, params: EngineParams, adapter_slot_NB: jax.Array) -> Any:
        if self._sides is None:
            self._sides = super()._gather(params, adapter_slot_NB)
        return self._sides

    def pad(self, token_ids: Sequence[int]) -> np.ndarray:
        """Returns token ids padded to a prefill length."""
        padded = np.zeros(self.buckets.prefill_length(len(token_ids)), np.int32)
        padded[: len(token_ids)] = token_ids
        return padded

    def warmup(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every program that the Driver will run, calling `progress(done, total)` before each prompt length."""
        state = self.init_decode_state()
        lengths = self.buckets.prefill_lengths
        for done, length in enumerate(lengths):
            progress(done, len(lengths) + 1)
            prompt = PaddedPrompt(np.zeros(length, np.int32), 0, 1)
            state = self.insert(self.prefill(params=self._params, padded_tokens=prompt, true_length=length - 1), state, 0)
        progress(len(lengths), len(lengths) + 1)
        state, _ = self.generate(self._params, state)
        jax.block_until_ready(state.token_S)
        progress(len(lengths) + 1, len(lengths) + 1)
