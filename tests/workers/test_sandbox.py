"""What uploaded code can and cannot do in each sandbox that works on this machine: it tries, and says what came of it."""

import json
import os
import shutil
import socket
import sys
import textwrap
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
LIMITS = Limits(
    address_space_bytes=1024 * MIB,
    total_memory_bytes=600 * MIB,
    file_bytes=8 * MIB,
    total_disk_bytes=32 * MIB,
    processes=40,
)
HEAD = """
import json, os, resource, signal, socket, time

ITEMS = ["a", "b", "c"]


def can(function, *args):
    try:
        function(*args)
    except OSError:
        return False
    return True


def say(value):
    raise RuntimeError("<" + json.dumps(value) + ">")


def reward(prompt, completion, item):
"""


@pytest.fixture(scope="module", params=["process", "bubblewrap"])
def box(request, tmp_path_factory):
    """A sandbox, with a folder beside it that stands for the service's: keys, database, another job's upload."""
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    data = tmp_path_factory.mktemp("service")
    (data / "jobs").mkdir()
    for name in ("admin.key", "marlaas.db", "jobs/other.py"):
        (data / name).write_text("secret")
    data.chmod(0o700)
    try:
        found = Sandbox.choose(request.param, network=False, hidden=data, limits=LIMITS)
    except InvalidConfig as error:
        pytest.skip(str(error))
    if found.is_weak:
        found.close()
        pytest.skip("neither root nor Landlock: this process is no sandbox for files")
    found.data = data
    yield found
    found.close()
    assert not found.root.exists()


def tried(box, body, timeout_s=30.0):
    """Runs `body` as a reward function that returns 1.0 at its end; returns what is wrong, or None."""
    code = HEAD + textwrap.indent(textwrap.dedent(body) + "\nreturn 1.0\n", "    ")
    job = validate(JobConfig, {"name": "x", "env": "rewards.py:reward", "rollout": {"step_timeout_s": 20}})
    checks = EnvChecks(timeout_s, 1)
    try:
        checks._try(job, {"rewards.py": code.encode()}, box)
    except InvalidConfig as error:
        return str(error)
    finally:
        checks.close()


def said(box, body):
    """Returns what the body handed to `say`."""
    fault = tried(box, body)
    assert fault and "RuntimeError: <" in fault, fault
    return json.loads(fault[fault.index("<") + 1 : fault.rindex(">")])


def test_what_is_not_its_own_is_out_of_reach(box, monkeypatch):
    """The admin's key, the store, other jobs' files, this process's secrets, and writing anywhere but into its temp folder."""
    monkeypatch.setenv("MARLAAS_API_KEY", "mj-hidden")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    other = box.room({"other.py": b"secret"})
    try:
        read = [box.data / name for name in ("admin.key", "marlaas.db", "jobs/other.py")]
        read = [*map(str, read), str(other.files / "other.py"), "/etc/shadow", f"/proc/{os.getpid()}/environ"]
        written = ["/usr/x", "/x", "/dev/x", str(box.root / "x"), str(box.data / "x")]
        seen = said(
            box,
            f"""
            own = os.path.dirname(__file__)
            say([
                [path for path in {read!r} if can(open, path)],
                [path for path in [*{written!r}, own + "/x", own + "/rewards.py"] if can(open, path, "w")],
                can(os.listdir, {str(box.data)!r}), can(open, "mine", "w"), sorted(os.environ),
            ])
            """,
        )
    finally:
        other.close()
    assert seen[:4] == [[], [], False, True]
    assert "PATH" in seen[4] and not [n for n in seen[4] if any(w in n for w in ("MARLAAS", "AWS", "KEY", "TOKEN"))], seen[4]


def test_it_is_nobody_and_has_nothing_of_ours_and_no_network(box):
    """One look from inside: who it is, what is open, whom it can signal; TCP to a server of this machine is refused."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        seen = said(
            box,
            f"""
            status = dict(line.split(":") for line in open("/proc/self/status") if line.startswith(("NoNewPrivs", "CapEff")))
            say({{
                "uid": os.getuid(), "groups": os.getgroups(), "fds": len(os.listdir("/proc/self/fd")),
                "at_home": os.environ["HOME"] == os.getcwd(), "core": resource.getrlimit(resource.RLIMIT_CORE),
                "privileges": [int(status["NoNewPrivs"]), int(status["CapEff"], 16)],
                "signals": can(os.kill, {os.getpid()}, 0), "names": [name for _, name in socket.if_nameindex()],
                "connects": can(socket.create_connection, ("127.0.0.1", {server.getsockname()[1]}), 5),
            }})
            """,
        )
    if box.has_users:
        assert FIRST <= seen["uid"] <= LAST and seen["groups"] == []
    assert seen["fds"] < 25 and seen["at_home"] and seen["core"] == [0, 0] and not seen["signals"]
    assert seen["privileges"] in ([1, 0], [1, 4])  # 4: it reads what root can, within Landlock
    if box.mode == "bubblewrap":
        assert seen["names"] == ["lo"]
    if box.mode == "bubblewrap" or box.landlock >= 4:
        assert not seen["connects"]


@pytest.mark.slow
def test_memory_is_bounded(box):
    """Of one process by its own limit, of all together by the watch."""
    assert "MemoryError" in tried(box, "x = bytearray(2 << 30)")
    fault = tried(
        box,
        """
        for _ in range(3):
            if os.fork() == 0:
                x = bytearray(400 << 20)
                time.sleep(60)
        time.sleep(60)
        """,
    )
    assert "MiB of memory; 600 are allowed" in fault


@pytest.mark.slow
def test_files_and_disk_are_bounded(box):
    """One file by its own limit; all together by the size of /tmp or by the watch."""
    assert "File too large" in tried(box, "open('big', 'wb').write(bytes(16 << 20))")
    fault = tried(
        box,
        """
        for i in range(20):
            open(f"{i}", "wb").write(bytes(7 << 20))
        time.sleep(60)
        """,
    )
    assert "No space left" in fault or "it wrote over 32 MiB" in fault


@pytest.mark.slow
def test_a_fork_bomb_is_bounded_and_leaves_nothing(box):
    """Forks without end, in sessions of their own: a limit or the watch stops it, and all of it is gone after the trial."""
    before = len(all_seen())
    started = time.monotonic()
    fault = tried(
        box,
        """
        while True:
            try:
                if os.fork() == 0:
                    os.setsid()
            except OSError:
                time.sleep(0.01)
        """,
        timeout_s=8.0,
    )
    assert fault is not None and time.monotonic() - started < 60 and len(all_seen()) - before < 200
    if box.has_users or box.mode == "bubblewrap":
        left = [process for process in all_seen() if FIRST <= process.uid <= LAST and process.resident_bytes]
        assert not left, left


@pytest.mark.slow
def test_killing_the_service_or_its_parent_ends_nobody_but_itself(box):
    fault = tried(
        box,
        f"""
        for pid in ({os.getpid()}, os.getppid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        """,
    )
    assert fault is None or "its process ended" in fault  # it may reach the first process of its own namespace; we are here


def test_a_folder_within_what_is_readable_cannot_be_the_services():
    with pytest.raises(InvalidConfig, match="uploaded code may read all of"):
        Sandbox.choose("process", network=False, hidden=Path(sys.prefix) / "data")


def test_bubblewrap_that_is_not_there_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: None)
    sentence = r"sandbox='bubblewrap': not possible here, bwrap is not installed .* set sandbox: process"
    with pytest.raises(InvalidConfig, match=sentence):
        Sandbox.choose("bubblewrap", network=False, hidden=tmp_path)
    assert Sandbox.choose("none", network=False, hidden=tmp_path) is None
