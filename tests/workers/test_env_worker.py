"""The environment worker's loop over the in-memory transport: answers, limits, and everything a user's code can do wrong."""

import asyncio
import contextlib
import time

import msgspec
import pytest

from marlaas_jax.messages import (
    EnvClose,
    EnvDone,
    EnvError,
    EnvLoaded,
    EnvObservation,
    EnvReset,
    EnvStep,
    Hello,
    LoadEnv,
    RemoveJob,
    Shutdown,
)
from marlaas_jax.transport.memory import MemoryClient, MemoryServer
from marlaas_jax.workers.env_answers import MAX_TEXT_CHARACTERS, checked_reward
from marlaas_jax.workers.env_worker import EnvWorker
from marlaas_jax.workers.user_calls import MAX_TRACEBACK_CHARACTERS

CODE = '''
import asyncio, math, sys, time
from marlaas_envs.protocol import Done, Observation

class Evil:
    def __str__(self): raise OSError("I have no name")

class Unpicklable(Exception):
    def __init__(self): self.lock = __import__("threading").Lock(); super().__init__("no pickle " + "x" * 100_000)
    def __reduce__(self): raise TypeError("cannot pickle")

def reward(prompt, completion, item):
    kind = completion.strip()
    if kind == "raise": raise ValueError("my own mistake")
    if kind == "surrogate": raise ValueError("half a \\ud800 pair")
    if kind == "exit": sys.exit(1)
    if kind == "unpicklable": raise Unpicklable()
    if kind == "loop":
        while True: pass
    if kind == "sleep": time.sleep(0.6); return 1.0
    if kind == "print": print("x" * 1000); return 1.0
    if kind == "big": return 10**400
    return {"none": None, "nan": math.nan, "inf": math.inf, "text": "1.0", "list": [1], "true": True, "int": 7}[kind]

async def later(prompt, completion, item):
    await asyncio.sleep(0.02)
    return 0.25

class Env:
    """Says back what it is told to."""
    closed = []
    def __init__(self, slow_reset=0.0): self.slow_reset = slow_reset; self.turns = 0
    async def reset(self, item, seed):
        await asyncio.sleep(self.slow_reset)
        self.seed = seed
        return Observation(text=f"{item['prompt']} {seed}", stop=["END"])
    async def step(self, action):
        self.turns += 1
        text = action.text
        if text == "huge": return Observation(text="x" * 50_000_000)
        if text == "huge messages": return Observation(messages=[{"role": "tool", "content": "y" * 50_000_000}])
        if text == "both": return Observation(text="a", messages=[{"role": "user", "content": "b"}])
        if text == "object": return Observation(messages=[{"role": "user", "content": object()}])
        if text == "number": return 5
        if text == "half": return Observation(text="a\\ud800b", stop=["c\\udfff"])
        if text == "half messages": return Observation(messages=[{"role": "tool\\ud800", "k\\ud800": ["v\\ud800"]}])
        if text == "half done": return Done(1.0, {"m\\ud800": 2.0, "n": "\\ud800"}, "note \\ud800")
        if text == "evil": return Done(1.0, {Evil(): 1.0})
        if text == "system exit": sys.exit(3)
        if text == "forever": await asyncio.sleep(1000)
        if text == "stubborn":
            for _ in range(2):  # refuses to end when it is cancelled, once
                try: await asyncio.sleep(1000)
                except asyncio.CancelledError: pass
        if text == "done": return Done(1, {"turns": self.turns, "bad": math.nan, "worse": "x"}, "seen " + "z" * 9999)
        return Observation(messages=({"role": "user", "content": text},), tools=({"type": "function"},))
    def close(self): print("closed", flush=True)
'''


@contextlib.asynccontextmanager
async def worker_with(tmp_path, *jobs):
    """Yields (server, worker id) with each job's (name, attribute, args) loaded."""
    (tmp_path / "user_env.py").write_text(CODE)
    async with MemoryServer() as server:
        client = MemoryClient(server, "environment", "w")
        worker = EnvWorker(client)
        task = asyncio.ensure_future(worker.run())
        assert isinstance((await server.receive())[1], Hello)
        for job, attribute, args in jobs:
            server.send("w", LoadEnv(job, 0, f"{tmp_path}/user_env.py:{attribute}", args))
            _, loaded = await server.receive()
            assert loaded == EnvLoaded(job, 0), loaded
        yield server
        if not task.done():
            server.send("w", Shutdown())
        assert await asyncio.wait_for(task, 5) == 0


def reset(episode, job="j", attempt=0, seed=1, timeout_s=5.0, item=None, incarnation=0):
    return EnvReset(episode, attempt, job, incarnation, msgspec.json.encode(item or {"prompt": "p"}), seed, timeout_s)


def step(episode, text, turn=0, attempt=0, timeout_s=5.0):
    return EnvStep(episode, attempt, turn, text, "stop", 3, timeout_s)


async def answer(server, seconds=10):
    return (await asyncio.wait_for(server.receive(), seconds))[1]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 40))


def test_episode_of_several_turns(tmp_path):
    async def main():
        async with worker_with(tmp_path, ("j", "Env", {})) as server:
            server.send("w", reset("e", seed=9))
            assert await answer(server) == EnvObservation("e", 0, 0, text="p 9", stop=("END",))
            server.send("w", step("e", "hello"))
            expected = EnvObservation(
                "e", 0, 1, messages=({"role": "user", "content": "hello"},), tools=({"type": "function"},)
            )
            assert await answer(server) == expected
            server.send("w", step("e", "done", turn=1))
            done = await answer(server)
            assert (done.reward, done.metrics) == (1.0, {"turns": 2.0})
            assert done.note.startswith("metric bad: nan; metric worse: 'x'") and len(done.note) == 500
            server.send("w", step("e", "again", turn=2))
            assert (await answer(server)).kind == "lost"

    run(main())


@pytest.mark.parametrize(
    ("kind", "reward", "note"),
    [
        ("none", None, "the reward is None"),
        ("nan", None, "the reward is nan"),
        ("inf", None, "the reward is inf"),
        ("text", None, "the reward is '1.0' (str), not a number"),
        ("list", None, "the reward is [1] (list), not a number"),
        ("big", None, "not one number (OverflowError)"),
        ("true", 1.0, ""),
        ("int", 7.0, ""),
    ],
)
def test_rewards_are_checked(tmp_path, kind, reward, note):
    """H24."""

    async def main():
        async with worker_with(tmp_path, ("j", "reward", {})) as server:
            server.send("w", reset("e"))
            assert (await answer(server)).text == "p"
            server.send("w", step("e", kind))
            done = await answer(server)
            assert isinstance(done, EnvDone) and done.reward == reward and note in done.note

    run(main())


def test_rewards_of_other_types():
    import numpy as np

    assert checked_reward(np.float32(0.5)) == (0.5, "") and checked_reward(np.int64(2)) == (2.0, "")
    assert checked_reward(np.asarray(1.5)) == (1.5, "") and checked_reward(np.asarray([1.5, 2.0]))[0] is None
    assert checked_reward(np.float64("nan"))[0] is None and checked_reward(b"1")[0] is None and checked_reward({})[0] is None


@pytest.mark.parametrize(
    ("kind", "error_kind", "says"),
    [
        ("raise", "raised", "ValueError: my own mistake"),
        ("surrogate", "raised", "ValueError: half a ? pair"),
        ("exit", "raised", "SystemExit: 1"),
        ("unpicklable", "raised", "characters left out"),
        ("loop", "timeout", "no answer within 0.3 s"),
        ("sleep", "timeout", "no answer within 0.3 s"),
    ],
)
def test_a_reward_function_that_fails_costs_its_episode_only(tmp_path, kind, error_kind, says):
    """H27 (a), H28: the worker goes on, and the late answer of the sleeping one is ignored."""

    async def main():
        async with worker_with(tmp_path, ("j", "reward", {}), ("k", "later", {})) as server:
            for episode, job in (("e", "j"), ("f", "k")):
                server.send("w", reset(episode, job))
                await answer(server)
            start = time.monotonic()
            server.send("w", step("e", kind, timeout_s=0.3))
            server.send("w", step("f", "x"))
            got = {m.episode_id: m for m in [await answer(server), await answer(server)]}
            assert got["f"] == EnvDone("f", 0, 0.25, {}, "")
            error = got["e"]
            assert isinstance(error, EnvError) and error.kind == error_kind and says in error.text
            assert len(error.text) <= MAX_TRACEBACK_CHARACTERS + 100 and time.monotonic() - start < 3
            await asyncio.sleep(0.5)
            server.send("w", reset("g", "j"))
            assert (await answer(server)).episode_id == "g"  # and nothing late from "e" before it
            server.send("w", step("g", "int"))
            assert (await answer(server)).reward == 7.0

    run(main())


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("both", "bad_answer", "exactly one of text and messages"),
        ("object", "bad_answer", "cannot be written as JSON"),
        ("number", "bad_answer", "it returned 5 (int), not an Observation or a Done"),
        ("evil", "bad_answer", "OSError: I have no name"),
        ("system exit", "raised", "SystemExit: 3"),
        ("forever", "timeout", "no answer within 0.3 s"),
        ("stubborn", "timeout", "no answer within 0.3 s"),
    ],
)
def test_an_environment_that_answers_badly_or_never(tmp_path, text, kind, says):
    async def main():
        async with worker_with(tmp_path, ("j", "Env", {})) as server:
            server.send("w", reset("e"))
            await answer(server)
            server.send("w", step("e", text, timeout_s=0.3))
            error = await answer(server)
            assert isinstance(error, EnvError) and error.kind == kind and says in error.text
            server.send("w", reset("f"))
            assert (await answer(server)).text == "p 1"

    run(main())


def test_text_that_utf8_cannot_hold_arrives_with_question_marks(tmp_path):
    async def main():
        async with worker_with(tmp_path, ("j", "Env", {})) as server:
            server.send("w", reset("e"))
            await answer(server)
            server.send("w", step("e", "half"))
            seen = await answer(server)
            assert (seen.text, seen.stop) == ("a?b", ("c?",))
            server.send("w", step("e", "half messages", turn=1))
            assert (await answer(server)).messages == ({"role": "tool?", "k?": ["v?"]},)
            server.send("w", step("e", "half done", turn=2))
            done = await answer(server)
            assert (done.reward, done.metrics) == (1.0, {"m?": 2.0})
            assert done.note == "metric n: '\\ud800' (str), not a number; note ?"

    run(main())


def test_huge_observations_are_cut(tmp_path):
    """H28: 50 MB."""

    async def main():
        async with worker_with(tmp_path, ("j", "Env", {})) as server:
            server.send("w", reset("e"))
            await answer(server)
            server.send("w", step("e", "huge"))
            seen = (await answer(server)).text
            assert len(seen) < MAX_TEXT_CHARACTERS + 100 and seen.endswith("[49800000 characters left out]")
            server.send("w", step("e", "huge messages", turn=1))
            seen = (await answer(server)).messages[0]["content"]
            assert len(seen) < MAX_TEXT_CHARACTERS + 100

    run(main())


def test_what_is_said_twice_or_late_is_taken_once(tmp_path):
    async def main():
        async with worker_with(tmp_path, ("j", "Env", {})) as server:
            server.send("w", reset("e", seed=1))
            server.send("w", reset("e", seed=1))
            assert (await answer(server)).turn == 0
            for _ in range(2):
                server.send("w", step("e", "a", turn=0))
            assert (await answer(server)).turn == 1
            server.send("w", reset("e", attempt=1, seed=2))  # a new attempt replaces the old one
            assert await answer(server) == EnvObservation("e", 1, 0, text="p 2", stop=("END",))
            server.send("w", step("e", "late", turn=1, attempt=0))
            server.send("w", reset("e", attempt=0))
            server.send("w", EnvClose("e", 0))
            server.send("w", step("e", "b", turn=0, attempt=1))
            seen = await answer(server)
            assert (seen.attempt, seen.turn, seen.messages[0]["content"]) == (1, 1, "b")

    run(main())


def test_closed_episodes_and_removed_jobs_answer_no_more(tmp_path):
    async def main():
        async with worker_with(tmp_path, ("j", "Env", {}), ("slow", "Env", {"slow_reset": 0.3})) as server:
            server.send("w", reset("a", "slow"))
            server.send("w", EnvClose("a", 0))
            server.send("w", reset("b", "slow"))
            await asyncio.sleep(0.05)
            server.send("w", RemoveJob("slow", 0))
            await asyncio.sleep(0.4)
            server.send("w", reset("c"))
            assert (await answer(server)).episode_id == "c"
            server.send("w", reset("d", "slow"))
            error = await answer(server)
            assert (error.kind, error.text) == ("lost", "this worker has not loaded job slow (0)")

    run(main())


def test_a_newer_incarnation_replaces_an_older_one(tmp_path):
    async def main():
        async with worker_with(tmp_path, ("j", "Env", {})) as server:
            server.send("w", LoadEnv("j", 2, "words:repeat", {}))
            assert await answer(server) == EnvLoaded("j", 2)
            server.send("w", LoadEnv("j", 1, "words:repeat", {}))
            server.send("w", reset("e", incarnation=1))
            assert (await answer(server)).kind == "lost"
            server.send("w", reset("e", incarnation=2))
            assert (await answer(server)).text == "p"

    run(main())


@pytest.mark.parametrize(
    ("env", "args", "says"),
    [
        ("wrods", {}, "no such environment; there are words"),
        ("words:repeat", {"shot": 1}, "env_args.shot=1: words:repeat does not know it"),
        ("broken.py:f", {}, "ZeroDivisionError"),
        ("exits.py:f", {}, "SystemExit"),
    ],
)
def test_an_environment_that_cannot_be_loaded_says_why(tmp_path, env, args, says):
    """H27 (c), as far as an import can fail without ending the process."""
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "exits.py").write_text("raise SystemExit(1)")

    async def main():
        async with worker_with(tmp_path) as server:
            name = f"{tmp_path}/{env}" if ".py" in env else env
            server.send("w", LoadEnv("j", 0, name, args))
            loaded = await answer(server)
            assert isinstance(loaded, EnvLoaded) and says in loaded.error

    run(main())


def test_many_episodes_at_once_end_exactly_once(tmp_path):
    async def main():
        async with worker_with(tmp_path, ("j", "later", {}), ("k", "Env", {})) as server:
            start = time.monotonic()
            for i in range(200):
                server.send("w", reset(f"e{i}", "jk"[i % 2]))
            ended = {}
            while len(ended) < 200:
                message = await answer(server)
                if isinstance(message, EnvObservation):
                    server.send("w", step(message.episode_id, "done"))
                else:
                    assert message.episode_id not in ended
                    ended[message.episode_id] = message.reward
            assert set(ended.values()) == {0.25, 1.0} and time.monotonic() - start < 10

    run(main())
