"""Schedules, buckets and the cost model: plain arithmetic."""

import dataclasses

import pytest

from marlaas_jax.config import LearnerSection, OptimizerConfig
from marlaas_jax.errors import InvalidConfig
from marlaas_jax.learner import buckets
from marlaas_jax.learner.cost import CostModel, Unit
from marlaas_jax.learner.schedule import learning_rate
from marlaas_jax.model.config import ModelConfig

SMOLLM2 = ModelConfig("llama", 30, 576, 9, 3, 64, 1536, 49152, 1e5, 1e-5, 2048, True)
TINY = ModelConfig("llama", 4, 128, 4, 2, 32, 384, 256, 1e4, 1e-5, 512, True)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [1, 2, 4, 4, 4, 4]), ("linear", [1, 2, 4, 3, 1, 0]), ("cosine", [1, 2, 4, 3.4142136, 0.5857864, 0])],
)
def test_schedules_with_warm_up(schedule, expected):
    config = OptimizerConfig(learning_rate=4.0, schedule=schedule, warmup_steps=4)
    steps = [0, 1, 4, 6, 10, 12]
    assert [learning_rate(config, step, 12) for step in steps] == pytest.approx(expected)


def test_no_step_has_rate_zero_before_the_end():
    config = OptimizerConfig(schedule="cosine", warmup_steps=3)
    assert all(learning_rate(config, step, 10) > 0 for step in range(10))
    assert learning_rate(OptimizerConfig(schedule="linear"), 99, 10) == 0.0


@pytest.mark.parametrize("max_context", [8, 40, 256, 4096])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_default_buckets_cover_the_context_with_few_programs(max_context, on_cpu):
    sizes = buckets.plan(LearnerSection(), TINY, max_context=max_context, max_rank=8, on_cpu=on_cpu)
    assert sizes.num_programs <= buckets.MAX_PROGRAMS
    for prompt in range(1, max_context, max(max_context // 16, 1)):
        for suffix in {1, max_context - prompt}:
            assert any(shape.fits(prompt, suffix) for shape in sizes.shapes), (prompt, suffix)
    assert sizes.capacity <= 2 * max(256 if on_cpu else 4096, max_context)


def test_given_buckets_are_used_as_they_are():
    section = LearnerSection(prompt_buckets=(48, 160), suffix_buckets=(8, 64), block_rows=8)
    sizes = buckets.plan(section, SMOLLM2, max_context=256, max_rank=8, on_cpu=True)
    assert [(s.prompt, s.suffix, s.rows, s.blocks) for s in sizes.shapes] == [
        (48, 8, 8, 2),
        (48, 64, 4, 1),
        (160, 8, 8, 1),
        (160, 64, 4, 1),
        (256, 256, 1, 1),  # for what the given ones leave out
    ]
    assert (sizes.layers_per_program, sizes.update_buckets) == (1, (1,))
    assert buckets.plan(section, TINY, max_context=256, max_rank=8, on_cpu=True).update_buckets == (1, 2, 4, 8)
    wide = dataclasses.replace(SMOLLM2, num_layers=4)
    assert buckets.plan(section, wide, max_context=256, max_rank=8, on_cpu=False).layers_per_program == 4


def test_too_many_buckets_are_refused_with_the_limit():
    section = LearnerSection(prompt_buckets=(8, 16, 64), suffix_buckets=(8, 64))
    with pytest.raises(InvalidConfig, match=r"prompt_buckets=\[8, 16, 64\].*6 shapes; at most 5"):
        buckets.plan(section, TINY, max_context=64, max_rank=8, on_cpu=True)


def test_predictions_follow_what_is_measured():
    cost = CostModel()
    units = [Unit("forward", 1e9), Unit("backward", 2e9)]
    for _ in range(30):
        cost.observe(units, 0.9)
    assert cost.predict_s(units) == pytest.approx(0.9, rel=0.05)
    cost.calibrate(Unit("head", 1e9), 0.5)
    assert cost.predict_s([Unit("head", 2e9)]) == pytest.approx(1.0, rel=0.02)
    before = cost.predict_s(units)
    cost.observe(units, 1e6)  # one wild reading moves a prediction less than twofold
    assert cost.predict_s(units) < 2 * before
    cost.observe([], 1.0)
