"""The benchmark of `marlaas run` against a plain loop; its figures are of no account here, that both do the same work is."""

import json

import pytest

from marlaas_jax.bench import run as bench
from marlaas_jax.errors import MarlaasError


@pytest.mark.slow
def test_quick_run_compares_equal_work(capsys):
    """It raises where the served job and the plain loop did not train the same first batch, or unlike many tokens in all."""
    report = bench.run(json=True, quick=True)
    assert len(report["lines"]) == 3 and all(line["value"] > 0 for line in report["lines"])
    assert json.loads(capsys.readouterr().out)["lines"][0]["wanted"] == "<= 1.1"


def test_unequal_work_is_refused():
    step = lambda tokens, reward=0.5: bench.Step(0.0, tokens, reward)
    bench._require_same_work([step(100), step(90)], [step(100), step(95)])
    for other in ([step(101), step(95)], [step(100, 0.6), step(95)], [step(100), step(120)], [step(100)]):
        with pytest.raises(MarlaasError, match="tell nothing"):
            bench._require_same_work([step(100), step(90)], other)
