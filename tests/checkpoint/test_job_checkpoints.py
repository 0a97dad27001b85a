"""Checkpoints: atomic, exact, the newest readable one wins, failures are told (H35, H36)."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from marlaas_jax.checkpoint.job_checkpoints import JobCheckpoints, JobState
from marlaas_jax.errors import CorruptFile, StorageError


def state_of(step: int) -> JobState:
    rng = np.random.default_rng(step)
    arrays = {name: rng.standard_normal(1000).astype(np.float32) for name in ("adapter", "m", "v")}
    return JobState(step, arrays, {"optimizer_steps": step * 2}, bytes(range(step)), {"weights": "abc"}, {"rank": 4})


def assert_equal(a: JobState, b: JobState):
    assert (a.step, a.counters, a.ledger, a.identity, a.spec) == (b.step, b.counters, b.ledger, b.identity, b.spec)
    assert a.arrays.keys() == b.arrays.keys()
    for name in a.arrays:
        np.testing.assert_array_equal(a.arrays[name], b.arrays[name])


def test_round_trip_keeps_newest_two_and_best(tmp_path):
    checkpoints = JobCheckpoints(tmp_path / "ck")
    assert checkpoints.restore() is None
    for step in range(6):
        checkpoints.save(state_of(step), reward=1.0 if step == 1 else 0.0)
    assert checkpoints.wait() == 5
    assert checkpoints.poll() is None
    assert checkpoints.steps() == [1, 4, 5]
    checkpoints.close()
    fresh = JobCheckpoints(tmp_path / "ck")
    assert_equal(fresh.restore(), state_of(5))
    assert_equal(fresh.restore(1), state_of(1))
    fresh.close()


def test_a_job_of_many_lives_keeps_newest_two_and_best_and_no_more(tmp_path):
    """Each start forgets what orbax knew of the rewards; the steps themselves must tell."""
    step, kept = 0, []
    for _ in range(3):
        checkpoints = JobCheckpoints(tmp_path / "ck")
        for _ in range(3):
            step += 1
            checkpoints.save(state_of(step), reward={2: 1.0, 3: float("nan"), 8: 2.0}.get(step, 0.0))
        checkpoints.wait()
        kept.append(checkpoints.steps())
        checkpoints.close()
    assert kept == [[2, 3], [2, 5, 6], [8, 9]]


def test_half_written_steps_are_removed_by_the_owner_alone_h35(tmp_path):
    checkpoints = JobCheckpoints(tmp_path / "ck")
    checkpoints.save(state_of(1), reward=0.0)
    checkpoints.close()
    half_written = tmp_path / "ck" / "5.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "ck" / "1", half_written)
    reader = JobCheckpoints(tmp_path / "ck", read_only=True)
    assert_equal(reader.restore(), state_of(1))
    reader.close()
    assert half_written.is_dir()
    owner = JobCheckpoints(tmp_path / "ck")
    assert owner.steps() == [1]
    owner.save(state_of(2), reward=0.0)
    owner.close()
    assert sorted(path.name for path in (tmp_path / "ck").iterdir()) == ["1", "2"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax leaves its reader's loop behind
def test_damaged_newest_step_falls_back_and_is_named_when_asked_for(tmp_path):
    checkpoints = JobCheckpoints(tmp_path / "ck")
    for step in (1, 2):
        checkpoints.save(state_of(step), reward=0.0)
    checkpoints.close()
    shutil.rmtree(tmp_path / "ck" / "2" / "arrays" / "d")
    fresh = JobCheckpoints(tmp_path / "ck")
    assert_equal(fresh.restore(), state_of(1))
    with pytest.raises(CorruptFile, match=str(tmp_path / "ck" / "2")):
        fresh.restore(2)
    assert_equal(fresh.restore(repair=True), state_of(1))
    fresh.save(state_of(2), reward=0.0)  # its owner can write that step again
    assert fresh.wait() == 2
    assert_equal(fresh.restore(), state_of(2))
    fresh.close()


def test_failed_save_is_told_with_its_path_and_forgotten_h36(tmp_path, monkeypatch):
    checkpoints = JobCheckpoints(tmp_path / "ck")
    checkpoints.save(state_of(1), reward=0.0)
    checkpoints.wait()
    real = checkpoints._manager.save
    monkeypatch.setattr(
        checkpoints._manager, "save", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(StorageError, match=r"ck.2: .*No space left on device"):
        checkpoints.save(state_of(2), reward=0.0)
    monkeypatch.setattr(checkpoints._manager, "save", real)
    assert_equal(checkpoints.restore(), state_of(1))
    checkpoints.save(state_of(2), reward=0.0)
    assert checkpoints.wait() == 2
    checkpoints.close()


def test_h36_closing_after_a_failed_save_raises_nothing_else(tmp_path, monkeypatch):
    """orbax tells of the failure at each of its waits, as a ValueError of tensorstore."""
    checkpoints = JobCheckpoints(tmp_path / "ck")
    checkpoints.save(state_of(1), reward=0.0)
    real, failures = checkpoints._manager.wait_until_finished, [ValueError("RESOURCE_EXHAUSTED: No space left on device")] * 2

    def wait():
        if failures:
            raise failures.pop()
        real()

    monkeypatch.setattr(checkpoints._manager, "wait_until_finished", wait)
    with pytest.raises(StorageError, match=r"ck.1: .*No space left on device"):
        checkpoints.close()
    assert not failures


WRITER = """
    import sys, numpy as np
    from pathlib import Path
    from marlaas_jax.checkpoint.job_checkpoints import JobCheckpoints, JobState
    checkpoints = JobCheckpoints(Path(sys.argv[1]))
    step = (checkpoints.steps() or [0])[-1]
    while True:
        step += 1
        arrays = {name: np.full(200_000, step, np.float32) for name in ("adapter", "m", "v")}
        checkpoints.save(JobState(step, arrays, {"n": step}, str(step).encode(), {}, {}), 0.0)
        print(step, flush=True)
"""


@pytest.mark.slow
def test_kill_during_saves_leaves_a_state_of_one_moment_h35(tmp_path):
    rng = np.random.default_rng(0)
    last = 0
    for _ in range(8):
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path / "ck")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.5))
            os.kill(process.pid, signal.SIGKILL)
        checkpoints = JobCheckpoints(tmp_path / "ck")
        state = checkpoints.restore()
        checkpoints.close()
        if state is None:
            continue
        assert state.step >= last
        last = state.step
        assert state.counters == {"n": last} and state.ledger == str(last).encode()
        assert all((array == last).all() for array in state.arrays.values())
    assert last > 0
