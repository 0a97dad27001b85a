"""`marlaas run`: all jobs of one configuration under one controller, until the last has ended."""

from pathlib import Path

import yaml

from marlaas_jax.config import RunConfig
from marlaas_jax.workers.controller import DEVICE_MODULE, Controller, OnEvent, OnStatus
from marlaas_jax.workers.controller_files import writing
from marlaas_jax.workers.controller_jobs import Job
from marlaas_jax.workers.controller_status import RunResult


async def run(
    config: RunConfig,
    run_dir: Path,
    resume: bool = False,
    on_status: OnStatus | None = None,
    on_event: OnEvent | None = None,
    device_module: str = DEVICE_MODULE,
) -> RunResult:
    """Trains all jobs of the run and returns how they ended.

    Raises a UserError, before any compute where that is possible, for what the caller can mend.
    """

    def end_if_over(job: Job | None = None) -> None:
        if len(controller.jobs) == len(config.jobs) and all(other.is_over for other in controller.jobs.values()):
            controller.end()

    def start() -> None:
        document = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        for job in config.jobs:
            controller.add(job, controller.folder / "jobs" / job.name, resume)
        with writing(controller.folder / "config.yaml"):
            (controller.folder / "config.yaml").write_text(document)
        controller.event("run_resumed" if resume else "run_started", jobs=list(controller.jobs))
        end_if_over()

    controller = Controller(
        config.runtime.sized_for(config.jobs),
        run_dir,
        on_status=on_status,
        on_event=on_event,
        on_over=end_if_over,
        is_strict=True,
        device_module=device_module,
    )
    await controller.serve(start)
    return RunResult(tuple(job.result() for job in controller.jobs.values()), controller.elapsed_s)
