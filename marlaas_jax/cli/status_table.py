"""The table of a run's jobs, fitted to the width and height at hand: what matters most keeps its place.

Name, state, step and reward are always there. The other figures come in the order of OPTIONAL as far as there is room, and
"waits for" has what is left. Widths depend on the jobs and on the terminal alone, so columns stay where they are.
"""

import re
from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from marlaas_jax.workers.controller_status import CANCELLED, FAILED, SUCCEEDED, JobStatus

STATE_STYLES = {"succeeded": "green", "failed": "bold red", "running": "cyan"}
STATE_WIDTH = len("succeeded")
REWARD_WIDTH = 6
GAP = 2
NAME_SHARE = 0.4  # of the width, at most
MIN_NAME = 12
MIN_WAITS = len("training batch 12, 46 s")  # room that further figures leave for "waits for"
LEAST_WAITS = 8  # with less the column goes
WAITS = re.compile(r"(?P<stage>[a-z ]+): (?P<what>.*?)(, by [^;]*?)?, since (?P<seconds>[\d.]+) s \((no limit|limit \d+ s)\)")
# stage of rollout/records.py -> what a person reads
STAGES = {
    "train": "training {what}",
    "item": "reading {what}",
    "generate": "sampling",
    "render": "tokenizing",
    "step": "environment's answer",
    "reset": "environment's start",
    "env worker": "environment worker",
}


def number(value: float | None, digits: int = 2) -> str:
    """Returns a figure for a table; "-" where it is not known."""
    return "-" if value is None else f"{value:.{digits}f}"


# heading, width, text; the most important first
OPTIONAL: tuple[tuple[str, int, Callable[[JobStatus], str]], ...] = (
    ("first", REWARD_WIDTH, lambda job: number(job.reward_first)),
    ("tok/s", 7, lambda job: number(job.tokens_per_s, 1)),
    ("live", 5, lambda job: number(job.live_share)),
    ("device", 6, lambda job: f"{100 * job.device_share:.0f}%"),
    ("stale", 5, lambda job: number(job.staleness)),
    ("episodes", 10, lambda job: f"{job.episodes.get('done', 0)}+{job.episodes.get('running', 0)}"),
)


class StatusTable:
    """A renderable of the jobs; `num_rows` is how many lines it may take, None: as many as there are."""

    def __init__(self, jobs: Sequence[JobStatus], num_rows: int | None = None):
        self._jobs = jobs
        self._num_rows = num_rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield table(self._jobs, options.max_width, self._num_rows)


def table(jobs: Sequence[JobStatus], width: int, num_rows: int | None = None) -> Table:
    """Returns the jobs in `width` columns; where not all have a line, those at work come first."""
    longest_name = max((len(job.name) for job in jobs), default=0)
    name_width = min(longest_name, max(MIN_NAME, int(NAME_SHARE * width)))
    step_width = max([len("step"), *(2 * len(str(job.steps)) + 1 for job in jobs)])
    free = width - name_width - sum(GAP + column for column in (STATE_WIDTH, step_width, REWARD_WIDTH))
    shown = []
    for column in OPTIONAL:
        if free - (GAP + column[1]) < GAP + MIN_WAITS:
            break
        free -= GAP + column[1]
        shown.append(column)
    waits_width = free - GAP
    out = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    out.add_column("job", no_wrap=True, width=name_width)
    out.add_column("state", no_wrap=True, width=STATE_WIDTH)
    for heading, column_width in (("step", step_width), ("reward", REWARD_WIDTH), *((h, w) for h, w, _ in shown)):
        out.add_column(heading, justify="right", no_wrap=True, width=column_width)
    if waits_width >= LEAST_WAITS:
        out.add_column("waits for", no_wrap=True, overflow="ellipsis", width=waits_width)
    lines = _cut(jobs, num_rows)
    for job in lines:
        waits = " ".join((job.reason or waits_for(job.waits_for)).split())
        row = [
            shortened(job.name, name_width),
            Text(job.state, style=STATE_STYLES.get(job.state, "")),
            f"{job.step}/{job.steps}",
            number(job.reward),
            *(text(job) for _, _, text in shown),
        ]
        out.add_row(*row, *([Text(waits)] if waits_width >= LEAST_WAITS else []))
    if len(lines) < len(jobs):
        out.add_row(f"{len(jobs) - len(lines)} more")
    return out


def waits_for(text: str) -> str:
    """Returns the short form of what a job waits for: "training batch 3, 46 s"."""
    found = WAITS.match(text)
    if found is None:
        return text
    if found["stage"] not in STAGES:
        return f"{found['stage']}: {found['what']}, {float(found['seconds']):.0f} s"
    what = found["what"].partition(" (")[0]  # without how many more there are
    return f"{STAGES[found['stage']].format(what=what)}, {float(found['seconds']):.0f} s"


def shortened(name: str, width: int) -> Text:
    """Returns a name of at most `width` characters; a long one keeps both ends, as names of a sweep differ at the last."""
    if len(name) <= width:
        return Text(name)
    end = (width - 1) // 2
    return Text(f"{name[: width - 1 - end]}…{name[len(name) - end :]}")


def _cut(jobs: Sequence[JobStatus], num_rows: int | None) -> Sequence[JobStatus]:
    if num_rows is None or len(jobs) <= num_rows:
        return jobs
    at_work_first = sorted(jobs, key=lambda job: job.state in (SUCCEEDED, FAILED, CANCELLED))
    return at_work_first[: max(num_rows - 1, 1)]
