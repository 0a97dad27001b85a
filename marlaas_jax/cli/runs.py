"""Finds a job in a run folder by "RUN_DIR/JOB[@STEP]"."""

import dataclasses
from pathlib import Path

from marlaas_jax.config import RunConfig, load_run
from marlaas_jax.device import initial
from marlaas_jax.errors import NotFound


@dataclasses.dataclass(frozen=True)
class RunSource:
    """A job of a run folder and the run's resolved configuration."""

    run_dir: Path
    job: str
    config: RunConfig

    @property
    def template(self) -> str | None:
        """The chat template in use when it is not the model's own."""
        path = self.config.runtime.chat_template
        return None if path is None else Path(path).read_text()


def split_source(source: str) -> RunSource:
    """Returns what `source` names. Raises NotFound with one sentence."""
    run_dir, job, _ = initial.split_source(source)
    if not (run_dir / "config.yaml").is_file():
        raise NotFound(f"{source!r}: {run_dir} is not a run folder (it has no config.yaml)")
    config = load_run([run_dir / "config.yaml"])
    names = [entry.name for entry in config.jobs]
    if job not in names:
        raise NotFound(f"{source!r}: the run has no job {job!r}; it has {', '.join(names)}")
    return RunSource(run_dir, job, config)
