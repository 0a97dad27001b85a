"""`marlaas run`: validates, trains with a live view, draws the rewards, prints what became of each job."""

import asyncio
import dataclasses
import logging
import time
from pathlib import Path

import rich.console
import yaml

from marlaas_jax import plots
from marlaas_jax.cli import live
from marlaas_jax.config import RunConfig, load_run
from marlaas_jax.documents import require_path
from marlaas_jax.errors import InvalidConfig, NotFound, StorageError, user_error
from marlaas_jax.workers import run as workers
from marlaas_jax.workers.controller_files import writing
from marlaas_jax.workers.controller_status import RunResult

EXIT_JOB_FAILED = 1
EXIT_JOB_REFUSED = 2


def run(files: list[Path], directory: Path | None, resume: bool, overrides: list[str], check: bool, json: bool) -> int:
    """Trains, and returns the exit code. Raises UserError for what is known to be wrong before the jobs start."""
    config = resolve(files, directory, resume, overrides)
    if check:
        print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
        return 0
    run_dir = directory or Path("runs") / f"{files[0].stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    require_path("--dir", str(run_dir))
    if not resume and run_dir.exists() and any(run_dir.iterdir()):
        raise InvalidConfig(f"--dir={run_dir}: holds files already; name a new folder, or add --resume to go on with that run")
    console = rich.console.Console(stderr=json)
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    view: live.View = live.JsonView() if json else live.LiveView(console) if console.is_terminal else live.PlainView(console)
    try:
        result = asyncio.run(workers.run(config, run_dir, resume, on_status=view.status, on_event=view.event))
    finally:
        view.close()
    unwritten: StorageError | None = None
    plot = run_dir / "rewards.png"
    try:
        with writing(plot):
            plots.write_reward_plot(run_dir)
    except StorageError as error:  # said after what became of the jobs
        unwritten = error
    if json:
        live.emit({"type": "result", "run_dir": str(run_dir), "plot": str(plot)} | dataclasses.asdict(result))
    else:
        console.print(live.summary(result))
        for job in result.jobs:
            if job.reason:
                console.print(f"{job.name}: {job.kind}: {job.reason}", style="red", markup=False, soft_wrap=True)
        console.print(
            f"{result.elapsed_s:.0f} s in all; plot {plot}; adapters in {run_dir}/jobs/*/adapter", markup=False, soft_wrap=True
        )
    if unwritten is not None:
        raise unwritten
    return exit_code(result)


def exit_code(result: RunResult) -> int:
    """Returns 0 if every job succeeded, 2 if what failed is for the caller to mend, else 1."""
    if result.succeeded:
        return 0
    return EXIT_JOB_REFUSED if all(user_error(job.kind) for job in result.jobs if job.reason) else EXIT_JOB_FAILED


def resolve(files: list[Path], directory: Path | None, resume: bool, overrides: list[str]) -> RunConfig:
    """Returns the run's configuration: from job files, or with `resume` from the run folder."""
    if directory is not None:
        require_path("--dir", str(directory))
    if not resume:
        if not files:
            raise InvalidConfig("marlaas run: name at least one job file")
        return load_run(files, overrides)
    if directory is None or files:
        raise InvalidConfig("--resume: give --dir RUN and no job files; the run folder holds its configuration")
    if not (directory / "config.yaml").is_file():
        raise NotFound(f"--dir={directory}: is not a run folder (it has no config.yaml)")
    return load_run([directory / "config.yaml"], overrides)
