"""Prefill, insert and decode against whole forward passes of merged weights; block forms against each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marlaas_jax.engine import state as states
from marlaas_jax.engine import steps
from marlaas_jax.engine.state import RowSettings
from marlaas_jax.lora import bank as banks

NUM_SLOTS = 8
CONTEXT = 32
PIECES = (5, 12, 32)  # where the caches are cut
STEPS = 4


@dataclasses.dataclass
class Row:
    """One row of a running batch and what it has produced."""

    slot: int
    adapter_slot: int
    prompt: list[int]
    settings: RowSettings
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    sampled_logprobs: list[float] = dataclasses.field(default_factory=list)
    finish: str = ""


def start(world, rows: list[Row], state=None, pad_to: int = 16):
    """Returns the state with the rows started, all prefilled in one batch."""
    if state is None:
        unrolled = steps.is_unrolled(world.params)
        state = states.empty_state(world.config, NUM_SLOTS, PIECES, jnp.float32, unrolled)
    tokens = np.zeros((len(rows), pad_to), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row.prompt)] = row.prompt
    lengths = np.asarray([len(row.prompt) for row in rows], np.int32)
    adapters = np.asarray([row.adapter_slot for row in rows], np.int32)
    prefix = steps.jit_prefill(world.config, NUM_SLOTS, world.params, world.bank, tokens, lengths, adapters)
    entries = [(row.slot, i, row.settings) for i, row in enumerate(rows)]
    return steps.jit_insert(state, prefix, states.insert_rows(entries, NUM_SLOTS))


def run(
    world, rows: list[Row], state, block: int = 1, form: str = "blocks", num_rows: int = NUM_SLOTS, num_context: int = CONTEXT
):
    """Decodes until all rows have ended, filling in what they produced; returns the state."""
    unrolled = steps.is_unrolled(world.params)
    order = block_order(rows, block, num_rows)
    of_slot = {row.slot: row.adapter_slot for row in rows}
    for _ in range(20):
        if form == "onehot":
            sides = steps.jit_gather_all(world.bank, unrolled)
        else:
            blocks = np.asarray(order).reshape(-1, block)
            adapters = [next((of_slot[s] for s in row if s in of_slot), 0) for row in blocks.tolist()]
            sides = steps.jit_gather(world.bank, np.asarray(adapters, np.int32), unrolled)
        state, packed = steps.jit_decode_chunk(
            world.config,
            STEPS,
            num_context,
            form,
            world.params,
            sides,
            state,
            np.asarray(order, np.int32),
            np.ones(NUM_SLOTS, bool),
        )
        result = steps.unpack(np.asarray(packed))
        for row in rows:
            keep = result.is_sampled_SN[row.slot]
            row.tokens += result.tokens_SN[row.slot][keep].tolist()
            row.logprobs += result.logprobs_SN[row.slot][keep].tolist()
            row.sampled_logprobs += result.sampled_logprobs_SN[row.slot][keep].tolist()
            row.finish = states.FINISH_REASONS[result.finish_S[row.slot]]
        if all(row.finish for row in rows):
            return state
    raise AssertionError("rows did not end")


def block_order(rows: list[Row], block: int, num_rows: int) -> list[int]:
    """Returns an order in which each block holds rows of one adapter and idle slots."""
    idle = [s for s in range(NUM_SLOTS) if s not in {row.slot for row in rows}]
    order: list[int] = []
    for adapter in sorted({row.adapter_slot for row in rows}):
        own = [row.slot for row in rows if row.adapter_slot == adapter]
        while len(own) % block:
            own.append(idle.pop())
        order += own
    return order + idle[: num_rows - len(order)]


def make_rows(adapters: list[int], slots: list[int], max_tokens: int = 10, **settings) -> list[Row]:
    rng = np.random.default_rng(7)
    return [
        Row(slot, adapter, rng.integers(0, 61, 3 + i).tolist(), RowSettings(max_tokens, seed=1000 + i, **settings))
        for i, (adapter, slot) in enumerate(zip(adapters, slots, strict=True))
    ]


def check_against_forward(world, row: Row, tolerance: float = 1e-4):
    reference = world.logprobs(row.adapter_slot, row.prompt + row.tokens)[len(row.prompt) - 1 : -1]
    np.testing.assert_allclose(row.logprobs, reference[np.arange(len(row.tokens)), row.tokens], atol=tolerance)
    return reference


def test_prefill_and_decode_equal_a_whole_forward_pass(world):
    """H04: rows of five adapters, ranks padded, in one batch: each log-prob is that of one pass over prompt and answer."""
    rows = make_rows([0, 1, 2, 3, 4, 2], [5, 0, 7, 3, 2, 1])
    run(world, rows, start(world, rows))
    for row in rows:
        assert len(row.tokens) == 10 and row.finish == "length"
        check_against_forward(world, row)


def test_greedy_takes_the_argmax(world):
    rows = make_rows([1, 4], [6, 2], temperature=0.0)
    run(world, rows, start(world, rows))
    for row in rows:
        reference = check_against_forward(world, row)
        assert row.tokens == reference.argmax(-1).tolist()
        assert row.sampled_logprobs == [0.0] * 10


def test_a_short_context_is_exact(world):
    """Attention over the first pieces alone, whole or in part, gives what it gives over all, while the rows stay within."""
    for num_context in (14, 12):
        rows = make_rows([1, 3], [6, 2], max_tokens=8)
        run(world, rows, start(world, rows), num_context=num_context)
        for row in rows:
            check_against_forward(world, row)


def test_a_row_alone_equals_the_row_among_others(world):
    rows = make_rows([3, 1, 2, 4], [0, 4, 5, 6])
    run(world, rows, start(world, rows))
    for row in rows:
        alone = dataclasses.replace(row, slot=2, tokens=[], logprobs=[], sampled_logprobs=[])
        run(world, [alone], start(world, [alone]))
        assert alone.tokens == row.tokens
        np.testing.assert_allclose(alone.logprobs, row.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("adapters", "block", "form", "num_rows"),
    [
        ([2, 2, 2], 8, "blocks", 8),
        ([2, 2, 2, 3, 3, 1], 2, "blocks", 8),
        ([2, 2, 2, 3], 4, "blocks", 8),
        ([4, 2, 0, 3, 1, 2], 1, "onehot", 8),
        ([2, 3], 1, "blocks", 2),
        ([2, 2], 2, "blocks", 2),
    ],
)
def test_forms_are_equal(unrolled, adapters, block, form, num_rows):
    slots = [6, 1, 3, 0, 7, 2][: len(adapters)]
    rows, same = make_rows(adapters, slots), make_rows(adapters, slots)
    run(unrolled, rows, start(unrolled, rows))
    run(unrolled, same, start(unrolled, same), block, form, num_rows)
    for a, b in zip(rows, same, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_a_group_from_one_prefill_equals_separate_prefills(unrolled):
    """H14: one prompt, one seed each: distinct completions, the same as when every row is prefilled by itself."""
    prompt = [5, 17, 40, 2]
    separate = [Row(s, 2, prompt, RowSettings(8, seed=50 + s)) for s in range(6)]
    run(unrolled, separate, start(unrolled, separate))
    group = [Row(s, 2, prompt, RowSettings(8, seed=50 + s)) for s in range(6)]
    tokens = np.zeros((2, 16), np.int32)
    tokens[1, :4] = prompt
    lengths, adapters = np.asarray([1, 4], np.int32), np.asarray([0, 2], np.int32)
    prefix = steps.jit_prefill(unrolled.config, NUM_SLOTS, unrolled.params, unrolled.bank, tokens, lengths, adapters)
    state = states.empty_state(unrolled.config, NUM_SLOTS, PIECES, jnp.float32, True)
    state = steps.jit_insert(state, prefix, states.insert_rows([(r.slot, 1, r.settings) for r in group], NUM_SLOTS))
    run(unrolled, group, state)
    assert [r.tokens for r in group] == [r.tokens for r in separate]
    assert len({tuple(r.tokens) for r in group}) == 6


def test_stop_ids_limits_and_context(unrolled):
    """H13, H15: every stop id ends a row and is kept; max_tokens 1 gives one token; a full context ends a row."""
    free = make_rows([1, 1], [0, 1])
    run(unrolled, free, start(unrolled, free))
    stop = free[0].tokens[3]
    prompt_to_context = [*range(30)]
    rows = [
        Row(0, 1, free[0].prompt, RowSettings(10, seed=1000, stop_ids=(60, stop))),
        Row(1, 1, free[1].prompt, RowSettings(1, seed=1001)),
        Row(2, 1, prompt_to_context, RowSettings(10, seed=3)),
        Row(3, 1, [9], RowSettings(3, seed=4)),
    ]
    run(unrolled, rows, start(unrolled, rows, pad_to=32))
    first = free[0].tokens.index(stop)
    assert rows[0].tokens == free[0].tokens[: first + 1] and rows[0].finish == "stop"
    assert rows[1].tokens == free[1].tokens[:1] and rows[1].finish == "length"
    assert len(rows[2].tokens) == CONTEXT - 30 and rows[2].finish == "context"
    assert len(rows[3].tokens) == 3
    for row in rows:
        check_against_forward(unrolled, row)


@pytest.mark.parametrize("factor", ["down", "up"])
@pytest.mark.parametrize("form", ["blocks", "onehot"])
def test_a_nan_adapter_ends_only_its_own_rows(unrolled, factor, form):
    """H10, and its sequel: the next row in the same slot, longer than what the broken one left, is unharmed."""
    weights, scale = banks.read(unrolled.bank, 4)
    weights["down"][factor] = weights["down"][factor].at[0, 0, 0].set(jnp.nan)
    world = dataclasses.replace(unrolled, bank=banks.write(unrolled.bank, 5, weights, scale))
    rows = make_rows([2, 5, 3, 5], [0, 1, 2, 3])
    good = make_rows([2, 0, 3, 0], [0, 1, 2, 3])
    run(unrolled, good, start(unrolled, good))
    state = run(world, rows, start(world, rows), form=form)
    assert [row.finish for row in rows] == ["length", "error", "length", "error"]
    assert rows[1].tokens == rows[3].tokens == []
    assert rows[0].tokens == good[0].tokens and rows[2].tokens == good[2].tokens
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.kv))


def test_a_state_with_an_adapter_that_turns_nan_while_decoding(unrolled):
    """A row whose prompt was fine but whose adapter breaks ends by the logits of its next token."""
    rows = make_rows([2], [4])
    state = start(unrolled, rows)
    weights, scale = banks.read(unrolled.bank, 2)
    weights["q"]["up"] = weights["q"]["up"] * jnp.inf
    world = dataclasses.replace(unrolled, bank=banks.write(unrolled.bank, 2, weights, scale))
    state = run(world, rows, state)
    assert rows[0].finish == "error" and rows[0].tokens == []
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.kv))


def test_insert_overwrites_the_adapter_slot_with_zero_too(unrolled):
    first = make_rows([3], [2])
    state = run(unrolled, first, start(unrolled, first))
    base = make_rows([0], [2])
    run(unrolled, base, start(unrolled, base, state))
    check_against_forward(unrolled, base[0])


def test_score_equals_a_whole_forward_pass(world):
    tokens = [3, 9, 27, 20, 60, 1, 0, 44]
    padded = np.zeros(16, np.int32)
    padded[: len(tokens)] = tokens
    out = steps.jit_score(world.config, world.params, world.bank, padded, np.int32(len(tokens)), np.int32(3))
    reference = world.logprobs(3, tokens)[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(np.asarray(out)[1 : len(tokens)], reference, atol=1e-4)
