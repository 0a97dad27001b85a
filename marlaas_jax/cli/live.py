"""What a person sees while jobs train: a live table on a terminal, plain lines elsewhere, JSON lines for scripts."""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from marlaas_jax.cli.status_table import GAP, STATE_STYLES, STATE_WIDTH, StatusTable, number, shortened
from marlaas_jax.config import JobConfig
from marlaas_jax.plots import read_metrics
from marlaas_jax.workers.controller_status import JobStatus, RunResult, RunStatus

HEAD_LINES = 2  # above the jobs: the headline and the table's own
MIN_SUMMARY_NAME = 16
# heading and width of the table that a run ends with; the last go first where there is no room
SUMMARY = (("steps", 7), ("first", 6), ("last 3", 6), ("change", 6), ("eval before", 11), ("after", 5), ("tokens", 8))


class View(Protocol):
    """Takes what the controller tells."""

    def status(self, status: RunStatus) -> None:
        """About once a second."""

    def event(self, event: dict[str, Any]) -> None:
        """Whenever something happened."""

    def close(self) -> None:
        """At the end."""


def headline(status: RunStatus) -> str:
    """Returns one line about the run as a whole."""
    parts = [f"{status.elapsed_s:.0f} s", status.phase]
    compiled, programs = status.programs
    if programs and compiled < programs:
        parts.append(f"compiling {compiled}/{programs} programs (kept for the next start)")
    elif status.device_share:
        shares = sorted(status.device_share.items(), key=lambda item: -item[1])
        parts.append("device " + ", ".join(f"{stage} {100 * share:.0f}%" for stage, share in shares if share >= 0.005))
    if status.compiles_since_warmup:
        parts.append(f"{status.compiles_since_warmup} programs compiled after warm-up")
    return " | ".join(parts)


class LiveView:
    """A table that is drawn anew on a terminal."""

    def __init__(self, console: Console):
        self._live = Live(console=console, refresh_per_second=2, transient=False)
        self._live.start()

    def status(self, status: RunStatus) -> None:
        """Redraws the table."""
        num_rows = max(self._live.console.height - HEAD_LINES - 1, 1)
        line = Text(headline(status), no_wrap=True, overflow="ellipsis")
        self._live.update(Group(line, StatusTable(status.jobs, num_rows)))

    def event(self, event: dict[str, Any]) -> None:
        """Prints what a person should not miss above the table."""
        if (text := notable(event)) is not None:
            self._live.console.print(Text(text, style="yellow"))

    def close(self) -> None:
        """Leaves the last table standing."""
        self._live.stop()


class PlainView:
    """A line per trained batch, for logs and pipes."""

    def __init__(self, console: Console):
        self._console = console
        self._steps: dict[str, int] = {}
        self._compiled = -1

    def status(self, status: RunStatus) -> None:
        """Prints what is new since the last one."""
        compiled, programs = status.programs
        if programs and compiled < programs and compiled >= self._compiled + 5:
            self._compiled = compiled
            self._print(f"[{status.elapsed_s:5.0f} s] compiling {compiled}/{programs} programs")
        for job in status.jobs:
            if job.step > self._steps.get(job.name, 0):
                self._steps[job.name] = job.step
                self._print(f"[{status.elapsed_s:5.0f} s] {self._line(job)}")

    def event(self, event: dict[str, Any]) -> None:
        """Prints what a person should not miss."""
        if (text := notable(event)) is not None:
            self._print(text)

    def close(self) -> None:
        """Nothing is open."""

    def _line(self, job: JobStatus) -> str:
        stale, live = number(job.staleness), number(job.live_share)
        return (
            f"{job.name}: step {job.step}/{job.steps} reward {number(job.reward)} (first {number(job.reward_first)}) "
            f"live {live} staleness {stale} {job.tokens_per_s:.1f} tok/s"
        )

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class JsonView:
    """One JSON object per line: statuses, events; the caller prints the result."""

    def status(self, status: RunStatus) -> None:
        """Prints the status."""
        emit({"type": "status"} | dataclasses.asdict(status))

    def event(self, event: dict[str, Any]) -> None:
        """Prints the event."""
        emit({"type": "event"} | event)

    def close(self) -> None:
        """Nothing is open."""


def emit(record: dict[str, Any]) -> None:
    """Prints one line of strict JSON."""
    print(json.dumps(record, allow_nan=False), flush=True)


def notable(event: dict[str, Any]) -> str | None:
    """Returns a sentence for the events that a person should see at once, None for the others."""
    job = event.get("job")
    match event["kind"]:
        case "job_failed":
            return f"{job}: failed: {event['failure']}: {event['reason']}"
        case "warning" | "ticket_given_up" | "evaluation_skipped":
            return f"{job}: {event['text']}"
        case "worker_lost" | "worker_given_up":
            return f"{event['kind'].replace('_', ' ')}: {event['worker']}: {event['reason']}"
        case "evaluated":
            return f"{job}: held-out reward {evaluation(event)}"
        case "stopping":
            return f"{job}: stops after step {event['step']}: {event['reason']}"
    return None


def evaluation(event: dict[str, Any]) -> str:
    """Returns an evaluation in a few words: "after step 4 0.52 +- 0.06 (32 items)"."""
    phase = event["phase"]
    when = f"after step {event['step']}" if phase == "during" else f"{phase} training"
    error = event.get("reward_std_error")
    spread = "" if error is None else f" +- {error:.2f}"
    return f"{when} {number(event['reward_mean'])}{spread} ({event['num_items']} items)"


def summary(result: RunResult, width: int) -> Table:
    """Returns the table that a run ends with, in `width` columns."""
    columns = list(SUMMARY)
    room = lambda: width - STATE_WIDTH - GAP - sum(GAP + column_width for _, column_width in columns)
    while columns and room() < MIN_SUMMARY_NAME:
        columns.pop()
    name_width = min(max((len(job.name) for job in result.jobs), default=0), max(room(), MIN_SUMMARY_NAME))
    out = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    out.add_column("job", no_wrap=True, width=name_width)
    out.add_column("state", no_wrap=True, width=STATE_WIDTH)
    for heading, column_width in columns:
        out.add_column(heading, justify="right", no_wrap=True, min_width=column_width)
    for job in result.jobs:
        first, last = job.reward_first, job.reward_last3
        figures = (
            f"{job.steps}/{job.steps_asked}",
            number(first),
            number(last),
            "-" if first is None or last is None else f"{last - first:+.2f}",
            number(job.eval_before),
            number(job.eval_after),
            str(job.tokens),
        )
        state = Text(job.state, style=STATE_STYLES.get(job.state, ""))
        out.add_row(shortened(job.name, name_width), state, *figures[: len(columns)])
    return out


def last_line(result: RunResult, run_dir: Path, plot: Path) -> str:
    """Returns where to find what a run left."""
    trained = any(job.steps for job in result.jobs)
    parts = [f"{result.elapsed_s:.0f} s in all", f"plot {plot}" if trained else "nothing was trained"]
    if any(job.adapter is not None for job in result.jobs):
        parts.append(f"adapters in {run_dir}/jobs/*/adapter")
    return "; ".join(parts)


def stopped(run_dir: Path, jobs: Sequence[JobConfig]) -> dict[str, Any]:
    """Returns how far the jobs of an interrupted run came, and how to go on where there is something to go on with."""
    rows = read_metrics(run_dir)
    reached = [
        {"name": job.name, "step": rows[job.name][-1]["step"] if rows.get(job.name) else 0, "steps": job.steps} for job in jobs
    ]
    go_on = f"marlaas run --dir {shlex.quote(str(run_dir))} --resume" if (run_dir / "config.yaml").is_file() else None
    return {"type": "stopped", "run_dir": str(run_dir), "jobs": reached, "resume": go_on}


def stopped_sentence(record: dict[str, Any]) -> str:
    """Returns the record of `stopped` as a sentence."""
    if record["resume"] is None:
        return "stopped before the jobs started"
    reached = ", ".join(f"{job['name']} at step {job['step']} of {job['steps']}" for job in record["jobs"])
    return f"stopped; {reached}; go on with: {record['resume']}"
