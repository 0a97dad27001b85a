"""The request loop: snapshots, admission, stops, cancelling, fairness, memory and compiles, against whole forward passes."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from marlaas_jax.engine import layered
from marlaas_jax.engine.engine import EngineSettings
from marlaas_jax.engine.sampler import Sampler
from marlaas_jax.engine.snapshots import key_of
from marlaas_jax.lora import bank as banks
from marlaas_jax.lora.snapshot import Snapshot, fingerprint
from marlaas_jax.messages import Generate, Sampling

SETTINGS = EngineSettings(
    num_decode_slots=8, max_context=32, num_adapter_slots=6, max_rank=4, decode_steps=4, prefill_batch=2, prefill_buckets=(16,)
)


class LetterTokenizer:
    """Token 0 ends a text; token i > 0 is a letter; the last three are words, for stops that begin or end inside a token."""

    end_ids = (0,)
    words = ("abc", "cab", "\n\n")

    def decode(self, ids):
        return "".join(self.words[i - 58] if i >= 58 else chr(64 + i) if i else "" for i in ids)


class Clock:
    """Advances by a second whenever it is read."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.fixture(scope="module")
def shared(unrolled):
    """A sampler for tests that leave nothing behind in it."""
    return make(unrolled)


def make(world, run_ahead=False, is_warm=False, **settings) -> Sampler:
    sampler = Sampler(
        world.config,
        world.params,
        dataclasses.replace(SETTINGS, **settings),
        LetterTokenizer(),
        Clock(),
        run_ahead,
    )
    if is_warm:
        sampler.warmup()
    return sampler


def snapshot(world, job: str, version: int, adapter_slot: int, incarnation: int = 0) -> Snapshot:
    """One of the world's adapters under a name."""
    weights, scale = banks.read(world.bank, adapter_slot)
    weights = jax.tree.map(np.asarray, weights)
    return Snapshot(job, incarnation, version, weights, float(scale), fingerprint(weights, float(scale)))


def ask(request_id: str, job: str, prompt=(3, 9, 20), seeds=(1,), version=-1, weight=1.0, **sampling) -> Generate:
    return Generate(request_id, job, 0, tuple(prompt), tuple(seeds), Sampling(**{"max_tokens": 6} | sampling), version, weight)


def drain(sampler: Sampler, max_steps: int = 200) -> dict[tuple[str, int], object]:
    """Steps until nothing is left; returns the answers by (request, sample)."""
    answers = {}
    for _ in range(max_steps):
        if not sampler.has_work():
            return answers
        for done in sampler.step():
            assert (done.request_id, done.sample) not in answers
            answers[done.request_id, done.sample] = done
    raise AssertionError("the sampler does not come to an end")


def floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<f4")


def check(world, answer, adapter_slot: int, prompt=(3, 9, 20), temperature: float = 1.0):
    """Log-probs equal those of a whole forward pass with merged weights."""
    ids = list(answer.token_ids)
    table = world.logprobs(adapter_slot, [*prompt, *ids])[len(prompt) - 1 : -1]
    np.testing.assert_allclose(floats(answer.logprobs), table[np.arange(len(ids)), ids], atol=1e-4)
    if temperature > 0:
        scaled = table / temperature
        scaled = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
        np.testing.assert_allclose(floats(answer.sampled_logprobs), scaled[np.arange(len(ids)), ids], atol=1e-4)


@pytest.mark.parametrize(("run_ahead", "form"), [(False, "blocks"), (True, "blocks"), (False, "onehot")])
def test_jobs_side_by_side(unrolled, run_ahead, form):
    """Five adapters' requests, more than the slots hold: each answer is that of its own snapshot, and seeds reproduce it."""
    results = []
    for _ in range(2):
        sampler = make(unrolled, run_ahead, form=form)
        for slot, job in enumerate("abc", start=1):
            sent = snapshot(unrolled, job, 5 + slot, slot)
            assert sampler.publish(sent) == sent.fingerprint
        for i, job in enumerate("abcabc"):
            sampler.submit(ask(f"{job}{i}", job, seeds=range(10 * i, 10 * i + 3)))
        sampler.submit(ask("base", "a", seeds=(7,), version=-2))
        answers = drain(sampler)
        assert len(answers) == 19
        for (name, _), answer in answers.items():
            slot = 0 if name == "base" else "abc".index(name[0]) + 1
            check(unrolled, answer, slot)
            assert answer.version == (-2 if name == "base" else 5 + slot)
        results.append({key: answer.token_ids for key, answer in answers.items()})
    assert results[0] == results[1]


def test_a_group_gives_distinct_reproducible_samples(unrolled):
    """H14: one prompt, eight seeds: distinct completions, the same ones again, whatever slots and company they get."""
    sampler = make(unrolled)
    sampler.publish(snapshot(unrolled, "a", 0, 1))
    sampler.submit(ask("first", "a", seeds=range(8)))
    first = drain(sampler)
    sampler.submit(ask("other", "a", prompt=(8, 8), seeds=(99,), version=-2))
    sampler.step()
    sampler.submit(ask("again", "a", seeds=range(8)))
    again = drain(sampler)
    texts = [first["first", i].token_ids for i in range(8)]
    assert texts == [again["again", i].token_ids for i in range(8)]
    assert len(set(texts)) >= 6


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.5])
def test_logprobs_at_any_temperature(unrolled, temperature):
    """H16: the model's log-probs are untempered at any temperature, those drawn from tempered; greedy divides by nothing."""
    sampler = make(unrolled)
    sampler.publish(snapshot(unrolled, "a", 0, 2))
    sampler.submit(ask("x", "a", seeds=range(8), temperature=temperature, max_tokens=12))
    for answer in drain(sampler).values():
        check(unrolled, answer, 2, temperature=temperature)
        assert np.isfinite(floats(answer.sampled_logprobs)).all()
        assert temperature > 0 or not floats(answer.sampled_logprobs).any()


@pytest.mark.parametrize(
    "cut", [{"top_p": 0.8}, {"top_k": 20}, {"top_k": 20, "top_p": 0.7, "temperature": 0.8}, {"min_p": 0.2}]
)
def test_logprobs_of_truncated_sampling(unrolled, cut):
    """H17: training's log-probs are of the whole distribution; those drawn from are renormalised over the kept tokens."""
    sampler = make(unrolled)
    sampler.publish(snapshot(unrolled, "a", 0, 1))
    sampler.submit(ask("x", "a", seeds=range(8), max_tokens=12, **cut))
    for answer in drain(sampler).values():
        check(unrolled, answer, 1, temperature=0)
        ids = list(answer.token_ids)
        table = unrolled.logprobs(1, [3, 9, 20, *ids])[2:-1]
        for row, token, got in zip(table, ids, floats(answer.sampled_logprobs), strict=True):
            p = np.exp(row / cut.get("temperature", 1.0))
            p /= p.sum()
            order = np.argsort(-p)[: cut.get("top_k") or len(p)]
            mass = p[order] / p[order].sum()
            order = order[: int((np.cumsum(mass) < cut.get("top_p", 1.0)).sum()) + 1]
            order = [t for t in order if p[t] >= cut.get("min_p", 0.0) * p.max()]
            assert token in order
            np.testing.assert_allclose(got, np.log(p[token] / p[order].sum()), atol=1e-4)


def test_swapping_snapshots_under_running_requests(unrolled):
    """H01, H11: publishing twice per dispatch fails nothing; every answer is of one version, that of when it started."""
    sampler = make(unrolled)
    content = {}
    version = 0
    answers = {}
    for turn in range(12):
        for _ in range(2):
            adapter_slot = version % 4 + 1
            content[version] = adapter_slot
            sent = snapshot(unrolled, "a", version, adapter_slot)
            assert sampler.publish(sent) == sent.fingerprint
            version += 1
        sampler.submit(ask(f"r{turn}", "a", seeds=(turn, 100 + turn), max_tokens=14))
        for done in sampler.step():
            answers[done.request_id, done.sample] = done
    answers |= drain(sampler)
    assert len(answers) == 24
    assert len({answer.version for answer in answers.values()}) > 3
    for answer in answers.values():
        assert answer.finish_reason in ("length", "stop")
        check(unrolled, answer, content[answer.version])
        assert answer.fingerprint == snapshot(unrolled, "a", answer.version, content[answer.version]).fingerprint


def test_evicted_adapters_come_back_the_same(unrolled):
    """H03: three jobs in a bank with room for two: rotation evicts each several times and changes no number."""
    sampler = make(unrolled, num_adapter_slots=3)
    for slot, job in enumerate("abc", start=1):
        sampler.publish(snapshot(unrolled, job, 0, slot))
    seen = {}
    for turn in range(3):
        for slot, job in enumerate("abc", start=1):
            sampler.submit(ask(f"{job}{turn}", job, temperature=0.0))
            answer = drain(sampler)[f"{job}{turn}", 0]
            check(unrolled, answer, slot, temperature=0)
            assert seen.setdefault(job, answer.logprobs) == answer.logprobs
            np.testing.assert_array_equal(sampler.score(job, -1, [1, 2, 3]), sampler.score(job, 0, [1, 2, 3]))


def test_memory_is_flat_over_a_thousand_publishes(unrolled):
    """Design 13.8, H02: only the latest snapshot and those that run are kept."""
    sampler = make(unrolled)
    weights, scale = banks.read(unrolled.bank, 1)
    live = []
    for version in range(1000):
        weights = {**weights, "q": {**weights["q"], "up": weights["q"]["up"] + 0}}
        sampler.publish(Snapshot("a", 0, version, weights, float(scale), "unused"))
        if version % 100 == 50:
            sampler.submit(ask(f"r{version}", "a", max_tokens=2))
            drain(sampler)
        if version % 250 == 249:
            gc.collect()
            live.append(len(jax.live_arrays()))
    assert len(set(live)) == 1
    counters = sampler.counters()
    assert counters["engine/kept_snapshots"] == counters["engine/resident_snapshots"] == 1


def test_memory_is_flat_with_more_jobs_than_slots(unrolled):
    """300 publishes of twelve jobs in a bank for three: two more may stay on the device, the rest goes to the host."""
    sampler = make(unrolled, is_warm=True, num_adapter_slots=4, max_device_snapshots=2)
    jobs = [f"job{i}" for i in range(12)]
    slots = {job: i % 4 + 1 for i, job in enumerate(jobs)}
    content = {slot: banks.read(unrolled.bank, slot) for slot in slots.values()}
    live, seen = [], {}
    for turn in range(300):
        job = jobs[turn % 12]
        weights, scale = content[slots[job]]
        weights = {**weights, "q": {**weights["q"], "up": weights["q"]["up"] + 0}}
        sampler.publish(Snapshot(job, 0, turn // 12, weights, float(scale), "unused"))
        del weights
        if turn % 125 == 60:
            for asked in jobs:
                sampler.submit(ask(f"{asked}@{turn}", asked, max_tokens=2, temperature=0.0))
            for (request, _), answer in drain(sampler, 400).items():
                assert seen.setdefault(request.partition("@")[0], answer.logprobs) == answer.logprobs
        if turn % 250 == 249:
            gc.collect()
            live.append(len(jax.live_arrays()))
            counters = sampler.counters()
            assert counters["engine/kept_snapshots"] == 12 and counters["engine/resident_snapshots"] == 3
            assert counters["engine/device_snapshots"] == 3 + 2
    assert len(set(live)) == 1
    latest = {job: sampler._snapshots.latest(job) for job in jobs}
    assert sum(isinstance(kept.weights["q"]["up"], np.ndarray) for kept in latest.values()) == 12 - 3 - 2
    before = sampler.compiles_since_warmup()
    for job, kept in latest.items():
        sampler.score(job, -1, [1, 2, 3])
        slot = sampler._residency.slot_of(key_of(kept))
        assert sampler.engine.fingerprint(sampler._params, slot) == fingerprint(*content[slots[job]])
    assert sampler.compiles_since_warmup() == before, "bringing one back is a copy"


def test_a_large_group_is_admitted_in_parts_from_one_prefill(unrolled):
    """Twenty samples, eight slots: one prefill, and the same tokens as when asked for one by one."""
    sampler = make(unrolled)
    sampler.publish(snapshot(unrolled, "a", 0, 3))
    calls = []
    prefill_rows = sampler.engine.prefill_rows
    sampler.engine.prefill_rows = lambda *args: calls.append(1) or prefill_rows(*args)
    sampler.submit(ask("group", "a", seeds=range(20)))
    sampler.publish(snapshot(unrolled, "a", 1, 1))  # between admission and the last part would be the same
    sampler.step()
    sampler.publish(snapshot(unrolled, "a", 2, 2))
    group = drain(sampler)
    assert len(calls) == 1
    assert {answer.version for answer in group.values()} == {1}
    for i in (0, 7, 8, 19):
        check(unrolled, group["group", i], 1)
    sampler.publish(snapshot(unrolled, "a", 3, 1))
    for i in range(20):
        sampler.submit(ask(f"one{i}", "a", seeds=(i,)))
    single = drain(sampler)
    assert [group["group", i].token_ids for i in range(20)] == [single[f"one{i}", 0].token_ids for i in range(20)]


def test_parts_do_not_lock_each_other_out(unrolled):
    """Two large groups and a bank with one pin to give: both end."""
    sampler = make(unrolled, num_adapter_slots=3)
    for slot, job in enumerate("ab", start=1):
        sampler.publish(snapshot(unrolled, job, 0, slot))
        sampler.submit(ask(job, job, seeds=range(20)))
    sampler._queue.max_overtaking_tokens = 1.0
    answers = drain(sampler)
    assert len(answers) == 40


def test_stop_strings_match_on_text(unrolled):
    """H12: stops over several tokens, inside one, and beginning in the middle of one; ids keep the completing token."""
    sampler = make(unrolled)
    sampler.publish(snapshot(unrolled, "a", 0, 1))
    sampler.submit(ask("free", "a", seeds=range(6), max_tokens=20))
    free = drain(sampler)
    for i in range(6):
        whole = free["free", i]
        text = whole.text
        for first, last in ((2, 4), (0, 0), (5, 8)):
            stop = text[first : last + 1]
            if not stop:
                continue
            sampler.submit(ask("stop", "a", seeds=(i,), max_tokens=20, stop=("never there", stop)))
            answer = drain(sampler)["stop", 0]
            assert answer.finish_reason == "stop"
            assert answer.text == text[: text.index(stop)]
            count = next(n for n in range(1, 21) if stop in LetterTokenizer().decode(whole.token_ids[:n]))
            assert answer.token_ids == whole.token_ids[:count]
            assert len(floats(answer.logprobs)) == len(floats(answer.sampled_logprobs)) == count
    assert not sampler.has_work()


def test_end_ids_and_stop_ids(unrolled):
    """H13: any end id and any of many stop ids ends a completion; the id is kept, the text leaves it out."""
    sampler = make(unrolled)
    sampler.publish(snapshot(unrolled, "a", 0, 1))
    sampler.submit(ask("free", "a", max_tokens=12))
    free = drain(sampler)["free", 0].token_ids
    stop = free[4]
    others = [i for i in range(1, 61) if i not in free][:12]  # more than the device watches
    sampler.submit(ask("stop", "a", max_tokens=12, stop_token_ids=(*others, stop)))
    answer = drain(sampler)["stop", 0]
    count = free.index(stop) + 1
    assert (answer.finish_reason, answer.token_ids) == ("stop", free[:count])
    assert answer.text == LetterTokenizer().decode(free[: count - 1])
    sampler.engine.end_ids = (0, stop)
    sampler.submit(ask("end", "a", max_tokens=12))
    assert drain(sampler)["end", 0].token_ids == free[:count]


def test_limits(unrolled):
    """H15: max_tokens 0 and 1, prompts of one token and up to the context."""
    sampler = make(unrolled)
    sampler.publish(snapshot(unrolled, "a", 0, 1))
    sampler.submit(ask("zero", "a", max_tokens=0))
    sampler.submit(ask("one", "a", max_tokens=1))
    sampler.submit(ask("short", "a", prompt=(5,), max_tokens=3))
    sampler.submit(ask("last", "a", prompt=range(1, 32), max_tokens=9))
    sampler.submit(ask("full", "a", prompt=[1] * 32, max_tokens=9))
    answers = {name: answer for (name, _), answer in drain(sampler).items()}
    assert {name: (len(a.token_ids), a.finish_reason) for name, a in answers.items()} == {
        "zero": (0, "length"),
        "one": (1, "length"),
        "short": (3, "length"),
        "last": (1, "context"),
        "full": (0, "context"),
    }
    check(unrolled, answers["last"], 1, prompt=range(1, 32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": ()}, "prompt_ids"),
        ({"prompt": (3, 61)}, "prompt_ids=61: 0 to 60"),
        ({"seeds": (-1,)}, "seeds=-1"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1e39}, "temperature=1e+39: 0 to 1e6"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"stop_token_ids": (3, 61)}, "stop_token_ids=61: 0 to 60"),
        ({"max_tokens": 2**31}, "max_tokens=2147483648"),
        ({"job": "nobody"}, "job='nobody'"),
        ({"version": 7}, "version=7"),
    ],
)
def test_refusals_name_the_field(shared, unrolled, change, words):
    shared.publish(snapshot(unrolled, "a", 0, 1))
    shared.submit(ask("bad", **{"job": "a"} | change))
    answer = drain(shared)["bad", 0]
    assert answer.finish_reason == "error" and words in answer.error and answer.token_ids == ()


def test_cancel(unrolled):
    """Cancelled samples answer with what they have, waiting ones with nothing; the others go on; nothing stays pinned."""
    sampler = make(unrolled)
    sampler.engine.end_ids = ()
    sampler.publish(snapshot(unrolled, "a", 0, 1))
    sampler.publish(snapshot(unrolled, "b", 0, 2))
    sampler.submit(ask("big", "a", seeds=range(10), max_tokens=20))
    sampler.submit(ask("other", "b", seeds=(1,), max_tokens=6))
    for _ in range(3):
        assert sampler.step() == []
    sampler.cancel("big")
    sampler.cancel("unknown")
    answers = drain(sampler)
    assert len(answers) == 11
    assert {answers["big", i].finish_reason for i in range(10)} == {"cancelled"}
    assert len(answers["big", 0].token_ids) == 8 and answers["big", 9].token_ids == ()
    check(unrolled, answers["big", 0], 1)
    check(unrolled, answers["other", 0], 2)
    assert sampler.counters()["engine/pinned_snapshots"] == 0


def test_forget_frees_everything(unrolled):
    """H02: a job that goes leaves no slot, snapshot or pin behind; its name may come back with other weights."""
    sampler = make(unrolled)
    for turn in range(6):
        sampler.publish(snapshot(unrolled, "a", 0, turn % 4 + 1, incarnation=turn))
        request = ask(f"r{turn}", "a", seeds=range(10), max_tokens=20)
        sampler.submit(msgspec.structs.replace(request, incarnation=turn))
        sampler.step()
        sampler.step()
        sampler.forget("a")
        assert {answer.finish_reason for answer in drain(sampler).values()} <= {"cancelled"}
        counters = sampler.counters()
        assert counters["engine/kept_snapshots"] == counters["engine/resident_snapshots"] == 0
        assert counters["engine/pinned_snapshots"] == counters["engine/running_rows"] == 0


def test_a_nan_adapter_fails_only_its_own_requests(unrolled):
    """H10: poison one job's adapter; its requests end as errors, the others' numbers are untouched, then and later."""
    sampler = make(unrolled)
    bad = snapshot(unrolled, "bad", 0, 1)
    bad.weights["v"]["up"] = bad.weights["v"]["up"].copy()
    bad.weights["v"]["up"][0, 0, 0] = np.nan
    sampler.publish(bad)
    sampler.publish(snapshot(unrolled, "good", 0, 2))
    for i in range(4):
        sampler.submit(ask(f"bad{i}", "bad", seeds=(1, 2)))
        sampler.submit(ask(f"good{i}", "good", seeds=(1, 2), max_tokens=20))
    for (name, _), answer in drain(sampler).items():
        if name.startswith("bad"):
            assert answer.finish_reason == "error" and answer.token_ids == () and "finite" in answer.error
        else:
            assert answer.finish_reason in ("length", "stop")
            check(unrolled, answer, 2)


def test_wrong_weights_show_in_the_fingerprint(unrolled):
    """H09: a publish that writes something else than what was published gives another fingerprint."""
    sampler = make(unrolled)
    sent = snapshot(unrolled, "a", 0, 1)
    write = sampler.engine.write_adapter
    sampler.engine.write_adapter = lambda params, slot, weights, scale: write(
        params, slot, {**weights, "o": {**weights["o"], "up": weights["o"]["up"] * 0}}, scale
    )
    assert sampler.publish(sent) != sent.fingerprint


@pytest.mark.parametrize(
    ("is_layered", "form"), [(False, "blocks"), pytest.param(True, "blocks", marks=pytest.mark.slow), (False, "onehot")]
)
def test_nothing_compiles_after_warmup(unrolled, monkeypatch, is_layered, form):
    """H44: mixed lengths, adapters, temperatures, publishes, cancels and scores after warm-up: no program is compiled."""
    monkeypatch.setattr(layered, "MIN_LAYERS", 1 if is_layered else 99)
    snapshots = [snapshot(unrolled, job, v, 1 + (v + i) % 4) for v in range(3) for i, job in enumerate("abcd")]
    sampler = make(unrolled, is_warm=True, form=form)
    rng = np.random.default_rng(0)
    with jax.no_tracing():
        for number, sent in enumerate(snapshots):
            sampler.publish(sent)
            for k in range(4):
                prompt = rng.integers(0, 61, rng.integers(1, 31)).tolist()
                cut = {"top_p": 0.9} if k == 3 else {"temperature": float(rng.choice([0.0, 0.7, 1.0]))}
                seeds = tuple(range(int(rng.integers(1, 11))))
                sampler.submit(ask(f"{number}.{k}", sent.job, prompt, seeds, max_tokens=int(rng.integers(1, 9)), **cut))
                sampler.step()
            sampler.cancel(f"{number}.0")
            sampler.score(sent.job, -1, prompt)
        drain(sampler)
    assert sampler.compiles_since_warmup() == 0
    assert len(sampler.engine.buckets.programs()) <= 24


def test_a_small_job_is_not_held_up_by_a_large_one(unrolled):
    """H08: with 60 requests of A waiting, B's single requests are answered while A's first few still are."""
    sampler = make(unrolled)
    sampler.publish(snapshot(unrolled, "a", 0, 1))
    sampler.publish(snapshot(unrolled, "b", 0, 2))
    for i in range(60):
        sampler.submit(ask(f"a{i}", "a", seeds=(i,), max_tokens=8))
    order = []
    for i in range(5):
        sampler.submit(ask(f"b{i}", "b", seeds=(i,), max_tokens=4))
        while f"b{i}" not in order:
            order += [done.request_id for done in sampler.step()]
    assert sum(name.startswith("a") for name in order) < 40
    drain(sampler)
    busy = sampler.busy_by_job_s
    assert set(busy) == {"a", "b"} and abs(sum(busy.values()) - sum(sampler.busy_s.values())) < 1e-6
    assert sampler.sampled_tokens["a"] > sampler.sampled_tokens["b"] > 0


def test_a_bfloat16_bank_takes_snapshots_of_its_type(unrolled):
    sampler = make(unrolled, dtype="bfloat16")
    weights, scale = banks.read(unrolled.bank, 1)
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    assert sampler.publish(Snapshot("a", 0, 0, weights, float(scale), "")) == fingerprint(weights, float(scale))
    sampler.submit(ask("x", "a"))
    assert len(drain(sampler)["x", 0].token_ids) > 0
