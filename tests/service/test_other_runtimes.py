"""A service that starts with other sizes than before: what fits goes on, what does not waits with the reason."""

import asyncio
import json

import pytest

from tests.service.live import FILES
from tests.service.test_service import config, of, serving, tenant, until
from tests.workers.faked import steps_of, tickets_of

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_a_job_whose_rank_no_longer_fits_waits_in_the_queue_and_goes_on_when_it_does(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"train_s": 0.2}))  # none of them ends before the first stop
    large = {"model": "tiny", "bank": {"max_rank": 16}}
    small = {"model": "tiny", "bank": {"max_rank": 4, "num_learner_slots": 2}, "engine": {"num_decode_slots": 4}}

    async def first():
        async with serving(config(tmp_path, runtime=large)) as service:
            ann = await tenant(service, "ann")
            wide = await service.submit(ann, of("wide", steps=30, lora={"rank": 16}), files=FILES)
            slim = await service.submit(ann, of("slim", steps=30, lora={"rank": 4}), files=FILES)
            while min([(await service.job(ann, job.id)).step for job in (wide, slim)]) < 3:
                await asyncio.sleep(0.02)
        return wide.id, slim.id

    async def second(wide, slim):
        async with serving(config(tmp_path, runtime=small)) as service:
            ann = await tenant(service, "ann")
            held = await until(service, ann, wide, "queued", "failed")
            words = "lora.rank=16: this service's bank allows 1 to 4; it waits for a start with more"
            assert held.state == "queued" and held.reason == words and service.why(held).startswith(f"queue: {words}, by ")
            assert (await until(service, ann, slim, "succeeded", "failed")).state == "succeeded"
            assert (await service.job(ann, wide)).state == "queued", "it takes nobody's turn and does not fail"

    async def third(wide):
        async with serving(config(tmp_path, runtime=large)) as service:
            ann = await tenant(service, "ann")
            assert (await until(service, ann, wide, "succeeded", "failed")).state == "succeeded"

    wide, slim = asyncio.run(first())
    asyncio.run(second(wide, slim))
    asyncio.run(third(wide))
    for job_id in (wide, slim):
        assert steps_of(tmp_path / "data", job_id) == list(range(1, 31))
        assert tickets_of(tmp_path / "data", job_id) == list(range(60))
