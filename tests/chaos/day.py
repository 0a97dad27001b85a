"""A disturbed day: the crowd of the scripted day on a real service, while its processes are killed and frozen."""

import asyncio
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from marlaas_jax.bench.service import figures, plan
from marlaas_jax.bench.service.driver import Driver, run_with_timeout, write_records
from marlaas_jax.bench.service.plan import Planned, Sizes
from marlaas_jax.bench.service.served import Served, gauges
from tests.chaos import checks, processes
from tests.chaos.disturbances import Monkey, draw

FREEZE_S = 60.0
PATIENCE_S = 600.0  # of clients: through a service that is frozen or starts again
IDLE_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Chaos:
    """How much of it."""

    sizes: Sizes
    kills: int
    freezes: int
    max_pause_s: float
    compares_rewards: bool  # with the same jobs undisturbed, which run first
    timeout_s: float


FULL = Chaos(dataclasses.replace(plan.FULL, num_others=60, arrivals_s=900.0), 50, 21, 10.0, True, 7200.0)
SMALL = Chaos(Sizes(("one turn", "own reward"), 1, 100, 10, 0.0, (), 0, 0, 0, 2, 10.0), 5, 7, 3.0, False, 1200.0)
# Keeps a process of every kind in need, whatever else runs.
ANCHOR = Planned(
    "anchor", "anchor", "anchor", "keeps going",
    {"env": "tiny:upper", "steps": 100_000, "weight": 0.1, "sampling": {"max_tokens": 12}, "eval": {"num_items": 0},
     "rollout": {"group_size": 4, "groups_per_batch": 2}},
    ends="cancelled",
)  # fmt: skip


def run(chaos: Chaos, seed: int, folder: Path, log: Callable[[str], None], freeze_s: float = FREEZE_S) -> dict[str, Any]:
    """Runs the day and returns {"seed", "faults", "delays_s", "rewards", ...}; no faults means that everything held."""
    day = plan.plan(seed, chaos.sizes)
    phases = ("alone", "crowd") if chaos.compares_rewards else ("crowd",)
    day = dataclasses.replace(day, jobs=(*day.of(*phases), ANCHOR))
    log(f"MARLAAS_CHAOS_SEED={seed}: {len(day.jobs)} jobs, {chaos.kills} kills, {chaos.freezes} freezes")
    return run_with_timeout(_run(chaos, day, folder, log, freeze_s), chaos.timeout_s, "the disturbed day")


async def _run(chaos: Chaos, day: plan.Day, folder: Path, log: Callable[[str], None], freeze_s: float) -> dict[str, Any]:
    service = Served(folder, plan.RUNTIME)
    driver = Driver(day, service, log, PATIENCE_S)
    monkey = Monkey(service, random.Random(day.seed), freeze_s, log)
    disturbances = draw(day.seed, chaos.kills, chaos.freezes, chaos.max_pause_s)
    faults: list[str] = []
    start = time.monotonic()
    try:
        await service.start()
        async with driver.tenants():
            await driver.warm_up()
            before, *_ = await _idle(service)
            if chaos.compares_rewards:
                await driver.alone()
            async with asyncio.TaskGroup() as group:
                group.create_task(driver.play(ANCHOR))
                crowd = group.create_task(driver.crowd())
                await driver.reached(ANCHOR, 1)
                await monkey.run(disturbances)
                await crowd
                await driver.cancel(ANCHOR)
            faults += checks.leak_faults(before, *await _idle(service))
        code = await service.stop()
        faults += [f"the service ended with code {code}"] if code else []
    finally:
        service.kill()
    orphans = [process for process in monkey.seen.values() if processes.is_alive(process)]
    faults += [f"process {process.pid} outlived the service: {process.cmdline()}" for process in orphans]
    events = checks.read_events(service.data)
    outcome = figures.outcome_line(driver.records)
    faults += outcome.detail["wrong"] + checks.history_faults(service.data, driver.records)
    faults += checks.event_faults(monkey.done, events)
    rewards = figures.reward_lines(driver.records, chaos.sizes) if chaos.compares_rewards else []
    faults += [f"{line.name}: {line.shown}" for line in rewards if not line.holds]
    write_records(folder / "jobs.jsonl", driver.records)
    return {
        "seed": day.seed,
        "faults": faults,
        "outcomes": outcome.shown,
        "delays_s": checks.event_delays(monkey.done, events),
        "recovered_s": [round(entry.recovered_s, 1) for entry in monkey.done],
        "rewards": {line.name: line.shown for line in rewards},
        "elapsed_s": time.monotonic() - start,
    }


async def _idle(service: Served) -> tuple[Counter[str], dict[str, float], Counter[str], float]:
    """Returns (open files, the device's figures, processes by kind, open streams) once no worker is left, or after a minute."""
    end = time.monotonic() + IDLE_TIMEOUT_S
    async with httpx.AsyncClient(trust_env=False) as http:
        while True:
            await asyncio.sleep(2.5)  # a report of the device, and keep-alive connections that nobody needs
            children = Counter(processes.kind_of(process) for process in processes.workers(service.pid))
            found = await gauges(http, service)
            device = {labels["figure"]: value for name, labels, value in found if name == "marlaas_device"}
            streams = next(value for name, _, value in found if name == "marlaas_open_streams")
            is_idle = not (children["data"] or children["environment"] or streams or device.get("learner/open_jobs", 1))
            if is_idle or time.monotonic() > end:
                return processes.descriptors(service.pid), device, children, streams
