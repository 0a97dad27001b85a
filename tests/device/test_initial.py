"""An adapter's first weights out of another run, which may go on meanwhile."""

import numpy as np
import pytest

from marlaas_jax.checkpoint.job_checkpoints import JobCheckpoints, JobState
from marlaas_jax.device import initial
from marlaas_jax.errors import CorruptFile, NotFound


def state_of(step: int) -> JobState:
    return JobState(step, {"adapter": np.full(8, step, np.float32)}, {}, b"", {}, {})


@pytest.fixture
def live(tmp_path, monkeypatch):
    """Returns (source, writer) of a job that has steps 1, its best, and 2, and prunes 2 while that is first read."""
    writer = JobCheckpoints(tmp_path / "jobs" / "a" / "checkpoints", keep=1)
    for step in (1, 2):
        writer.save(state_of(step), reward=-step)
    writer.wait()
    read = JobCheckpoints.restore

    def restore(reader, step=None, **options):
        if writer.steps() == [1, 2]:
            writer.save(state_of(3), reward=-3.0)
            writer.wait()
        return read(reader, step, **options)

    monkeypatch.setattr(JobCheckpoints, "restore", restore)
    monkeypatch.setattr(initial, "READ_PAUSE_S", 0.0)
    yield f"{tmp_path}/a"
    writer.close()


def test_a_step_that_is_pruned_under_the_reader_gives_way_to_the_newest(live):
    state = initial.read_run_step(live)
    assert state.step == 3 and state.arrays["adapter"][0] == 3


def test_a_step_asked_for_and_pruned_under_the_reader_is_named_with_those_kept(live):
    with pytest.raises(NotFound, match="step 2 is not kept; kept: 1, 3"):
        initial.read_run_step(f"{live}@2")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax leaves its reader's loop behind
def test_a_damaged_step_is_no_reason_to_read_for_ever(live, tmp_path):
    initial.read_run_step(live)
    (tmp_path / "jobs/a/checkpoints/3/meta/metadata").write_text("{")
    assert initial.read_run_step(live).step == 1
    with pytest.raises(CorruptFile, match="checkpoints/3"):
        initial.read_run_step(f"{live}@3")
