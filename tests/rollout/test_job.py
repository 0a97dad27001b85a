"""One job against the scripted world, one rule at a time."""

import struct

import pytest

from marlaas_jax.fairness import Owner
from marlaas_jax.messages import EnvDone, EnvObservation, Generate
from marlaas_jax.rollout.commands import BatchSent, EpisodeEnded, EvalDone, JobDone, JobGivenUp, KillWorker
from tests.rollout.world import END, World, ready, settings


def records(world):
    return [command.record for command in world.seen[EpisodeEnded]]


def find(world, kind):
    return next(i for i, (what, _) in enumerate(world.pending) if what == kind)


def run_until(world, kind):
    while not any(what == kind for what, _ in world.pending):
        world.deliver()


def test_a_job_trains_every_ticket_once_and_ends():
    world = World()
    world.add(settings(steps=3))
    world.run()
    world.check()
    assert [group.ticket for batch in world.history["job"] for group in batch.groups] == [0, 1, 2, 3, 4, 5]
    assert len(world.seen[JobDone]) == 1 and world.seen[BatchSent][0].tickets == ((0, 0), (1, 0))


def test_a_group_with_one_prompt_is_one_request():
    world = World()
    world.add(settings(group_size=4))
    run_until(world, "generated")
    assert len(world.generates[0].seeds) == 4 and len(set(world.generates[0].seeds)) == 4


def test_multi_turn_ids_are_kept_and_only_sampled_ones_are_trained():
    """H20: the ids trained are those sampled; the environment's have mask 0; later turns extend the same ids."""
    world = World(turns=3)
    world.add(settings(steps=1, groups_per_batch=1, group_size=2))
    world.run()
    group = world.history["job"][0].groups[0]
    assert group.prompt_ids == (90, 91)
    for row in group.rows:
        assert row.loss_mask == bytes([1, 1, 0, 0, 1, 1, 0, 0, 1, 1])
        assert row.token_ids[2:4] == (92, 93) and row.token_ids[1] == END
        logprobs = struct.unpack("<10f", row.logprobs)
        assert logprobs == (-0.5, -0.25, 0, 0, -0.5, -0.25, 0, 0, -0.5, -0.25)
        assert struct.unpack("<10i", row.versions) == (0, 0, -1, -1, 0, 0, -1, -1, 0, 0)
    asked = [g for g in world.generates if len(g.prompt_ids) == 10]
    assert {g.prompt_ids[2:] for g in asked} == {row.token_ids[:8] for row in group.rows}


def test_seeds_differ_between_samples_and_turns():
    world = World(turns=2)
    world.add(settings(steps=1))
    world.run()
    seeds = [seed for request in world.generates for seed in request.seeds]
    assert len(seeds) == len(set(seeds)) and all(0 <= seed < 2**63 for seed in seeds)


def test_an_episode_that_would_pass_the_context_ends_as_truncated():
    """H22: turn 1 would start at 2 + 2 + 2 tokens; a context of 6 leaves no room, so the reward is 0 and nothing is sent."""
    world = World(turns=3)
    world.add(settings(steps=1, max_context=6))
    world.run()
    ended = records(world)
    assert {record["outcome"] for record in ended} == {"truncated"} and {record["reward"] for record in ended} == {0.0}
    assert all(row.truncated and len(row.token_ids) == 2 for g in world.history["job"][0].groups for row in g.rows)
    assert "max_context=6" in ended[0]["note"]


@pytest.mark.parametrize(("max_context", "fits"), [(3, True), (2, False), (1, False)])
def test_a_prompt_that_fills_the_context_is_refused_before_any_request(max_context, fits):
    """H22: two prompt tokens need a context of at least three."""
    world = World()
    world.add(settings(steps=1, max_context=max_context))
    world.run()
    assert bool(world.generates) == fits
    if not fits:
        assert "the prompt has 2 tokens" in world.seen[JobGivenUp][0].reason
        assert f"max_context={max_context}" in world.seen[JobGivenUp][0].reason
        assert world.seen[JobGivenUp][0].kind == "InvalidRequest", "for the caller to mend"


def test_max_turns_truncates():
    world = World(turns=9)
    world.add(settings(steps=1, max_turns=2))
    world.run()
    assert {(r["outcome"], r["reward"], len(r["turns"])) for r in records(world)} == {("truncated", 0.0, 2)}


def test_equal_rewards_give_no_advantage_and_are_counted():
    """H23."""
    world = World(reward=lambda seed, text: 1.0)
    world.add(settings(steps=1))
    world.run()
    assert all(row.advantage == 0.0 for group in world.history["job"][0].groups for row in group.rows)
    assert world.seen[BatchSent][0].metrics["rollout/live_share"] == 0.0


def test_a_group_of_one_has_advantage_zero():
    """H23."""
    world = World()
    world.add(settings(steps=1, group_size=1))
    world.run()
    assert [row.advantage for group in world.history["job"][0].groups for row in group.rows] == [0.0, 0.0]


def test_missing_rewards_leave_the_statistics():
    """H24: rewards 1, None, 0, NaN count as 1 and 0."""
    world = World()
    answers = iter([1.0, None, 0.0, float("nan")])
    world.reward = lambda seed, text: next(answers)
    world.add(settings(steps=1, groups_per_batch=1, group_size=4, normalize_std=False))
    world.run()
    group = world.history["job"][0].groups[0]
    assert sorted(row.advantage for row in group.rows) == [-0.5, 0.5]
    metrics = world.seen[BatchSent][0].metrics
    assert metrics["rollout/reward_mean"] == 0.5 and metrics["rollout/num_missing_rewards"] == 2
    assert [r["reward"] for r in records(world)].count(None) == 2


@pytest.mark.parametrize("reward", [float("inf"), -float("inf"), 1e300])
def test_a_reward_beyond_all_bounds_counts_as_missing(reward):
    """H24: it stops neither the job nor the arithmetic."""
    world = World()
    answers = iter([reward, 1.0, 0.0])
    world.reward = lambda seed, text: next(answers)
    world.add(settings(steps=1, groups_per_batch=1, group_size=3, normalize_std=False))
    world.run()
    assert sorted(row.advantage for row in world.history["job"][0].groups[0].rows) == [-0.5, 0.5]
    assert any("counts as missing" in record["note"] for record in records(world))


def test_a_group_without_rewards_is_replaced_under_its_ticket():
    world = World()
    answers = iter([None, None])
    world.reward = lambda seed, text: next(answers, float(seed % 2))
    world.add(settings(steps=1, groups_per_batch=1))
    world.run()
    group = world.history["job"][0].groups[0]
    assert (group.ticket, group.attempt) == (0, 1)
    assert len({seed for request in world.generates for seed in request.seeds}) == 4, "the new attempt draws anew"


def test_exhausted_tickets_make_a_smaller_batch():
    world = World()
    world.reward = lambda seed, text: 1.0
    world.add(settings(steps=1, groups_per_batch=2, max_attempts=2, max_staleness=0))
    while world.pending:  # every call of ticket 1 fails
        kind, what = world.pending[0]
        if kind == "step" and what[1].episode_id.split("/")[3] == "1":
            world.fail_call(0, "raised")
        else:
            world.deliver()
    batch = world.history["job"][0]
    assert [group.ticket for group in batch.groups] == [0]
    assert world.seen[BatchSent][0].metrics["rollout/num_empty_places"] == 1
    assert world.seen[JobDone]


@pytest.mark.parametrize("rule", [True, False])
def test_a_reward_that_always_raises_ends_the_job_with_its_reason(rule):
    world = World()
    world.add(settings(fail_when_exhausted=rule))
    while world.pending:
        kind = world.pending[0][0]
        if kind == "step":
            world.fail_call(0, "raised")
        else:
            world.deliver()
    assert len(world.seen[JobGivenUp]) == 1 and not world.history["job"]
    assert world.seen[JobGivenUp][0].kind == "EnvironmentFailed" and "raised in step" in world.seen[JobGivenUp][0].reason
    assert all(record["outcome"] in ("failed", "cancelled") for record in records(world))


def test_a_call_that_times_out_ends_only_its_episode():
    """H28: the rest of the group goes on."""
    world = World(reward=lambda seed, text: 1.0)
    world.add(settings(steps=1, groups_per_batch=1, group_size=3))
    run_until(world, "step")
    world.fail_call(find(world, "step"), "timeout")
    world.run()
    assert sorted(r["outcome"] for r in records(world)) == ["finished", "finished", "timed_out"]
    assert len(world.history["job"][0].groups[0].rows) == 2


def test_late_answers_are_ignored():
    """H28: an answer for an ended episode or an older attempt changes nothing."""
    world = World()
    world.add(settings(steps=1, groups_per_batch=1))
    run_until(world, "step")
    _, (worker, message) = world.pending[find(world, "step")]
    world.fail_call(find(world, "step"), "timeout")
    rollout = world.orchestrator.jobs["job"]
    before = rollout.tally.as_dict()
    for attempt in (message.attempt, message.attempt + 1):
        world.orchestrator.on_env_done(worker, EnvDone(message.episode_id, attempt, 1.0), world.now)
        world.orchestrator.on_env_observation(worker, EnvObservation(message.episode_id, attempt, 1, text="x"), world.now)
    after = rollout.tally.as_dict()
    assert after.pop("late_answers") == 4 and before.pop("late_answers") == 0 and after == before


def test_a_lost_worker_restarts_its_episodes_elsewhere():
    """H27: they start as new attempts on another worker, and the job trains what it would have trained."""
    world = World(turns=2, workers=("w0", "w1"))
    world.add(settings(steps=2))
    run_until(world, "step")
    world.lose_worker("w0")
    world.run()
    world.check()
    assert [group.ticket for batch in world.history["job"] for group in batch.groups] == [0, 1, 2, 3]
    assert any(record["attempt"] == 1 for record in records(world)) and world.seen[JobDone]


def test_an_environment_that_must_not_be_retried_fails_with_its_worker():
    world = World()
    world.add(settings(steps=1, retry_lost=False))
    run_until(world, "step")
    world.lose_worker("w0")
    assert any(r["outcome"] == "failed" and r["note"].startswith("lost") for r in records(world))


def test_workers_that_die_again_and_again_end_the_job():
    """H27: restarts are capped; the cap ends the job with the reason."""
    world = World()
    world.add(settings(max_attempts=100))
    for _ in range(5):
        run_until(world, "step")
        world.lose_worker(world.workers[0])
    assert "5 environment workers in a row" in world.seen[JobGivenUp][0].reason and "killed" in world.seen[JobGivenUp][0].reason


def test_a_hung_worker_is_killed_and_only_the_culprit_times_out():
    """H27, H28: nothing was answered for longer than a call may take; the oldest call is to blame."""
    world = World(reward=lambda seed, text: 1.0)
    world.add(settings(steps=1, groups_per_batch=1, group_size=3))
    run_until(world, "step")
    while any(kind == "generated" for kind, _ in world.pending):
        world.deliver(find(world, "generated"))
    world.tick(14.0)
    assert not world.seen[KillWorker]
    world.tick(2.0)
    assert [command.worker_id for command in world.seen[KillWorker]] == ["w0"]
    world.add_worker()
    world.run()
    assert sorted(r["outcome"] for r in records(world)) == ["finished", "finished", "timed_out"]
    assert len(world.history["job"][0].groups[0].rows) == 2


def test_a_busy_worker_that_answers_is_not_hung():
    world = World()
    world.add(settings(steps=1, groups_per_batch=1, group_size=4))
    run_until(world, "step")
    while any(kind == "generated" for kind, _ in world.pending):
        world.deliver(find(world, "generated"))
    for _ in range(4):
        world.tick(9.0)
        world.deliver(find(world, "step"))
    assert not world.seen[KillWorker] and len(world.history["job"]) + len(world.pending) == 1


def test_lost_items_are_asked_for_again_and_then_fail_the_ticket():
    world = World()
    world.add(settings(steps=1, groups_per_batch=1, max_attempts=2, max_staleness=0))
    for _ in range(4):
        assert world.pending.pop(0)[0] == "item"
        world.tick(61.0)
    assert "no answer within 60 s" in world.seen[JobGivenUp][0].reason


def test_a_silent_sampler_ends_the_episode_and_withdraws_the_request():
    world = World()
    world.add(settings(steps=1, groups_per_batch=1, max_staleness=0))
    run_until(world, "generated")
    world.pending.clear()
    assert str(world.orchestrator.why("job", world.now)[0]).startswith("generate: episode job/1/train/0/")
    world.tick(601.0)
    assert {r["outcome"] for r in records(world)} == {"timed_out"}
    assert world.pending and world.pending[0][0] == "item", "its ticket starts again"


def test_the_episode_has_its_own_limit():
    world = World(turns=3)
    world.add(settings(steps=1, groups_per_batch=1, episode_timeout_s=15.0, max_staleness=0))
    for _ in range(2):
        run_until(world, "step")
        world.now += 9.0
        while world.pending and not world.seen[EpisodeEnded]:
            if world.pending[0][0] == "step" and world.orchestrator.jobs["job"].tally.sent == 2:
                world.deliver()
                break
            world.deliver()
        world.tick(0.0)
    assert any(r["outcome"] == "timed_out" and "episode_timeout_s=15" in r["note"] for r in records(world))


def test_weights_that_were_never_published_end_the_job():
    """H09: a completion whose fingerprint is not the published one."""
    world = World()
    world.add(settings())
    run_until(world, "generated")
    request, sample = world.pending[find(world, "generated")][1]
    from marlaas_jax.messages import Generated

    wrong = Generated(request.request_id, sample, "job", 1, (5,), bytes(4), bytes(4), "stop", 0, 0, "other", text="x")
    world.orchestrator.on_generated(wrong, world.now)
    world.collect()
    assert world.seen[JobGivenUp][0].kind == "WrongWeights" and "fp0" in world.seen[JobGivenUp][0].reason


def test_evaluations_come_before_the_first_and_after_the_last_step():
    world = World(reward=lambda seed, text: 1.0)
    world.add(settings(steps=2, eval_items=3), eval_before=True)
    world.run()
    done = world.seen[EvalDone]
    assert [(d.phase, d.step, d.reward_mean, d.num_items) for d in done] == [("before", 0, 1.0, 3), ("after", 2, 1.0, 3)]
    assert len(world.seen[JobDone]) == 1
    evaluated = [g for g in world.generates if g.sampling.temperature == 0.0]
    assert len(evaluated) == 6 and evaluated[:3] != evaluated[3:]
    assert [g.seeds for g in evaluated[:3]] == [g.seeds for g in evaluated[3:]], "both phases draw the same"


def test_the_first_evaluation_sees_the_untrained_policy():
    world = World()
    world.add(settings(steps=2, eval_items=2, max_staleness=4), eval_before=True)
    while world.pending:  # everything but the evaluation goes first
        index = next((i for i, (k, w) in enumerate(world.pending) if not is_eval(k, w)), None)
        if index is None:
            break
        world.deliver(index)
    assert not world.seen[BatchSent]
    world.run()
    assert len(world.history["job"]) == 2


def is_eval(kind, what):
    text = str(what[0] if kind == "generated" else what)
    if kind == "generated":
        return what[0].sampling.temperature == 0.0
    return "eval" in text


def test_resume_goes_on_from_the_ledger_without_gap_or_repeat():
    """The ledger of batch 1 restores a job that trains the remaining tickets and only those."""
    world = World()
    world.add(settings(steps=4))
    while len(world.history["job"]) < 2:
        world.deliver()
    ledger = world.history["job"][1].ledger
    first = [group.ticket for batch in world.history["job"][:2] for group in batch.groups]
    again = World()
    again.add(settings(steps=4, incarnation=2), ready_message=ready(incarnation=2, step=2, version=2, ledger=ledger))
    again.run()
    rest = [group.ticket for batch in again.history["job"] for group in batch.groups]
    assert sorted(first + rest) == list(range(8)) and [batch.step for batch in again.history["job"]] == [2, 3]


def test_a_new_incarnation_replaces_the_old_one_in_place():
    world = World()
    world.add(settings(steps=3))
    while len(world.history["job"]) < 2:
        world.deliver()
    stale = [g for kind, g in world.pending if kind == "generated"]
    ledger = world.history["job"][0].ledger
    world.pending.clear()
    del world.history["job"][1:]
    world.add(settings(steps=3, incarnation=2), ready_message=ready(incarnation=2, step=1, version=1, ledger=ledger))
    for request in stale:
        world._generated(request)
    world.run()
    world.check()
    assert [batch.step for batch in world.history["job"]] == [0, 1, 2]
    assert sorted(group.ticket for batch in world.history["job"] for group in batch.groups) == list(range(6))


def test_different_prompts_of_one_group_share_their_common_start():
    from marlaas_jax.rollout.batches import common_prefix

    assert common_prefix([(1, 2, 3), (1, 2, 4, 5), (1, 2)]) == (1, 2)
    assert common_prefix([(1, 2, 3)]) == (1, 2, 3)


def test_requests_go_out_with_the_newest_snapshot_and_the_jobs_weight():
    world = World()
    world.add(settings(weight=2.5))
    run_until(world, "generated")
    assert isinstance(world.generates[0], Generate) and world.generates[0].version == -1 and world.generates[0].weight == 2.5


@pytest.mark.parametrize("large", [8, 20], ids=["as large as the pool", "larger"])
def test_a_large_group_is_not_kept_out_of_a_full_pool_by_small_ones(large):
    world = World()
    world.orchestrator.max_episodes_per_worker = 8
    world.add(settings("small", group_size=2, steps=200))
    world.add(settings("large", group_size=large, steps=3))
    while len(world.history["large"]) < 3:
        world.deliver()
    assert len(world.history["small"]) * 2 * 2 <= 3 * 2 * large + 4 * large, "the small ones had more than their share"
    world.run()
    assert len(world.history["small"]) == 200


def test_episodes_of_a_pool_follow_the_weights():
    world = World()
    world.orchestrator.max_episodes_per_worker = 4
    for name, weight in {"light": 1.0, "heavy": 3.0}.items():
        world.add(settings(name, weight=weight, steps=60, max_staleness=4))
    while len(world.history["heavy"]) < 60:
        world.deliver()
    assert 17 <= len(world.history["light"]) <= 24


def test_episodes_of_a_pool_follow_the_tenants_weights_and_not_the_number_of_their_jobs():
    world = World()
    world.orchestrator.max_episodes_per_worker = 4
    for name, weight in {"a1": 1000.0, "a2": 1000.0, "b": 1.0}.items():
        world.add(settings(name, weight=weight, steps=60, max_staleness=4), Owner(name[0], 1.0))
    while len(world.history["b"]) < 60:
        world.deliver()
    assert all(25 <= len(world.history[name]) <= 36 for name in ("a1", "a2")), {k: len(v) for k, v in world.history.items()}
