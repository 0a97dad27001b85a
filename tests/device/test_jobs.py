"""Jobs on a device: resume equals uninterrupted, stale messages are ignored, full disks are told (H07, H36, H38)."""

import numpy as np
import pytest

from marlaas_jax.device import initial
from marlaas_jax.errors import StorageError
from marlaas_jax.messages import (
    AddJob,
    Checkpointed,
    FinishJob,
    JobFailed,
    JobFinished,
    JobReady,
    JobWarning,
    RemoveJob,
    StepDone,
)
from marlaas_jax.model.disk import read_json
from marlaas_jax.model.source import TINY
from tests.device.harness import failures, run_config, steps_done


def test_resume_equals_uninterrupted_whatever_the_step(make, tmp_path):
    """H38: five steps straight, against stopping after k and going on: the same weights, ledger and version."""
    config = run_config(1, checkpoint={"every_steps": 1})
    straight = make(config)
    straight.add("a")
    for step in range(4):
        straight.train("a", step)
    wanted = straight.weights("a")
    straight.device.close()
    for stop in (1, 3):
        first = make(config)
        first.tmp_path = tmp_path / f"stop{stop}"
        first.add("a")
        for step in range(stop):
            first.train("a", step)
        first.device.close()
        second = make(config)
        second.tmp_path = first.tmp_path
        (ready,) = second.add("a", incarnation=1, resume=True)
        assert (ready.step, ready.version, ready.ledger) == (stop, stop, b"ledger %d" % stop)
        for step in range(stop, 4):
            second.train("a", step, incarnation=1)
        for ours, theirs in zip(second.weights("a"), wanted, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        second.device.close()


def test_repeated_and_stale_messages_change_nothing(make):
    """H07: at-least-once delivery trains a batch once."""
    harness = make(run_config(1))
    harness.add("a", incarnation=3)
    batch = harness.batch("a", 0, incarnation=3)
    assert len(steps_done(harness.device.handle(batch) + harness.device.handle(batch) + harness.drain())) == 1
    before = harness.weights("a")
    assert harness.device.handle(batch) + harness.drain() == []
    stale = harness.batch("a", 1, incarnation=3)
    stale = type(stale)(**{f: getattr(stale, f) for f in stale.__struct_fields__} | {"incarnation": 2})
    assert harness.device.handle(stale) + harness.drain() == []
    assert harness.add("a", incarnation=2) == []
    for ours, theirs in zip(harness.weights("a"), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_finish_commits_the_last_step_and_exports(make, tmp_path):
    harness = make(run_config(1))
    harness.add("a")
    harness.train("a", 0)
    answers = harness.device.handle(FinishJob("a", 0, str(tmp_path / "adapter")))
    assert [type(a) for a in answers] == [Checkpointed, JobFinished] and answers[-1].step == 1
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    page = (tmp_path / "adapter" / "README.md").read_text()
    assert "base model `tiny`" in page and f"base = '{TINY}'" in page
    compile(page.split("```python")[1].split("```")[0], "snippet", "exec")
    assert read_json(tmp_path / "adapter" / "adapter_config.json")["base_model_name_or_path"] == str(TINY)


def test_a_full_disk_warns_then_fails_the_job_and_no_other_h36(make, monkeypatch):
    harness = make(run_config(2, checkpoint={"every_steps": 1}))
    harness.add("a"), harness.add("b")
    checkpoints = harness.device._jobs["a"].checkpoints

    def full(state, reward):
        raise StorageError(f"{checkpoints.directory}: No space left on device")

    monkeypatch.setattr(checkpoints, "save", full)
    kinds = []
    for step in range(3):
        kinds += [a for a in harness.train("a", step) if isinstance(a, JobWarning | JobFailed)]
    assert [type(a) for a in kinds] == [JobWarning, JobWarning, JobFailed]
    assert "No space left" in kinds[-1].reason and str(checkpoints.directory) in kinds[-1].reason
    assert [done.step for done in steps_done(harness.train("b", 0))] == [1]


def test_slots_come_back_after_many_jobs_h02(make):
    """Room for two jobs; six come one after another, none finds the traces of those before it."""
    harness = make(run_config(2))
    fingerprints = []
    for incarnation in range(6):
        (ready,) = harness.add("a", incarnation=incarnation)
        assert isinstance(ready, JobReady)
        fingerprints.append(ready.fingerprint)
        if incarnation < 5:
            harness.train("a", 0, incarnation=incarnation)
        harness.device.handle(RemoveJob("a", incarnation))
    assert len(set(fingerprints)) == 1


@pytest.mark.parametrize("change", [{"alpha": 99.0}, {"targets": ["q"]}, {"rank": 2}])
def test_resume_refuses_an_adapter_that_means_something_else(make, tmp_path, change):
    """The flat vector of a checkpoint fits other targets of equal width: it must not be loaded as those."""
    first = make(run_config(1))
    first.add("a")
    first.train("a", 0)
    first.device.close()
    second = make(run_config(1, lora={"rank": 4} | change))
    ((_, kind, reason),) = failures(second.add("a", incarnation=1, resume=True))
    assert kind == "InvalidConfig" and f"lora.{next(iter(change))}" in reason


@pytest.mark.parametrize("source", ["nowhere", "nowhere/job@3"])
def test_init_from_something_that_is_not_there_fails_with_one_sentence(make, source):
    harness = make(run_config(1, lora={"rank": 4, "init_from": source}))
    ((_, kind, reason),) = failures(harness.add("a"))
    assert kind in ("NotFound", "InvalidConfig") and source in reason


def test_init_from_another_run_and_from_its_export_start_from_those_weights(make, tmp_path):
    first = make(run_config(1))
    first.tmp_path = tmp_path / "RUN" / "jobs"
    first.add("a")
    first.train("a", 0)
    first.device.handle(FinishJob("a", 0, str(tmp_path / "peft")))
    wanted = first.weights("a")
    first.device.close()
    for source in (f"{tmp_path}/RUN/a", f"{tmp_path}/RUN/a@1", f"{tmp_path}/peft"):
        second = make(run_config(1, lora={"rank": 4, "init_from": source}))
        second.tmp_path = tmp_path / source.replace("/", "_").replace("@", "_")
        (ready,) = second.add("a")
        assert isinstance(ready, JobReady), ready
        for ours, theirs in zip(second.weights("a"), wanted, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        second.device.close()


def test_an_error_that_nobody_foresaw_ends_its_own_job_only(make, monkeypatch):
    """Design 13.9: while a job is opened, trained or published."""
    harness = make(run_config(3))
    harness.add("b")
    real = initial.weights
    monkeypatch.setattr(initial, "weights", lambda model, spec, *rest: [].pop() if spec.seed else real(model, spec, *rest))
    opened = harness.config.jobs[0].model_copy(update={"seed": 1})
    message = AddJob("a", 0, opened.model_dump_json().encode(), str(harness.tmp_path / "a"))
    failed, *_ = harness.device.handle(message)
    assert (type(failed), failed.job, failed.kind) == (JobFailed, "a", "InternalError") and "IndexError" in failed.reason
    monkeypatch.setattr(harness.sampler, "publish", lambda snapshot: 1 // 0 if snapshot.job == "c" else "")
    failed, *_ = harness.add("c")
    assert (type(failed), failed.job, failed.kind) == (JobFailed, "c", "InternalError") and "ZeroDivision" in failed.reason
    monkeypatch.undo()
    assert [done.step for done in harness.train("b", 0) if isinstance(done, StepDone)] == [1]
    assert isinstance(harness.add("c", incarnation=1)[0], JobReady), "its slots are free again"
