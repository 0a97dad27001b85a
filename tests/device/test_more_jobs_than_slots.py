"""A device with room for one job in the learner and two in the sampler runs twelve: they end as with room for all."""

import jax
import numpy as np
import pytest

from marlaas_jax.messages import FinishJob, JobFinished, JobPaused, JobReady, PauseJob, RemoveJob
from tests.device.crowd import NAMES, NUM_STEPS, SMALL, assert_equal, crowd, train_all
from tests.device.harness import CANARY, failures, steps_done

pytestmark = pytest.mark.slow  # bits that are the same only as users compile: with quickly compiled programs places differ


def test_twelve_jobs_in_one_learner_slot_end_as_with_room_for_all(make, roomy):
    harness = make(crowd(**SMALL))
    answers = train_all(harness)
    assert not failures(answers)
    assert sum(isinstance(answer, JobReady) for answer in answers) == 12 and len(steps_done(answers)) == 12 * NUM_STEPS
    for name in NAMES:
        assert_equal(harness.weights(name), roomy[name])
    gauges = harness.device.gauges()
    assert gauges["learner/open_jobs"] == 12 and gauges["learner/resident_jobs"] == 1
    assert gauges["learner/page_ins"] == gauges["learner/page_outs"] >= 12 * NUM_STEPS - 2
    assert gauges["engine/kept_snapshots"] == 12 and gauges["engine/resident_snapshots"] == 3
    assert gauges["engine/device_snapshots"] <= 3 + 2


def test_a_job_without_a_slot_pauses_resumes_finishes_and_goes_h02(make, roomy, tmp_path):
    harness = make(crowd(3, **SMALL))
    for name in NAMES[:3]:
        harness.add(name)
        harness.train(name, 0)
    paged_out = lambda name: name in harness.learner._shelf
    assert [paged_out(name) for name in NAMES[:3]] == [True, True, False]

    answers = harness.device.handle(PauseJob("job0", 0))
    assert isinstance(answers[-1], JobPaused) and answers[-1].step == 1 and "job0" not in harness.learner._jobs
    (ready,) = harness.add("job0", incarnation=1, resume=True)
    assert (ready.step, ready.version) == (1, 1) and paged_out("job0")
    harness.train("job0", 1, incarnation=1)
    assert_equal(harness.weights("job0"), roomy["job0"])

    harness.train("job2", 1)
    assert paged_out("job0") and not paged_out("job2")
    finished = harness.device.handle(FinishJob("job0", 1, str(tmp_path / "adapter")))[-1]
    assert isinstance(finished, JobFinished) and (tmp_path / "adapter" / "adapter_model.safetensors").is_file()

    for name, incarnation in (("job0", 1), ("job1", 0), ("job2", 0)):
        harness.device.handle(RemoveJob(name, incarnation))
    for stack in jax.tree.leaves(harness.learner._executor.masters):
        assert not np.asarray(stack).any()
    (ready,) = harness.add("job1", incarnation=1)
    assert isinstance(ready, JobReady) and ready.version == 0
    base = harness.sampler.score("job1", -2, CANARY)
    np.testing.assert_allclose(harness.learner.score("job1", CANARY), base, atol=1e-5)
