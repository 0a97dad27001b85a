"""What the commands that talk to a service do."""

import dataclasses
import itertools
import json as jsonlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.console
import typer
from rich.table import Table
from rich.text import Text

from marlaas_jax.cli.live import STATE_STYLES, notable, number
from marlaas_jax.client import job_files
from marlaas_jax.client.blocking import Client
from marlaas_jax.client.records import Event, Job
from marlaas_jax.errors import InvalidConfig

SHORT_S, LONG_S = 5.0, 600.0  # patience of a command, and of one that follows a job across restarts of the service
CLOSING_S = 150.0  # of one that waits for the device to close a job
SUCCEEDED, OTHERWISE = 0, 1
DONE = {"pause": "asked to pause", "resume": "queued again", "cancel": "cancelled", "delete": "deleted"}


@dataclass(frozen=True)
class Target:
    """The service and the key, as the command line gives them."""

    url: str | None
    api_key: str | None

    def client(self, patience_s: float = SHORT_S) -> Client:
        """Returns a client; close it."""
        return Client(self.url, self.api_key, patience_s=patience_s)


def submit(
    target: Target,
    files: list[Path],
    overrides: list[str],
    name: str | None,
    priority: int,
    labels: list[str],
    more: list[Path],
    is_one: bool,
    json: bool,
) -> list[str]:
    """Queues all jobs of the files, none if one of the files is wrong; returns their ids."""
    packed = [job for file in files for job in job_files.read(file, overrides)]
    if (name is not None or is_one) and len(packed) != 1:
        option = f"--name={name!r}" if name is not None else "--watch"
        raise InvalidConfig(f"{option}: is for one job; these files hold {len(packed)}")
    sent_too = {path.name: path.read_bytes() for path in more}
    ids = []
    with target.client() as client:
        for entry in packed:
            job = client.submit(entry.job, name=name, files=entry.files | sent_too, priority=priority, labels=pairs(labels))
            ids.append(job.id)
            echo(json, dataclasses.asdict(job), f"{job.id} {job.name} {job.state}" + (f": {job.why}" if job.why else ""))
    return ids


def jobs(target: Target, states: list[str], name: str | None, labels: list[str], limit: int, json: bool) -> None:
    """Prints the newest jobs."""
    with target.client() as client:
        found = list(itertools.islice(client.jobs(state=states, name=name, labels=pairs(labels)), limit))
    if json:
        for job in found:
            echo(True, dataclasses.asdict(job), "")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("id", "name", "state", "step", "priority", "age", "left"):
        table.add_column(heading, no_wrap=True)
    table.add_column("reason", overflow="fold")
    for job in found:
        state = Text(job.state, style=STATE_STYLES.get(job.state, ""))
        row = (f"{job.step}/{job.steps}", str(job.priority), age(time.time() - job.created), _left(job), Text(job.reason))
        table.add_row(job.id, Text(job.name), state, *row)
    console = rich.console.Console()
    console.print(table, soft_wrap=not console.is_terminal)


def sample(
    target: Target, prompt: str, model: str, adapter: str | None, options: dict[str, Any], is_chat: bool, json: bool
) -> None:
    """Prints what a model of the service answers to a prompt."""
    if adapter is not None:
        raise InvalidConfig(f"--adapter={adapter!r}: of a service, name the job as --model")
    given = {name: value for name, value in options.items() if value is not None}
    with target.client() as client:
        if is_chat:
            answer = client.chat(model, [{"role": "user", "content": prompt}], **given)
        else:
            answer = client.complete(model, prompt, **given)
    for choice in answer.choices:
        echo(json, dataclasses.asdict(choice) | {"model": answer.model, "version": answer.version}, choice.text)


def watch(target: Target, job_id: str, json: bool) -> int:
    """Prints a line per batch and what else matters until the job is over; returns the exit code."""
    with target.client() as client:
        job = client.job(job_id)
    with target.client(LONG_S) as client:
        if not json:
            left = _eta(job.status)
            typer.echo(f"{job.name}: {job.state}" + (f": {job.why}" if job.why else "") + (f"; {left}" if left else ""))
        for event in client.events(job_id):
            if json:
                echo(True, dataclasses.asdict(event), "")
            elif (line := _watched(event, job)) is not None:
                if event.kind == "step" and (left := _eta(event.data)):
                    line += f", {left}"
                typer.echo(f"[{time.strftime('%H:%M:%S', time.localtime(event.time))}] {line}")
        job = client.job(job_id)
    echo(json, {"type": "result"} | dataclasses.asdict(job), f"{job.name}: {_outcome(job)}")
    return SUCCEEDED if job.state == "succeeded" else OTHERWISE


def events(target: Target, job_id: str, after: int, json: bool) -> None:
    """Prints every event of a job until it is over."""
    with target.client() as client:
        client.job(job_id)
    with target.client(LONG_S) as client:
        for event in client.events(job_id, after):
            fields = " ".join(f"{name}={jsonlib.dumps(value)}" for name, value in event.data.items())
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
            echo(json, dataclasses.asdict(event), f"{event.seq} {moment} {event.kind} {fields}".rstrip())


def episodes(target: Target, job_id: str, which: dict[str, Any], limit: int, json: bool) -> None:
    """Prints episodes."""
    with target.client() as client:
        for episode in itertools.islice(client.episodes(job_id, **which), limit):
            if json:
                echo(True, episode, "")
                continue
            head = f"--- {episode.get('split')} ticket {episode.get('ticket')} sample {episode.get('sample')}"
            typer.echo(f"{head}: {episode.get('outcome')}, reward {number(episode.get('reward'))}")
            typer.echo(str(episode.get("prompt", "")).rstrip())
            for turn in episode.get("turns", ()):
                typer.echo(f">>> {turn.get('text', '')}")


def act(target: Target, action: str, job_id: str, json: bool) -> None:
    """Pauses, resumes, cancels or deletes a job."""
    with target.client() as client:
        job: Job | None = getattr(client, action)(job_id)
    echo(json, {"id": job_id, "deleted": True} if job is None else dataclasses.asdict(job), f"{job_id}: {DONE[action]}")


def checkpoints(target: Target, job_id: str, json: bool) -> None:
    """Prints the committed steps of a job."""
    with target.client() as client:
        for entry in client.checkpoints(job_id):
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"]))
            echo(json, entry, f"step {entry['step']} of {moment}" + (" (rolled back)" if entry["is_undone"] else ""))


def rollback(target: Target, job_id: str, step: int, json: bool) -> None:
    """Takes a job back to a committed step."""
    with target.client(CLOSING_S) as client:
        job = client.rollback(job_id, step)
    echo(json, dataclasses.asdict(job), f"{job_id}: is back at step {step} and {job.state}")


def why(target: Target, job_id: str, json: bool) -> None:
    """Prints what a job waits for."""
    with target.client() as client:
        job = client.job(job_id)
    told = job.why or ("it waits for nothing" if not job.is_over else "it is over")
    echo(json, {"id": job.id, "state": job.state, "why": job.why}, f"{job.name} is {job.state}: {told}")


def pairs(texts: list[str]) -> dict[str, str]:
    """Returns KEY=VALUE arguments as a mapping. Raises InvalidConfig."""
    found = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise InvalidConfig(f"{text!r}: must read KEY=VALUE")
        found[key] = value
    return found


def echo(json: bool, record: dict[str, Any], text: str) -> None:
    """Prints a line of JSON, or the text."""
    typer.echo(jsonlib.dumps(record) if json else text)


def _watched(event: Event, job: Job) -> str | None:
    """Returns what a person who watches a job should read of an event, None for nothing."""
    if event.kind == "step":
        reward = event.data.get("rollout/reward_mean")
        return f"step {event.data.get('step')}/{job.steps} reward {number(reward)}"
    if event.kind.startswith("job_") and "failure" not in event.data:
        reason = event.data.get("reason")
        return event.kind.removeprefix("job_") + (f": {reason}" if reason else "")
    return notable({"kind": event.kind, "job": job.name, **event.data})


def _outcome(job: Job) -> str:
    return f"{job.state} after {job.step} of {job.steps} steps" + (f": {job.reason}" if job.reason else "")


def duration(seconds: float) -> str:
    """Returns a length of time for people, in its largest unit but one."""
    if seconds < 60:
        return f"{max(0.0, seconds):.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def _eta(status: dict[str, Any] | None) -> str:
    """Returns when a job will be done, with the band; "" where that is not known."""
    if status is None or status.get("eta_s") is None:
        return ""
    low, high = duration(status["eta_low_s"]), duration(status["eta_high_s"])
    return f"{duration(status['eta_s'])} left ({low} to {high})"


def _left(job: Job) -> str:
    return duration(job.status["eta_s"]) if job.status is not None and job.status.get("eta_s") is not None else ""


def age(seconds: float) -> str:
    """Returns a time for a table."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
