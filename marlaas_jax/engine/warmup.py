"""Runs every program of an engine once, on nothing, so that no request waits for a compiler."""

from collections.abc import Callable

import jax
import numpy as np

from marlaas_jax.engine.buckets import EXACT_DECODE, EXACT_PLACE
from marlaas_jax.engine.engine import EngineParams, MarlaasEngine
from marlaas_jax.engine.plan import Plan
from marlaas_jax.engine.residency import NULL_SLOT
from marlaas_jax.engine.state import DecodeState
from marlaas_jax.lora.adapter import weight_shapes


def warm(
    engine: MarlaasEngine, params: EngineParams, state: DecodeState, progress: Callable[[str], None]
) -> tuple[EngineParams, DecodeState]:
    """Returns (params, state), which are donated, after calling `progress` with the name of each program and running it.

    No row may be running. The last adapter slot must be unused; zeros are written to it.
    """
    buckets, settings = engine.buckets, engine.settings
    for length in buckets.prefill_lengths:
        prefixes = []
        for rows in buckets.prefill_rows:
            progress(f"prefill {rows}x{length}")
            prefixes.append(engine.prefill_rows(params, [[0] * length] * rows, [NULL_SLOT] * rows))
        progress(f"insert {length}")
        state = engine.insert_rows(state, prefixes[0], [])
    nobody = np.zeros(settings.num_decode_slots, bool)
    for count in buckets.block_counts:
        progress(f"place adapters in {count} blocks")
        if engine.form == "onehot":
            sides = engine.all_adapters(params)
        else:
            sides = engine.place_blocks(params, engine.empty_blocks(params, count), {0: NULL_SLOT})
        for form in (form for form in buckets.forms if form.num_blocks == count):
            plan = Plan(form, tuple(range(form.num_rows)), (NULL_SLOT,) * count)
            for context in buckets.context_lengths:
                progress(f"decode {form.num_rows} rows in blocks of {form.block}, context {context}")
                state, _ = engine.decode(params, state, sides, plan, context, nobody)
    if not buckets.in_blocks:
        progress(EXACT_PLACE)
        form = buckets.exact_form
        sides = engine.place_blocks(params, engine.empty_blocks(params, form.num_blocks), {0: NULL_SLOT})
        progress(EXACT_DECODE)
        plan = Plan(form, tuple(range(form.num_rows)), (NULL_SLOT,) * form.num_blocks)
        state, _ = engine.decode(params, state, sides, plan, settings.max_context, nobody, in_blocks=True)
    for length in buckets.score_lengths:
        progress(f"score {length}")
        engine.score(params, [0] * length, NULL_SLOT)
    progress("write adapter")
    shapes = weight_shapes(engine.config, settings.max_rank)
    dtype = jax.tree.leaves(params.bank.weights)[0].dtype
    zeros = {target: {f: np.zeros(shape, dtype) for f, shape in factors.items()} for target, factors in shapes.items()}
    params = engine.write_adapter(params, settings.num_adapter_slots - 1, zeros, 0.0)
    progress("fingerprint")
    engine.fingerprint(params, NULL_SLOT)
    jax.block_until_ready(state.token_S)
    return params, state
