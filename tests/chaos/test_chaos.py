"""Whatever dies or freezes costs time and nothing else (design 13.5, 13.6; H27, H30, H31, H33, H35, H38)."""

import os
import random

import pytest

from tests.chaos import day


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(1300)
def test_a_service_whose_processes_die_and_freeze_loses_nothing_h27_h33_h38(tmp_path):
    """Each kind of process is killed and frozen once; `python -m tests.chaos` does it 71 times."""
    seed = int(os.environ.get("MARLAAS_CHAOS_SEED", random.randrange(1_000_000)))
    report = day.run(day.SMALL, seed, tmp_path / "day", print, freeze_s=15.0)
    print(report)
    assert report["faults"] == []
