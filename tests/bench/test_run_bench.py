"""The benchmark of `marlaas run` against a plain loop; its figures are of no account here, that both sample the same is."""

import json

import pytest

from marlaas_jax.bench import run as bench


@pytest.mark.slow
def test_quick_run_compares_equal_work(capsys):
    """It raises where the served job and the plain loop did not train the very same tokens and rewards."""
    report = bench.run(json=True, quick=True)
    assert len(report["lines"]) == 3 and all(line["value"] > 0 for line in report["lines"])
    assert json.loads(capsys.readouterr().out)["lines"][0]["wanted"] == "<= 1.1"
