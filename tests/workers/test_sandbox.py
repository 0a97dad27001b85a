"""What uploaded code can and cannot do in each sandbox that works on this machine: it tries, and says what came of it."""

import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

from marlaas_jax.config import JobConfig, validate
from marlaas_jax.errors import InvalidConfig
from marlaas_jax.service.env_check import EnvChecks
from marlaas_jax.workers.sandbox import sandbox as sandboxes
from marlaas_jax.workers.sandbox.identities import FIRST, LAST
from marlaas_jax.workers.sandbox.processes import all_seen
from marlaas_jax.workers.sandbox.rules import MIB, Limits
from marlaas_jax.workers.sandbox.sandbox import Sandbox

pytestmark = [pytest.mark.multiprocess, pytest.mark.skipif(sys.platform != "linux", reason="Linux")]
LIMITS = Limits(address_space_bytes=1024 * MIB, total_memory_bytes=600 * MIB, file_bytes=8 * MIB, total_disk_bytes=32 * MIB,
                processes=40)  # fmt: skip
HEAD = "import ctypes, json, os, pathlib, signal, socket, subprocess, sys, threading, time\nITEMS = ['a', 'b', 'c']\n"


@pytest.fixture(scope="module", params=["process", "bubblewrap"])
def box(request, tmp_path_factory):
    """A sandbox, with a folder beside it that stands for the service's: keys, database, another job's upload."""
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    data = tmp_path_factory.mktemp("service")
    (data / "admin.key").write_text("mj-secret")
    (data / "jobs").mkdir()
    (data / "jobs" / "other.py").write_text("secret")
    data.chmod(0o700)
    try:
        found = Sandbox.choose(request.param, network=False, hidden=data, limits=LIMITS)
    except InvalidConfig as error:
        pytest.skip(str(error))
    assert found.mode == request.param
    found.data = data
    yield found
    found.close()
    assert not found.root.exists()


def tried(box, body, timeout_s=30.0, **changes):
    """Runs `body` as a reward function that returns 1.0 at its end; returns what is wrong, or None."""
    code = (
        HEAD
        + "def reward(prompt, completion, item):\n"
        + "".join(f"    {line}\n" for line in body.splitlines())
        + "    return 1.0\n"
    )
    job = validate(JobConfig, {"name": "x", "env": "rewards.py:reward", "rollout": {"step_timeout_s": 20}} | changes)
    checks = EnvChecks(timeout_s, 1)
    try:
        checks._try(job, {"rewards.py": code.encode()}, box)
    except InvalidConfig as error:
        return str(error)
    finally:
        checks.close()


def parsed(fault):
    """Returns what uploaded code raised as RuntimeError('<JSON>')."""
    assert fault and "RuntimeError: <" in fault, fault
    return json.loads(fault[fault.index("<") + 1 : fault.rindex(">")])


def reach(path, mode="r"):
    """Code that says whether a path can be opened or listed."""
    how = f"os.listdir({str(path)!r})" if mode == "list" else f"open({str(path)!r}, {mode!r}).close()"
    return (
        f"try:\n    {how}\n    reached = True\nexcept OSError as error:\n    reached = False\nassert not reached, {str(path)!r}"
    )


def test_what_is_not_its_own_is_out_of_reach(box, monkeypatch):
    """The admin's key, the store, other jobs' files, this process's secrets, and writing anywhere but into its temp folder."""
    monkeypatch.setenv("MARLAAS_API_KEY", "mj-hidden")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    other = box.room({"other.py": b"secret"})
    try:
        hidden = [box.data / "admin.key", box.data / "jobs" / "other.py", other.files / "other.py", "/etc/shadow"]
        hidden.append(f"/proc/{os.getpid()}/environ")
        body = "\n".join([reach(path) for path in hidden] + [reach(path, "list") for path in (box.data, "/home")])
        written = ["/usr/x", "/x", "/dev/x", str(box.root / "x"), str(box.data / "x"), "rewards.py"]
        own = "os.path.dirname(__file__)"
        body += "\n" + "\n".join(reach(path, "w") for path in written[:-1])
        body += f"\ntry:\n    open({own} + '/rewards.py', 'w')\n    raise SystemError('wrote into the upload')\nexcept OSError:\n    pass"
        body += "\nopen('mine', 'w').write('x')\nassert open('mine').read() == 'x'"
        assert tried(box, body) is None
    finally:
        other.close()
    names = set(parsed(tried(box, "raise RuntimeError('<' + json.dumps(sorted(os.environ)) + '>')")))
    assert "PATH" in names and not {n for n in names if any(w in n for w in ("MARLAAS", "AWS", "KEY", "TOKEN"))}, names


def test_it_is_nobody_and_has_nothing_of_ours_and_no_network(box):
    """One look from inside: who it is, what is open, its limits; a TCP connection to the service's machine is refused."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
def connects():
    try:
        socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5).close()
    except OSError:
        return False
    return True
def signals():
    try:
        os.kill({os.getpid()}, 0)
    except OSError:
        return False
    return True
seen = dict(uid=os.getuid(), groups=os.getgroups(), fds=len(os.listdir('/proc/self/fd')), home=os.environ['HOME'], cwd=os.getcwd(),
            core=__import__('resource').getrlimit(4), status=[line for line in open('/proc/self/status') if line.startswith(('NoNewPrivs', 'CapEff'))], connects=connects(),
            signals=signals(), interfaces=[name for _, name in socket.if_nameindex()])
raise RuntimeError('<' + json.dumps(seen) + '>')"""
        seen = parsed(tried(box, code))
    if box.has_users:
        assert FIRST <= seen["uid"] <= LAST and seen["groups"] == []
    assert seen["fds"] < 25 and seen["home"] == seen["cwd"] and seen["core"] == [0, 0]
    assert not seen["signals"]
    status = dict(line.split(":\t") for line in seen["status"])
    assert int(status["NoNewPrivs"]) == 1 and int(status["CapEff"], 16) in (0, 4)  # 4: reading, within Landlock
    if box.mode == "bubblewrap":
        assert seen["interfaces"] == ["lo"]
    if box.mode == "bubblewrap" or box.landlock >= 4:
        assert not seen["connects"]


@pytest.mark.slow
def test_memory_is_bounded(box):
    assert "MemoryError" in tried(box, "x = bytearray(2 << 30)")
    body = (
        "for _ in range(3):\n    if os.fork() == 0:\n        x = bytearray(400 << 20)\n        time.sleep(60)\ntime.sleep(60)"
    )
    assert "MiB of memory; 600 are allowed" in tried(box, body)


@pytest.mark.slow
def test_files_and_disk_are_bounded(box):
    assert "File too large" in tried(box, "open('big', 'wb').write(bytes(16 << 20))")
    body = "for i in range(20):\n    open(f'{i}', 'wb').write(bytes(7 << 20))\ntime.sleep(60)"
    fault = tried(box, body)
    assert "No space left" in fault or "it wrote over 32 MiB" in fault


@pytest.mark.slow
def test_a_fork_bomb_is_bounded_and_leaves_nothing(box):
    """Forks without end: it is stopped by its own limit or by the watch, and all of it is gone when the trial is over."""
    before = {process.pid for process in all_seen()}
    body = "os.setsid() if os.fork() == 0 else None\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(0.01)"
    started = time.monotonic()
    assert tried(box, body, timeout_s=8.0) is not None
    most = len(all_seen()) - len(before)
    assert time.monotonic() - started < 60 and most < 200
    if box.has_users or box.mode == "bubblewrap":
        left = [p for p in all_seen() if FIRST <= p.uid <= LAST and p.resident_bytes]
        assert not left, left


def test_hidden_folder_within_what_is_readable_is_refused(tmp_path):
    inner = os.path.join(sys.prefix, "data")
    with pytest.raises(InvalidConfig, match="uploaded code may read all of"):
        Sandbox.choose("process", network=False, hidden=Path(inner))


def test_bubblewrap_that_is_not_there_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: None)
    with pytest.raises(
        InvalidConfig, match=r"sandbox='bubblewrap': not possible here, bwrap is not installed .*set sandbox: process"
    ):
        Sandbox.choose("bubblewrap", network=False, hidden=tmp_path)
    assert Sandbox.choose("none", network=False, hidden=tmp_path) is None
