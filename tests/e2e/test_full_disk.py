"""A disk that is really full: each job ends or not by its own folder, in one sentence, and the run's end is orderly."""

import pytest

from tests.e2e import runs

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def test_a_run_on_a_full_disk_ends_in_sentences_and_exit_code_2_h36(tmp_path, small_disk):
    jobs = [runs.job("upper", steps=12), runs.job("lower", steps=12)]
    file, log, run_dir = runs.write(tmp_path / "jobs.yaml", jobs), tmp_path / "log", small_disk / "run"
    result = runs.finish(runs.start(file, "--dir", run_dir, log=log), log, 240)
    failed = [job for job in result["jobs"] if job["state"] == "failed"]
    assert failed and result["exit_code"] == 2, result
    for job in failed:
        assert job["kind"] == "StorageError", job
        assert str(run_dir) in job["reason"] and "No space left on device" in job["reason"], job
    assert "Traceback" not in log.read_text(errors="replace")
