"""`marlaas run`: validates, trains with a live view, draws the rewards, prints what became of each job."""

import contextlib
import dataclasses
import json as jsonlib
import logging
import logging.handlers
import operator
import re
import sys
import time
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

import rich.console
import yaml

from marlaas_jax import plots
from marlaas_jax.cli import checks, live, signals
from marlaas_jax.config import RunConfig, load_run
from marlaas_jax.documents import require_path
from marlaas_jax.errors import InvalidConfig, NotFound, StorageError, user_error
from marlaas_jax.rollout.settings import EXACT_PRICE
from marlaas_jax.workers import run as workers
from marlaas_jax.workers.controller_files import writing
from marlaas_jax.workers.controller_status import RunResult

EXIT_JOB_FAILED = 1
EXIT_JOB_REFUSED = 2
MAX_LOG_BYTES = 1 << 20  # of controller.log; one older file of the same size is kept


def run(files: list[Path], directory: Path | None, resume: bool, overrides: list[str], check: bool, json: bool) -> int:
    """Trains, and returns the exit code. Raises UserError for what is known to be wrong before the jobs start."""
    config = resolve(files, directory, resume, overrides)
    run_dir = directory or Path("runs") / f"{files[0].stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    require_path("--dir", str(run_dir))
    if not resume and run_dir.exists() and any(run_dir.iterdir()):
        raise InvalidConfig(f"--dir={run_dir}: holds files already; name a new folder, or add --resume to go on with that run")
    if check:
        document = checks.check(config, resume).model_dump(mode="json")
        if any(job.isolation == "exact" for job in config.jobs):
            print(EXACT_PRICE, file=sys.stderr)
        print(jsonlib.dumps(document) if json else yaml.safe_dump(document, sort_keys=False), end="\n" if json else "")
        return 0
    if not resume:
        _require_adapters(config)
    console = rich.console.Console(stderr=json)
    if not json:
        console.print(f"run folder {run_dir}; loading {config.runtime.model}", markup=False, highlight=False, soft_wrap=True)
    view: live.View = live.JsonView() if json else live.LiveView(console) if console.is_terminal else live.PlainView(console)
    try:
        with warnings_in(run_dir / "logs" / "controller.log"):
            result = signals.run(workers.run(config, run_dir, resume, on_status=view.status, on_event=view.event))
    except (KeyboardInterrupt, SystemExit):  # told to end, by SIGINT or SIGTERM
        view.close()
        stopped = live.stopped(run_dir, config.jobs)
        if json:
            live.emit(stopped)
        else:
            print(live.stopped_sentence(stopped), file=sys.stderr)
        raise
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
        console.print(live.summary(result, console.width))
        console.print(live.last_line(result, run_dir, plot), markup=False, highlight=False, soft_wrap=True)
    if unwritten is not None:
        raise unwritten
    return exit_code(result)


class BoundedLog(logging.handlers.RotatingFileHandler):
    """A log file of bounded size that is made with its first line, and that a full disk silences."""

    def __init__(self, path: Path):
        super().__init__(path, maxBytes=MAX_LOG_BYTES, backupCount=1, encoding="utf-8", errors="replace", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Does nothing: what a person must know comes through the view."""


@contextlib.contextmanager
def warnings_in(path: Path) -> Iterator[None]:
    """Sends this process's warnings to a file; the terminal belongs to the view."""
    handler = BoundedLog(path)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


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
    changed = load_run([directory / "config.yaml"], overrides)
    _require_same_tickets(load_run([directory / "config.yaml"]), changed)
    return changed


def _require_adapters(config: RunConfig) -> None:
    """Refuses an adapter to start from that is not there, before anything is compiled."""
    for job in config.jobs:
        if (source := job.lora.init_from) is not None:
            folder = Path(re.sub(r"@\d+$", "", source.rstrip("/")))
            peft, of_run = folder / "adapter_config.json", folder.parent / "jobs" / folder.name / "checkpoints"
            if not peft.is_file() and not of_run.is_dir():
                raise NotFound(f"job {job.name!r}: lora.init_from={source!r}: no PEFT folder, RUN_DIR/JOB or RUN_DIR/JOB@STEP")


def _require_same_tickets(stored: RunConfig, changed: RunConfig) -> None:
    """Refuses to go on with a job whose steps and items until now would mean something else."""
    for before, after in zip(stored.jobs, changed.jobs, strict=True):
        for field in ("name", "env", "env_args", "data", "seed", "lora", "rollout.groups_per_batch"):
            old, new = (operator.attrgetter(field)(job) for job in (before, after))
            if old != new:
                raise InvalidConfig(
                    f"--resume --set jobs.{before.name}.{field}={new!r}: the job has begun with {old!r} and must keep it; "
                    f"start a new run, if need be with lora.init_from"
                )
