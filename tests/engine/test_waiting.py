"""Requests that somebody waits for: parts, slots of their own, snapshots that outlive their job, and loaded adapters."""

import jax
import msgspec
import numpy as np
import pytest

from marlaas_jax.engine.requests import Request, Row
from marlaas_jax.engine.snapshots import SnapshotKey, SnapshotStore
from marlaas_jax.engine.steps import Chunk
from marlaas_jax.errors import WrongWeights
from marlaas_jax.fairness import Owner
from marlaas_jax.lora.snapshot import Snapshot
from marlaas_jax.messages import Generate, Sampling
from tests.engine.test_sampler import ask, check, drain, make, snapshot


def wait_for(request_id, job, share="tenant", partial=False, incarnation=0, **fields):
    return msgspec.structs.replace(ask(request_id, job, **fields), share=share, partial=partial, incarnation=incarnation)


class Bytes:
    """Tokens are bytes of UTF-8, but for 0, which ends a text."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize(("stop", "shown"), [((), "a\u00e9\u6f22\U0001f642!"), (("\U0001f642!",), "a\u00e9\u6f22")])
def test_parts_hold_whole_characters_and_no_beginning_of_a_stop(stop, shown):
    """Chunks of three bytes, which cut characters of two to four bytes."""
    text = "a\u00e9\u6f22\U0001f642!"
    request = Request(Generate("r", "a", 0, (1,), (0,), Sampling(stop=stop), partial=True), frozenset({0}))
    row = Row(request, 0, 0, Bytes())
    ids = [*text.encode(), 0]
    told, told_ids = "", []
    for start in range(0, len(ids), 3):
        some = np.zeros((1, 3), np.int32)
        some[0, : len(ids[start : start + 3])] = ids[start : start + 3]
        is_sampled = np.arange(3)[None] < len(ids[start : start + 3])
        zeros = np.zeros((1, 3), np.float32)
        row.take(Chunk(some, is_sampled, zeros, zeros, np.zeros(1, np.int32), np.zeros(1, np.int32)))
        if row.finish_reason:
            break
        part = row.part()
        told, told_ids = told + part.text, [*told_ids, *part.token_ids]
        assert shown.startswith(told) and len(part.logprobs) == 4 * len(part.token_ids)
    last = row.result(0)
    assert last.text == shown and last.text.startswith(told) and told
    assert list(last.token_ids)[: len(told_ids)] == told_ids and last.finish_reason == "stop"


def test_parts_come_once_a_chunk_and_only_where_they_are_wanted(unrolled):
    sampler = make(unrolled)
    sampler.publish(snapshot(unrolled, "a", 0, 1))
    sampler.submit(wait_for("parts", "a", partial=True, seeds=(1, 2), max_tokens=11))
    sampler.submit(wait_for("whole", "a", seeds=(1,), max_tokens=11))
    parts, answers = [], {}
    while sampler.has_work():
        answers |= {(done.request_id, done.sample): done for done in sampler.step()}
        new = sampler.take_parts()
        assert len({part.sample for part in new}) == len(new)
        parts += new
    assert {part.request_id for part in parts} == {"parts"} and {part.version for part in parts} == {0}
    assert answers["parts", 0].token_ids == answers["whole", 0].token_ids
    for sample in (0, 1):
        whole, mine = answers["parts", sample], [part for part in parts if part.sample == sample]
        ids = tuple(token for part in mine for token in part.token_ids)
        assert whole.token_ids[: len(ids)] == ids and whole.logprobs.startswith(b"".join(part.logprobs for part in mine))
        assert whole.text.startswith("".join(part.text for part in mine))
    check(unrolled, answers["parts", 0], 1)


def test_who_waits_gets_a_slot_while_rollouts_hold_all_theirs(unrolled):
    """A rollout batch as large as the engine leaves one slot; without somebody who waits, nobody takes that."""
    sampler = make(unrolled, reserved_slots=1)
    sampler.publish(snapshot(unrolled, "a", 0, 1))
    sampler.submit(ask("rollouts", "a", seeds=range(40), max_tokens=16))
    running = []
    answers = {}

    def step():
        answers.update({(done.request_id, done.sample): done for done in sampler.step()})
        running.append(sampler.counters()["engine/running_rows"])

    for _ in range(3):
        step()
    assert max(running) == running[0] == 7
    sampler.submit(wait_for("mine", "a", seeds=(1,), max_tokens=4))
    for _ in range(3):  # a prefill, a chunk of four tokens, and what was under way
        step()
    assert ("mine", 0) in answers and max(running) == 8
    sampler.submit(wait_for("many", "a", share="other", seeds=range(20), max_tokens=4))
    answers |= drain(sampler)
    assert len(answers) == 61
    check(unrolled, answers["rollouts", 39], 1)


def test_a_tenants_requests_count_with_its_jobs_against_other_tenants(unrolled):
    """One tenant has a job and requests, the other a job alone: each tenant gets half."""
    sampler = make(unrolled, reserved_slots=1)
    greedy, small = Owner("greedy", 1.0), Owner("small", 1.0)
    for job in "ab":
        sampler.publish(snapshot(unrolled, job, 0, 1))
    for i in range(40):
        sampler.submit(msgspec.structs.replace(ask(f"a{i}", "a", seeds=range(4), max_tokens=8), owner=greedy, weight=1000.0))
        sampler.submit(
            msgspec.structs.replace(wait_for(f"w{i}", "a", seeds=range(4), max_tokens=8), owner=greedy, weight=1000.0)
        )
        sampler.submit(msgspec.structs.replace(ask(f"b{i}", "b", seeds=range(4), max_tokens=8), owner=small))
    while sampler.counters()["engine/sampled_tokens"] < 800:
        sampler.step()
    used = {share: sampler.sampled_tokens[share] + sampler.prefilled_tokens[share] for share in ("a", "tenant", "b")}
    assert 0.8 < used["b"] / (used["a"] + used["tenant"]) < 1.25, used


def test_a_tenants_requests_and_its_jobs_rollouts_share_by_weight(unrolled):
    sampler = make(unrolled, reserved_slots=1)
    sampler.publish(snapshot(unrolled, "a", 0, 1))
    for i in range(40):
        sampler.submit(ask(f"r{i}", "a", seeds=range(4), max_tokens=8))
        sampler.submit(msgspec.structs.replace(wait_for(f"w{i}", "a", seeds=range(4), max_tokens=8), weight=2.0))
    while sampler.counters()["engine/sampled_tokens"] < 800:
        sampler.step()
    used = {share: sampler.sampled_tokens[share] + sampler.prefilled_tokens[share] for share in ("a", "tenant")}
    assert 1.5 < used["tenant"] / used["a"] < 2.6, used
    for i in range(40):
        sampler.cancel(f"r{i}")
        sampler.cancel(f"w{i}")
    drain(sampler)
    assert set(sampler.busy_by_job_s) == {"a", "tenant"}


def test_an_answer_comes_from_the_version_of_its_arrival_though_the_job_goes(unrolled):
    sampler = make(unrolled)
    sampler.publish(snapshot(unrolled, "a", 0, 1))
    sampler.submit(ask("rollout", "a", seeds=range(8), max_tokens=20))
    sampler.step()
    sampler.submit(wait_for("running", "a", seeds=(1,)))
    sampler.submit(wait_for("waiting", "a", seeds=(2,)))
    sampler.publish(snapshot(unrolled, "a", 1, 2))
    sampler.forget("a")
    answers = drain(sampler)
    assert {answers["rollout", i].finish_reason for i in range(8)} == {"cancelled"}
    for name in ("running", "waiting"):
        assert answers[name, 0].version == 0
        check(unrolled, answers[name, 0], 1)
    counters = sampler.counters()
    assert counters["engine/kept_snapshots"] == counters["engine/pinned_snapshots"] == 0
    sampler.submit(wait_for("late", "a"))
    assert drain(sampler)["late", 0].finish_reason == "missing"
    sampler.submit(ask("late rollout", "a"))
    assert drain(sampler)["late rollout", 0].finish_reason == "error"


def test_loaded_snapshots_make_room_for_each_other_and_for_no_job():
    store = SnapshotStore(4, max_loaded=2)
    of = lambda job: Snapshot(job, 7, 3, {}, 1.0, "")
    key = lambda job: SnapshotKey(job, 7, 3)
    for job in ("a", "b", "c"):
        store.publish(of(job))
    assert store.load(of("x")) == [] and store.load(of("y")) == []
    store.use(key("x"))
    assert store.load(of("z")) == [key("y")] and store.get(key("y")) is None
    store.use(key("z"))
    assert not store.has_room_to_load
    assert store.release(key("z")) == [] and store.has_room_to_load
    assert store.load(of("w")) == [key("z")] and store.release(key("x")) == []
    assert store.load(of("v")) == [key("x")]
    assert all(store.latest(job) is not None for job in ("a", "b", "c")) and len(store) == 5


def test_loading_compiles_nothing_and_proves_the_weights(unrolled):
    sampler = make(unrolled, is_warm=True, max_loaded_snapshots=2)
    for i, job in enumerate("abcd"):
        sampler.publish(snapshot(unrolled, job, 0, i + 1))
    answers = {}
    loads = [snapshot(unrolled, f"old{i}", i, 1 + i % 4, incarnation=5) for i in range(5)]
    with jax.no_tracing():
        for i, loaded in enumerate(loads):
            sampler.load(loaded)
            sampler.submit(wait_for(f"x{i}", f"old{i}", version=i, incarnation=5))
            sampler.submit(wait_for(f"y{i}", "abcd"[i % 4]))
            answers |= {(done.request_id, done.sample): done for done in sampler.step()}
        answers |= drain(sampler)
    for i in range(5):
        check(unrolled, answers[f"x{i}", 0], 1 + i % 4)
        check(unrolled, answers[f"y{i}", 0], 1 + i % 4)
    assert sampler.compiles_since_warmup() == 0
    wrong = snapshot(unrolled, "wrong", 0, 1)
    with pytest.raises(WrongWeights, match="wrong: the sampler holds"):
        sampler.load(Snapshot("wrong", 0, 0, wrong.weights, 0.5, wrong.fingerprint))
    assert not sampler.holds("wrong", 0, 0)
