"""`marlaas bench service`: a scripted day of 32 tenants on a real `marlaas serve`, and what the service promises of it.

The service runs with a data folder of its own on the loopback; every tenant talks to it through the client. `plan` says what is
played, `figures` how the lines come about. Everything is kept in a folder: jobs.jsonl (a line per job), snapshots.jsonl (how
each running job stood, every few seconds), report.json, pictures, the service's own log and data.
"""

import json as json_format
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marlaas_jax.bench import timing
from marlaas_jax.bench.report import Line, show
from marlaas_jax.bench.service import figures, pictures, plan
from marlaas_jax.bench.service.driver import Driver, Record, Shares, run_with_timeout, write_records
from marlaas_jax.bench.service.served import Served
from marlaas_jax.errors import StorageError

TIMEOUT_S = 3600.0  # of the whole day, on a machine that is busy with other things
WANTED_S = 1500.0


def run(json: bool = False, quick: bool = False, seed: int | None = None, out: Path | None = None) -> dict[str, Any]:
    """Runs the day, prints a table (or JSON) and returns the report. Raises StorageError for an `out` that exists.

    quick: a few tenants, a few steps; its rewards and shares say little.
    """
    seed = random.randrange(1_000_000) if seed is None else seed
    folder = out or Path("runs") / f"day-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists():
        raise StorageError(f"{folder}: exists already; name a new folder")
    day = plan.plan(seed, plan.QUICK if quick else plan.FULL)
    log = lambda text: print(text, file=sys.stderr, flush=True)
    log(f"seed {seed}: {len(day.tenants)} tenants, {len(day.jobs)} jobs; everything is kept in {folder}")
    start = time.monotonic()
    records, shares = run_with_timeout(_play(day, folder, log), TIMEOUT_S, "the scripted day")
    elapsed_s = time.monotonic() - start
    write_records(folder / "jobs.jsonl", records)
    pictures.write(folder, records, shares, day.sizes)
    lines = [*_lines(records, shares, day.sizes), _time_line(elapsed_s, quick)]
    report = {"machine": timing.machine(), "seed": seed, "lines": [line.as_dict() for line in lines]}
    (folder / "report.json").write_text(json_format.dumps(report, indent=2) + "\n")
    show(report, f"service, seed {seed}", json, figures="measured")
    return report


async def _play(day: plan.Day, folder: Path, log: Callable[[str], None]) -> tuple[list[Record], Shares]:
    """Returns what came of every job, and the shares of the device in the window."""
    service = Served(folder, plan.RUNTIME)
    driver = Driver(day, service, log)
    try:
        await service.start()
        async with driver.tenants():
            await driver.warm_up()
            await driver.alone()
            shares = await driver.shares()
            await driver.flood_and_crowd()
        await service.stop()
    finally:
        service.kill()
    return driver.records, shares


def _lines(records: list[Record], shares: Shares, sizes: plan.Sizes) -> list[Line]:
    by_name = {record.planned.name: record for record in records}
    alone = next(record for record in records if record.planned.phase == "alone" and record.turn_s)
    return [
        figures.outcome_line(records),
        *figures.reward_lines(records, sizes),
        figures.eta_line(records),
        *figures.share_lines(shares),
        figures.wait_line(alone, by_name["small"]),
    ]


def _time_line(elapsed_s: float, quick: bool) -> Line:
    wanted = "" if quick else f"<= {WANTED_S:.0f}"
    return Line("the whole day, s", elapsed_s, f"{elapsed_s:.0f} s", wanted, {})
