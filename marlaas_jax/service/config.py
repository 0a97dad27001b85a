"""The service file: one runtime, where the service listens, where it keeps things, what tenants may use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from marlaas_jax.config import (
    MIN_EVAL_SLOTS,
    JobConfig,
    RuntimeConfig,
    Section,
    eval_slots_fault,
    resolve_paths,
    set_key,
    split_override,
    validate,
)
from marlaas_jax.documents import read_yaml
from marlaas_jax.errors import InvalidConfig, short
from marlaas_jax.service.prices import Prices
from marlaas_jax.service.quotas import Quotas
from marlaas_jax.workers.sandbox.sandbox import Setting

MIN_SLOTS_TO_RESERVE = 8  # with fewer, one slot less would cost the jobs too much


class ServiceConfig(Section):
    """`marlaas serve service.yaml`."""

    runtime: RuntimeConfig = RuntimeConfig()
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000  # 0: any free one, printed at the start
    data_dir: str = "marlaas-data"  # jobs, checkpoints, logs, and the database unless `db` says otherwise
    db: str | None = None  # sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME; None: SQLite in data_dir
    max_running_jobs: Annotated[int, Field(ge=1, le=4096)] = 32  # of all tenants; others wait in the queue
    request_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 300.0  # of a sampling request, to its last token
    drain_s: Annotated[float, Field(gt=0)] = 120.0  # for running steps to end and be saved after SIGTERM
    quotas: Quotas = Quotas()  # of a tenant that has none of its own
    prices: Prices | None = None  # None: use is told without its cost
    usage_job_days: Annotated[int, Field(ge=1, le=36500)] = 400  # use is kept by job for so long, by tenant for ever
    # where uploaded code runs: auto is the strongest that works here; none: as the service's user, for code that you trust
    sandbox: Setting = "auto"
    sandbox_network: bool = False  # uploaded code may use the network
    sandbox_memory_mib: Annotated[int, Field(ge=256, le=1 << 24)] = 4096  # of one worker with all that it starts
    # tcp://HOST:PORT at which tenants' own environment workers join (and the port after it); None: they do not
    env_workers_at: Annotated[str, Field(pattern=r"^tcp://[^/:]+:\d{1,5}$")] | None = None
    check_timeout_s: Annotated[float, Field(ge=1, le=3600)] = 60.0  # for a job's environment to be tried before it is queued
    checks_at_once: Annotated[int, Field(ge=1, le=64)] = 2  # trials of environments

    @property
    def db_url(self) -> str:
        """The database's URL."""
        return self.db or f"sqlite:///{(Path(self.data_dir) / 'marlaas.db').absolute()}"

    def sized_runtime(self) -> RuntimeConfig:
        """Returns the runtime with sizes for a service where the file leaves them open.

        There is room for a few resident adapters, others page; and a decode slot that rollouts leave to requests.
        """
        bank, engine = self.runtime.bank, self.runtime.engine
        reserved = engine.reserved_slots
        if reserved is None:
            reserved = 1 if engine.num_decode_slots >= MIN_SLOTS_TO_RESERVE else 0
        filled = {
            "num_sampler_slots": bank.num_sampler_slots or max(MIN_EVAL_SLOTS, 1 + 2 * min(self.max_running_jobs, 16)),
            "num_learner_slots": bank.num_learner_slots or 1 + min(self.max_running_jobs, 16),
        }
        return self.runtime.model_copy(
            update={"bank": bank.model_copy(update=filled), "engine": engine.model_copy(update={"reserved_slots": reserved})}
        )


def load_service(path: Path | None, overrides: Sequence[str] = ()) -> ServiceConfig:
    """Returns the service in a file (None: all defaults) with `--set` overrides. Raises InvalidConfig or NotFound."""
    document = {} if path is None else read_yaml(path)
    if path is not None:
        resolve_paths([], document.get("runtime"), path.parent)
    for override in overrides:
        key, value = split_override(override)
        set_key(document, key.split("."), value, f"--set {short(override)}")
    if overrides:
        resolve_paths([], document.get("runtime"), Path.cwd())
    return validate(ServiceConfig, document)


def check_fits(job: JobConfig, runtime: RuntimeConfig) -> None:
    """Raises InvalidConfig unless the job fits the fixed sizes of the runtime."""
    if job.lora.rank > runtime.bank.max_rank:
        raise InvalidConfig(f"lora.rank={job.lora.rank}: this service's bank allows 1 to {runtime.bank.max_rank}")
    if job.sampling.max_tokens >= runtime.engine.max_context:
        raise InvalidConfig(
            f"sampling.max_tokens={job.sampling.max_tokens}: must be below the service's context, {runtime.engine.max_context}"
        )
    if fault := eval_slots_fault(job, runtime):
        raise InvalidConfig(fault)
