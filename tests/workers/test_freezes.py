"""Freezing counts as dying: stopped processes are named, killed and replaced; a loop that stands still is named and ended."""

import asyncio
import json
import os
import signal
import threading
import time

import psutil
import pytest

from marlaas_jax.messages import EnvDone, GetItem
from marlaas_jax.transport.client import Client
from marlaas_jax.transport.flow import PeerLost
from marlaas_jax.transport.server import Server
from marlaas_jax.workers.controller_files import read_lines
from marlaas_jax.workers.loop_watch import LoopWatch
from tests.workers.faked import serve, steps_of, tickets_of

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stopped_processes_of_every_kind_are_named_within_10_s_killed_and_replaced(tmp_path, rewards, monkeypatch):
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"train_s": 0.1}))
    stopped: dict[str, tuple[int, float]] = {}

    async def story(served):
        job = served.add("a", f"{rewards}:good", steps=60)
        for place in ("job-a-0", "data-a", "device"):
            step = job.step
            await served.until(lambda: job.step >= step + 3)  # noqa: B023
            worker = served.controller._processes._supervisor.workers[place]
            os.kill(worker.pid, signal.SIGSTOP)
            stopped[place] = worker.pid, time.time()
            await served.until(lambda: worker.pid != stopped[place][0] and worker.is_running, 60)  # noqa: B023
        await served.until(lambda: job.is_over, 120)
        assert job.state == "succeeded", job.reason

    serve(tmp_path / "run", story)
    assert steps_of(tmp_path / "run", "a") == list(range(1, 61)) and tickets_of(tmp_path / "run", "a") == list(range(120))
    lost = {event["worker"]: event for event in read_lines(tmp_path / "run" / "events.jsonl") if event["kind"] == "worker_lost"}
    assert lost.keys() == stopped.keys()
    for place, (pid, at) in stopped.items():
        reason = lost[place]["reason"]  # a worker in the middle of a call is noticed by that call's limit, if it is earlier
        assert "no heartbeat for 8 s" in reason or (place == "job-a-0" and "answered nothing" in reason)
        assert lost[place]["time"] - at < 10.0
        assert not psutil.pid_exists(pid)


def test_what_a_worker_says_after_it_was_given_up_is_ignored():
    """As when a stopped worker of elsewhere, which nobody here can kill, wakes after another took over its work."""

    async def story():
        async with Server("ipc", heartbeat_s=0.1, lost_after_s=0.5) as server:
            client = await asyncio.to_thread(Client, server.address, "environment", "remote-1")
            await server.receive()
            server.lose("remote-1", "no heartbeat")
            assert isinstance((await server.receive())[1], PeerLost)
            with pytest.raises(Exception, match="not connected"):
                server.send("remote-1", GetItem("r", "a", 1, "train", 0))
            await asyncio.to_thread(client.send, EnvDone("a/1/train/0/0", 0, 1.0))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(server.receive(), 0.5)
            assert server.counters().ignored >= 1
            await asyncio.to_thread(client.close)

    asyncio.run(story())


def test_a_loop_that_stands_still_is_named_and_ended(caplog):
    ended = threading.Event()

    async def story(still_s):
        with LoopWatch(named_after_s=0.2, ended_after_s=0.6, end=ended.set):
            await asyncio.sleep(0.3)
            time.sleep(still_s)  # a hang
            await asyncio.sleep(0.1)

    asyncio.run(story(0.4))
    assert "event loop stands still" in caplog.text and "# a hang" in caplog.text and not ended.is_set()
    asyncio.run(story(1.5))
    assert ended.is_set()
