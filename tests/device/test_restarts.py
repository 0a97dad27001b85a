"""Jobs that come back to a device that is not the one they left: another step, other slots, another rank, other buckets."""

import shutil

import numpy as np
import pytest

from marlaas_jax.messages import AddJob, JobFailed, JobPaused, JobReady, JobWarning, PauseJob
from tests.device.harness import failures, run_config

NUM_STEPS = 3
OTHER_RUNTIMES = {
    "fewer_learner_slots": {"bank": {"num_learner_slots": 2, "max_rank": 4}},
    "fewer_decode_slots": {"engine": {"num_decode_slots": 4}},
    "larger_rank_bank": {"bank": {"max_rank": 16}},
    "other_buckets": {
        "engine": {"max_context": 48, "context_buckets": [24, 48], "prefill_buckets": [24]},
        "learner": {"prompt_buckets": [24], "suffix_buckets": [24], "block_rows": 2},
    },
}


def with_runtime(config, changes):
    """Returns the run on another runtime; sections are changed field by field."""
    sections = {name: getattr(config.runtime, name).model_copy(update=fields) for name, fields in changes.items()}
    return config.model_copy(update={"runtime": config.runtime.model_copy(update=sections)})


def add(harness, name, incarnation, step=-1):
    """Reopens a job from its newest committed step, or from `step`."""
    job = next(job for job in harness.config.jobs if job.name == name)
    document = job.model_dump_json().encode()
    return harness.device.handle(AddJob(name, incarnation, document, str(harness.tmp_path / name), resume=True, step=step))


def train(harness, name, step, **options):
    """Trains a batch and waits until it is committed."""
    answers = harness.train(name, step, **options)
    harness.device._jobs[name].checkpoints.wait()
    return answers


def saved(harness, name):
    """Returns what a checkpoint of the job holds now: flat arrays and counters."""
    state = harness.learner.state(name)
    return state["arrays"] | {"counters": np.array(list(state["counters"].values()))}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """Three jobs as they were when a device with room for all ended; (their folder, run, states)."""
    from tests.device.harness import Harness

    folder = tmp_path_factory.mktemp("left")
    config = run_config(3, checkpoint={"every_steps": 1, "keep": 10}, lora={"rank": 2})
    harness = Harness(folder, config)
    for name in "abc":
        harness.add(name)
        for step in range(NUM_STEPS):
            harness.train(name, step, seed=ord(name))
    states = {name: saved(harness, name) for name in "abc"}
    harness.device.close()
    return folder, config, states


@pytest.mark.parametrize(
    "changes",
    [pytest.param(c, id=n, marks=() if n == "fewer_learner_slots" else pytest.mark.slow) for n, c in OTHER_RUNTIMES.items()],
)
def test_weights_moments_and_counters_come_back_bit_for_bit_on_another_runtime(make, left, tmp_path, changes):
    folder, config, states = left
    harness = make(with_runtime(config, changes))
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for name in "abc":
        (ready,) = add(harness, name, incarnation=1)
        assert isinstance(ready, JobReady) and (ready.step, ready.version) == (NUM_STEPS, NUM_STEPS)
    for name in "abc":
        assert_same(saved(harness, name), states[name])
    for name in "abc":
        assert not failures(harness.train(name, NUM_STEPS, incarnation=1))


def test_a_rollback_reads_the_step_that_was_asked_for_and_then_removes_the_newer_ones(make, tmp_path):
    harness = make(run_config(1, checkpoint={"every_steps": 1, "keep": 10}))
    harness.add("a")
    at = {}
    for step in range(4):
        train(harness, "a", step)
        at[step + 1] = saved(harness, "a")
    answers = harness.device.handle(PauseJob("a", 0, discard=True))
    assert isinstance(answers[-1], JobPaused)

    (refused,) = add(harness, "a", incarnation=1, step=7)
    assert isinstance(refused, JobFailed) and "step 7 is not kept; kept: 1, 2, 3, 4" in refused.reason
    (ready,) = add(harness, "a", incarnation=2, step=2)
    assert (ready.step, ready.version, ready.ledger) == (2, 2, b"ledger 2")
    assert_same(saved(harness, "a"), at[2])
    (again,) = add(harness, "a", incarnation=3, step=2)  # as after a crash right behind it
    assert again.step == 2 and harness.device._jobs["a"].checkpoints.steps() == [1, 2]
    train(harness, "a", 2, incarnation=3)
    assert_same(saved(harness, "a"), at[3])


def test_a_step_to_go_back_to_that_cannot_be_read_costs_no_newer_one(make, tmp_path):
    harness = make(run_config(1, checkpoint={"every_steps": 1, "keep": 10}))
    harness.add("a")
    for step in range(3):
        train(harness, "a", step)
    harness.device.handle(PauseJob("a", 0))
    for file in (tmp_path / "a" / "checkpoints" / "2").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\xff" * file.stat().st_size)
    (failed,) = add(harness, "a", incarnation=1, step=2)
    assert isinstance(failed, JobFailed) and failed.kind == "CorruptFile" and "checkpoints/2" in failed.reason
    (ready,) = add(harness, "a", incarnation=2)
    assert ready.step == 3


def test_a_newest_step_that_cannot_be_read_is_told_and_the_job_goes_on_from_the_one_before_h35(make, tmp_path):
    harness = make(run_config(1, checkpoint={"every_steps": 1, "keep": 10}))
    harness.add("a")
    for step in range(3):
        train(harness, "a", step)
    harness.device.handle(PauseJob("a", 0))
    for file in (tmp_path / "a" / "checkpoints" / "3").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\xff" * file.stat().st_size)
    warning, ready = add(harness, "a", incarnation=1)
    assert isinstance(warning, JobWarning) and "checkpoints/3: the checkpoint cannot be read; the job goes on from step 2" in (
        warning.text
    )
    assert ready.step == 2
