"""The learner as a whole: isolation, minibatches, proximal and base log-probs, failure, resume, and that it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marlaas_jax.errors import CorruptFile, InternalError, InvalidRequest, NotFound, WrongWeights
from marlaas_jax.fairness import Owner
from marlaas_jax.lora.adapter import AdapterSpec
from marlaas_jax.messages import JobFailed, StepDone, TrainBatch, TrainGroup
from marlaas_jax.rl.advantages import group_advantages
from tests.learner import small

# jobs that differ in everything that is data
JOBS = {
    "a": (small.make_job("a"), small.SPEC),
    "b": (
        small.make_job(
            "b", algorithm={"loss": "dapo", "kl_weight": 0.2}, optimizer={"learning_rate": 0.003, "max_grad_norm": None}
        ),
        AdapterSpec(2, 8.0, ("q", "v", "down"), seed=2),
    ),
    "c": (
        small.make_job(
            "c",
            algorithm={"loss": "gspo", "objective": "decoupled", "minibatches": 2},
            optimizer={"beta1": 0.5, "schedule": "cosine"},
        ),
        AdapterSpec(1, 2.0, small.SPEC.targets, seed=3),
    ),
}


def open_job(learner, name, **options):
    config, spec = JOBS[name]
    weights = None if "state" in options else small.trained_weights(spec, seed=spec.seed)
    learner.add_job(name, 0, config, spec, weights=weights, **options)


def batch_of(name, step=0):
    return small.make_batch(name, step, seed=ord(name), groups=3, rows=4)


def same(one, other, tolerance=1e-5):
    assert one["counters"] == other["counters"]
    for name, array in one["arrays"].items():
        scale = np.abs(other["arrays"][name]).max()
        np.testing.assert_allclose(array / scale, other["arrays"][name] / scale, atol=tolerance)


@pytest.fixture(scope="module")
def alone():
    """State of each job after one batch trained by itself."""
    states = {}
    for name in JOBS:
        learner = small.make_learner()
        open_job(learner, name)
        small.run(learner, batch_of(name))
        states[name] = learner.state(name)
    return states


def test_an_update_among_others_equals_the_update_alone(alone):
    learner = small.make_learner()
    for name in JOBS:
        open_job(learner, name)
    done = small.run(learner, *(batch_of(name) for name in JOBS))
    assert sorted(d.job for d in done) == ["a", "b", "c"]
    for name in JOBS:
        same(learner.state(name), alone[name])


def test_an_exact_job_shares_neither_micro_batches_nor_optimizer_steps(monkeypatch):
    together, updates = [], []
    learner = small.make_learner()
    start, update = learner._start, learner._executor.update
    monkeypatch.setattr(learner, "_start", lambda ready: together.append(start(ready)) or together[-1])
    monkeypatch.setattr(learner._executor, "update", lambda slots, hyper: updates.append(slots) or update(slots, hyper))
    for name, isolation in (("a", "shared"), ("b", "exact"), ("c", "shared")):
        config = small.make_job(name, isolation=isolation, rollout={"max_staleness": 0})
        learner.add_job(name, 0, config, small.SPEC)
    done = small.run(learner, *(small.make_batch(name) for name in "abc"))
    assert sorted(d.job for d in done) == ["a", "b", "c"] and [learner._slots["b"]] in updates
    assert sum(map(len, updates)) == 3
    owners = [{job.name for job, _ in running.work} for running in together]
    assert {"b"} in owners and {"a", "c"} in owners
    assert not any("b" in names and len(names) > 1 for names in owners)
    for name in "abc":
        learner.submit(small.make_batch(name, step=1, advantage=0.0))  # nothing to compute: due at once
    turns = []
    while due := learner._due():
        turns.append([job.name for job in due])
        learner.step()
    assert turns == [["a", "c"], ["b"]]


def test_bounded_dispatches_give_the_same_update(alone):
    """One program per dispatch, the next job's batch arriving between any two."""
    sizes = dataclasses.replace(small.SIZES, max_dispatch_s=1e-12)
    learner = small.make_learner(sizes=sizes)
    for name in JOBS:
        open_job(learner, name)
    learner.submit(batch_of("a"))
    steps = 0
    while learner.has_work():
        learner.step()
        steps += 1
        if steps in (5, 20):
            learner.submit(batch_of("b" if steps == 5 else "c"))
    assert steps > 60
    for name in JOBS:
        same(learner.state(name), alone[name])


def test_other_jobs_are_bit_identical_after_a_step_with_weight_decay(alone):
    learner = small.make_learner()
    for name in JOBS:
        open_job(learner, name)
    small.run(learner, batch_of("b"))
    before = {name: learner.state(name) for name in ("b", "c")}
    small.run(learner, batch_of("a"))
    for name in ("b", "c"):
        after = learner.state(name)
        assert after["counters"] == before[name]["counters"]
        for array in after["arrays"]:
            np.testing.assert_array_equal(after["arrays"][array], before[name]["arrays"][array])


def test_padding_above_a_smaller_rank_stays_zero_h04():
    learner = small.make_learner()
    for name in JOBS:
        open_job(learner, name)
    for step in range(3):
        small.run(learner, *(batch_of(name, step) for name in JOBS))
    for name, (_, spec) in JOBS.items():
        for target, factors in learner.weights(name).items():
            for array in factors.values():
                used = spec.rank if target in spec.targets else 0
                assert not array[:, used:].any()
                assert used == 0 or array[:, :used].any()


def test_log_probs_are_those_of_the_plain_pass_of_the_published_snapshot():
    """Design 13.2, the learner's side: what is scored are the weights that are published."""
    learner = small.make_learner()
    open_job(learner, "b")
    small.run(learner, batch_of("b"))
    snapshot = learner.snapshot("b")
    for length in (2, 5, 9, 12):  # in the probe, and over both parts of a block
        ids = np.random.default_rng(length).integers(0, 32, length)
        expected = small.plain_logprobs(small.params(), jax.device_get(snapshot.weights), snapshot.scale, ids.tolist())
        np.testing.assert_allclose(learner.score("b", ids), expected, atol=1e-5)
    assert learner.score("b", [3]).shape == (0,)
    with pytest.raises(InvalidRequest, match="40 tokens; the learner's buckets allow at most 16"):
        learner.score("b", [1] * 40)


def test_kl_to_the_base_uses_the_null_adapter():
    """With the adapter still at its start the policy is the base: KL and its gradient are zero; later they are not."""
    config = small.make_job("a", algorithm={"kl_weight": 0.5})
    learner = small.make_learner()
    learner.add_job("a", 0, config, small.SPEC)
    [first] = small.run(learner, small.make_batch("a", 0))
    assert first.metrics["learner/base_kl"] == pytest.approx(0.0, abs=1e-6)
    [second] = small.run(learner, small.make_batch("a", 1))
    assert second.metrics["learner/base_kl"] > 1e-5
    assert learner.counters["scored_micro_batches"] > 0


def test_minibatches_step_in_turn_and_proximal_log_probs_stay_those_of_the_start():
    learner = small.make_learner()
    open_job(learner, "c")
    ids = [1, 2, 3, 4, 5]
    before = learner.score("c", ids)
    [done] = small.run(learner, batch_of("c"))
    assert (done.step, done.version) == (1, 2)
    assert done.metrics["learner/num_optimizer_steps"] == 2
    assert np.abs(learner.score("c", ids) - before).max() > 1e-4
    # A decoupled batch of one minibatch needs no scoring: its anchor is the policy itself, at ratio 1.
    config = small.make_job("d", algorithm={"objective": "decoupled"})
    learner.add_job("d", 0, config, small.SPEC, weights=small.trained_weights(small.SPEC))
    scored = learner.counters["scored_micro_batches"]
    [one] = small.run(learner, small.make_batch("d"))
    assert learner.counters["scored_micro_batches"] == scored
    assert one.metrics["learner/ratio_mean"] == pytest.approx(1.0) and one.metrics["learner/clip_share"] == 0


def test_more_minibatches_than_groups_skip_the_empty_ones():
    learner = small.make_learner()
    learner.add_job("a", 0, small.make_job("a", algorithm={"minibatches": 4}), small.SPEC)
    [done] = small.run(learner, small.make_batch("a", groups=2))
    assert (done.version, done.metrics["learner/num_skipped_flat"]) == (4, 2)


def test_flat_groups_move_nothing_h23():
    learner = small.make_learner()
    open_job(learner, "a")
    small.run(learner, batch_of("a"))  # moments are not zero any more
    before = learner.state("a")
    [done] = small.run(learner, small.make_batch("a", 1, advantage=0.0))
    after = learner.state("a")
    for name in before["arrays"]:
        np.testing.assert_array_equal(after["arrays"][name], before["arrays"][name])
    assert done.version == 2 and done.metrics["learner/num_skipped_flat"] == 1
    assert done.metrics["learner/num_loss_tokens"] > 0 and done.metrics["learner/num_computed_loss_tokens"] == 0
    assert all(np.isfinite(v) for v in done.metrics.values())


def test_rows_without_gradient_still_count_in_the_normaliser():
    """Leaving out the computation of rows with advantage 0 must not change what the others weigh."""
    batch = small.make_batch("a", groups=2, rows=4)
    group = batch.groups[0]
    rows = (*group.rows[:2], *(small.make_row(np.random.default_rng(i), 5, advantage=0.0) for i in range(2)))
    mixed = TrainBatch("a", 0, 0, (TrainGroup(0, 0, group.prompt_ids, rows),), b"", 0.0)
    learner = small.make_learner()
    learner.add_job("a", 0, small.make_job("a"), small.SPEC, weights=small.trained_weights(small.SPEC))
    [done] = small.run(learner, mixed)
    value, gradient = small.plain_grpo(small.params(), small.trained_weights(small.SPEC), small.SPEC.scale, mixed)
    norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradient)))
    assert done.metrics["learner/loss"] == pytest.approx(value, abs=1e-6)
    assert done.metrics["learner/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_truncated_episodes_leave_numerator_and_denominator_h25():
    batch = small.make_batch("a", groups=1, rows=4)
    [group] = batch.groups
    cut = tuple(small.make_row(np.random.default_rng(9), 6, truncated=True) for _ in range(4))
    mixed = TrainBatch("a", 0, 0, (TrainGroup(0, 0, group.prompt_ids, (*group.rows, *cut)),), b"", 0.0)
    config = small.make_job("a", algorithm={"mask_truncated": True})
    done = []
    for sent in (batch, mixed):
        learner = small.make_learner()
        learner.add_job("a", 0, config, small.SPEC, weights=small.trained_weights(small.SPEC))
        done += small.run(learner, sent)
    for name in ("loss", "grad_norm", "num_loss_tokens", "num_rows", "entropy"):
        assert done[0].metrics[f"learner/{name}"] == pytest.approx(done[1].metrics[f"learner/{name}"], rel=1e-5)
    learner = small.make_learner()
    learner.add_job("a", 0, config, small.SPEC)
    [empty] = small.run(learner, TrainBatch("a", 0, 0, (TrainGroup(0, 0, group.prompt_ids, cut),), b"", 0.0))
    assert empty.metrics["learner/loss"] == 0 and empty.metrics["learner/num_skipped_flat"] == 1


def test_a_gradient_that_is_not_finite_skips_one_job_only_and_fails_it_after_n_in_a_row():
    learner = small.make_learner()
    config = small.make_job("a", optimizer={"max_nonfinite_steps": 2})
    learner.add_job("a", 0, config, small.SPEC, weights=small.trained_weights(small.SPEC))
    open_job(learner, "b")
    before = learner.state("a")["arrays"]

    def poisoned(step):
        batch = small.make_batch("a", step)
        row = batch.groups[0].rows[0]
        bad = np.full(len(row.token_ids), np.nan, "<f4").tobytes()
        rows = (small.make_row(np.random.default_rng(1), len(row.token_ids), logprobs=bad), *batch.groups[0].rows[1:])
        return TrainBatch("a", 0, step, (TrainGroup(0, 0, (1, 2), rows), *batch.groups[1:]), b"", 0.0)

    done = {d.job: d for d in small.run(learner, poisoned(0), batch_of("b"))}
    assert done["a"].metrics["learner/num_skipped_nonfinite"] == 1 and done["a"].version == 1
    assert all(np.isfinite(v) for v in done["a"].metrics.values())
    assert done["b"].metrics["learner/num_optimizer_steps"] == 1
    for name, array in learner.state("a")["arrays"].items():
        np.testing.assert_array_equal(array, before[name])
    [good] = small.run(learner, small.make_batch("a", 1))  # breaks the row
    assert good.metrics["learner/num_optimizer_steps"] == 1
    [third] = small.run(learner, poisoned(2))
    assert isinstance(third, StepDone)
    [fourth] = small.run(learner, poisoned(3))
    assert isinstance(fourth, JobFailed) and fourth.kind == "NonFinite" and "max_nonfinite_steps=2" in fourth.reason
    assert not learner.submit(small.make_batch("a", 4)) and not learner.has_work()
    [other] = small.run(learner, batch_of("b", 1))
    assert other.step == 2


def test_stale_and_repeated_batches_change_nothing():
    learner = small.make_learner()
    open_job(learner, "a")
    assert learner.submit(batch_of("a"))
    assert not learner.submit(batch_of("a"))
    assert not learner.submit(TrainBatch("a", 7, 0, (), b"", 0.0))
    assert not learner.submit(TrainBatch("gone", 0, 0, (), b"", 0.0))
    with pytest.raises(InternalError, match="batch 3 came before batch 1"):
        learner.submit(batch_of("a", 3))
    small.run(learner)
    state = learner.state("a")
    assert not learner.submit(batch_of("a")) and not learner.has_work()
    same(learner.state("a"), state, tolerance=0)
    with pytest.raises(NotFound, match="'x' is not open in the learner; open: a"):
        learner.snapshot("x")


@pytest.mark.parametrize("at", [1, 3, 9, 14])
def test_a_slot_is_wiped_when_it_changes_hands_even_within_a_micro_batch_h02(at, alone):
    learner = small.make_learner(sizes=dataclasses.replace(small.SIZES, max_dispatch_s=1e-12))
    open_job(learner, "a")
    open_job(learner, "b")
    learner.submit(batch_of("b"))
    learner.submit(batch_of("a"))
    for _ in range(at):
        learner.step()
    learner.remove_job("a")
    learner.remove_job("a")
    learner.add_job("a", 1, *JOBS["a"])
    fresh = learner.score("a", [1, 2, 3, 4])
    small.run(learner)
    state = learner.state("a")
    assert not any(state["arrays"][name].any() for name in ("first_moment", "second_moment"))
    assert set(state["counters"].values()) == {0}
    base = small.plain_logprobs(small.params(), learner.weights("a"), 0.0, [1, 2, 3, 4])
    np.testing.assert_allclose(fresh, base, atol=1e-6)  # a fresh adapter samples like the base
    same(learner.state("b"), alone["b"])
    # its first update is that of a fresh slot: no gradient was left in the accumulator
    other = small.make_learner()
    other.add_job("a", 1, *JOBS["a"])
    sent = TrainBatch("a", 1, 0, batch_of("a").groups, b"", 0.0)
    small.run(learner, sent)
    small.run(other, sent)
    same(learner.state("a"), other.state("a"))


@pytest.mark.parametrize("stop", [1, 2])
def test_resumed_equals_uninterrupted_number_for_number_h38(stop):
    straight = small.make_learner()
    open_job(straight, "c")
    for step in range(3):
        small.run(straight, batch_of("c", step))
    first = small.make_learner()
    open_job(first, "c")
    for step in range(stop):
        small.run(first, batch_of("c", step))
    saved = first.state("c")
    for _ in range(2):  # twice from the same checkpoint: the same result
        second = small.make_learner()
        open_job(second, "a")  # the job comes back in another slot
        open_job(second, "c", state=saved)
        same(second.state("c"), saved, tolerance=0)
        for step in range(stop, 3):
            small.run(second, batch_of("c", step))
        same(second.state("c"), straight.state("c"), tolerance=0)


def test_a_state_of_another_shape_is_refused():
    learner = small.make_learner()
    open_job(learner, "a")
    saved = learner.state("a")
    other = small.make_learner()
    with pytest.raises(CorruptFile, match=r"'adapter'.*rank 2 over q, v, down needs"):
        other.add_job("b", 0, *JOBS["b"], state=saved)
    with pytest.raises(CorruptFile, match="second_moment, count missing"):
        broken = {
            "arrays": {k: v for k, v in saved["arrays"].items() if k != "second_moment"},
            "counters": {k: v for k, v in saved["counters"].items() if k != "count"},
        }
        other.add_job("a", 0, *JOBS["a"], state=broken)
    open_job(other, "a")  # a refusal takes no slot


def test_state_is_not_given_between_minibatches():
    learner = small.make_learner()
    open_job(learner, "c")
    learner.submit(batch_of("c"))
    while not learner._jobs["c"].batches[0].done:
        learner.step()
    with pytest.raises(InternalError, match="between two minibatches"):
        learner.state("c")


def test_a_snapshot_is_a_copy_in_the_samplers_dtype():
    learner = small.make_learner(sampler_dtype=jnp.bfloat16)
    open_job(learner, "a")
    first = learner.snapshot("a")
    kept = jax.device_get(first.weights)
    small.run(learner, batch_of("a"))
    second = learner.snapshot("a")
    assert (first.version, second.version) == (0, 1) and first.fingerprint != second.fingerprint
    assert {x.dtype for x in jax.tree.leaves(second.weights)} == {jnp.dtype(jnp.bfloat16)}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(first.weights), kept)
    assert learner.snapshot("a").fingerprint == second.fingerprint  # nothing trained in between: no error


def test_a_publish_that_changes_nothing_after_a_gradient_is_an_error_h09_h26(monkeypatch):
    learner = small.make_learner()
    open_job(learner, "a")
    learner.snapshot("a")
    stale = learner._executor.published(learner._slots["a"], learner._dtype)
    small.run(learner, batch_of("a"))
    monkeypatch.setattr(learner._executor, "published", lambda slot, dtype: stale)
    with pytest.raises(WrongWeights, match="version 1: an update with a gradient changed nothing"):
        learner.snapshot("a")


def test_nothing_compiles_after_warm_up_h44():
    learner = small.make_learner()
    programs: list[str] = []
    learner.warmup(programs.append)
    assert len(programs) == len(set(programs)) == learner.sizes.num_programs <= 24
    with jax.no_tracing():
        for name in JOBS:
            open_job(learner, name)
            learner.snapshot(name)
        for step in range(2):
            small.run(learner, *(batch_of(name, step) for name in JOBS))
            for name in JOBS:
                learner.snapshot(name)
                learner.score(name, [1, 2, 3, 4])
        state = learner.state("b")
        learner.remove_job("b")
        learner.add_job("b", 1, *JOBS["b"], state=state)


def test_jobs_share_the_learner_by_weight():
    """With one heavy and one light job always waiting, micro-batches are dealt out 3 : 1."""
    learner = small.make_learner(
        sizes=dataclasses.replace(small.SIZES, shapes=(dataclasses.replace(small.SHAPES[1], blocks=1),))
    )
    learner.add_job("a", 0, small.make_job("a", weight=3.0), small.SPEC)
    learner.add_job("b", 0, small.make_job("b", weight=1.0), small.SPEC)
    for name in ("a", "b"):
        learner.submit(small.make_batch(name, groups=24, rows=2))
    served = {"a": 0, "b": 0}
    while sum(served.values()) < 16:
        learner.step()
        served = {n: 24 - len(learner._jobs[n].batches[0].current.work) for n in served}
    assert served == {"a": 12, "b": 4}


def test_a_tenants_jobs_share_what_the_tenant_gets_of_the_learner():
    """Two jobs of weight 1000 of one tenant beside one of weight 1 of another: blocks are dealt out 1 : 1, later 3 : 1."""
    learner = small.make_learner(
        sizes=dataclasses.replace(small.SIZES, shapes=(dataclasses.replace(small.SHAPES[1], blocks=1),))
    )
    for name, owner, weight in (("a1", "a", 1000.0), ("a2", "a", 1000.0), ("b", "b", 1.0)):
        learner.add_job(name, 0, small.make_job(name, weight=weight), small.SPEC, owner=Owner(owner, 1.0))
        learner.submit(small.make_batch(name, groups=24, rows=2))

    def served_after(steps: int) -> list[int]:
        while sum(served := [24 - len(learner._jobs[n].batches[0].current.work) for n in ("a1", "a2", "b")]) < steps:
            learner.step()
        return served

    assert served_after(16) == [4, 4, 8]
    learner.reweigh(Owner("b", 3.0))
    assert served_after(32) == [6, 6, 20]


def test_metrics_are_means_over_tokens_of_known_values():
    learner = small.make_learner()
    weights = small.trained_weights(small.SPEC)
    learner.add_job("a", 0, small.make_job("a"), small.SPEC, weights=weights)
    rng = np.random.default_rng(0)
    prompt = (1, 2, 3)
    rows, gaps = [], []
    for length in (3, 2):
        ids = tuple(int(t) for t in rng.integers(0, 32, length))
        logprob = small.plain_logprobs(small.params(), weights, small.SPEC.scale, (*prompt, *ids))[2:]
        gap = rng.normal(0, 0.1, length)
        gaps.append(gap)
        row = small.make_row(rng, length, token_ids=ids, logprobs=(logprob - gap).astype("<f4").tobytes())
        rows.append(row)
    [done] = small.run(learner, TrainBatch("a", 0, 0, (TrainGroup(0, 0, prompt, tuple(rows)),), b"", 0.0))
    gap = np.concatenate(gaps)
    m = done.metrics
    assert m["learner/num_loss_tokens"] == 5 and m["learner/num_rows"] == 2
    assert m["learner/ratio_mean"] == pytest.approx(np.exp(gap).mean(), rel=1e-4)
    assert m["learner/ratio_max"] == pytest.approx(np.exp(gap).max(), rel=1e-4)
    assert m["learner/behaviour_kl"] == pytest.approx((np.exp(gap) - 1 - gap).mean(), rel=1e-2)
    assert m["learner/staleness_max"] == 0 and m["learner/learning_rate"] == pytest.approx(0.01)


def test_it_learns_a_bandit():
    """Reward 1 for a token from one half of the vocabulary: sampled from the published weights, the mean reward rises."""
    model_params = small.params()
    model_params["embed_VD"] = model_params["embed_VD"] * 25  # logits of a spread that an adapter can move
    learner = small.make_learner(model_params)
    config = small.make_job("a", optimizer={"learning_rate": 0.02, "weight_decay": 0.0}, algorithm={"loss": "dapo"})
    learner.add_job("a", 0, config, small.SPEC)
    rng = np.random.default_rng(0)
    means = []
    for step in range(12):
        snapshot = learner.snapshot("a")
        weights = jax.device_get(snapshot.weights)
        groups, rewards = [], []
        for prompt in ((3, 1, 4), (1, 5, 9, 2)):
            log_p = np.asarray(small.plain_log_softmax(model_params, weights, snapshot.scale, [prompt]))[0, len(prompt) - 1]
            tokens = rng.choice(32, size=8, p=np.exp(log_p) / np.exp(log_p).sum())
            reward = [float(t < 16) for t in tokens]
            advantages = group_advantages(reward, normalize_std=True)
            rows = tuple(
                small.make_row(
                    rng,
                    1,
                    version=snapshot.version,
                    advantage=float(a),
                    token_ids=(int(t),),
                    logprobs=log_p[t].astype("<f4").tobytes(),
                )
                for t, a in zip(tokens, advantages, strict=True)
            )
            groups.append(TrainGroup(len(groups), 0, prompt, rows))
            rewards += reward
        means.append(np.mean(rewards))
        small.run(learner, TrainBatch("a", 0, step, tuple(groups), b"", 0.0))
    assert np.mean(means[:3]) < 0.72 and np.mean(means[-3:]) > 0.88, means
