"""The benchmark of exact jobs runs and reports; its prices are of no account here, that the promise holds is."""

import json

import pytest

from marlaas_jax.bench import exact as bench


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_quick_run_keeps_the_promise(capsys):
    report = bench.run(json=True, quick=True)
    assert json.loads(capsys.readouterr().out) == report
    wanted = [line for line in report["lines"] if line["wanted"]]
    assert len(wanted) == 2 and all(line["holds"] for line in wanted)
    assert len([line for line in report["lines"] if "ratio" in line]) == 6
