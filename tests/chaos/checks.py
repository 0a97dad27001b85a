"""What must hold after a disturbed day; each check returns what is wrong, in sentences."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from marlaas_jax.bench.service.driver import Record
from tests.chaos.disturbances import Done
from tests.e2e import history, runs

NAMED_WITHIN_S = 10.0
NAMING = ("worker_lost", "worker_killed", "service_started", "stalled")
IDLE_GAUGES = ("engine/running_rows", "engine/waiting_requests", "engine/pinned_snapshots", "engine/kept_snapshots",
               "learner/open_jobs", "learner/resident_jobs")  # fmt: skip
SPARE_DESCRIPTORS = 4  # of one sort: a pool's connection, a listener's socket that closes late


def history_faults(data_dir: Path, records: Iterable[Record]) -> list[str]:
    """No job lost, no step doubled or skipped, every ticket trained once, staleness within its cap."""
    return [
        fault
        for record in records
        for fault in history.faults(
            data_dir / "jobs" / record.job.id, record.job.config, is_whole=record.planned.ends == "succeeded"
        )
    ]


def event_faults(done: Sequence[Done], events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every kill and every freeze is named by an event, in time."""
    found = []
    for entry in (entry for entry in done if entry.victim):
        delay_s = _delay_s(entry, events)
        if delay_s is None or delay_s > NAMED_WITHIN_S:
            when = "never" if delay_s is None else f"after {delay_s:.1f} s"
            found.append(f"{entry.disturbance.action} of {entry.victim}: an event names it {when}, not within 10 s")
    return found


def event_delays(done: Sequence[Done], events: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Returns the seconds until an event named the process, by action and kind; None: never."""
    found: dict[str, list[float | None]] = {}
    for entry in (entry for entry in done if entry.victim):
        found.setdefault(f"{entry.disturbance.action} {entry.disturbance.kind}", []).append(_delay_s(entry, events))
    return found


def _delay_s(entry: Done, events: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the seconds from when an event was due to the first that names the process; 0 for one that came before."""
    naming = (event for event in events if event["kind"] in NAMING and event.get("worker") == entry.victim)
    times = [event["time"] for event in naming if event["time"] >= entry.since]
    return round(max(0.0, times[0] - entry.until), 1) if times else None


def read_events(data_dir: Path) -> list[dict[str, Any]]:
    """Returns the events of the controller's own log, over all its starts."""
    return runs.lines(data_dir / "events.jsonl")


def leak_faults(
    before: Counter[str], after: Counter[str], gauges: Mapping[str, float], children: Counter[str], open_streams: float
) -> list[str]:
    """An idle service holds nothing: no slot, no snapshot, no worker, no stream, no more open files than when it was new."""
    found = [f"the device holds {name}={value:g}" for name in IDLE_GAUGES if (value := gauges[name])]
    if extra := {kind: count for kind, count in children.items() if kind not in ("device", "guardian") or count > 1}:
        found.append(f"processes of an idle service: {extra}")
    if open_streams:
        found.append(f"{open_streams:.0f} event streams are open")
    grown = {sort: (before[sort], count) for sort, count in after.items() if count > before[sort] + SPARE_DESCRIPTORS}
    if grown:
        found.append(f"open files (before, after): {grown}")
    return found
