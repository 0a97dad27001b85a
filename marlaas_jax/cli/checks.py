"""`marlaas run --check`: what a run would refuse before it computes, found without starting a process.

Model, context, compiled shapes, environments with their arguments, data files, adapters to start from. A user's own file is
read and never run, nor is an environment of another package. What stands for "the default that fits" is filled in where it is
known without asking JAX for its devices.
"""

import math
import os
from pathlib import Path
from typing import Any

from marlaas_envs.protocol import EnvLookupError
from marlaas_jax.config import JobConfig, RunConfig, RuntimeConfig
from marlaas_jax.engine import buckets as engine_buckets
from marlaas_jax.errors import InvalidConfig, UserError
from marlaas_jax.learner import buckets as learner_buckets
from marlaas_jax.model import usable
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.rl import objective
from marlaas_jax.text.tokenizer import Tokenizer
from marlaas_jax.workers.env_checks import check_environment, check_items


def check(config: RunConfig, resume: bool = False) -> RunConfig:
    """Returns the configuration with its defaults filled in. Raises a UserError, one sentence, for what a run would refuse."""
    runtime = config.runtime.sized_for(config.jobs)
    folder, model = usable.require(runtime.model, runtime.engine.max_context)
    tokenizer = Tokenizer.load(folder, runtime.chat_template)
    for job in config.jobs:
        try:
            check_environment(job, tokenizer.check_followups)
            check_items(job)
            if job.lora.init_from is not None and not resume:
                _check_adapter(job, runtime, model, folder)
        except (UserError, EnvLookupError) as error:
            raise InvalidConfig(f"job {job.name!r}: {error}") from None
    return RunConfig(runtime=_filled_runtime(runtime, model), jobs=tuple(map(_filled_job, config.jobs)))


# ---- adapters


def _check_adapter(job: JobConfig, runtime: RuntimeConfig, model: ModelConfig, folder: Path) -> None:
    """The adapter that the job starts from, read as the device will read it."""
    from marlaas_jax.device import initial
    from marlaas_jax.model.identity import identity

    template = None if runtime.chat_template is None else Path(runtime.chat_template).read_text()
    base = identity(folder, template)
    initial.weights(model, initial.spec_of_job(job), job.lora.init_from, runtime.bank.max_rank, base)


# ---- defaults


def _filled_runtime(runtime: RuntimeConfig, model: ModelConfig) -> RuntimeConfig:
    """Returns the runtime with what the sizes and, on a CPU asked for by $JAX_PLATFORMS, the device decide."""
    engine, learner = runtime.engine, runtime.learner
    on_cpu = os.environ.get("JAX_PLATFORMS", "").partition(",")[0] == "cpu"
    chosen = engine_buckets.choose(
        engine.num_decode_slots,
        engine.max_context,
        engine.prefill_batch,
        engine.context_buckets,
        engine.prefill_buckets,
        in_blocks=on_cpu,  # elsewhere perhaps not, with fewer programs, so that more buckets are allowed
    )
    sizes = learner_buckets.plan(learner, model, max_context=engine.max_context, max_rank=runtime.bank.max_rank, on_cpu=on_cpu)
    changes: dict[str, Any] = {"engine": engine.model_copy(update={"prefill_buckets": chosen.prefill_lengths})}
    if on_cpu:
        lengths = {"context_buckets": chosen.context_lengths, "prefill_buckets": chosen.prefill_lengths}
        changes["engine"] = engine.model_copy(update=lengths)
        widths = {"micro_batch_tokens": learner.micro_batch_tokens or 256, "logits_chunk": sizes.head_chunk}
        changes["learner"] = learner.model_copy(update=widths)
        changes["dtype"] = "float32" if runtime.dtype == "auto" else runtime.dtype
        changes["layers"] = "unrolled" if runtime.layers == "auto" else runtime.layers
    return runtime.model_copy(update=changes)


def _filled_job(job: JobConfig) -> JobConfig:
    """Returns the job with the seed of its adapter and its loss's own values."""
    own = objective.resolve(job.algorithm)
    values = {field: getattr(own, field) for field in ("aggregation", "normalize_std")}
    bounds = {field: getattr(own, field) for field in ("clip_low", "clip_high")}
    values |= {field: bound for field, bound in bounds.items() if math.isfinite(bound)}  # infinite: the loss has none
    seed = job.seed if job.lora.seed is None else job.lora.seed
    return job.model_copy(
        update={
            "lora": job.lora.model_copy(update={"seed": seed}),
            "algorithm": job.algorithm.model_copy(update=values),
        }
    )
