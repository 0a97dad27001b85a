"""The chain of programs against one plain pass per row: values and gradients, in every form that must not change them."""

import dataclasses

import jax
import numpy as np
import pytest

from marlaas_jax.learner.batch import Batch
from marlaas_jax.learner.executor import Executor
from marlaas_jax.learner.rows import loss_rows
from marlaas_jax.model import transformer
from marlaas_jax.rl.objective import resolve
from marlaas_jax.rl.packing import BlockShape, lay_out
from tests.learner import small

SLOT = 2


def gradients_of(batch, sizes=small.SIZES, model_params=None, spec=small.SPEC, model=small.MODEL):
    """Returns (gradients of the job's slot, total loss, entropy per loss token) from the learner's own chain."""
    model_params = small.params() if model_params is None else model_params
    executor = Executor(model, model_params, sizes, num_slots=4, max_rank=small.MAX_RANK)
    weights = small.trained_weights(spec)
    executor.place(SLOT, weights, executor.zeros, executor.zeros, spec.scale)
    objective = resolve(small.make_job().algorithm)
    work = [w.block for w in Batch(batch, objective, 8, sizes.shapes).current.work]
    loss = entropy = tokens = 0.0
    while work:
        shape = work[0].shape
        blocks = [b for b in work if b.shape == shape][: shape.blocks]
        for block in blocks:
            work.remove(block)
        layout = lay_out(shape, blocks, sizes.capacity, sizes.num_rows, sizes.num_suffix)
        slots = np.array([SLOT] * len(blocks) + [0] * (shape.blocks - len(blocks)))
        rows = loss_rows(layout, [(objective, 0)] * len(blocks), sizes.num_rows, sizes.num_suffix)
        chain = executor.train_chain(layout, slots, rows)
        while chain.calls:
            chain.run()
        metrics = jax.device_get(chain.results["metrics"])
        loss, entropy, tokens = (
            loss + metrics["loss"].sum(),
            entropy + metrics["entropy"].sum(),
            tokens + metrics["tokens"].sum(),
        )
    stacks = jax.device_get(executor.masters.gradients)
    for stack in jax.tree.leaves(stacks):
        assert not stack[[0, 1, 3]].any(), "a block's gradient reached another slot"
    return jax.tree.map(lambda stack: stack[SLOT], stacks), loss, entropy / tokens


def plain_gradients_of(batch, model_params=None, spec=small.SPEC, model=small.MODEL):
    model_params = small.params() if model_params is None else model_params
    return small.plain_grpo(model_params, small.trained_weights(spec), spec.scale, batch, model)


def assert_same(one, other, tolerance=1e-5):
    scale = max(np.abs(x).max() for x in jax.tree.leaves(other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a / scale, b / scale, atol=tolerance), one, other)


BATCH = small.make_batch()


@pytest.fixture(scope="module")
def plain():
    return plain_gradients_of(BATCH)


def test_shared_prefix_equals_the_plain_form(plain):
    gradient, loss, _ = gradients_of(BATCH)
    assert_same(gradient, plain[1])
    assert loss == pytest.approx(plain[0], abs=1e-6)


def test_scanned_equals_unrolled():
    unrolled, loss, entropy = gradients_of(BATCH)
    scanned, scanned_loss, scanned_entropy = gradients_of(BATCH, model_params=transformer.stack_layers(small.params()))
    assert_same(scanned, unrolled)
    assert (loss, entropy) == (pytest.approx(scanned_loss, abs=1e-6), pytest.approx(scanned_entropy, abs=1e-5))


def test_all_layers_in_one_program_equal_one_layer_each():
    assert_same(gradients_of(BATCH, dataclasses.replace(small.SIZES, layers_per_program=2))[0], gradients_of(BATCH)[0])


@pytest.mark.parametrize(
    "shapes",
    [
        (BlockShape(6, 9, 5, 1),),  # whole groups, one at a time
        (BlockShape(6, 9, 1, 3),),  # every row with its own prompt, three rows at a time
        (BlockShape(17, 23, 6, 2),),  # far more padding
    ],
    ids=["group", "rows", "padded"],
)
def test_bucketed_equals_exact(shapes, plain):
    sizes = dataclasses.replace(small.SIZES, shapes=shapes, head_chunk=16)
    gradient, loss, _ = gradients_of(BATCH, sizes)
    assert_same(gradient, plain[1])
    assert loss == pytest.approx(plain[0], abs=1e-6)


def test_smaller_rank_and_fewer_targets_leave_their_padding_at_exactly_zero_h04():
    spec = dataclasses.replace(small.SPEC, rank=2, targets=("q", "down"))
    gradient, *_ = gradients_of(BATCH, spec=spec)
    assert_same(gradient, plain_gradients_of(BATCH, spec=spec)[1])
    for target, factors in gradient.items():
        for array in factors.values():
            assert not array[:, 2 if target in spec.targets else 0 :].any()


def test_untied_embeddings_biases_and_norms():
    model = dataclasses.replace(small.MODEL, tied_embeddings=False, qkv_bias=True, qk_norm=True)
    model_params = small.params(3, model)
    gradient, loss, _ = gradients_of(BATCH, model_params=model_params, model=model)
    wanted_loss, wanted = plain_gradients_of(BATCH, model_params=model_params, model=model)
    assert_same(gradient, wanted)
    assert loss == pytest.approx(wanted_loss, abs=1e-6)


def test_entropy_is_that_of_the_distribution():
    batch = small.make_batch(groups=1, rows=1)
    [group] = batch.groups
    weights = small.trained_weights(small.SPEC)
    mask = np.frombuffer(group.rows[0].loss_mask, np.uint8).astype(bool)
    *_, entropy = gradients_of(batch)
    ids = (*group.prompt_ids, *group.rows[0].token_ids)
    log_p = np.asarray(small.plain_log_softmax(small.params(), weights, small.SPEC.scale, [ids]))[0]
    log_p = log_p[len(group.prompt_ids) - 1 : len(ids) - 1]
    assert entropy == pytest.approx(-(np.exp(log_p) * log_p).sum(axis=1)[mask].mean(), rel=1e-4)
