"""What the commands around sweeps do."""

import dataclasses
import time
from pathlib import Path

import rich.console
from rich.table import Table
from rich.text import Text

from marlaas_jax.cli.live import STATE_STYLES, number
from marlaas_jax.cli.remote import Target, age, echo, pairs
from marlaas_jax.client.records import Sweep


def submit(target: Target, file: Path, priority: int, labels: list[str], more: list[Path], json: bool) -> None:
    """Takes a sweep in."""
    with target.client() as client:
        sent_too = {path.name: path for path in more}
        sweep = client.submit_sweep(file, files=sent_too, priority=priority, labels=pairs(labels))
    echo(json, dataclasses.asdict(sweep), f"{sweep.id} {sweep.name}: {sweep.num_trials} trials")


def show(target: Target, sweep_id: str, cancel: bool, json: bool) -> None:
    """Prints a sweep, which is cancelled before if that is wished."""
    with target.client() as client:
        sweep = client.cancel_sweep(sweep_id) if cancel else client.sweep(sweep_id)
    if json:
        echo(True, dataclasses.asdict(sweep), "")
        return
    console = rich.console.Console()
    console.print(Text(headline(sweep)), soft_wrap=True)
    console.print(table(sweep), soft_wrap=not console.is_terminal)


def show_all(target: Target, json: bool) -> None:
    """Prints all sweeps."""
    with target.client() as client:
        found = client.sweeps()
    out = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("id", "name", "state", "trials", "age"):
        out.add_column(heading, no_wrap=True)
    for sweep in found:
        if json:
            echo(True, dataclasses.asdict(sweep), "")
        style = STATE_STYLES.get(sweep.state, "")
        out.add_row(
            sweep.id, sweep.name, Text(sweep.state, style=style), str(sweep.num_trials), age(time.time() - sweep.created)
        )
    if not json:
        console = rich.console.Console()
        console.print(out, soft_wrap=not console.is_terminal)


def headline(sweep: Sweep) -> str:
    """Returns one line about a sweep."""
    states = [trial.state for trial in sweep.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    return f"{sweep.name}: {sweep.state}; {sweep.num_trials} trials" + (f": {counts}" if counts else "")


def table(sweep: Sweep) -> Table:
    """Returns a line per trial."""
    keys = sorted({key for trial in sweep.trials for key in trial.values})
    out = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (
        "",
        "trial",
        *(key.rpartition(".")[2] for key in keys),
        "step",
        sweep.config.get("metric", "reward"),
        "state",
    ):
        out.add_column(heading, no_wrap=True)
    out.add_column("job", no_wrap=True)
    for trial in sweep.trials:
        values = [_text(trial.values[key]) if key in trial.values else "-" for key in keys]
        step = f"{trial.step}/{trial.steps}" if trial.steps is not None else "-"
        state = Text(trial.state, style=STATE_STYLES.get(trial.state, ""))
        mark = Text("*" if trial.is_best else "", style="bold green")
        out.add_row(mark, str(trial.number), *values, step, number(trial.reward, 3), state, trial.job_id or trial.reason)
    return out


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
