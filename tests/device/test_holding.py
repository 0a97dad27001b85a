"""The device keeps the snapshots that an evaluation needs, and no longer than it does."""

import msgspec

from marlaas_jax.messages import AddJob, Generate, Generated, ReleaseSnapshot, Sampling
from tests.device.harness import failures, run_config, steps_done


def answer(harness, name, version):
    """Returns what one greedy request of a version gives."""
    harness.device.handle(Generate(f"e{version}", name, 0, (5, 9, 13), (1,), Sampling(temperature=0.0, max_tokens=6), version))
    (found,) = [a for a in harness.drain() if isinstance(a, Generated)]
    return found


def test_what_a_batch_asks_to_hold_can_be_sampled_after_later_steps(make):
    harness = make(run_config(1, eval={"every_steps": 1}))
    job = harness.config.jobs[0].model_dump_json().encode()
    harness.device.handle(AddJob("a", 0, job, str(harness.tmp_path / "a"), hold=True))
    first = answer(harness, "a", 0)
    for step in range(3):
        batch = msgspec.structs.replace(harness.batch("a", step), hold=step == 0)
        assert steps_done(harness.device.handle(batch) + harness.drain())
    assert answer(harness, "a", 0).logprobs == first.logprobs, "the same weights after three steps"
    held = answer(harness, "a", 1)
    assert held.version == 1 and held.fingerprint not in ("", first.fingerprint)
    assert "not kept" in answer(harness, "a", 2).error
    for version in (0, 1):
        assert harness.device.handle(ReleaseSnapshot("a", 0, version)) == []
    assert "not kept" in answer(harness, "a", 0).error and "not kept" in answer(harness, "a", 1).error
    assert harness.device.gauges()["engine/kept_snapshots"] == 1
    assert not failures(harness.train("a", 3))
