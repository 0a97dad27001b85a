"""The service's jobs from queue to end, with real workers, a fake device and a store on disk."""

import asyncio
import contextlib

import pytest

from marlaas_jax.config import JobConfig, validate
from marlaas_jax.errors import InvalidConfig, InvalidRequest, NotFound, QuotaExceeded, StorageError
from marlaas_jax.fairness import Owner
from marlaas_jax.messages import AddJob, Generate, Reweigh
from marlaas_jax.service.config import ServiceConfig
from marlaas_jax.service.service import Service
from marlaas_jax.store import jobs, tenants
from marlaas_jax.store.engine import Store
from tests.workers.faked import REWARDS, job, steps_of, tickets_of

pytestmark = pytest.mark.multiprocess
FILES = {"rewards.py": REWARDS.encode()}


def config(tmp_path, **changes):
    document = {"runtime": {"model": "tiny"}, "data_dir": str(tmp_path / "data"), "port": 0, "sandbox": "none"}
    return validate(ServiceConfig, document | changes)


def of(name, **changes):
    return validate(JobConfig, job(name, "rewards.py:good", **changes))


@contextlib.asynccontextmanager
async def serving(settings):
    """A service that serves, with two tenants; drained at the end."""
    with Store.open(settings.db_url) as store:
        service = Service(settings, store, device_module="tests.workers.fakes")
        ready = asyncio.Event()
        task = asyncio.create_task(service.serve(ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        try:
            yield service
        finally:
            await service.drain()
            await asyncio.wait_for(task, 60)


async def tenant(service, name, **changes):
    with contextlib.suppress(NotFound):
        return await service.store.aread(tenants.get_tenant, name)
    return await service.store.awrite(tenants.create_tenant, name, now=1.0, **changes)


async def until(service, owner, job_id, *states, timeout_s=60):
    async with asyncio.timeout(timeout_s):
        while (record := await service.job(owner, job_id)).state not in states:
            await asyncio.sleep(0.02)
    return record


def test_jobs_of_two_tenants_run_and_stay_their_own(tmp_path):
    async def story():
        async with serving(config(tmp_path)) as service:
            ann, bob = await tenant(service, "ann"), await tenant(service, "bob")
            first = await service.submit(ann, of("first"), files=FILES)
            second = await service.submit(bob, of("second"), files=FILES)
            with pytest.raises(NotFound):
                await service.job(bob, first.id)
            for action in (service.pause, service.resume, service.cancel, service.delete):
                with pytest.raises(NotFound):
                    await action(bob, first.id)
            done = await until(service, ann, first.id, "succeeded", "failed")
            assert (done.state, done.step, done.reason) == ("succeeded", 4, "")
            assert (await until(service, bob, second.id, "succeeded", "failed")).state == "succeeded"
            seen = [event async for event in until_ended(service.events.listen(tenant_id=ann.id, after=0))]
            kinds = [event.kind for event in seen]
            assert kinds[0] == "job_queued" and kinds[-1] == "job_succeeded" and kinds.count("step") == 4
            assert {event.job_id for event in seen} == {first.id}
            await service.delete(ann, first.id)
            with pytest.raises(NotFound):
                await service.job(ann, first.id)
            assert not service.folder(first.id).exists() and service.folder(second.id).exists()

    asyncio.run(story())


def test_every_stage_is_told_whose_share_a_jobs_is_and_a_new_weight_holds_at_once(tmp_path, monkeypatch):
    sent = []

    async def story():
        async with serving(config(tmp_path)) as service:
            send = service.controller._send
            monkeypatch.setattr(service.controller, "_send", lambda to, message: (sent.append(message), send(to, message))[1])
            heavy = await tenant(service, "heavy", weight=3.0)
            record = await service.submit(heavy, of("a", weight=7.0, steps=40), files=FILES)
            before, after = Owner(heavy.id, 3.0), Owner(heavy.id, 5.0)
            async with asyncio.timeout(60):
                while not any(isinstance(message, Generate) for message in sent):
                    await asyncio.sleep(0.01)
            service.tenant_changed(await service.store.awrite(tenants.update_tenant, heavy.id, weight=5.0))
            changed_at = len(sent)
            assert (await until(service, heavy, record.id, "succeeded", "failed")).state == "succeeded"
            assert [message.owner for message in sent if isinstance(message, AddJob)] == [before]
            assert [message.owner for message in sent if isinstance(message, Reweigh)] == [after]
            for asked, owner in ((sent[:changed_at], before), (sent[changed_at:], after)):
                found = {(message.owner, message.weight) for message in asked if isinstance(message, Generate)}
                assert found == {(owner, 7.0)}

    asyncio.run(story())


async def until_ended(stream):
    async for event in stream:
        yield event
        if event.kind in ("job_succeeded", "job_failed", "job_cancelled"):
            return


def test_what_cannot_be_served_is_refused_and_leaves_nothing(tmp_path):
    async def story():
        async with serving(config(tmp_path, quotas={"max_queued_jobs": 1, "max_running_jobs": 0})) as service:
            ann = await tenant(service, "ann")
            with pytest.raises(InvalidConfig, match=r"lora\.rank=64"):
                await service.submit(ann, of("a", lora={"rank": 64}), files=FILES)
            with pytest.raises(InvalidRequest, match=r"rewards\.py"):
                await service.submit(ann, of("a"))
            with pytest.raises(InvalidRequest, match=r"without '\.\.'"):
                await service.submit(ann, of("a"), files={"../rewards.py": b""})
            with pytest.raises(InvalidRequest, match="JOB_ID"):
                await service.submit(ann, of("a", lora={"init_from": "/etc"}), files=FILES)
            with pytest.raises(NotFound, match="no such job"):
                await service.submit(ann, of("a", lora={"init_from": "job_0123456789012345678901"}), files=FILES)
            queued = await service.submit(ann, of("a"), files=FILES)
            with pytest.raises(QuotaExceeded, match="max_queued_jobs=1"):
                await service.submit(ann, of("b"), files=FILES)
            assert "max_running_jobs=0" in service.why(await service.job(ann, queued.id))
            cancelled = await service.cancel(ann, queued.id)
            assert cancelled.state == "cancelled"
            with pytest.raises(InvalidRequest, match="cancelled"):
                await service.resume(ann, queued.id)

    asyncio.run(story())


@pytest.mark.slow
def test_jobs_wait_for_a_place_and_pause_and_go_on(tmp_path):
    async def story():
        async with serving(config(tmp_path, max_running_jobs=1)) as service:
            ann = await tenant(service, "ann")
            long = await service.submit(ann, of("long", steps=40), files=FILES)
            short = await service.submit(ann, of("short", steps=2), files=FILES)
            await until(service, ann, long.id, "running")
            assert "places" in service.why(await service.job(ann, short.id))
            while (await service.job(ann, long.id)).step < 2:
                await asyncio.sleep(0.02)
            await service.pause(ann, long.id)
            await until(service, ann, long.id, "paused")
            assert (await until(service, ann, short.id, "succeeded", "failed")).state == "succeeded"
            await service.resume(ann, long.id)
            assert (await until(service, ann, long.id, "succeeded", "failed")).step == 40
            return long.id

    job_id = asyncio.run(story())
    assert steps_of(tmp_path / "data", job_id) == list(range(1, 41))
    assert tickets_of(tmp_path / "data", job_id) == list(range(80))


@pytest.mark.slow
def test_a_drained_service_goes_on_with_what_ran_and_what_waited(tmp_path, url):
    """On SQLite, and on Postgres where there is a server."""

    async def first():
        async with serving(config(tmp_path, max_running_jobs=1, db=url)) as service:
            ann = await tenant(service, "ann")
            running = await service.submit(ann, of("running", steps=30), files=FILES)
            queued = await service.submit(ann, of("queued", steps=2), files=FILES)
            while (await service.job(ann, running.id)).step < 3:
                await asyncio.sleep(0.02)
        return running.id, queued.id

    async def second(running, queued):
        async with serving(config(tmp_path, max_running_jobs=1, db=url)) as service:
            ann = await tenant(service, "ann")
            assert (await service.job(ann, queued)).state == "queued"
            assert (await until(service, ann, running, "succeeded", "failed")).step == 30
            assert (await until(service, ann, queued, "succeeded", "failed")).step == 2

    running, queued = asyncio.run(first())
    asyncio.run(second(running, queued))
    assert steps_of(tmp_path / "data", running) == list(range(1, 31))
    assert tickets_of(tmp_path / "data", running) == list(range(60))


@pytest.mark.slow
def test_admission_outlives_jobs_that_are_cancelled_while_it_chooses_and_a_store_that_fails(tmp_path, monkeypatch):
    async def story():
        async with serving(config(tmp_path, quotas={"max_running_jobs": 20})) as service:
            ann = await tenant(service, "ann")
            gone = await asyncio.gather(*(service.submit(ann, of(f"gone{i}"), files=FILES) for i in range(12)))
            await asyncio.gather(*(service.cancel(ann, record.id) for record in gone))
            assert {(await service.job(ann, record.id)).state for record in gone} == {"cancelled"}
            real, faults = service._move, []

            async def failing(record, state, *rest):
                if len(faults) < 2 and state in ("running", "succeeded") and state not in faults:
                    faults.append(state)
                    raise StorageError("the disk is full")
                return await real(record, state, *rest)

            monkeypatch.setattr(service, "_move", failing)
            monkeypatch.setattr("marlaas_jax.service.service.SETTLE_INTERVAL_S", 0.1)
            last = await service.submit(ann, of("last", steps=1), files=FILES)
            assert (await until(service, ann, last.id, "succeeded", "failed")).state == "succeeded"
            assert faults == ["running", "succeeded"]
            alive = [job.name for job in service.controller.jobs.values() if job.is_live]
            assert not alive, "no cancelled job was started"

    asyncio.run(story())


@pytest.mark.slow
def test_a_job_that_ended_before_a_crash_could_be_told_to_the_store_is_told_at_the_next_start(tmp_path):
    async def first():
        async with serving(config(tmp_path)) as service:
            ann = await tenant(service, "ann")
            record = await service.submit(ann, of("a", steps=1), files=FILES)
            await until(service, ann, record.id, "succeeded")
            return record.id

    async def second(job_id):
        async with serving(config(tmp_path)) as service:
            ann = await tenant(service, "ann")
            assert (await until(service, ann, job_id, "succeeded", "failed")).state == "succeeded"

    job_id = asyncio.run(first())
    with Store.open(config(tmp_path).db_url) as store:  # as if the process had died just before
        store.write(jobs.move_job, job_id, "running", tenant_id=None, allowed_from=("succeeded",), now=1.0).result()
    asyncio.run(second(job_id))


@pytest.mark.slow
def test_a_tenant_that_has_used_its_tokens_of_the_day_waits_in_the_queue_and_goes_on(tmp_path):
    async def story():
        async with serving(config(tmp_path)) as service:
            ann = await tenant(service, "ann", quotas={"tokens_per_day": 20})
            record = await service.submit(ann, of("a", steps=60), files=FILES)
            await until(service, ann, record.id, "running")
            stopped = await until(service, ann, record.id, "queued", "succeeded")
            assert stopped.state == "queued" and 0 < stopped.step < 60
            assert "tokens_per_day=20: this tenant used" in service.why(stopped)
            used = service.metering.tokens_today(ann.id)
            assert used >= 20
            await asyncio.sleep(2.5)
            assert (await service.job(ann, record.id)).state == "queued" and service.metering.tokens_today(ann.id) == used
            service.tenant_changed(await service.store.awrite(tenants.update_tenant, ann.id, quotas={}))
            assert (await until(service, ann, record.id, "succeeded", "failed")).step == 60
            return record.id

    job_id = asyncio.run(story())
    assert steps_of(tmp_path / "data", job_id) == list(range(1, 61))
