"""`isolation: exact`: a job's ids, log-probs, updates and figures are the same bits alone and in any crowd."""

import collections
import dataclasses

import numpy as np
import pytest

from marlaas_jax.engine import steps
from marlaas_jax.model import load, source
from marlaas_jax.model.config import ModelConfig
from tests.device.crowds import Machine, differing
from tests.device.harness import MODEL

# Wider, three layers, sizes that no tile divides; and one deep enough to run layer by layer, its embeddings not tied.
WIDE = ModelConfig("llama", 3, 200, 5, 5, 40, 520, 777, 1e4, 1e-5, 1024, True)
DEEP = ModelConfig("llama", 9, 96, 4, 2, 24, 200, 301, 1e4, 1e-5, 1024, False)
SAMPLING = ({}, {"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 0.0})


@pytest.mark.slow
def test_a_few_crowds_change_no_bit_of_an_exact_job():
    machine = Machine(dataclasses.replace(MODEL, num_layers=1), num_slots=6, max_context=32, few=True)
    alone = machine.run(None)
    assert len(alone) == 2 * (2 * 2 * 4 + 3)
    for seed in range(6):
        assert not differing(alone, machine.run(seed)), f"crowd {seed}"


@pytest.mark.long
def test_200_crowds_change_no_bit_of_an_exact_job():
    """The figure of shared jobs beside it shows that these crowds do change bits where nothing guards them."""
    model, params = load.load(source.resolve("tiny"), "float32", True)
    machine = Machine(model, num_slots=16, max_context=64, params=params, context_buckets=(32, 64), prefill_buckets=(16, 64))
    exact, shared = machine.run(None), machine.run(None, "shared")
    changed: collections.Counter[str] = collections.Counter()
    for seed in range(1000, 1200):
        assert not differing(exact, machine.run(seed)), f"crowd {seed}"
        if seed % 20 == 0:
            changed.update(differing(shared, machine.run(seed, "shared")) or {"nothing"})
    print(f"crowds 1000 to 1199: no bit of the exact job changed; of a shared job, in 10 of them: {dict(changed)}")
    assert changed["logprobs"], "no crowd changes a shared job either: these crowds show nothing"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "form"), [(WIDE, "auto"), (DEEP, "auto"), (MODEL, "onehot")], ids=["wide", "deep", "onehot"])
def test_crowds_change_no_bit_on_other_models_and_forms(model, form):
    machine = Machine(model, num_slots=20, max_context=64, form=form)
    for sampling in SAMPLING:
        alone = machine.run(None, **sampling)
        for seed in range(3):
            assert not differing(alone, machine.run(seed, **sampling)), f"crowd {seed}, {sampling}"


@pytest.mark.parametrize("tied", [True, False])
def test_the_place_of_a_row_does_not_change_its_products(tied):
    """What exact decoding rests on: one program, any place, any neighbours."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    params = {"embed_VD": draw(99, 64)} if tied else {"embed_VD": draw(99, 64), "unembed_DV": draw(64, 99)}
    table = params["embed_VD"].T if tied else params["unembed_DV"]
    row = draw(64)
    for count in (2, 7, 16, 17, 24, 33, 40, 64):
        seen = set()
        for place in range(count):
            hidden = draw(count, 64)
            hidden[place] = row
            logits = np.asarray(steps.logits(params, hidden))
            np.testing.assert_allclose(logits, hidden @ table, atol=1e-4)
            seen.add(logits[place].tobytes())
        assert len(seen) == 1, f"{count} rows"
