"""How a sweep is shown: each trial with what it changes, how far it is, its metric; the best is marked."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlaas_jax.service.sweeps import STOPPED
from marlaas_jax.store import sweeps as sweep_table
from marlaas_jax.store.jobs import ENDED, JobRecord
from marlaas_jax.store.sweeps import SweepRecord, Trial

if TYPE_CHECKING:
    from marlaas_jax.service.service import Service

FIGURE = {"train_reward": "reward_last3", "eval_reward": "eval_last"}  # of a job's status and of its summary
OUT_OF_THE_RUNNING = ("stopped", "failed", "cancelled", "deleted")


async def shown(service: "Service", sweep: SweepRecord) -> dict[str, Any]:
    """Returns a sweep with its trials as a document."""
    trials = await service.store.aread(sweep_table.list_trials, sweep.id)
    jobs = await service.store.aread(sweep_table.jobs_of_trials, sweep.id)
    figure = FIGURE[sweep.config["metric"]]
    ended = [job.id for job in jobs.values() if job.state in ENDED]
    summaries = await asyncio.to_thread(lambda: {job_id: _summary(service.folder(job_id)) for job_id in ended})
    rows = []
    for trial in trials:
        job = jobs.get(trial.job_id or "")
        status = service.status(job.id) if job is not None else None
        value = getattr(status, figure) if status is not None else summaries.get(trial.job_id or "", {}).get(figure)
        if value is None and trial.rungs:
            value = trial.rungs[max(trial.rungs, key=int)]
        rows.append(
            {
                **{name: entry for name, entry in asdict(trial).items() if name != "sweep_id"},
                "state": state_of(trial, job, sweep),
                "step": status.step if status is not None else 0 if job is None else job.step,
                "steps": None if job is None else job.steps,
                "reward": value,
                "reason": trial.error or ("" if job is None else job.reason),
            }
        )
    best = best_of(rows)
    rows = [row | {"is_best": row["number"] == best} for row in rows]
    return asdict(sweep) | {"trials": rows, "best": best}


def state_of(trial: Trial, job: JobRecord | None, sweep: SweepRecord) -> str:
    """Returns a job's state, or: waiting (to be queued), stopped (others did better), deleted."""
    if trial.error:
        return "failed"
    if trial.job_id is None:
        return "cancelled" if sweep.state == "cancelled" else "waiting"
    if job is None:
        return "deleted"
    return "stopped" if job.state == "succeeded" and job.reason.startswith(STOPPED) else job.state


def best_of(rows: list[dict[str, Any]]) -> int | None:
    """Returns the number of the trial with the highest metric: of those still in the running if any has one, else of all."""
    measured = [row for row in rows if row["reward"] is not None]
    running = [row for row in measured if row["state"] not in OUT_OF_THE_RUNNING]
    return max(running or measured, key=lambda row: (row["reward"], -row["number"]))["number"] if measured else None


def _summary(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # a job that ended before it began has none
        return {}
    return found if isinstance(found, dict) else {}
