"""Environment and data workers as real processes behind Server and Supervisor (H27, H28, H30, H31, H33)."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time

import msgspec
import psutil
import pytest

from marlaas_jax.config import DataConfig
from marlaas_jax.errors import WorkerLost
from marlaas_jax.messages import (
    EnvDone,
    EnvError,
    EnvLoaded,
    EnvObservation,
    EnvReset,
    EnvStep,
    GetItem,
    Hello,
    Item,
    LoadEnv,
    RemoveJob,
    Shutdown,
    WorkerFailed,
)
from marlaas_jax.transport.flow import PeerLost
from marlaas_jax.transport.server import Server
from marlaas_jax.workers.supervisor import EXIT_BLOCKED, EXIT_CONTROLLER_GONE, Exited, GaveUp, Restarted, Supervisor, WorkerSpec

pytestmark = pytest.mark.multiprocess

CODE = """
import asyncio, ctypes, os, re, sys, time
from marlaas_envs.protocol import Done, Observation

def reward(prompt, completion, item):
    if completion == "exit": os._exit(1)
    if completion == "segfault": ctypes.string_at(0)
    if completion == "print": sys.stdout.write("x" * 50 * 2**20); return 1.0
    if completion == "regex": return float(bool(re.match("(a+)+$", "a" * 40 + "b")))
    if completion == "jax": return float("jax" in sys.modules or "tokenizers" in sys.modules)
    time.sleep(0.02)
    return 0.5

class Blocks:
    async def reset(self, item, seed): return Observation(text="p")
    async def step(self, action):
        if action.text == "block":
            while True: pass
        if action.text == "stubborn":
            while True:
                try: await asyncio.sleep(1000)
                except asyncio.CancelledError: pass
        return Done(1.0)
"""


class Cluster:
    """A small controller: routes messages by name of worker, with time limits on every wait."""

    def __init__(self, server, supervisor, tmp_path):
        self.server, self.supervisor, self.tmp_path = server, supervisor, tmp_path
        self.env = f"{tmp_path}/user_env.py:"
        (tmp_path / "user_env.py").write_text(CODE)

    def start(self, name="env-0", module="marlaas_jax.workers.env_worker", **options):
        options.setdefault("backoff_s", 0.05)
        log_path = self.tmp_path / f"{name}.log"
        return self.supervisor.start(WorkerSpec(name, module, ("--address", self.server.address), log_path=log_path, **options))

    async def next(self, kind, seconds=20):
        """Returns the next (worker id, message), which must be of this kind."""
        worker_id, message = await asyncio.wait_for(self.server.receive(), seconds)
        assert isinstance(message, kind), message
        return worker_id, message

    async def event(self, kind, seconds=20):
        event = await asyncio.wait_for(self.supervisor.next_event(), seconds)
        assert isinstance(event, kind), event
        return event

    async def ready(self, worker_id, attribute="reward", job="j"):
        self.server.send(worker_id, LoadEnv(job, 0, self.env + attribute, {}))
        assert (await self.next(EnvLoaded))[1] == EnvLoaded(job, 0)

    async def play(self, worker_id, text, episode="e", timeout_s=5.0, job="j"):
        self.server.send(worker_id, EnvReset(episode, 0, job, 0, b'{"prompt": "p"}', 0, 5.0))
        await self.next(EnvObservation)
        self.server.send(worker_id, EnvStep(episode, 0, 0, text, "stop", 1, timeout_s))


@contextlib.asynccontextmanager
async def cluster(tmp_path, **options):
    async with Server("ipc", **options) as server, Supervisor() as supervisor:
        yield Cluster(server, supervisor, tmp_path)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 80))


@pytest.mark.parametrize(
    ("text", "reason"), [("exit", "it crashed (exit code 1)"), ("segfault", "killed by SIGSEGV"), ("kill", "killed by SIGKILL")]
)
def test_a_worker_that_dies_mid_episode_is_noticed_at_once_and_replaced(tmp_path, text, reason):
    """H27 (b), H31: the old identity is forgotten, the new one says hello."""

    async def main():
        async with cluster(tmp_path) as c:
            worker = c.start()
            first, hello = await c.next(Hello)
            assert first == worker.worker_id and hello.pid == worker.pid and hello.role == "environment"
            await c.ready(first)
            await c.play(first, "x" if text == "kill" else text)
            start = time.monotonic()
            if text == "kill":
                os.kill(worker.pid, signal.SIGKILL)
            exited = await c.event(Exited)
            assert (exited.worker_id, exited.reason) == (first, reason) and time.monotonic() - start < 5
            if text == "segfault":
                assert "Segmentation fault" in exited.log_tail and "user_env.py" in exited.log_tail
            c.server.lose(first, exited.reason)
            assert await c.next(PeerLost) == (first, PeerLost("environment", reason))
            await c.event(Restarted)
            second, _ = await c.next(Hello)
            assert second == worker.worker_id != first and list(c.server.peers) == [second]
            await c.ready(second)
            await c.play(second, "fine")
            assert (await c.next(EnvDone))[1].reward == 0.5

    run(main())


def test_a_stopped_worker_is_lost_by_silence_and_what_it_says_later_is_ignored(tmp_path):
    """H31: SIGSTOP, not a kill."""

    async def main():
        async with cluster(tmp_path, heartbeat_s=0.1, lost_after_s=1.0) as c:
            worker = c.start(backoff_s=30.0, max_backoff_s=30.0)
            first, _ = await c.next(Hello)
            await c.ready(first)
            await c.play(first, "slow answer")
            os.kill(worker.pid, signal.SIGSTOP)
            lost_id, lost = await c.next((PeerLost, EnvDone))
            if isinstance(lost, EnvDone):  # it was quicker than the signal
                lost_id, lost = await c.next(PeerLost)
            assert lost_id == first and lost.reason == "no heartbeat for 1 s"
            os.kill(worker.pid, signal.SIGCONT)
            exited = await c.event(Exited)
            assert exited.code == EXIT_CONTROLLER_GONE and "given this worker up" in exited.log_tail
            assert not c.server.peers

    run(main())


def test_code_that_holds_the_interpreter_costs_its_worker_only(tmp_path):
    """H28: a regular expression that runs for ever lets no other thread run, so the heartbeats stop."""

    async def main():
        async with cluster(tmp_path, heartbeat_s=0.1, lost_after_s=1.5) as c:
            first, second = c.start("env-0"), c.start("env-1")
            names = {(await c.next(Hello))[0], (await c.next(Hello))[0]}
            assert names == {first.worker_id, second.worker_id}
            for worker in (first, second):
                await c.ready(worker.worker_id)
            lost_id = first.worker_id
            await c.play(lost_id, "regex")
            assert (await c.next(PeerLost))[0] == lost_id
            c.supervisor.kill(first)
            assert (await c.event(Exited)).reason == "killed by SIGKILL"
            await c.play(second.worker_id, "fine", episode="f")
            worker_id, message = await c.next((EnvDone, Hello))
            while isinstance(message, Hello):
                worker_id, message = await c.next((EnvDone, Hello))
            assert (worker_id, message.reward) == (second.worker_id, 0.5)

    run(main())


def test_a_coroutine_that_blocks_the_loop_is_named_and_its_worker_replaced(tmp_path):
    """H27 (d)."""

    async def main():
        async with cluster(tmp_path) as c:
            c.start()
            first, _ = await c.next(Hello)
            await c.ready(first, "Blocks")
            await c.play(first, "block", timeout_s=0.3)
            error = (await c.next(EnvError))[1]
            assert (error.episode_id, error.kind) == ("e", "timeout") and "while True: pass" in error.text
            failed = (await c.next(WorkerFailed))[1]
            assert failed.kind == "Blocked" and "user_env.py" in failed.text
            assert (await c.event(Exited)).code == EXIT_BLOCKED

    run(main())


def test_a_coroutine_that_refuses_to_end_does_not_keep_its_worker(tmp_path):
    async def main():
        async with cluster(tmp_path) as c:
            worker = c.start()
            first, _ = await c.next(Hello)
            await c.ready(first, "Blocks")
            await c.play(first, "stubborn", timeout_s=0.2)
            assert (await c.next(EnvError))[1].kind == "timeout"
            c.server.send(first, Shutdown())
            exited = await c.event(Exited)
            assert exited.code == 0 and exited.log_tail and worker.failures == 1

    run(main())


def test_fifty_megabytes_printed_by_a_reward_function(tmp_path):
    """H28; and the process has no JAX and no tokenizer."""

    async def main():
        async with cluster(tmp_path) as c:
            worker = c.start(max_log_bytes=1 << 20)
            first, _ = await c.next(Hello)
            await c.ready(first)
            await c.play(first, "print", timeout_s=20.0)
            assert (await c.next(EnvDone))[1].reward == 1.0
            await c.play(first, "jax", episode="f")
            assert (await c.next(EnvDone))[1].reward == 0.0
            assert worker.output.num_bytes > 50 * 2**20 and worker.spec.log_path.stat().st_size < 2 << 20
            assert psutil.Process(worker.pid).memory_info().rss < 400 << 20

    run(main())


def test_an_environment_that_dies_at_import_is_given_up(tmp_path):
    """H27 (c): the cap on restarts ends it, with the reason."""
    (tmp_path / "dies.py").write_text("import os; print('dying at import', flush=True); os._exit(7)")

    async def main():
        async with cluster(tmp_path) as c:
            c.start(max_restarts=1)
            for _ in range(2):
                worker_id, _ = await c.next(Hello)
                c.server.send(worker_id, LoadEnv("j", 0, f"{tmp_path}/dies.py:f", {}))
                exited = await c.event(Exited)
                assert exited.code == 7 and "dying at import" in exited.log_tail
                c.server.lose(worker_id, exited.reason)
                await c.next(PeerLost)
                last = await c.event((Restarted, GaveUp))
            assert isinstance(last, GaveUp) and "2 times in a row" in last.reason

    run(main())


def test_workers_leave_when_the_controller_closes_and_when_it_says_so(tmp_path):
    """H33."""

    async def main():
        async with cluster(tmp_path) as c:
            told, left = c.start("told"), c.start("left", max_restarts=0)
            for _ in range(2):
                await c.next(Hello)
            c.server.send(told.worker_id, Shutdown())
            assert (await c.event(Exited)).code == 0
            start = time.monotonic()
            await c.server.close()
            events = [await c.event((Exited, GaveUp, Restarted)) for _ in range(2)]
            codes = [e.code for e in events if isinstance(e, Exited) and e.name == "left"]
            assert codes == [EXIT_CONTROLLER_GONE] and time.monotonic() - start < 5
            assert not left.is_running

    run(main())


def test_every_episode_ends_exactly_once_though_workers_come_and_go(tmp_path):
    """H31, scaled down: 60 episodes, two workers, kills and a stop in between; what was lost starts as a new attempt."""

    async def main():
        async with cluster(tmp_path, heartbeat_s=0.1, lost_after_s=1.0) as c:
            workers = {w.spec.name: w for w in (c.start("env-0"), c.start("env-1"))}
            ready, owner, attempt = set(), {}, dict.fromkeys((f"e{i}" for i in range(60)), 0)
            todo, ended = list(attempt), {}
            trouble = {10: signal.SIGKILL, 25: signal.SIGSTOP, 40: signal.SIGKILL}
            turn = itertools.count()
            ours = c.event((Exited, Restarted, GaveUp), 60)
            event = asyncio.ensure_future(ours)
            message_task = asyncio.ensure_future(c.server.receive())
            while len(ended) < 60:
                await asyncio.wait({event, message_task}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
                if event.done():
                    if isinstance(event.result(), Exited):
                        c.server.lose(event.result().worker_id, event.result().reason)
                    event = asyncio.ensure_future(c.event((Exited, Restarted, GaveUp), 60))
                if not message_task.done():
                    continue
                worker_id, message = message_task.result()
                message_task = asyncio.ensure_future(c.server.receive())
                match message:
                    case Hello():
                        c.server.send(worker_id, LoadEnv("j", 0, c.env + "reward", {}))
                    case EnvLoaded():
                        ready.add(worker_id)
                    case PeerLost():
                        ready.discard(worker_id)
                        for worker in workers.values():
                            if worker.worker_id == worker_id:
                                c.supervisor.kill(worker)  # it may only be stopped
                        for episode in [e for e, w in owner.items() if w == worker_id]:
                            del owner[episode]
                            attempt[episode] += 1
                            todo.append(episode)
                    case EnvObservation():
                        with contextlib.suppress(WorkerLost):
                            c.server.send(worker_id, EnvStep(message.episode_id, message.attempt, 0, "x", "stop", 1, 5.0))
                    case EnvDone():
                        assert attempt[message.episode_id] == message.attempt and message.episode_id not in ended
                        ended[message.episode_id] = message.reward
                        del owner[message.episode_id]
                        if len(ended) in trouble:
                            os.kill(workers[f"env-{len(ended) % 2}"].pid, trouble[len(ended)])
                for worker_id in sorted(ready):
                    while todo and sum(w == worker_id for w in owner.values()) < 4:
                        episode = todo.pop(0)
                        owner[episode] = worker_id
                        reset = EnvReset(episode, attempt[episode], "j", 0, b'{"prompt": "p"}', next(turn), 5.0)
                        with contextlib.suppress(WorkerLost):  # its PeerLost is under way
                            c.server.send(worker_id, reset)
            assert set(ended.values()) == {0.5} and sum(attempt.values()) >= 1
            event.cancel()
            message_task.cancel()
            await asyncio.wait({event, message_task})
            counters = c.server.counters()
            assert counters.sent == counters.delivered + counters.in_flight + counters.failed

    run(main())


def test_data_worker_serves_all_jobs_by_ticket(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps({"q": f"p{i}", "a": i, "s": "\ud800"}) + "\n" for i in range(20)))
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    config = DataConfig(source=f"jsonl:{path}", prompt_field="q", answer_field="a").model_dump_json().encode()

    async def main():
        async with cluster(tmp_path) as c:
            c.start("data", "marlaas_jax.workers.data_worker")
            w, hello = await c.next(Hello, 60)
            assert hello.role == "data"

            async def ask(job, split, index, incarnation=0):
                c.server.send(w, GetItem("r", job, incarnation, split, index))
                item = (await c.next(Item))[1]
                return item.error or msgspec.json.decode(item.item)

            c.server.send(w, LoadEnv("slow", 0, f"{tmp_path}/slow.py:f", {}))  # holds up nobody
            c.server.send(w, LoadEnv("file", 0, "calculator", {}, config, 3))
            assert (await c.next(EnvLoaded))[1] == EnvLoaded("file", 0, "", 18, 2)
            c.server.send(w, LoadEnv("env", 0, "words:last_word", {}, seed=1))
            assert (await c.next(EnvLoaded))[1] == EnvLoaded("env", 0, "", 0, 0)
            c.server.send(w, LoadEnv("bad", 0, "words:last_word", {"n": 1}))
            assert "env_args.n=1" in (await c.next(EnvLoaded))[1].error
            c.server.send(w, LoadEnv("none", 0, "calculator", {}, config.replace(b"items", b"other")))
            assert "no such file" in (await c.next(EnvLoaded))[1].error
            first = [await ask("file", "train", t) for t in range(18)]
            assert sorted(i["answer"] for i in first) == list(range(18)) and first[0]["prompt"].startswith("p")
            assert first[0]["s"] == "?"  # half of a surrogate pair
            assert await ask("file", "train", 5) == first[5]
            assert "there are 2 held-out items" in await ask("file", "eval", 2)
            assert (await ask("env", "eval", 3))["prompt"].endswith("\nA:")
            assert "could not be opened" in await ask("bad", "train", 0)
            assert "not loaded job file (1)" in await ask("file", "train", 0, 1)
            c.server.send(w, RemoveJob("file", 0))
            assert "not loaded job file (0)" in await ask("file", "train", 0)
            c.server.send(w, Shutdown())
            assert (await c.event(Exited)).code == 0

    run(main())
