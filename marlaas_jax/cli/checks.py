"""`marlaas run --check`: what a run would refuse before it computes, found without starting a process.

Model, context, compiled shapes, environments with their arguments, data files, adapters to start from. A user's own file is
read and never run, nor is an environment of another package. What stands for "the default that fits" is filled in where it is
known without asking JAX for its devices.
"""

import ast
import math
import os
from pathlib import Path
from typing import Any

from marlaas_envs import registry
from marlaas_envs.protocol import EnvLookupError
from marlaas_jax.config import JobConfig, RunConfig, RuntimeConfig
from marlaas_jax.engine import buckets as engine_buckets
from marlaas_jax.errors import InvalidConfig, NotFound, UserError
from marlaas_jax.learner import buckets as learner_buckets
from marlaas_jax.model import usable
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.rl import objective
from marlaas_jax.text.tokenizer import Tokenizer


def check(config: RunConfig, resume: bool = False) -> RunConfig:
    """Returns the configuration with its defaults filled in. Raises a UserError, one sentence, for what a run would refuse."""
    runtime = config.runtime.sized_for(config.jobs)
    folder, model = usable.require(runtime.model, runtime.engine.max_context)
    tokenizer = Tokenizer.load(folder, runtime.chat_template)
    for job in config.jobs:
        try:
            _check_environment(job, tokenizer)
            _check_items(job)
            if job.lora.init_from is not None and not resume:
                _check_adapter(job, runtime, model, folder)
        except (UserError, EnvLookupError) as error:
            raise InvalidConfig(f"job {job.name!r}: {error}") from None
    return RunConfig(runtime=_filled_runtime(runtime, model), jobs=tuple(map(_filled_job, config.jobs)))


# ---- environments, items, adapters


def _check_environment(job: JobConfig, tokenizer: Tokenizer) -> None:
    path, _, attribute = job.env.rpartition(":")
    if path.endswith(".py"):
        _check_file(job, Path(path), attribute)
    elif (family_name := job.env.partition(":")[0]) in registry.BUILT_IN:
        env = registry.make(registry.load(job.env), job.env, job.env_args)
        if roles := getattr(env, "reply_roles", ()):
            try:
                tokenizer.check_followups(roles)
            except UserError as error:
                raise InvalidConfig(f"env={job.env!r} answers in turns of the role {'/'.join(roles)}, but {error}") from None
    elif family_name not in registry.names():
        registry.load(job.env)  # raises, naming those that there are


def _check_file(job: JobConfig, path: Path, attribute: str) -> None:
    """A user's file, by its syntax tree: the name is defined, and there are items."""
    if not path.is_file():
        raise NotFound(f"env={job.env!r}: no such file")
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise InvalidConfig(f"env={job.env!r}: the file is not Python ({getattr(error, 'msg', error)}, line {line})") from None
    names = _defined(tree.body)
    if "*" in names:
        return
    if attribute not in names:
        public = ", ".join(name for name in names if not name.startswith("_")) or "none"
        raise InvalidConfig(f"env={job.env!r}: the file defines no {attribute!r}; it defines {public}")
    if job.data is None and "ITEMS" not in names and not isinstance(names[attribute], ast.ClassDef | ast.Assign | ast.alias):
        raise InvalidConfig(f"env={job.env!r}: it has no items; give `data.source`, or a list ITEMS in the file")


def _defined(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """Returns the names that a module's statements bind, with what binds them; "*": a star import, so there may be others."""
    names: dict[str, ast.AST] = {}
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[statement.name] = statement
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name).partition(".")[0]: alias for alias in statement.names}
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                found = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
                names |= {node.id: statement for node in found}
            case _:  # if, try, with, for: what is bound inside is bound outside
                for field in ("body", "orelse", "handlers", "finalbody"):
                    for inner in getattr(statement, field, []):
                        names |= _defined(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])
    return names


def _check_items(job: JobConfig) -> None:
    """The first items of the job's files, or of a built-in environment."""
    if job.data is not None:
        from marlaas_jax.data import dataset

        dataset.from_config(job.data, job.seed)
    elif not job.env.rpartition(":")[0].endswith(".py") and job.env.partition(":")[0] in registry.BUILT_IN:
        family = registry.load(job.env)
        for split in ("train", "eval"):
            items = registry.dataset(family, job.env, split, job.seed, job.env_args)
            if not len(items):
                raise InvalidConfig(f"env={job.env!r}: there is no {split} item")
            items[0]


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
