"""What a person writes: job files and the runtime they run on. These classes are the file's schema and the API's.

A file holds either one job, or `jobs:` (a list) with an optional `runtime:`. Unknown keys are errors. Precedence: default <
file < `--set runtime.engine.num_decode_slots=64`. Cores never see these classes: shells build frozen dataclasses from them.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from marlaas_jax.documents import parse_yaml, path_fault, plain, read_yaml
from marlaas_jax.errors import InvalidConfig, cut, short

NAME_RULE = "use 1 to 64 letters, digits, dots, dashes and underscores, with a letter or digit first"
JOB_ID = re.compile(r"job_[0-9A-Za-z]{22}(@\d+)?")  # of a service, with or without a step
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
# Limits keep whole numbers within the int32 and int64 of the arrays they end in, and numbers within float32's normal range.
MAX_SEED = 2**63 - 1
MAX_INT32 = 2**31 - 1
MAX_TOKENS = 2**24
MIN_EVAL_SLOTS = 4  # the null adapter, one being published, one under training, one under evaluation
MIN_ALPHA, MAX_ALPHA = 1e-6, 1e6


def _path(value: str) -> str:
    if fault := path_fault(value):
        raise ValueError(fault)
    return value


PathText = Annotated[str, pydantic.AfterValidator(_path)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Seconds = Annotated[float, Field(ge=1e-3, le=1e7)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Temperature = Annotated[float, Field(ge=0, le=1e6)]


class Section(pydantic.BaseModel):
    """Strict base of every section: unknown keys are errors, values are frozen."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraConfig(Section):
    """One job's adapter."""

    rank: Annotated[int, Field(ge=1, le=256)] = 8
    alpha: Annotated[float, Field(ge=MIN_ALPHA, le=MAX_ALPHA)] = 16.0  # the update is scaled by alpha / rank
    targets: tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...] = LORA_TARGETS
    seed: Seed | None = None  # of the random down factors; None: the job's seed
    init_from: PathText | None = None  # a PEFT folder, or "RUN_DIR/JOB[@STEP]" of another run

    @pydantic.field_validator("targets")
    @classmethod
    def _targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError(f"targets=[]: name at least one of {', '.join(LORA_TARGETS)}")
        return tuple(t for t in LORA_TARGETS if t in value)


class SamplingConfig(Section):
    """How one turn is sampled."""

    temperature: Temperature = 1.0  # 0: greedy
    top_k: Annotated[int, Field(ge=0, le=MAX_INT32)] = 0  # 0: off
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_tokens: Tokens = 64  # per turn
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # stop strings, matched on text
    stop_token_ids: tuple[Annotated[int, Field(ge=0, le=MAX_INT32)], ...] = ()  # besides all end ids of the model


class AlgorithmConfig(Section):
    """The policy-gradient objective. `loss` sets the form; the other fields are its data."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "importance_sampling"] = "grpo"
    # How token losses become one number: "token" divides by the batch's token count (DAPO), "sequence" averages each
    # completion first (GRPO), "constant" divides by num_sequences * max_tokens (Dr.GRPO). None: the loss's own.
    aggregation: Literal["token", "sequence", "constant"] | None = None
    normalize_std: bool | None = None  # divide advantages by the group's standard deviation; None: the loss's own
    clip_low: Annotated[float, Field(ge=0, le=1e6)] | None = None  # None: the loss's own
    clip_high: Annotated[float, Field(ge=0, le=1e6)] | None = None
    importance_cap: Annotated[float, Field(ge=1e-6, le=1e6)] = 2.0  # truncated importance weights between sampler and learner
    # "behaviour": ratios against the sampler's log-probs. "decoupled": against proximal log-probs (AReaL), which are
    # those of the weights at the start of the batch, or interpolated by staleness (A-3PO).
    objective: Literal["behaviour", "decoupled", "decoupled_interpolated"] = "behaviour"
    minibatches: Annotated[int, Field(ge=1, le=64)] = 1  # optimizer steps per batch
    kl_weight: Annotated[float, Field(ge=0, le=1e6)] = 0.0  # of the KL estimate (k3) to the base model
    mask_truncated: bool = False  # leave truncated episodes out of the loss


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter 2019) with a schedule over optimizer steps."""

    learning_rate: Annotated[float, Field(ge=1e-12, le=1e3)] = 2e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    beta1: Annotated[float, Field(ge=0, le=0.999999)] = 0.9
    beta2: Annotated[float, Field(ge=0, le=0.999999)] = 0.95
    eps: Annotated[float, Field(ge=1e-30, le=1e3)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    max_grad_norm: Annotated[float, Field(ge=1e-12, le=1e12)] | None = 1.0  # None: no clipping
    max_nonfinite_steps: Count = 3  # this many in a row fail the job


class RolloutConfig(Section):
    """Groups, staleness and what happens to what fails."""

    group_size: Annotated[int, Field(ge=1, le=1024)] = 8  # episodes of one prompt
    groups_per_batch: Annotated[int, Field(ge=1, le=2**16)] = 8  # groups of one optimizer step
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 1  # versions; 0 is synchronous
    max_turns: Annotated[int, Field(ge=1, le=10**4)] = 8
    max_attempts: Annotated[int, Field(ge=1, le=1000)] = 3  # of one ticket
    on_exhausted: Literal["smaller_batch", "fail"] = "smaller_batch"  # when a ticket has used its attempts
    step_timeout_s: Seconds = 30.0  # one call of the environment
    episode_timeout_s: Seconds = 600.0


class EvalConfig(Section):
    """Greedy evaluation on held-out items: before the first and after the last step, and in between beside the training."""

    num_items: Annotated[int, Field(ge=0, le=10**6)] = 32  # 0: none
    temperature: Temperature = 0.0
    every_steps: Annotated[int, Field(ge=0, le=10**9)] = 0  # an evaluation after every so many batches; 0: none in between


class StopConfig(Section):
    """When a job ends before its last step, well: as `succeeded`, with the reason, its checkpoint and its adapter.

    What decides are the batches in the order in which they are trained, and the evaluations; each rule works alone.
    """

    metric: Literal["train_reward", "eval_reward"] = "train_reward"  # what target and patience look at
    window: Annotated[int, Field(ge=1, le=10**6)] = 3  # train_reward is the mean over the last so many batches
    target: float | None = None  # ends the job once the metric has reached it
    patience: Count | None = None  # ends it after so many steps in which the metric did not rise by more than min_delta
    min_delta: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    max_tokens: Annotated[int, Field(ge=1, le=10**15)] | None = None  # sampled, of the batches trained
    max_time_s: Seconds | None = None  # while the job runs; not in a queue, nor paused, nor what a crash lost


class DataConfig(Section):
    """Items by ticket, from a file instead of the environment's own generator."""

    source: PathText  # "jsonl:PATH", "parquet:PATH", "json:PATH"
    prompt_field: str = "prompt"
    answer_field: str | None = "answer"
    answer_regex: str | None = None  # the answer is its first group
    prompt_template: str | None = None  # "{prompt}" and any field of the item
    eval_source: PathText | None = None  # None: the last tenth (at least one item) of `source` is held out


class CheckpointConfig(Section):
    """When a job's state is written."""

    every_steps: Count = 10
    every_s: Seconds = 60.0
    keep: Count = 2  # besides the best


class JobConfig(Section):
    """One RL run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    env: PathText  # "words:last_word", "calculator", "path/to/file.py:function", "reasoning_gym:chain_sum"
    env_args: dict[str, Any] = {}  # `path` and `*_path` are relative to the job file where such a file exists
    data: DataConfig | None = None
    steps: Count = 20  # optimizer batches to train
    seed: Seed = 0
    weight: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0  # share of the stages, against its owner's other jobs
    # "exact": ids, log-probs and updates are the same bits alone or beside any other jobs; rollout.max_staleness is then 0
    isolation: Literal["shared", "exact"] = "shared"
    lora: LoraConfig = LoraConfig()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    stop: StopConfig = StopConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _synchronous(cls, value: Any) -> Any:
        """Fills in the staleness that `isolation: exact` needs, where none is given."""
        if isinstance(value, dict) and value.get("isolation") == "exact" and isinstance(value.get("rollout", {}), dict):
            value = value | {"rollout": {"max_staleness": 0} | value.get("rollout", {})}
        return value

    @pydantic.model_validator(mode="after")
    def _exact(self) -> "JobConfig":
        if self.isolation == "exact" and self.rollout.max_staleness:
            raise ValueError(
                f"rollout.max_staleness={self.rollout.max_staleness}: isolation='exact' allows 0 only, because which snapshot "
                "samples a ticket must not depend on how fast others let the job run"
            )
        return self

    @pydantic.field_validator("env_args")
    @classmethod
    def _env_args(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, entry in value.items():
            if _names_a_path(key) and isinstance(entry, str) and (fault := path_fault(entry)):
                raise ValueError(f"env_args.{key}={short(entry)}: {fault}")
        return value

    @pydantic.model_validator(mode="after")
    def _across(self) -> "JobConfig":
        if fault := _stop_fault(self):
            raise ValueError(fault)
        return self


def _stop_fault(job: JobConfig) -> str:
    """Returns what of a job's evaluations and early stop could never have an effect, "" if nothing."""
    stop, every = job.stop, job.eval.every_steps
    if every and not job.eval.num_items:
        return f"eval.every_steps={every}: eval.num_items=0 leaves nothing to evaluate; it must be at least 1"
    if stop.min_delta and stop.patience is None:
        return f"stop.min_delta={stop.min_delta:g}: has an effect only together with stop.patience"
    if stop.patience is not None and stop.patience >= job.steps:
        return f"stop.patience={stop.patience}: must be less than steps={job.steps}"
    if stop.metric == "eval_reward" and (every == 0 or every >= job.steps):
        return f"stop.metric='eval_reward': takes evaluations in between: eval.every_steps={every} must be 1 to {job.steps - 1}"
    if stop.metric == "train_reward" and stop.window > job.steps and (stop.target, stop.patience) != (None, None):
        return f"stop.window={stop.window}: must be at most steps={job.steps}"
    return ""


class EngineSection(Section):
    """The sampler's fixed sizes; each combination of buckets is one compiled program."""

    num_decode_slots: Annotated[int, Field(ge=1, le=4096)] = 32
    max_context: Annotated[int, Field(ge=8, le=MAX_TOKENS)] = 256  # tokens of prompt and answer together
    decode_steps: Annotated[int, Field(ge=1, le=256)] = 8  # per dispatch
    context_buckets: tuple[Tokens, ...] = ()  # attention lengths while decoding; (): chosen from max_context
    prefill_buckets: tuple[Tokens, ...] = ()  # prompt lengths; (): chosen from max_context
    prefill_batch: Annotated[int, Field(ge=1, le=4096)] = 4  # prompts per prefill dispatch
    # decode slots that rollouts leave to requests over HTTP; None: one in a service of 8 slots or more, else none
    reserved_slots: Annotated[int, Field(ge=0, le=4095)] | None = None

    @pydantic.model_validator(mode="after")
    def _leaves_slots(self) -> "EngineSection":
        if (self.reserved_slots or 0) >= self.num_decode_slots:
            raise ValueError(f"reserved_slots={self.reserved_slots}: must be below num_decode_slots={self.num_decode_slots}")
        return self


class BankSection(Section):
    """The adapter bank of the sampler and the masters of the learner.

    Slots bound what is on the device at once, not how many jobs there are: further jobs wait in host memory for their turn.
    Slot 0 of each is the null adapter.
    """

    max_rank: Annotated[int, Field(ge=1, le=256)] = 8
    # snapshots that rows may run under, and one being published; None: 1 + 2 * jobs, at least 3
    num_sampler_slots: Annotated[int, Field(ge=3, le=2**16)] | None = None
    # jobs with masters, moments and gradients on the device; None: 1 + jobs
    num_learner_slots: Annotated[int, Field(ge=2, le=2**16)] | None = None
    # kept on the device beside the resident ones; the rest on the host
    max_device_snapshots: Annotated[int, Field(ge=0, le=2**16)] = 32
    # adapters of ended jobs and of older steps that are kept for requests over HTTP; the longest unused makes room
    max_loaded_snapshots: Annotated[int, Field(ge=1, le=2**16)] = 8


class LearnerSection(Section):
    """The learner's fixed sizes."""

    # padded, of one micro-batch; None: 256 on CPU, else 4096
    micro_batch_tokens: Annotated[int, Field(ge=16, le=MAX_TOKENS)] | None = None
    max_dispatch_s: Seconds = 0.25  # predicted length of one dispatch
    prompt_buckets: tuple[Tokens, ...] = ()  # prompt tokens but the last; (): chosen from max_context
    suffix_buckets: tuple[Tokens, ...] = ()  # tokens after the prompt; (): chosen from max_context
    block_rows: Annotated[int, Field(ge=1, le=1024)] = 8  # rollouts per block; larger groups are split, smaller ones padded
    # loss tokens per vocabulary projection; None: 64 on CPU, else 1024
    logits_chunk: Annotated[int, Field(ge=8, le=MAX_TOKENS)] | None = None
    # weights and moments of jobs without a slot that wait in host memory; the rest waits in files; None: all in memory
    max_host_bytes: Annotated[int, Field(ge=0, le=2**62)] | None = 4 << 30


class RuntimeConfig(Section):
    """The machine's side: one base model and the sizes of the three stages."""

    model: PathText = "smollm2-135m"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on CPU, bfloat16 elsewhere
    layers: Literal["auto", "scanned", "unrolled"] = "auto"  # auto: unrolled on CPU, scanned elsewhere
    engine: EngineSection = EngineSection()
    bank: BankSection = BankSection()
    learner: LearnerSection = LearnerSection()
    env_workers: Annotated[int, Field(ge=1, le=1024)] = 1  # processes per environment pool
    chat_template: PathText | None = None  # a jinja2 file; None: the model's own

    def sized_for(self, jobs: "Sequence[JobConfig]") -> "RuntimeConfig":
        """Returns the runtime with the sizes that depend on the jobs filled in, where the user left them open.

        There are slots for all: each job may have rows under one snapshot while the next is published, and rows of an
        evaluation under a third; nobody is paged out.
        Blocks are no wider than the largest group, unless a job is exact: its neighbours' groups may not change its blocks.
        """
        bank, learner = self.bank, self.learner
        filled = {
            "num_sampler_slots": bank.num_sampler_slots or 1 + sum(3 if job.eval.every_steps else 2 for job in jobs),
            "num_learner_slots": bank.num_learner_slots or 1 + len(jobs),
        }
        rows = learner.block_rows
        if all(job.isolation == "shared" for job in jobs):
            rows = min(rows, max(job.rollout.group_size for job in jobs))
        return self.model_copy(
            update={"bank": bank.model_copy(update=filled), "learner": learner.model_copy(update={"block_rows": rows})}
        )


class RunConfig(Section):
    """A whole run: the runtime and its jobs."""

    runtime: RuntimeConfig = RuntimeConfig()
    jobs: Annotated[tuple[JobConfig, ...], Field(min_length=1)]

    @pydantic.model_validator(mode="after")
    def _across(self) -> "RunConfig":
        names = [job.name for job in self.jobs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"jobs: name={name!r} is used by {names.count(name)} jobs; names must differ")
        for i, job in enumerate(self.jobs):
            if job.lora.rank > self.runtime.bank.max_rank:
                raise ValueError(
                    f"jobs.{i}.lora.rank={job.lora.rank}: runtime.bank.max_rank={self.runtime.bank.max_rank} is the most"
                )
            if job.sampling.max_tokens >= self.runtime.engine.max_context:
                raise ValueError(
                    f"jobs.{i}.sampling.max_tokens={job.sampling.max_tokens}: must be below "
                    f"runtime.engine.max_context={self.runtime.engine.max_context}"
                )
            if fault := eval_slots_fault(job, self.runtime):
                raise ValueError(f"jobs.{i}.{fault}")
        return self


def eval_slots_fault(job: JobConfig, runtime: RuntimeConfig) -> str:
    """Returns why the sampler could not evaluate beside training, "" if it can: training needs a slot of its own."""
    slots, every = runtime.bank.num_sampler_slots, job.eval.every_steps
    if not every or slots is None or slots >= MIN_EVAL_SLOTS:
        return ""
    return f"eval.every_steps={every}: takes at least {MIN_EVAL_SLOTS} of runtime.bank.num_sampler_slots, which is {slots}"


def load_run(paths: list[Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the run described by job files, with `--set` overrides. Raises InvalidConfig or NotFound, one sentence."""
    return validate(RunConfig, _merged(paths, overrides))


def load_jobs(path: Path, overrides: Sequence[str] = ()) -> list[JobConfig]:
    """Returns the jobs of a file for a service, which has a runtime of its own. Raises InvalidConfig or NotFound."""
    return [validate(JobConfig, job) for job in _merged([path], overrides)["jobs"]]


def _merged(paths: list[Path], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns what the files hold together, paths absolute."""
    merged: dict[str, Any] = {"jobs": []}
    for path in paths:
        document = read_yaml(path)
        jobs = document.pop("jobs", None)
        runtime = document.pop("runtime", None)
        if jobs is None:
            jobs = [document]
        elif document:
            raise InvalidConfig(f"{path}: unknown key {short(min(document))} beside `jobs`; allowed: runtime, jobs")
        if not isinstance(jobs, list):
            raise InvalidConfig(f"{path}: jobs={short(jobs)} must be a list of jobs")
        resolve_paths(jobs, runtime, path.parent)
        merged["jobs"] += jobs
        if runtime is not None:
            if merged.get("runtime", runtime) != runtime:
                raise InvalidConfig(f"{path}: its `runtime` differs from that of an earlier file; all jobs of a run share one")
            merged["runtime"] = runtime
    for override in overrides:
        _apply_override(merged, override)
    if overrides:
        resolve_paths(merged["jobs"], merged.get("runtime"), Path.cwd())  # those of job files are absolute by now
    return merged


def load_runtime(path: Path) -> RuntimeConfig:
    """Returns the runtime in a file."""
    return validate(RuntimeConfig, read_yaml(path))


def validate(model: type[pydantic.BaseModel], document: Any) -> Any:
    """Returns `document` as `model`, or raises InvalidConfig naming the first wrong field, its value and what is allowed."""
    document = plain(document)
    try:
        return model.model_validate(document)
    except pydantic.ValidationError as error:
        raise InvalidConfig(explain(model, error.errors()[0])) from None


def explain(model: type[pydantic.BaseModel], problem: Mapping[str, Any]) -> str:
    """Returns one of pydantic's errors of `model` as a sentence: the field, its value, what is allowed."""
    field = cut(".".join(str(part) for part in problem["loc"]))
    message = problem["msg"].removeprefix("Value error, ")
    for limit in (problem.get("ctx") or {}).values():
        if isinstance(limit, float):  # pydantic writes 1e-30 with all its zeros
            message = f"{message[: message.rindex(' ')]} {limit:g}"
    if problem["type"] == "extra_forbidden":
        return f"{field}: unknown key; allowed here: {', '.join(_allowed_keys(model, problem['loc']))}"
    if problem["type"] == "missing":
        return f"{field}: missing; it must be given"
    if problem["type"] == "value_error":
        return message if not field or "=" in message.split(":")[0] else f"{field}={short(problem['input'])}: {message}"
    if problem["type"] == "string_pattern_mismatch":  # only of names
        message = NAME_RULE
    return f"{field}={short(problem['input'])}: {message[0].lower() + message[1:]}"


def _allowed_keys(model: type[pydantic.BaseModel], location: tuple) -> list[str]:
    current: Any = model
    for part in location[:-1]:
        if isinstance(part, int) or not hasattr(current, "model_fields") or part not in current.model_fields:
            continue
        annotation = current.model_fields[part].annotation
        classes = [a for a in (annotation, *_inner(annotation)) if isinstance(a, type) and issubclass(a, pydantic.BaseModel)]
        current = classes[0] if classes else current
    return sorted(current.model_fields)


def _inner(annotation: Any) -> list[Any]:
    found = []
    for argument in getattr(annotation, "__args__", ()):
        found += [argument, *_inner(argument)]
    return found


def resolve_paths(jobs: list[Any], runtime: Any, base: Path) -> None:
    """Makes relative paths absolute, so that a run does not depend on the working directory it is resumed in."""
    for job in jobs:
        if isinstance(job, dict):
            _resolve_job_paths(job, base)
    if not isinstance(runtime, dict):
        return
    if isinstance(runtime.get("chat_template"), str):
        runtime["chat_template"] = _absolute(base, runtime["chat_template"])
    model = runtime.get("model")
    if isinstance(model, str) and ("/" in model or model.endswith(".gguf")) and os.path.exists(base / model):
        runtime["model"] = _absolute(base, model)


def _resolve_job_paths(job: dict[str, Any], base: Path) -> None:
    env = job.get("env")
    if isinstance(env, str) and (match := re.fullmatch(r"(.+\.py):(\w+)", env)):
        job["env"] = f"{_absolute(base, match[1])}:{match[2]}"
    data = job.get("data")
    if isinstance(data, dict):
        for key in ("source", "eval_source"):
            if isinstance(data.get(key), str) and (match := re.fullmatch(r"(jsonl|json|parquet):(.+)", data[key])):
                data[key] = f"{match[1]}:{_absolute(base, match[2])}"
    env_args = job.get("env_args")
    if isinstance(env_args, dict):
        for key, value in env_args.items():
            if _names_a_path(key) and isinstance(value, str) and os.path.exists(base / value):
                env_args[key] = _absolute(base, value)
    lora = job.get("lora")
    if isinstance(lora, dict) and isinstance(lora.get("init_from"), str) and not JOB_ID.fullmatch(lora["init_from"]):
        lora["init_from"] = str((base / lora["init_from"]).absolute())


def _names_a_path(key: str) -> bool:
    return key == "path" or key.endswith("_path")


def _absolute(base: Path, path: str) -> str:
    """Returns the path as seen from `base`. One that no file can have stays as it is: validation names its field."""
    try:
        return str((base / path).resolve())
    except (OSError, ValueError, RuntimeError):
        return path


def _apply_override(document: dict[str, Any], override: str) -> None:
    """Sets one key in place: `runtime.A.B=VALUE`, `jobs.NAME.A=VALUE` or `jobs.*.A=VALUE`."""
    key, value = split_override(override)
    where = f"--set {short(override)}"
    head, _, rest = key.partition(".")
    if head not in ("runtime", "jobs") or not rest:
        raise InvalidConfig(f"{where}: the key must start with `runtime.`, `jobs.*.` or `jobs.NAME.`")
    targets: list[Any] = [document]
    parts = key.split(".")
    if head == "jobs":
        jobs = [job for job in document["jobs"] if isinstance(job, dict)]
        if rest.startswith("*."):
            targets, parts = jobs, rest[2:].split(".")
        else:  # names may hold dots: the longest that fits is meant
            named = [job for job in jobs if rest.startswith(f"{job.get('name')}.")]
            if not named:
                raise InvalidConfig(f"{where}: no job is named {short(rest.split('.')[0])}; `jobs.*.` sets all")
            targets = [max(named, key=lambda job: len(str(job["name"])))]
            parts = rest[len(str(targets[0]["name"])) + 1 :].split(".")
    for target in targets:
        set_key(target, parts, value, where)


def split_override(override: str) -> tuple[str, Any]:
    """Returns the key and the value of `KEY=VALUE`. Raises InvalidConfig."""
    key, separator, text = override.partition("=")
    where = f"--set {short(override)}"
    if not separator or not key:
        raise InvalidConfig(f"{where}: must read KEY=VALUE, as in runtime.engine.num_decode_slots=64")
    return key, parse_yaml(text, where)


def set_key(target: dict[str, Any], parts: Sequence[str], value: Any, where: str) -> None:
    """Sets a value inside nested mappings, in place; `where` begins the sentence of an InvalidConfig."""
    for part in parts[:-1]:
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise InvalidConfig(f"{where}: {short(part)} holds {short(target)}, which has no keys")
    target[parts[-1]] = plain(value)  # a copy each: the next override may change one of them
