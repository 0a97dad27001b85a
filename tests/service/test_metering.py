"""Exactly once: whatever crashes between a batch, its line, its bill and the checkpoint, the bill is that of the history."""

import asyncio
import contextlib
import random
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import pytest

from marlaas_jax.config import validate
from marlaas_jax.errors import InvalidConfig, StorageError
from marlaas_jax.service.config import ServiceConfig
from marlaas_jax.service.metering import Metering, amounts_of
from marlaas_jax.service.prices import Prices
from marlaas_jax.store import jobs, tenants, usage
from marlaas_jax.store.engine import Store
from marlaas_jax.workers.controller_status import RUNNING, SUCCEEDED

DAY_S = 86400.0


def line(step, tokens=10.0, **changes):
    figures = {
        "meter/prompt_tokens": 2.0, "meter/sampled_tokens": tokens, "meter/trained_tokens": tokens, "meter/env_s": 0.5,
        "device/learner_s": 1.0, "device/publish_s": 0.25, "device/prefill_s_per_token": 0.125,
        "device/decode_s_per_token": 0.0625,
    }  # fmt: skip
    return {"step": step, "time": 1000.0} | figures | changes


def test_the_devices_seconds_are_the_learners_and_those_of_the_tokens_that_count():
    assert amounts_of(line(1)) == {
        "prompt_tokens": 2.0, "sampled_tokens": 10.0, "trained_tokens": 10.0, "env_s": 0.5,
        "device_s": 1.0 + 0.25 + 2 * 0.125 + 10 * 0.0625,
    }  # fmt: skip
    assert amounts_of({"step": 1})["device_s"] == 0.0


class FailingStore:
    """A store whose writes fail, before or after they were done, as a script says."""

    def __init__(self, store, faults):
        self.store = store
        self.faults = faults

    async def awrite(self, function, *args, **kwargs):
        fault = self.faults.pop() if self.faults else ""
        if fault == "before":
            raise StorageError("the disk is full")
        result = await self.store.awrite(function, *args, **kwargs)
        if fault == "after":
            raise StorageError("the server was lost")
        return result

    def __getattr__(self, name):
        return getattr(self.store, name)


FAULTS = st.lists(st.sampled_from(["", "", "before", "after"]), max_size=12)


SLOW_DISK = hypothesis.settings(
    deadline=None, max_examples=10, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


@SLOW_DISK
@hypothesis.given(st.integers(0, 2**32 - 1), FAULTS)
def test_every_committed_step_is_billed_once_whatever_crashes(tmp_path_factory, seed, faults):
    live_through_crashes(tmp_path_factory, seed, faults)


@pytest.mark.slow
@hypothesis.settings(SLOW_DISK, max_examples=150)
@hypothesis.given(st.integers(0, 2**32 - 1), FAULTS)
def test_every_committed_step_is_billed_once_in_many_more_lives(tmp_path_factory, seed, faults):
    live_through_crashes(tmp_path_factory, seed, faults)


def live_through_crashes(tmp_path_factory, seed, faults):
    """A job of 8 steps. At random: steps train, are committed, bills are written; the device dies (its steps since the
    checkpoint are trained again, with other figures); the whole service dies (bills not written are lost from memory)."""
    rng, total_steps = random.Random(seed), 8
    folder = tmp_path_factory.mktemp("meter")

    async def story(store):
        def begin(connection):
            owner = tenants.create_tenant(connection, "t", now=0.0)
            record = jobs.create_job(connection, owner.id, name="j", config={}, steps=total_steps, now=0.0)
            jobs.move_job(connection, record.id, "running", tenant_id=None, allowed_from=("queued",), now=0.0)
            return owner.id, record.id

        owner, job_id = await store.awrite(begin)
        failing = FailingStore(store, list(faults))

        async def process():
            metering = Metering(failing, lambda: 1000.0, 400)
            await metering.start()
            metering.open_job(job_id, owner)
            return metering

        metering = await process()
        rows, committed, ever = [], 0, {}
        job = SimpleNamespace(
            name=job_id, state=RUNNING, config=SimpleNamespace(steps=total_steps), files=SimpleNamespace(metrics=rows, state={})
        )
        for _ in range(500):
            event = rng.choice(["step", "step", "step", "commit", "write", "device dies", "service dies"])
            if event == "step" and len(rows) < total_steps:
                number = len(rows) + 1
                rows.append(line(number, tokens=float(rng.randrange(1, 50))))
                ever.setdefault(number, []).append(rows[-1])
                if rng.random() < 0.9:  # else the process is busy dying
                    metering.collect(job)
            elif event == "commit":
                committed = len(rows)
            elif event == "write":
                with contextlib.suppress(StorageError):
                    await metering.flush()
            elif event == "device dies":
                del rows[committed:]
            elif event == "service dies":
                del rows[committed:]
                metering = await process()
            if committed == total_steps:
                break
        else:
            committed = total_steps
            rows += [line(n) for n in range(len(rows) + 1, total_steps + 1)]
            for row in rows:
                ever.setdefault(row["step"], []).append(row)
        job.state, job.files.state = SUCCEEDED, {"used_after": {"sampled_tokens": 4.0}}
        metering.collect(job)
        failing.faults.clear()
        await metering.flush()
        metering.collect(job)  # told again after a restart
        await metering.flush()
        metering = await process()
        metering.collect(job)
        await metering.flush()
        (found,) = await store.aread(usage.sum_usage, ("tenant",), tenant_id=None, limit=10)
        assert found.amounts["prompt_tokens"] == 2.0 * total_steps, "each step once: its size does not depend on the attempt"
        assert found.amounts["env_s"] == 0.5 * total_steps
        least = sum(min(row["meter/sampled_tokens"] for row in ever[n]) for n in range(1, total_steps + 1)) + 4.0
        most = sum(max(row["meter/sampled_tokens"] for row in ever[n]) for n in range(1, total_steps + 1)) + 4.0
        assert least <= found.amounts["sampled_tokens"] <= most
        assert metering.tokens_today(owner) == pytest.approx(
            sum(found.amounts[m] for m in ("prompt_tokens", "sampled_tokens", "trained_tokens"))
        ), "the quota reads the same figures"

    with Store.open(f"sqlite:///{folder}/store.db") as store:
        asyncio.run(story(store))


def test_requests_are_added_up_and_written_once_also_where_a_write_was_done_unknown_to_us(tmp_path):
    async def story(store):
        failing = FailingStore(store, ["after", "before"])
        metering = Metering(failing, lambda: 1000.0, 400)
        await metering.start()
        for _ in range(3):
            metering.record_request("t", prompt_tokens=5, sampled_tokens=7, job_id="j")
            with_fault = bool(failing.faults)
            try:
                await metering.flush()
                assert not with_fault
            except StorageError:
                assert with_fault and metering.num_unwritten
        await asyncio.gather(metering.flush(), metering.flush())
        assert metering.num_unwritten == 0
        (found,) = await store.aread(usage.sum_usage, ("tenant", "job"), tenant_id="t", limit=10)
        assert (found.job_id, found.amounts) == ("j", {"prompt_tokens": 15.0, "sampled_tokens": 21.0})
        assert metering.tokens_today("t") == 36.0 and metering.tokens_today("u") == 0.0

    with Store.open(f"sqlite:///{tmp_path}/store.db") as store:
        asyncio.run(story(store))


def test_a_roll_back_makes_steps_count_again(tmp_path):
    async def story(store):
        metering = Metering(store, lambda: 1000.0, 400)
        await metering.start()
        metering.open_job("j", "t")
        files = SimpleNamespace(metrics=[line(1), line(2), line(3)], state={})
        job = SimpleNamespace(name="j", state=RUNNING, config=SimpleNamespace(steps=9), files=files)
        metering.collect(job)
        await metering.flush()
        del files.metrics[1:]
        await store.awrite(usage.reset_billed, "j", 1)
        metering.rolled_back("j", 1)
        files.metrics += [line(2)]
        metering.collect(job)
        await metering.flush()
        (found,) = await store.aread(usage.sum_usage, ("job",), tenant_id=None, limit=10)
        assert found.amounts["sampled_tokens"] == 40.0 and metering.used_by("j")["sampled_tokens"] == 40.0

    with Store.open(f"sqlite:///{tmp_path}/store.db") as store:
        asyncio.run(story(store))


def test_prices_are_per_million_tokens_and_per_hour():
    prices = Prices(currency="EUR", prompt_tokens=1.0, sampled_tokens=3.0, trained_tokens=2.0, device_hour=36.0, env_hour=7.2)
    amounts = {"prompt_tokens": 2e6, "sampled_tokens": 1e6, "trained_tokens": 5e5, "device_s": 100.0, "env_s": 500.0}
    assert prices.cost(amounts) == pytest.approx(2 + 3 + 1 + 1 + 1)
    assert Prices().cost(amounts) == 0.0
    for wrong in ({"prompt_tokens": -1}, {"currency": "1 EUR"}, {"per_hour": 1}):
        with pytest.raises(InvalidConfig, match=f"prices.{next(iter(wrong))}"):
            validate(ServiceConfig, {"prices": wrong})
