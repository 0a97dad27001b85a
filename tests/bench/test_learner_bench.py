"""The learner benchmark's own arithmetic; a whole run of its quick form is slow."""

import jax
import numpy as np
import pytest

from marlaas_jax.bench import learner as bench
from marlaas_jax.model import transformer


def test_optimizer_state_grows_with_the_number_of_adapters():
    assert bench.state_line("tiny").value == pytest.approx(1.0)


def test_loads_count_the_tokens_that_pass_through_the_layers():
    load = bench.Load(jobs=2, groups=3, rows=4, prompt=10, suffix=5)
    batch = load.batch(bench.SHAPES["tiny"], "job0", 7)
    assert load.tokens_per_job == 90 and batch.step == 7
    assert len(batch.groups) == 3 and {len(g.prompt_ids) for g in batch.groups} == {11}


@pytest.mark.slow
def test_the_plain_form_gives_the_same_gradient_as_the_learner():
    """What the memory and time lines compare computes the same thing."""
    model = bench.SHAPES["tiny"]
    params = transformer.init_params(model)
    load = bench.Load(1, 2, 1, 4, 4)
    learner = bench.make_learner(model, params, load, 2, (1,))
    batch = load.batch(model, "job0", 0)
    weights = learner.weights("job0")
    tokens = np.array([(*g.prompt_ids, *g.rows[0].token_ids) for g in batch.groups], np.int32)
    old = np.full(tokens.shape, -np.log(model.vocab_size), np.float32)
    advantage = np.array([g.rows[0].advantage for g in batch.groups], np.float32)
    gradient = bench.plain_step(model, 4)(weights, params, tokens, old, advantage)
    norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradient)))
    learner.submit(batch)
    done = []
    while learner.has_work():
        done += learner.step()
    assert done[0].metrics["learner/grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.long
def test_quick_run_reports_every_line(capsys):
    report = bench.run(json=True, quick=True, cores=1024)
    assert len(report["lines"]) == 9
    assert '"holds"' in capsys.readouterr().out
