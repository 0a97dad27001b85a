"""What a machine does to a service: a full disk, a rotten database, a clock that jumps. Each has a stated outcome."""

import asyncio
import contextlib
import json
import random
import sqlite3
import subprocess
import sys
import time

import pytest
import yaml

from marlaas_jax.errors import CorruptFile, StorageError
from marlaas_jax.service.quotas import DAY_S
from marlaas_jax.store import events as event_table
from marlaas_jax.store import jobs
from marlaas_jax.store.engine import Store
from tests.service.live import FILES, live
from tests.service.live import of as job_of
from tests.service.test_service import config, of, serving, tenant
from tests.workers.faked import ROOT, steps_of

pytestmark = pytest.mark.multiprocess


def rot(path):
    """Overwrites every page of an SQLite file but the first few."""
    with path.open("r+b") as file:
        for page in range(3, path.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(random.Random(page).randbytes(4096))


def test_a_rotten_database_is_one_sentence_with_the_remedy_and_exit_code_2_at_the_start(tmp_path):
    settings = {"runtime": {"model": "tiny"}, "data_dir": str(tmp_path / "data"), "port": 0}
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(settings))
    database = tmp_path / "data" / "marlaas.db"

    async def story():
        async with serving(config(tmp_path)) as service:
            ann = await tenant(service, "ann")
            return (await service.submit(ann, of("a", steps=1), files=FILES)).id

    asyncio.run(story())
    asyncio.run(story())  # the second start makes a copy that holds the first one's job
    rot(database)
    command = [sys.executable, "-m", "marlaas_jax.cli.main", "serve", str(tmp_path / "service.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"{database}: is damaged" in done.stderr and f"mv {database}.copy {database}" in done.stderr

    for beside in ("-wal", "-shm"):
        database.with_name(database.name + beside).unlink(missing_ok=True)
    database.with_name(database.name + ".copy").rename(database)  # as the sentence says

    with Store.open(config(tmp_path).db_url) as store:
        assert len(store.read(jobs.list_jobs).jobs) == 1, "the copy was made at the second start, before the second job"


@pytest.mark.slow
def test_a_database_that_rots_while_it_is_served_is_named_and_what_trains_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"train_s": 0.2}))

    async def story():
        async with serving(config(tmp_path)) as service:
            ann = await tenant(service, "ann")
            record = await service.submit(ann, of("a", steps=100), files=FILES)
            while (await service.job(ann, record.id)).step < 3:
                await asyncio.sleep(0.02)
            job = service.controller.jobs[record.id]
            for _ in range(400):
                await service.store.awrite(event_table.add_event, "filler", {"text": "x" * 200}, now=1.0)
            with contextlib.closing(sqlite3.connect(tmp_path / "data" / "marlaas.db")) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            rot(tmp_path / "data" / "marlaas.db")
            with pytest.raises(CorruptFile, match=r"marlaas\.db: is damaged .*put back the copy of"):
                await service.store.aread(event_table.list_events, tenant_id=None)
            assert not job.is_over
            async with asyncio.timeout(90):
                while not job.is_over:
                    await asyncio.sleep(0.05)
            assert job.state == "succeeded" and service.controller.has_device
            return record.id

    job_id = asyncio.run(story())
    assert steps_of(tmp_path / "data", job_id) == list(range(1, 101))


@pytest.mark.slow
@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_nothing_that_waits_notices_a_clock_that_jumps_a_day(tmp_path, monkeypatch, jump_s):
    offset, real = {"s": 0.0}, time.time
    monkeypatch.setattr(time, "time", lambda: real() + offset["s"])
    with live(tmp_path) as service:
        client = service.client("ann")
        job = client.submit(job_of("a", steps=30), files=FILES)
        events = client.events(job.id)
        assert any(event.kind == "step" and event.data["step"] >= 3 for event in events)
        offset["s"] = jump_s
        done = client.wait(job.id)
        assert (done.state, done.step) == ("succeeded", 30), done.reason
        again = client.submit(job_of("b", steps=2), files=FILES)  # keys, idempotency and admission on the new day
        assert client.wait(again.id).state == "succeeded"
        assert client.rollback(again.id, 2).step == 2 and client.resume(again.id).state == "queued"
        assert client.wait(again.id).state == "succeeded"
        events.close()


@pytest.mark.slow
def test_a_full_disk_ends_jobs_in_sentences_and_the_service_stays_and_goes_on_when_there_is_room_h36(small_disk):
    with live(small_disk) as service:
        client = service.client("ann")
        job = client.submit(job_of("a", steps=2000), files=FILES)
        events = client.events(job.id)
        assert any(event.kind == "step" for event in events)
        ballast = small_disk / "ballast"
        with ballast.open("wb") as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(b"x" * 65536)
                file.flush()
        controller = service.service.controller
        end = time.monotonic() + 60
        while not controller.jobs[job.id].is_over and time.monotonic() < end:
            time.sleep(0.1)
        failed = controller.jobs[job.id]
        assert failed.kind == "StorageError" and "No space left on device" in failed.reason
        with pytest.raises(StorageError, match=r"cannot be (used|written)|full"):
            client.submit(job_of("b"), files=FILES)
        ballast.unlink()
        again = client.submit(job_of("c", steps=2), files=FILES)
        assert client.wait(again.id).state == "succeeded"
        assert client.wait(job.id).state == "failed"
        events.close()
