"""A report's verdicts and what is printed."""

import json

from marlaas_jax.bench.report import Line, show
from marlaas_jax.bench.timing import Ratio


def test_verdicts():
    line = lambda value, wanted: Line("x", value, "", wanted, {}).holds
    assert line(0.95, ">= 0.9") and not line(0.85, ">= 0.9") and line(1.4, "<= 1.4") and line(9.0, "") is None


def test_the_paired_wall_time_of_a_ratio_decides(capsys):
    line = Line.of_ratio("x", Ratio(1.3, 1.1, 1.0), "<= 1.2", {"share": 0.25})
    assert line.holds is False
    report = {"machine": {"device": "cpu", "cores": 1, "jax": "0"}, "lines": [line.as_dict()]}
    show(report, "bench", as_json=True)
    assert json.loads(capsys.readouterr().out) == report
    show(report, "bench", as_json=False, shares=(("of peak", "share"),))
    printed = capsys.readouterr().out
    assert "wall|CPU|best" in printed and "1.30|1.10|1.00" in printed and "25%" in printed and "no" in printed
    show(report, "bench", as_json=False, figures="measured")
    printed = capsys.readouterr().out
    assert "measured" in printed and "wall" not in printed
