"""An engine without JAX: a row's tokens are 100 * adapter slot + 10, + 11, ...; some prompts make it fail."""

import dataclasses
import time

import numpy as np

from marlaas_jax.engine.state import ERROR, LENGTH, RUNNING
from marlaas_jax.jetstream.engine import PaddedPrompt, RowResult, StopTokens

RAISES, OVERFLOWS = 66, 77  # first tokens of prompts that make prefill raise, and the row end with an error


@dataclasses.dataclass
class Row:
    """A decode slot's row."""

    prompt: PaddedPrompt
    made: int = 0
    finish: int = RUNNING


class FakeEngine:
    """What the Driver asks of an engine."""

    samples_per_slot = 1
    max_prefill_length = 16

    def __init__(self, num_slots: int = 4, step_s: float = 0.0):
        self.max_concurrent_decodes = num_slots
        self.step_s = step_s
        self.prefilled: list[int] = []  # the length of each prompt, in order
        self.num_steps = 0
        self.is_stuck = False

    def load_params(self):
        return None

    def warmup(self):
        pass

    def get_tokenizer(self):
        return StopTokens(frozenset({2}))

    def build_tokenizer(self, metadata):
        return metadata

    def init_decode_state(self):
        return {}

    def pad(self, token_ids):
        return np.asarray(token_ids, np.int32)

    def prefill(self, *, params, padded_tokens, true_length):
        if padded_tokens.token_ids[0] == RAISES:
            raise RuntimeError("out of memory\nand a long story")
        self.prefilled.append(true_length)
        return padded_tokens

    def insert(self, prefix, decode_state, slot):
        return decode_state | {slot: Row(prefix)}

    def generate(self, params, decode_state):
        time.sleep(self.step_s)
        self.num_steps += 1
        data = np.zeros((self.max_concurrent_decodes, 6), np.int32)
        for slot, row in decode_state.items():
            is_sampled = row.finish == RUNNING
            if is_sampled and row.prompt.token_ids[0] == OVERFLOWS and row.made == 2:
                row.finish, is_sampled = ERROR, False
            row.made += is_sampled
            if is_sampled and row.made == row.prompt.max_tokens:
                row.finish = LENGTH
            data[slot] = (100 * row.prompt.adapter_slot + 9 + row.made, is_sampled, 0, 0, row.made, row.finish)
        return decode_state, RowResult(data, (0, 1), (1, 2), (4, 5), 1)
