"""Running layer by layer gives the numbers of running all layers in one program."""

import jax
import numpy as np
import pytest

from marlaas_jax.engine import layered
from marlaas_jax.engine.buckets import Form
from marlaas_jax.engine.engine import EngineSettings, MarlaasEngine
from marlaas_jax.engine.plan import Plan
from marlaas_jax.engine.state import RowSettings

SETTINGS = EngineSettings(
    num_decode_slots=4, max_context=32, num_adapter_slots=6, max_rank=4, decode_steps=4, prefill_batch=2, prefill_buckets=(16,)
)
PROMPTS = [[3, 9, 20], [7, 7]]


@pytest.fixture(params=[1, 2])
def block(request) -> int:
    return request.param


def run(world, block: int):
    """Returns what two prompts' rows, two each, give in two dispatches, and a score."""
    engine = MarlaasEngine(world.config, SETTINGS)
    params = engine.load_params(world.params, world.bank)
    assert layered.suits(world.config, world.params, engine.form) == (layered.MIN_LAYERS == 1)
    prefix = engine.prefill_rows(params, PROMPTS, [2, 3])
    entries = [(slot, slot // 2, RowSettings(6, seed=slot)) for slot in range(4)]
    state = engine.insert_rows(engine.init_decode_state(), prefix, entries)
    adapters = [2, 3] if block == 2 else [2, 2, 3, 3]
    sides = engine.place_blocks(params, engine.empty_blocks(params, len(adapters)), dict(enumerate(adapters)))
    out = []
    for _ in range(2):
        plan = Plan(Form(4, block), (0, 1, 2, 3), tuple(adapters))
        state, result = engine.decode(params, state, sides, plan, 32, np.ones(4, bool))
        out.append(np.asarray(result.data))
    return out, engine.score(params, [5, 1, 2, 3, 40], 4), state


def test_layered_equals_whole(unrolled, monkeypatch, block):
    whole, whole_score, whole_state = run(unrolled, block)
    monkeypatch.setattr(layered, "MIN_LAYERS", 1)
    by_layer, layer_score, layer_state = run(unrolled, block)
    for a, b in zip(whole, by_layer, strict=True):
        np.testing.assert_array_equal(a[:, :8], b[:, :8])
        np.testing.assert_array_equal(a[:, -2:], b[:, -2:])
        np.testing.assert_allclose(a[:, 8:16].copy().view(np.float32), b[:, 8:16].copy().view(np.float32), atol=1e-5)
    np.testing.assert_allclose(whole_score, layer_score, atol=1e-5)
    for a, b in zip(jax.tree.leaves(whole_state.kv), jax.tree.leaves(layer_state.kv), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
