"""Wrong weights cannot hide: whatever goes wrong between learner and sampler stops that job within one step (H09, H10, H26)."""

import dataclasses

import jax
import numpy as np
import pytest

from marlaas_jax.messages import JobReady
from tests.device.harness import failures, run_config, steps_done


def zero_factor(snapshot):
    weights = dict(snapshot.weights)
    weights["q"] = {"down": snapshot.weights["q"]["down"], "up": np.zeros_like(np.asarray(snapshot.weights["q"]["up"]))}
    return dataclasses.replace(snapshot, weights=weights)


def half_of_the_keys(snapshot):
    """As an import whose names match only for the first half of the modules: the rest stays as it was, zero."""
    names = sorted(snapshot.weights)[::2]
    blank = lambda tree: jax.tree.map(lambda x: np.zeros_like(np.asarray(x)), tree)
    weights = {t: (w if t in names else blank(w)) for t, w in snapshot.weights.items()}
    return dataclasses.replace(snapshot, weights=weights)


def base_instead(snapshot):
    return dataclasses.replace(snapshot, weights=jax.tree.map(lambda x: np.zeros_like(np.asarray(x)), snapshot.weights))


def scaled_twice(snapshot):
    return dataclasses.replace(snapshot, scale=snapshot.scale * snapshot.scale)


class Previous:
    """Hands over the version before."""

    def __init__(self):
        self.last = None

    def __call__(self, snapshot):
        before, self.last = self.last or snapshot, snapshot
        return dataclasses.replace(before, version=snapshot.version)


@pytest.mark.parametrize(
    "fault",
    [zero_factor, half_of_the_keys, base_instead, scaled_twice, Previous()],
    ids=lambda f: getattr(f, "__name__", "previous"),
)
def test_a_fault_in_publishing_stops_its_job_within_one_step(make, fault):
    broken = {"on": False}
    transfer = lambda snapshot: fault(snapshot) if broken["on"] and snapshot.job == "a" else snapshot
    harness = make(run_config(2), transfer=transfer)
    assert [type(answer) for answer in harness.add("a") + harness.add("b")] == [JobReady, JobReady]
    if isinstance(fault, Previous):
        fault.last = harness.learner.snapshot("a")
    assert not failures(harness.train("a", 0)) and not failures(harness.train("b", 0))
    if isinstance(fault, Previous):
        fault.last = harness.learner.snapshot("a")
    broken["on"] = True
    answers = harness.train("a", 1)
    ((job, kind, reason),) = failures(answers)
    assert (job, kind) == ("a", "WrongWeights") and "version 2" in reason
    assert not steps_done(answers), "a step whose weights never reached the sampler must not count"
    assert [done.step for done in steps_done(harness.train("b", 1))] == [2], "the other job goes on"


def test_weights_in_the_wrong_slot_are_caught(make):
    harness = make(run_config(2))
    harness.add("a"), harness.add("b")
    harness.train("a", 0), harness.train("b", 0)
    engine = harness.sampler.engine
    real, slots = engine.write_adapter, {}

    def misplaced(params, slot, weights, scale):
        return real(params, slots.get("other", slot), weights, scale)

    slots["other"] = harness.sampler._residency.slot_of(next(k for k in harness.sampler._residency.resident if k.job == "b"))
    engine.write_adapter = misplaced
    ((job, kind, _),) = failures(harness.train("a", 1))
    assert (job, kind) == ("a", "WrongWeights")


def test_an_update_that_reaches_no_published_weight_is_an_error(make):
    """H26: the gradient is not zero, the optimizer ran, and what is published stays the same."""
    harness = make(run_config(1))
    harness.add("a")
    harness.train("a", 0)
    executor = harness.learner._executor
    frozen = executor.published(harness.learner._slots["a"], harness.learner._dtype)
    executor.published = lambda slot, dtype: frozen
    ((_, kind, reason),) = failures(harness.train("a", 1))
    assert kind == "WrongWeights" and "changed nothing" in reason


def test_the_canary_catches_a_sampler_that_computes_something_else(make):
    harness = make(run_config(1))
    harness.add("a")
    real = harness.sampler.score
    harness.sampler.score = lambda job, version, ids: real(job, version, ids) + 1e-3
    ((_, kind, reason),) = failures(harness.train("a", 0))
    assert kind == "WrongWeights" and "canary" in reason


def test_a_nan_adapter_fails_its_own_job_only(make):
    """H10: poisoned masters end in an explicit error, and the neighbour trains on."""
    harness = make(run_config(2))
    harness.add("a"), harness.add("b")
    real = harness.learner.snapshot
    nan = lambda tree: jax.tree.map(lambda x: np.full_like(np.asarray(x), np.nan), tree)

    def poisoned(job):
        snapshot = real(job)
        if job != "a":
            return snapshot
        weights = nan(snapshot.weights)
        from marlaas_jax.lora.snapshot import fingerprint

        return dataclasses.replace(snapshot, weights=weights, fingerprint=fingerprint(weights, snapshot.scale))

    harness.learner.snapshot = poisoned
    ((job, kind, reason),) = failures(harness.train("a", 0))
    assert (job, kind) == ("a", "WrongWeights") and "non-finite" in reason
    assert [done.step for done in steps_done(harness.train("b", 0))] == [1]
