"""What a benchmark reports: its lines, each with what is wanted of it, as a table for people and JSON for scripts."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from marlaas_jax.bench.timing import Ratio
from marlaas_jax.model.config import ModelConfig

SHAPES = {
    "smollm2-135m": ModelConfig("llama", 30, 576, 9, 3, 64, 1536, 49152, 1e5, 1e-5, 8192, True),
    "tiny": ModelConfig("llama", 4, 128, 4, 2, 32, 384, 256, 1e4, 1e-5, 1024, True),
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One figure of a report; `value` decides, `shown` is printed."""

    name: str
    value: float
    shown: str
    wanted: str  # ">= 0.9", or "" where a figure is only printed
    detail: dict[str, Any]

    @classmethod
    def of_ratio(cls, name: str, ratio: Ratio, wanted: str, detail: dict[str, Any]) -> "Line":
        """Returns the line of a ratio of which the paired wall time decides."""
        return cls(name, ratio.wall, str(ratio), wanted, {"ratio": ratio.as_dict()} | detail)

    @property
    def holds(self) -> bool | None:
        """Whether the figure is within what is wanted; None where nothing is."""
        if not self.wanted:
            return None
        sign, number = self.wanted.split()
        return self.value <= float(number) if sign == "<=" else self.value >= float(number)

    def as_dict(self) -> dict[str, Any]:
        """Returns the line for a JSON report."""
        return {
            "name": self.name,
            "value": self.value,
            "shown": self.shown,
            "wanted": self.wanted,
            "holds": self.holds,
            **self.detail,
        }


def show(
    report: dict[str, Any], title: str, as_json: bool, shares: Sequence[tuple[str, str]] = (), figures: str = "wall|CPU|best"
) -> None:
    """Prints a report {"machine": ..., "lines": [...]}.

    `shares`: (heading, key of a line) of more columns, in percent. `figures`: the heading over what the lines show.
    """
    if as_json:
        print(json.dumps(report, indent=2))
        return
    machine = report["machine"]
    table = Table(title=f"{title}: {machine['device']}, {machine['cores']} core(s), jax {machine['jax']}")
    for heading in ("what", figures, "wanted", "holds", *(heading for heading, _ in shares)):
        table.add_column(heading)
    for line in report["lines"]:
        verdict = {True: "yes", False: "no", None: ""}[line["holds"]]
        extra = [f"{100 * line[key]:.0f}%" if key in line else "" for _, key in shares]
        table.add_row(line["name"], line["shown"], line["wanted"], verdict, *extra)
    Console().print(table)
