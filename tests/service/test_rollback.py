"""Roll-back to a committed step, against real workers and a fake device that commits every second step."""

import asyncio
import json

import httpx
import pytest

from marlaas_jax.errors import InvalidRequest, NotFound, StorageError
from marlaas_jax.store import jobs as job_table
from marlaas_jax.workers import roll_back
from marlaas_jax.workers.controller_files import read_state
from tests.service.live import FILES, live
from tests.service.live import of as job_of
from tests.service.test_service import config, of, serving, tenant, until
from tests.workers.faked import steps_of, tickets_of

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with live(tmp_path_factory.mktemp("rollback")) as found:
        yield found


def history(service, job_id):
    """Asserts that every ticket of the history that remains was trained once; returns (steps, names of snapshots)."""
    data = service.service.data_dir
    steps, tickets = steps_of(data, job_id), tickets_of(data, job_id)
    assert steps == list(range(1, len(steps) + 1)) and tickets == list(range(2 * len(steps)))
    return steps


def test_an_ended_job_goes_back_and_on_again_as_a_new_incarnation(service):
    client = service.client("ann")
    job = client.submit(job_of("ended"), files=FILES)
    assert client.wait(job.id).state == "succeeded"
    assert [(entry["step"], entry["is_undone"]) for entry in client.checkpoints(job.id)] == [(2, False), (4, False)]
    with pytest.raises(InvalidRequest, match=r"step=3: job_\w+ has no such committed step; it has 2, 4$"):
        client.rollback(job.id, 3)
    with pytest.raises(NotFound, match="no such job"):
        service.client("bob").rollback(job.id, 2)

    back = client.rollback(job.id, 2)
    assert (back.state, back.step, back.reason) == ("paused", 2, "rolled back to step 2; resume it to go on")
    assert [(entry["step"], entry["is_undone"]) for entry in client.checkpoints(job.id)] == [(2, False), (4, True)]
    assert [row["step"] for row in client.metrics(job.id)] == [1, 2]
    with pytest.raises(NotFound, match="no adapter"):
        client.download_adapter(job.id, "nowhere")
    undone = {(entry["ticket"] // 2 + 1, entry["is_undone"]) for entry in client.episodes(job.id, split="train")}
    assert undone == {(1, False), (2, False), (3, True), (4, True)}

    assert client.resume(job.id).state == "queued"
    assert client.wait(job.id).state == "succeeded"
    assert history(service, job.id) == [1, 2, 3, 4]
    episodes = list(client.episodes(job.id, split="train", step=4))
    assert {(entry["incarnation"], entry["is_undone"]) for entry in episodes} == {(1, True), (2, False)}
    state = read_state(service.service.folder(job.id) / "state.json")
    assert state["incarnation"] == 2 and state["rollback_to"] is None
    kinds = [event.kind for event in client.events(job.id, 0)]
    assert kinds.count("job_rolled_back") == 1 and kinds.count("job_succeeded") == 2


@pytest.mark.slow
def test_a_running_job_goes_back_and_on_without_a_gap_or_a_repeat(service, tmp_path):
    client = service.client("ann")
    job = client.submit(job_of("running", steps=30), files=FILES)
    events = client.events(job.id)
    assert any(event.kind == "step" and event.data["step"] >= 7 for event in events)
    key = {"Authorization": f"Bearer {service.key('ann')}", "Idempotency-Key": "back-to-4"}
    answers = [
        httpx.post(f"{service.url}/v1/jobs/{job.id}/rollback", json={"step": 4}, headers=key, timeout=60) for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["state"] == "queued" and answers[1].headers["Idempotency-Replayed"] == "true"
    assert client.wait(job.id).state == "succeeded"
    assert history(service, job.id) == list(range(1, 31))
    rows = client.metrics(job.id)
    assert {row["incarnation"] for row in rows[:4]} == {1} and {row["incarnation"] for row in rows[4:]} == {2}
    events.close()


@pytest.mark.slow
def test_a_paused_job_stays_paused_and_may_go_forward_again_until_it_goes_on(service):
    client = service.client("ann")
    job = client.submit(job_of("paused", steps=30), files=FILES)
    events = client.events(job.id)
    assert any(event.kind == "step" and event.data["step"] >= 5 for event in events)
    client.pause(job.id)
    assert any(event.kind == "job_paused" for event in events)
    last = client.job(job.id).step
    assert (client.rollback(job.id, 2).state, client.job(job.id).step) == ("paused", 2)
    assert (client.rollback(job.id, last).state, client.job(job.id).step) == ("paused", last)
    assert len(client.metrics(job.id)) == last
    client.rollback(job.id, 4)
    client.resume(job.id)
    assert client.wait(job.id).state == "succeeded"
    assert history(service, job.id) == list(range(1, 31))
    events.close()


@pytest.mark.slow
def test_a_rollback_that_the_store_cannot_take_leaves_the_running_job_running(tmp_path, monkeypatch):
    async def story():
        async with serving(config(tmp_path)) as service:
            ann = await tenant(service, "ann")
            record = await service.submit(ann, of("a", steps=12), files=FILES)
            while (await service.job(ann, record.id)).step < 5:
                await asyncio.sleep(0.02)

            def full(*_, **__):
                raise StorageError("the disk is full")

            with monkeypatch.context() as patch:
                patch.setattr(job_table, "update_job", full)
                with pytest.raises(StorageError, match="the disk is full"):
                    await service.rollback(ann, record.id, 2)
            assert (await until(service, ann, record.id, "succeeded", "failed")).state == "succeeded"
            assert not (service.folder(record.id) / roll_back.HELD).exists()
            return record.id

    job_id = asyncio.run(story())
    assert steps_of(tmp_path / "data", job_id) == list(range(1, 13))
    state = read_state(tmp_path / "data" / "jobs" / job_id / "state.json")
    assert "rollbacks" not in state, "nothing was undone"


@pytest.mark.slow
def test_a_crash_after_the_intent_and_before_the_commit_takes_a_running_job_back_at_the_next_start(tmp_path):
    async def first():
        async with serving(config(tmp_path)) as service:
            ann = await tenant(service, "ann")
            record = await service.submit(ann, of("a", steps=30), files=FILES)
            while (await service.job(ann, record.id)).step < 7:
                await asyncio.sleep(0.02)
            return record.id

    async def second(job_id):
        async with serving(config(tmp_path)) as service:
            ann = await tenant(service, "ann")
            assert (await until(service, ann, job_id, "succeeded", "failed")).state == "succeeded"

    job_id = asyncio.run(first())
    folder = tmp_path / "data" / "jobs" / job_id
    roll_back.intend(folder, 4, now=1.0)
    asyncio.run(second(job_id))
    assert steps_of(tmp_path / "data", job_id) == list(range(1, 31)) and tickets_of(tmp_path / "data", job_id) == list(
        range(60)
    )
    incarnations = [json.loads(line)["incarnation"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert incarnations == [1] * 4 + [2] * 26


def test_a_held_step_outlives_its_pruning(tmp_path):
    step = tmp_path / "checkpoints" / "5"
    (step / "arrays").mkdir(parents=True)
    (step / "arrays" / "a").write_bytes(b"weights")
    roll_back.hold(tmp_path, step)
    (step / "arrays" / "a").unlink()
    (step / "arrays").rmdir()
    step.rmdir()
    assert roll_back.committed(tmp_path) == {}
    roll_back.put_back(tmp_path)
    roll_back.release(tmp_path)
    assert (step / "arrays" / "a").read_bytes() == b"weights" and list(roll_back.committed(tmp_path)) == [5]
    with pytest.raises(StorageError, match="checkpoints/6: cannot be held"):
        roll_back.hold(tmp_path, tmp_path / "checkpoints" / "6")
