"""A run that is told to end, or is killed, as `marlaas run` has it; real environment and data workers, a fake device."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from marlaas_jax.errors import StorageError
from marlaas_jax.workers import folder_lock
from tests.workers.faked import ROOT, job, make, steps_of, train

pytestmark = pytest.mark.multiprocess

REWARD = """
import subprocess
ITEMS = [f"Say yes to question {i}." for i in range(40)]
started = []

def reward(prompt, completion, item):
    if not started:
        started.append(subprocess.Popen(["sleep", "4242"]))
    return float(completion == "yes")
"""

RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from pathlib import Path
from marlaas_jax.cli import signals
from marlaas_jax.config import load_run
from marlaas_jax.workers import run
print("ready", flush=True)
signals.run(run.run(load_run([Path(sys.argv[1])]), Path(sys.argv[2]), device_module="tests.workers.fakes"))
"""


@pytest.fixture
def running(tmp_path):
    """Returns (a run in training, all processes that came of it)."""
    (tmp_path / "rewards.py").write_text(REWARD)
    config = make(job("a", f"{tmp_path}/rewards.py:reward", steps=1000))
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    process = subprocess.Popen([sys.executable, "-c", RUN, path, tmp_path / "run"], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while len(steps_of(tmp_path / "run", "a")) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        assert "sleep" in [member.name() for member in family]
        yield process, family
    finally:
        process.kill()
        process.wait()


def assert_all_end(family):
    _, alive = psutil.wait_procs([member for member in family if member.is_running()], timeout=5)
    assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, -9),
        *(pytest.param(number, code, marks=pytest.mark.slow) for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, -2))),
    ],
)
def test_no_process_outlives_a_run_however_it_ends(running, tmp_path, number, code):
    """H33. The command makes 130 of the KeyboardInterrupt by which an interrupt leaves this script."""
    process, family = running
    process.send_signal(number)
    assert process.wait(20) == code
    assert_all_end(family)
    with folder_lock.hold(tmp_path / "run"):  # free again
        pass


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once(running):
    process, family = running
    device = next(member for member in family if "tests.workers.fakes" in member.cmdline())
    device.suspend()  # so that the orderly end takes its time
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(3) == 143
    assert_all_end(family)


def test_a_run_folder_has_one_writer(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    refusal = rf"{run_dir}: is being written by another run \(pid {os.getpid()}\)"
    with folder_lock.hold(run_dir):
        for resume in (False, True):
            with pytest.raises(StorageError, match=refusal) as caught:
                train(make(job("a", "arithmetic")), run_dir, resume=resume)
            assert "\n" not in str(caught.value)
    assert not list(run_dir.glob("*.*")) and not (run_dir / "jobs").exists()


def test_a_lock_is_free_once_its_holder_is_gone_and_is_not_handed_down(tmp_path):
    with folder_lock.hold(tmp_path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
        with pytest.raises(StorageError, match=f"pid {os.getpid()}"), folder_lock.hold(tmp_path):
            pass
    try:
        with folder_lock.hold(tmp_path):
            assert (tmp_path / "lock").read_text() == str(os.getpid())
    finally:
        child.kill()
        child.wait()
