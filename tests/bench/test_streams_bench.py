"""`marlaas bench streams`, its short form: the harness itself, not the figures."""

import json
import os

import pytest

from marlaas_jax.bench import streams

pytestmark = [pytest.mark.long, pytest.mark.multiprocess]


def test_quick_run_reports_every_line(capsys):
    cores = os.sched_getaffinity(0)
    try:
        report = streams.run(json=True, quick=True)
    finally:
        os.sched_setaffinity(0, cores)
    assert json.loads(capsys.readouterr().out) == report
    lines = {line["name"]: line for line in report["lines"]}
    assert len(lines) == 5
    failed = lines["requests and streams that failed"]
    assert failed["holds"] and failed["num_requests"] > 100 and failed["num_streams_cut"] == 0
    assert lines["events delivered per second"]["value"] > 0
    assert all(rate > 0 for rate in lines["training under load, of the quiet rate"]["quiet_steps_per_s"])
