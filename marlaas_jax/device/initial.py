"""Where an adapter's first weights come from: fresh, a PEFT folder, or a step of another run."""

import re
import time
from collections.abc import Mapping
from pathlib import Path

from marlaas_jax.checkpoint.job_checkpoints import JobCheckpoints, JobState
from marlaas_jax.config import JobConfig
from marlaas_jax.errors import CorruptFile, InvalidConfig, NotFound, StorageError
from marlaas_jax.learner.state import unflatten
from marlaas_jax.lora import peft_format
from marlaas_jax.lora.adapter import AdapterSpec, Weights, init_weights
from marlaas_jax.messages import AddJob, JobWarning
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.disk import read_json
from marlaas_jax.model.identity import require_same

MAX_READS = 5  # of a job whose run goes on meanwhile and prunes its steps
READ_PAUSE_S = 0.1


def split_source(source: str) -> tuple[Path, str, int | None]:
    """Returns (run folder, job, step or None) of "RUN_DIR/JOB" or "RUN_DIR/JOB@STEP"."""
    match = re.fullmatch(r"(.*)/([^/@]+)(?:@(\d+))?", source.rstrip("/"))
    if match is None:
        raise InvalidConfig(f"{source!r}: must be a PEFT folder, or read RUN_DIR/JOB or RUN_DIR/JOB@STEP")
    return Path(match[1] or "/"), match[2], None if match[3] is None else int(match[3])


def read_run_step(source: str) -> JobState:
    """Returns the committed state that "RUN_DIR/JOB" (newest step) or "RUN_DIR/JOB@STEP" names."""
    run_dir, job, step = split_source(source)
    folder = run_dir / "jobs" / job / "checkpoints"
    if not folder.is_dir():
        known = sorted(path.parent.name for path in run_dir.glob("jobs/*/checkpoints"))
        raise NotFound(
            f"{source!r}: no job {job!r} in {run_dir}; " + (f"it has {', '.join(known)}" if known else "no run is there")
        )
    for reads_left in reversed(range(MAX_READS)):
        try:
            state, is_wanted = _read_step(source, folder, step)
        except (CorruptFile, StorageError):
            if not reads_left:
                raise
        else:
            if state is not None and (is_wanted or not reads_left):
                return state
        time.sleep(READ_PAUSE_S)
    raise NotFound(f"{source!r}: the job has no committed step yet")


def _read_step(source: str, folder: Path, step: int | None) -> tuple[JobState | None, bool]:
    """Returns (the state after `step` batches, or of the newest readable step; whether it is the wanted or newest step)."""
    checkpoints = JobCheckpoints(folder, read_only=True)
    try:
        steps = checkpoints.steps()
        if step is not None and step not in steps:
            raise NotFound(f"{source!r}: step {step} is not kept; kept: {', '.join(map(str, steps)) or 'none'}")
        state = checkpoints.restore(step)
    finally:
        checkpoints.close()
    return state, state is not None and state.step == (steps[-1] if step is None else step)


def restored(checkpoints: JobCheckpoints, message: AddJob) -> tuple[JobState | None, list[JobWarning]]:
    """Returns (the committed state that a job goes on from, what its owner should know of it); None: it starts afresh.

    A step that was asked for must be readable, and the newer ones go once it was read. Without one it is the newest that can
    be read. Raises CorruptFile or NotFound.
    """
    if not message.resume:
        return None, []
    steps = checkpoints.steps()
    if message.step >= 0:
        if message.step not in steps:
            kept = ", ".join(map(str, steps)) or "none"
            raise NotFound(f"{checkpoints.directory}: step {message.step} is not kept; kept: {kept}")
        state = checkpoints.restore(message.step)
        checkpoints.remove_after(message.step)
        return state, []
    state = checkpoints.restore(repair=True)
    if state is None or state.step == steps[-1]:
        return state, []
    text = f"{checkpoints.directory / str(steps[-1])}: the checkpoint cannot be read; the job goes on from step {state.step}"
    return state, [JobWarning(message.job, message.incarnation, text)]


def spec_of_job(job: JobConfig) -> AdapterSpec:
    """Returns the specification of the adapter that a job asks for."""
    seed = job.seed if job.lora.seed is None else job.lora.seed
    return AdapterSpec(job.lora.rank, job.lora.alpha, job.lora.targets, seed)


def spec_of(state: JobState) -> AdapterSpec:
    """Returns the specification of a checkpoint's adapter."""
    return AdapterSpec(state.spec["rank"], state.spec["alpha"], tuple(state.spec["targets"]), state.spec["seed"])


def read_adapter(source: str, model: ModelConfig, max_rank: int | None, base: Mapping[str, str]) -> tuple[AdapterSpec, Weights]:
    """Returns (spec, weights) of a PEFT folder or of "RUN_DIR/JOB[@STEP]"; `max_rank` None pads to the adapter's own rank."""
    if (Path(source) / peft_format.CONFIG).is_file():
        declared = read_json(Path(source) / peft_format.CONFIG).get("r", 8)
        own_rank = declared if isinstance(declared, int) else 1  # `load` refuses what is not a number
        imported = peft_format.load(Path(source), model, max_rank or own_rank, base)
        return imported.spec, imported.weights
    return adapter_of(read_run_step(source), source, model, max_rank, base)


def adapter_of(
    state: JobState, source: str, model: ModelConfig, max_rank: int | None, base: Mapping[str, str]
) -> tuple[AdapterSpec, Weights]:
    """Returns (spec, weights) of the committed state that `source` named."""
    require_same(base, state.identity, "this run's", f"that of {source!r}")
    spec = spec_of(state)
    if max_rank is not None and spec.rank > max_rank:
        raise InvalidConfig(f"{source!r}: rank {spec.rank}, the bank allows 1 to {max_rank} (runtime.bank.max_rank)")
    return spec, unflatten(state.arrays["adapter"], model, spec, max_rank or spec.rank, "adapter")


def weights(model: ModelConfig, spec: AdapterSpec, init_from: str | None, max_rank: int, base: Mapping[str, str]) -> Weights:
    """Returns the first weights of a job. An adapter from elsewhere must have the job's own rank, alpha and targets."""
    if init_from is None:
        return init_weights(model, spec, max_rank)
    found, loaded = read_adapter(init_from, model, max_rank, base)
    require_same_adapter(spec, found, f"lora.init_from={init_from!r}")
    return loaded


def require_same_adapter(spec: AdapterSpec, found: AdapterSpec, where: str) -> None:
    """Raises InvalidConfig unless weights found elsewhere mean under `spec` what they meant there."""
    for field in ("rank", "alpha", "targets"):
        ours, theirs = getattr(spec, field), getattr(found, field)
        if ours != theirs:
            raise InvalidConfig(f"lora.{field}={ours!r}: {where} has {theirs!r}; they must be equal")
