"""Adapters on disk, sampled from without a learner slot, while the device goes on with its jobs."""

import concurrent.futures
import shutil

import msgspec
import numpy as np

from marlaas_jax.messages import CancelGenerate, FinishJob, Generate, Generated, RemoveJob, Sampling
from tests.device.harness import run_config


def ask(request_id, job, version=-1, incarnation=0, adapter="", seeds=(1, 2)):
    return Generate(
        request_id, job, incarnation, (5, 9, 13), seeds, Sampling(max_tokens=6), version, share="tenant", adapter=adapter
    )


def answers(harness, *messages):
    """Returns (token ids, log-probs) by request and sample; of refusals the reason and the error."""
    out = []
    for message in messages:
        out += harness.device.handle(message)
    out += harness.drain()
    found = {}
    for answer in out:
        if isinstance(answer, Generated):
            is_good = answer.finish_reason in ("stop", "length")
            found[answer.request_id, answer.sample] = (
                (answer.token_ids, np.frombuffer(answer.logprobs, "<f4")) if is_good else (answer.finish_reason, answer.error)
            )
    return found


def train(harness, step):
    """Trains a batch of job a and waits until it is committed."""
    harness.train("a", step)
    while harness.device._jobs["a"].checkpoints.busy:
        harness.device.step()


def same(ours, theirs):
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)


def test_steps_of_an_ended_job_give_what_they_gave_when_they_were_published(make, tmp_path, monkeypatch):
    harness = make(run_config(2, checkpoint={"every_steps": 1, "keep": 5}))
    harness.tmp_path = tmp_path / "run" / "jobs"
    harness.add("a")
    harness.add("b")
    published = {}
    for step in range(3):
        train(harness, step)
        published[step + 1] = answers(harness, ask("x", "a"))
    harness.device.handle(FinishJob("a", 0, str(tmp_path / "peft")))
    harness.device.handle(RemoveJob("a", 0))
    compiled = harness.sampler.compiles_since_warmup()
    source = lambda step: f"{tmp_path}/run/a@{step}"
    found = answers(harness, *(ask(f"{step}", f"a@{step}", step, 77, source(step)) for step in (3, 1, 2)))
    for step in (1, 2, 3):
        for sample in (0, 1):
            same(found[f"{step}", sample], published[step]["x", sample])
    export = answers(harness, ask("e", "a@export", 3, 78, str(tmp_path / "peft")))
    same(export["e", 0], published[3]["x", 0])
    assert harness.sampler.compiles_since_warmup() == compiled
    shutil.rmtree(tmp_path / "run" / "jobs" / "a")  # they are in memory
    same(answers(harness, ask("again", "a@2", 2, 77, source(2)))["again", 0], published[2]["x", 0])
    assert harness.device.gauges()["engine/pinned_snapshots"] == 0
    assert len(answers(harness, ask("b", "b"))) == 2  # of the job that goes on


def test_what_cannot_be_loaded_is_said_to_its_requests_alone(make, tmp_path):
    harness = make(run_config(2, checkpoint={"every_steps": 1}))
    harness.tmp_path = tmp_path / "run" / "jobs"
    harness.add("a")
    harness.train("a", 0)
    harness.device.handle(FinishJob("a", 0, str(tmp_path / "peft")))
    harness.add("b")
    (tmp_path / "peft" / "adapter_model.safetensors").write_bytes(b"no tensors")
    asked = [
        ask("pruned", "a@9", 9, 1, f"{tmp_path}/run/a@9"),
        ask("broken", "a@export", 1, 1, str(tmp_path / "peft")),
        ask("good", "a@1", 1, 1, f"{tmp_path}/run/a@1"),
        ask("live", "b"),
    ]
    found = answers(harness, *asked)
    assert found["pruned", 0][0] == "missing" and "step 9 is not kept" in found["pruned", 1][1]
    assert found["broken", 0][0] == "error" and "adapter_model.safetensors" in found["broken", 0][1]
    assert len(found["good", 0][0]) > 0 and len(found["live", 1][0]) > 0


def test_more_adapters_than_may_be_kept_take_turns(make, tmp_path):
    config = run_config(1, checkpoint={"every_steps": 1, "keep": 5})
    bank = config.runtime.bank.model_copy(update={"max_loaded_snapshots": 1})
    harness = make(config.model_copy(update={"runtime": config.runtime.model_copy(update={"bank": bank})}))
    harness.tmp_path = tmp_path / "run" / "jobs"
    harness.add("a")
    published = {}
    for step in range(3):
        train(harness, step)
        published[step + 1] = answers(harness, ask("x", "a"))["x", 0]
    asked = [ask(f"{n}.{step}", f"a@{step}", step, 1, f"{tmp_path}/run/a@{step}") for n in range(3) for step in (1, 2, 3)]
    found = answers(harness, *asked)
    assert len(found) == 18
    for message in asked:
        same(found[message.request_id, 0], published[message.version])
    assert harness.device.gauges()["engine/kept_snapshots"] == 2  # the job's own, and the one that was loaded last


def test_a_request_that_is_cancelled_while_its_adapter_is_read(make, tmp_path, monkeypatch):
    harness = make(run_config(1))
    stored = harness.device._stored
    reading: concurrent.futures.Future = concurrent.futures.Future()
    monkeypatch.setattr(stored._executor, "submit", lambda *_: reading)
    message = ask("x", "old", 1, 1, "somewhere")
    harness.device.handle(message)
    harness.device.handle(msgspec.structs.replace(message, request_id="y"))
    harness.device.step()
    for request_id in ("x", "y"):
        harness.device.handle(CancelGenerate(request_id))
    out = [answer for answer in harness.device.step() if isinstance(answer, Generated)]
    assert [(a.request_id, a.sample, a.finish_reason) for a in out] == [(r, i, "cancelled") for r in "xy" for i in (0, 1)]
    reading.set_exception(OSError("the disk is gone"))
    assert harness.device.step() == [] and not harness.device.has_work()
