"""What `marlaas usage`, `marlaas fairness` and `marlaas submit --quote` do."""

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich.console
from rich.table import Table

from marlaas_jax.cli.live import number
from marlaas_jax.cli.remote import Target, duration, echo
from marlaas_jax.client import job_files
from marlaas_jax.errors import InvalidConfig

__all__ = ["Target", "fairness", "quote", "usage"]

DIMENSIONS = ("day", "job", "tenant")
FILE_WIDTH = 240  # where no terminal says how wide it is
METERS = ("prompt_tokens", "sampled_tokens", "trained_tokens", "device_s", "env_s")


def usage(
    target: Target, first_day: str | None, last_day: str | None, job: str | None, by: list[str], as_csv: bool, json: bool
) -> None:
    """Prints a row per day, job or tenant."""
    if wrong := [name for name in by if name not in DIMENSIONS]:
        raise InvalidConfig(f"--by {wrong[0]}: must be {', '.join(DIMENSIONS)}")
    with target.client() as client:
        found = client.usage(first_day=first_day, last_day=last_day, job_id=job, by=by)  # pyright: ignore[reportArgumentType]
    rows = found["usage"]
    keys = [name for name in ("day", "tenant_id", "tenant", "job_id") if rows and name in rows[0]]
    currency = (found["prices"] or {}).get("currency")
    columns = [*keys, *METERS, *(["cost", "currency"] if currency else [])]
    if json:
        echo(True, found, "")
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        shown = [name for name in (*keys, *METERS, *(["cost"] if currency else [])) if name != "tenant_id"]
        _print(shown, [*rows, found["total"] | {keys[0]: "total"}] if keys else [found["total"]], currency)


def quote(target: Target, files: list[Path], overrides: list[str], more: list[Path], json: bool) -> None:
    """Prints what the jobs of the files would take."""
    packed = [job for file in files for job in job_files.read(file, overrides)]
    sent_too = {path.name: path.read_bytes() for path in more}
    with target.client() as client:
        for entry in packed:
            found = client.quote(entry.job, files=entry.files | sent_too)
            echo(json, {"name": entry.job.get("name")} | found, f"{entry.job.get('name')}\n{_quoted(found)}")


def fairness(target: Target, window_s: float, json: bool) -> None:
    """Prints waits and shares."""
    with target.client() as client:
        found = client.fairness(window_s)
    if json:
        echo(True, found, "")
        return
    index = number(found["jain"], 3)
    echo(False, {}, f"Jain index {index} of {found['num_backlogged']} backlogged tenants, last {found['window_s']:.0f} s")
    rows = []
    for tenant in found["tenants"]:
        row = {"tenant": tenant["tenant"], "device_s": number(tenant["device_s"], 1), "share": number(tenant["share"])}
        row["entitled"] = number(tenant["entitled_share"])
        for stage, waits in tenant["waits"].items():
            row[f"{stage} p50/p95/max s"] = "/".join(number(waits[name]) for name in ("p50_s", "p95_s", "max_s"))
        rows.append(row)
    if rows:
        _print(list(rows[0]), rows, None)


def _print(columns: list[str], rows: list[dict[str, Any]], currency: str | None) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        heading = f"cost {currency}" if name == "cost" else name.removesuffix("_tokens")
        table.add_column(heading, no_wrap=True, justify="left" if name in ("day", "tenant", "job_id") else "right")
    for row in rows:
        table.add_row(*(_cell(name, row.get(name)) for name in columns))
    console = rich.console.Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.{0 if name.endswith('tokens') else 4 if name == 'cost' else 1}f}"
    return "" if value is None else str(value)


def _quoted(found: Mapping[str, Any]) -> str:
    """Returns a quote in a few lines for people."""
    lines = [f"  {meter}: {_band(amount, 0 if meter.endswith('tokens') else 1)}" for meter, amount in found["amounts"].items()]
    if (cost := found["cost"]) is not None:
        lines.append(f"  cost: {_band(cost, 4)} {cost['currency']}")
    for title, span in (("time under the present load", found["now_s"]), ("time alone", found["alone_s"])):
        low, expected, high = (duration(span[name]) for name in ("low", "expected", "high"))
        lines.append(f"  {title}: {expected} ({low} to {high})")
    if found["basis"] != "measured":
        lines.append("  partly from defaults: this service has measured too little of such jobs yet")
    if found["waits_for"]:
        lines.append(f"  it would wait first: {found['waits_for']}")
    return "\n".join(lines)


def _band(amount: Mapping[str, Any], digits: int) -> str:
    return f"{amount['expected']:,.{digits}f} ({amount['low']:,.{digits}f} to {amount['high']:,.{digits}f})"
