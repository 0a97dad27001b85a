"""Twelve jobs that differ in their seeds, and what becomes of them on a device with room for all."""

import numpy as np
import pytest

from tests.device.harness import Harness, run_config

NAMES = [f"job{i}" for i in range(12)]
NUM_STEPS = 2


def crowd(num_jobs: int = len(NAMES), **bank):
    """Returns a run of jobs that differ in their seeds; `bank` overrides the slots."""
    config = run_config(1, checkpoint={"every_steps": 1})
    (first,) = config.jobs
    jobs = tuple(first.model_copy(update={"name": name, "seed": i}) for i, name in enumerate(NAMES[:num_jobs]))
    runtime = config.runtime.model_copy(update={"bank": config.runtime.bank.model_copy(update=bank)})
    return config.model_copy(update={"runtime": runtime, "jobs": jobs})


SMALL = {"num_learner_slots": 2, "num_sampler_slots": 4, "max_device_snapshots": 2}


def train_all(harness) -> list:
    """Opens all jobs and trains every step of all of them at once; returns the answers."""
    answers = [answer for job in harness.config.jobs for answer in harness.add(job.name)]
    for step in range(NUM_STEPS):
        for batch in [harness.batch(job.name, step) for job in harness.config.jobs]:
            answers += harness.device.handle(batch)
        answers += harness.drain()
    return answers


def assert_equal(one, other):
    for ours, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """Every job's weights after all steps, on a device with room for all."""
    harness = Harness(tmp_path_factory.mktemp("roomy"), crowd())
    train_all(harness)
    assert harness.device.gauges()["learner/page_ins"] == 0
    weights = {name: harness.weights(name) for name in NAMES}
    harness.device.close()
    return weights
