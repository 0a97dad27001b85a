"""Supervisor, lifeline and output with real processes (H27, H32, H33)."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from marlaas_jax.workers.output import TAIL_BYTES, OutputLog
from marlaas_jax.workers.supervisor import Exited, GaveUp, Restarted, Supervisor, WorkerSpec, describe_exit

pytestmark = pytest.mark.multiprocess

HOLD = "from marlaas_jax.workers import lifeline\nlifeline.hold()\nimport sys, os, time\n"


@pytest.fixture
def spec(tmp_path):
    """Returns a maker of specs for a worker with the given code."""

    def make(code, name="w", **options):
        (tmp_path / f"{name}_module.py").write_text(HOLD + textwrap.dedent(code))
        options.setdefault("backoff_s", 0.05)
        return WorkerSpec(
            name, f"{name}_module", env={"PYTHONPATH": str(tmp_path)}, log_path=tmp_path / "log" / f"{name}.txt", **options
        )

    return make


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 40))


async def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.02)


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_killed_worker_is_restarted_with_a_new_id_and_stop_ends_it(spec):
    async def main():
        async with Supervisor() as supervisor:
            worker = supervisor.start(spec("print('up', sys.argv, flush=True)\ntime.sleep(60)"))
            first_id, first_pid = worker.worker_id, worker.pid
            await until(lambda: first_id in worker.output.tail())  # --worker-id reached it
            os.kill(first_pid, signal.SIGKILL)
            event = await supervisor.next_event()
            assert isinstance(event, Exited) and event.worker_id == first_id and not event.expected
            assert event.reason == "killed by SIGKILL" and "up" in event.log_tail
            event = await supervisor.next_event()
            assert isinstance(event, Restarted) and event.worker_id != first_id and event.pid == worker.pid != first_pid
            await supervisor.stop(worker)
            event = await supervisor.next_event()
            assert event.expected and event.reason == "killed by SIGTERM" and is_gone(worker.pid) and not worker.is_running

    run(main())


def test_worker_that_dies_at_import_is_given_up_after_the_cap_with_its_traceback(spec):
    """H27 (c)."""

    async def main():
        async with Supervisor() as supervisor:
            supervisor.start(spec("raise ImportError('no such thing as foo')", max_restarts=2))
            events = [await supervisor.next_event() for _ in range(6)]
            assert [type(e) for e in events] == [Exited, Restarted, Exited, Restarted, Exited, GaveUp]
            assert "no such thing as foo" in events[0].log_tail and events[0].code == 1
            assert "3 times in a row" in events[-1].reason and "it crashed (exit code 1)" in events[-1].reason

    run(main())


def test_wrong_start_is_not_tried_again(spec):
    async def main():
        async with Supervisor() as supervisor:
            supervisor.start(spec("sys.exit(2)"))
            assert (await supervisor.next_event()).code == 2
            assert isinstance(await supervisor.next_event(), GaveUp)

    run(main())


def test_pauses_grow_and_a_healthy_life_resets_the_count(spec):
    async def main():
        async with Supervisor() as supervisor:
            worker = supervisor.start(spec("time.sleep(0.3); os._exit(1)", max_restarts=1, healthy_after_s=0.1))
            events = [await supervisor.next_event() for _ in range(5)]
            assert not any(isinstance(e, GaveUp) for e in events) and worker.failures == 1

    run(main())


def test_fifty_megabytes_of_output_neither_block_nor_fill(spec):
    """H28: the file stays under its cap, memory holds the tail, the worker goes on."""

    async def main():
        async with Supervisor() as supervisor:
            code = "for _ in range(50): sys.stdout.write('x' * 2**20)\nprint('the end', flush=True)\ntime.sleep(60)"
            worker = supervisor.start(spec(code, max_log_bytes=100_000))
            await until(lambda: "the end" in worker.output.tail(), 20)
            assert worker.output.num_bytes > 50 * 2**20
            assert 100_000 <= worker.spec.log_path.stat().st_size < 100_200
            assert worker.output.num_discarded_bytes == worker.output.num_bytes - 100_000
            assert len(worker.output.tail()) <= TAIL_BYTES

    run(main())


def test_stop_kills_after_the_grace_and_takes_grandchildren_along(spec):
    code = """
    import signal, subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "60"])
    print("child", child.pid, flush=True)
    time.sleep(60)
    """

    async def main():
        async with Supervisor() as supervisor:
            worker = supervisor.start(spec(code, grace_s=0.3))
            await until(lambda: "child" in worker.output.tail())
            child = int(worker.output.tail().split("child")[1].split()[0])
            await supervisor.stop(worker)
            assert is_gone(worker.pid)
            await until(lambda: is_gone(child))
            assert (await supervisor.next_event()).reason == "killed by SIGKILL"

    run(main())


def test_stopped_process_can_be_killed_and_comes_back(spec):
    async def main():
        async with Supervisor() as supervisor:
            worker = supervisor.start(spec("time.sleep(60)"))
            os.kill(worker.pid, signal.SIGSTOP)
            supervisor.kill(worker)
            assert (await supervisor.next_event()).reason == "killed by SIGKILL"
            assert isinstance(await supervisor.next_event(), Restarted)

    run(main())


@pytest.mark.parametrize("how", ["kernel signal and pipe", "pipe alone", "holding the interpreter"])
def test_children_die_with_a_parent_that_is_killed_hard(tmp_path, how):
    """H33: SIGKILL to the parent leaves nobody, even a child that computes without letting other threads run."""
    body = {
        "kernel signal and pipe": "time.sleep(60)",
        "pipe alone": "time.sleep(60)",
        "holding the interpreter": "print(re.match('(a+)+$', 'a' * 40 + 'b'))",
    }[how]
    before = "import sys, re\nsys.platform = 'elsewhere'\n" if how == "pipe alone" else "import re\n"
    (tmp_path / "orphan_module.py").write_text(f"{before}{HOLD}print('up', flush=True)\n{body}\n")
    parent_code = f"""
    import asyncio
    from marlaas_jax.workers.supervisor import *
    async def main():
        supervisor = Supervisor()
        worker = supervisor.start(WorkerSpec("o", "orphan_module", env={{"PYTHONPATH": {str(tmp_path)!r}}}))
        while "up" not in worker.output.tail():
            await asyncio.sleep(0.02)
        print(worker.pid, flush=True)
        await asyncio.sleep(60)
    asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent_code)], stdout=subprocess.PIPE, text=True)
    with parent:
        child = int(parent.stdout.readline())
        assert not is_gone(child)
        parent.kill()
    end = time.monotonic() + 5
    while not is_gone(child):
        assert time.monotonic() < end, "an orphan"
        time.sleep(0.02)


@pytest.mark.parametrize("guardian_is_killed_first", [False, True])
def test_what_a_worker_started_dies_with_a_parent_that_is_killed_hard(tmp_path, guardian_is_killed_first):
    """H33: the kernel kills the worker before it could take its own children along; the guardian does."""
    body = "import subprocess\nprint('up', subprocess.Popen(['sleep', '60']).pid, flush=True)\ntime.sleep(60)\n"
    (tmp_path / "starts_module.py").write_text(HOLD + body)
    parent_code = f"""
    import asyncio
    from marlaas_jax.workers.supervisor import *
    async def main():
        supervisor = Supervisor()
        spec = lambda name: WorkerSpec(name, "starts_module", env={{"PYTHONPATH": {str(tmp_path)!r}}})
        workers = [supervisor.start(spec("a"))]
        if {guardian_is_killed_first}:
            supervisor._guardian._process.kill()
            supervisor._guardian._process.wait()
        workers.append(supervisor.start(spec("b")))
        while not all(worker.output.tail().endswith("\\n") for worker in workers):
            await asyncio.sleep(0.02)
        print(*(pid for worker in workers for pid in (worker.pid, worker.output.tail().split()[1])), flush=True)
        await asyncio.sleep(60)
    asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent_code)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 4 and not any(map(is_gone, pids))
        os.killpg(parent.pid, signal.SIGKILL)
    end = time.monotonic() + 5
    while not all(map(is_gone, pids)):
        assert time.monotonic() < end, "an orphan"
        time.sleep(0.02)


def test_workers_start_from_a_process_that_used_threads_and_sockets(spec):
    """H32: a worker is a fresh interpreter, so it inherits neither modules nor descriptors."""

    async def main():
        inherited = os.open("/dev/null", os.O_RDONLY)
        async with Supervisor() as supervisor:
            code = (
                "print('fds', sorted(int(f) for f in os.listdir('/dev/fd')), 'zmq' in sys.modules, flush=True); time.sleep(60)"
            )
            worker = supervisor.start(spec(code))
            await until(lambda: worker.output.tail().strip().endswith(("True", "False")))
            assert worker.output.tail().strip().endswith("False")
            assert len(worker.output.tail().split("]")[0].split(",")) <= 5  # 0, 1, 2, the lifeline and the listing itself
        os.close(inherited)

    run(main())


def test_exit_codes_in_words():
    assert describe_exit(-11) == "killed by SIGSEGV"
    assert describe_exit(3) == "it lost the controller (exit code 3)"
    assert describe_exit(77) == "it ended by itself (exit code 77)"


def test_log_survives_a_full_disk_and_a_restart(tmp_path):
    log = OutputLog(tmp_path / "w.txt", 10)
    log.write(b"12345")
    log.close()
    again = OutputLog(tmp_path / "w.txt", 10)
    again.write(b"6789012345")
    assert (tmp_path / "w.txt").read_bytes().startswith(b"1234567890\n[the rest is discarded")
    again.close()
    if Path("/dev/full").exists():
        full = OutputLog(Path("/dev/full"), 100)
        full.write(b"abc")
        full.write(b"def")
        assert full.tail() == "abcdef" and full.num_discarded_bytes == 6
        full.close()
