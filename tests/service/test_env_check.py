"""An environment is tried before its job is queued: what is refused, in which words, and that nobody can hold the others up."""

import asyncio
import threading
import time
from pathlib import Path

import httpx
import pytest

from marlaas_jax.config import JobConfig, validate
from marlaas_jax.errors import InvalidConfig, QuotaExceeded
from marlaas_jax.service import env_check
from marlaas_jax.service.env_check import EnvChecks
from marlaas_jax.workers.env_trial import Tried, where_raised
from tests.service.live import FILES, live, of

pytestmark = pytest.mark.multiprocess
FAULTY = """
import os, sys, time
ITEMS = ["one", "two", "three"]

def helper(item):
    return item["nothing"]

def crashes(prompt, completion, item):
    print("a word on standard output")
    return helper(item)

def not_a_number(prompt, completion, item):
    return float("nan")

def text(prompt, completion, item):
    return "1.0"

def nothing(prompt, completion, item):
    completion == "yes"

def hangs(prompt, completion, item):
    time.sleep(1000)

async def blocks(prompt, completion, item):
    time.sleep(1000)

def exits(prompt, completion, item):
    os._exit(7)

class Odd:
    def reset(self, item, seed):
        return 7
    def step(self, action):
        return 1.0

class Endless:
    reply_roles = ("tool",)
    def reset(self, item, seed):
        from marlaas_envs.protocol import Observation
        return Observation(text="?")
    def step(self, action):
        return self.reset({}, 0)

def good(prompt, completion, item):
    return 0.5
"""
SENTENCES = {
    "rewards.py:crashes": r"env='rewards.py:crashes': KeyError: 'nothing' \(rewards.py, line 6\), when \w+ item \d is tried",
    "rewards.py:not_a_number": r"env='rewards.py:not_a_number': the reward is nan, when \w+ item \d is tried",
    "rewards.py:text": r"the reward is '1.0' \(str\), not a number, when",
    "rewards.py:nothing": r"it returned None for every item that was tried; return a number",
    "rewards.py:hangs": r"no answer within rollout.step_timeout_s=1, when \w+ item \d is tried",
    "rewards.py:blocks": r"env='rewards.py:blocks': no answer within 5 s, when it was tried",
    "rewards.py:exits": r"its process ended without an answer, .*exit code 7",
    "rewards.py:Odd": r"it returned 7 \(int\), not an Observation or a Done, when",
    "rewards.py:missing": r"the file defines no 'missing'; it defines",
    "empty.py:good": r"ITEMS has 0 items; at least 2 are needed",
    "broken.py:good": r"the file is not Python \(.*line \d\)",
    "raises.py:good": r"env='raises.py:good': ZeroDivisionError: division by zero \(raises.py, line 1\), when it is loaded",
    "words:nope": r"env='words:nope'",
}
UPLOAD = {
    "rewards.py": FAULTY.encode(),
    "empty.py": b"ITEMS = []\ndef good(prompt, completion, item): return 1.0\n",
    "broken.py": b"def good(:\n  (",
    "raises.py": b"ITEMS = [1 / 0]\ndef good(prompt, completion, item): return 1.0\n",
}
FAST = ("rewards.py:crashes", "rewards.py:not_a_number", "rewards.py:exits", "empty.py:good")


def config(env, **changes):
    return validate(JobConfig, {"name": "x", "env": env, "rollout": {"step_timeout_s": 1.0}} | changes)


@pytest.mark.parametrize("env", [pytest.param(env, marks=() if env in FAST else pytest.mark.slow) for env in SENTENCES])
def test_what_cannot_be_trained_on_is_refused_in_one_sentence(env):
    checks = EnvChecks(5.0 if "blocks" in env else 60.0, 1)
    try:
        with pytest.raises(InvalidConfig, match=SENTENCES[env]) as caught:
            asyncio.run(checks.check("ann", config(env), UPLOAD, None))
        assert "\n" not in str(caught.value) and "marlaas-trial" not in str(caught.value)
    finally:
        checks.close()


def test_what_is_good_is_tried_once_and_its_roles_are_known(monkeypatch):
    tried = []
    real = env_check._run
    monkeypatch.setattr(env_check, "_run", lambda *args: tried.append(1) or real(*args))

    async def story():
        checks = EnvChecks(60.0, 2)
        good = await asyncio.gather(*(checks.check("ann", config("rewards.py:good"), UPLOAD, None) for _ in range(5)))
        assert good == [Tried()] * 5 and len(tried) == 1
        assert (await checks.check("ann", config("rewards.py:Endless"), UPLOAD, None)).reply_roles == ("tool",)
        checks.close()

    asyncio.run(story())


def test_one_tenant_cannot_use_up_the_checks(monkeypatch):
    """A tenant has one trial running, however many it asks for; beyond a number that wait it is told to come back."""
    release, running, most = threading.Event(), [], []

    def run(job, *rest):
        running.append(job.seed)
        most.append(len(running))
        if job.seed < 100:
            release.wait(30)
        running.remove(job.seed)
        return Tried()

    monkeypatch.setattr(env_check, "_run", run)

    async def story():
        checks = EnvChecks(60.0, 2)
        flood = [
            asyncio.create_task(checks.check("greedy", config("x", seed=seed), {}, None))
            for seed in range(env_check.MAX_WAITING)
        ]
        await asyncio.sleep(0.2)
        with pytest.raises(QuotaExceeded, match="are being checked already"):
            await checks.check("greedy", config("x", seed=50), {}, None)
        await asyncio.wait_for(checks.check("small", config("x", seed=100), {}, None), 20)
        assert running == [0] and max(most) <= 2
        release.set()
        await asyncio.gather(*flood)
        assert max(most) <= 2 and not checks._waiting and not checks._turns
        checks.close()

    asyncio.run(story())


def test_where_an_exception_came_from():
    """The user's own line is named, also where the exception was raised in a library below it."""
    text = 'Traceback:\n  File "/box/files/sub/r.py", line 7, in f\n  File "/usr/lib/json.py", line 3, in g\nValueError: bad'
    assert where_raised(text, Path("/box/files")) == "ValueError: bad (r.py, line 7)"
    assert where_raised("MemoryError", Path("/box/files")) == "MemoryError"


def test_uploaded_code_trains_in_the_sandbox_and_a_bad_one_never_reaches_the_queue(tmp_path):
    """Over HTTP, with the sandbox that works here: it is stated, a bad job is refused, a good one trains to its end."""
    with live(tmp_path, sandbox="auto") as service:
        client = service.client("ann")
        with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {service.key('ann')}"}) as http:
            stated = http.get("/v1/info").json()["sandbox"]
        assert stated["mode"] == service.service.sandbox.mode and not stated["network"] and stated["text"]
        assert (service.service.data_dir.stat().st_mode & 0o777) == 0o700
        with pytest.raises(InvalidConfig, match="no reward today"):
            client.submit(of("bad") | {"env": "rewards.py:raises"}, files=FILES)
        assert list(client.jobs()) == [] and not list((service.service.data_dir / "uploads").glob("*"))
        spy = b"\nimport os\nopen(os.environ['TMPDIR'] + '/mine', 'w').write('x')\nassert 'MARLAAS_API_KEY' not in os.environ\n"
        job = client.submit(of("good", steps=2), files={"rewards.py": FILES["rewards.py"] + spy})
        assert client.wait(job.id).state == "succeeded", client.job(job.id)
        end = time.monotonic() + 20
        while list(service.service.sandbox.root.iterdir()) and time.monotonic() < end:
            time.sleep(0.05)
        assert not list(service.service.sandbox.root.iterdir())  # the job's room went with it
