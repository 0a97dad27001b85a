"""What a person sees while jobs train: a live table on a terminal, plain lines elsewhere, JSON lines for scripts."""

import dataclasses
import json
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from marlaas_jax.workers.controller_status import JobStatus, RunResult, RunStatus

STATE_STYLES = {"succeeded": "green", "failed": "bold red", "running": "cyan"}
MAX_TABLE_ROWS = 40


class View(Protocol):
    """Takes what the controller tells."""

    def status(self, status: RunStatus) -> None:
        """About once a second."""

    def event(self, event: dict[str, Any]) -> None:
        """Whenever something happened."""

    def close(self) -> None:
        """At the end."""


def number(value: float | None, digits: int = 2) -> str:
    """Returns a figure for a table; "-" where it is not known."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(status: RunStatus) -> Table:
    """Returns the live table of all jobs."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    out.add_column("job", no_wrap=True)
    for heading in ("state", "step", "reward", "first", "live", "stale", "tok/s", "device", "episodes"):
        out.add_column(heading, justify="left" if heading == "state" else "right", no_wrap=True)
    out.add_column("waits for", overflow="ellipsis", no_wrap=True)
    for job in status.jobs[:MAX_TABLE_ROWS]:
        out.add_row(
            job.name,
            Text(job.state, style=STATE_STYLES.get(job.state, "")),
            f"{job.step}/{job.steps}",
            number(job.reward),
            number(job.reward_first),
            number(job.live_share),
            number(job.staleness),
            number(job.tokens_per_s, 1),
            f"{100 * job.device_share:.0f}%",
            f"{job.episodes.get('done', 0)}+{job.episodes.get('running', 0)}",
            job.reason or job.waits_for,
        )
    if len(status.jobs) > MAX_TABLE_ROWS:
        out.add_row(f"... and {len(status.jobs) - MAX_TABLE_ROWS} more")
    return out


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
        self._live.update(Group(Text(headline(status)), table(status)))

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
        case "warning" | "ticket_given_up":
            return f"{job}: {event['text']}"
        case "worker_lost" | "worker_given_up":
            return f"{event['kind'].replace('_', ' ')}: {event['worker']}: {event['reason']}"
        case "evaluated":
            return f"{job}: held-out reward {event['phase']} training {number(event['reward_mean'])}"
    return None


def summary(result: RunResult) -> Table:
    """Returns the table that a run ends with."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    out.add_column("job", no_wrap=True)
    for heading in ("state", "steps", "first", "last 3", "change", "eval before", "after", "tokens"):
        out.add_column(heading, justify="left" if heading == "state" else "right", no_wrap=True)
    for job in result.jobs:
        first, last = job.reward_first, job.reward_last3
        change = "-" if first is None or last is None else f"{last - first:+.2f}"
        out.add_row(
            job.name,
            Text(job.state, style=STATE_STYLES.get(job.state, "")),
            f"{job.steps}/{job.steps_asked}",
            number(job.reward_first),
            number(job.reward_last3),
            change,
            number(job.eval_before),
            number(job.eval_after),
            str(job.tokens),
        )
    return out
