"""Builds the device side of a run: the base loaded once, the sampler and the learner that share it, every program compiled."""

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax

from marlaas_jax.config import RuntimeConfig
from marlaas_jax.device.colocated import ColocatedDevice
from marlaas_jax.device.pages import Pages
from marlaas_jax.engine.engine import EngineSettings
from marlaas_jax.engine.sampler import Sampler
from marlaas_jax.learner.learner import Learner
from marlaas_jax.learner.paging import Shelf
from marlaas_jax.lora.readme import Base
from marlaas_jax.model import load, source
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.identity import identity
from marlaas_jax.text.tokenizer import Tokenizer

CANARY_TEXT = "the quick brown fox jumps over the lazy dog 0123456789"
CANARY_TOKENS = 16

log = logging.getLogger(__name__)


def use_compilation_cache() -> None:
    """Keeps compiled programs on disk between starts, unless the caller's JAX_COMPILATION_CACHE_DIR says where."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(source.cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a start compiles hundreds of small programs too
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def resolve_dtype(dtype: str) -> str:
    """Returns the dtype of the base, caches and snapshots; "auto" is float32 on CPU, where bfloat16 is 2-15 times slower."""
    if dtype != "auto":
        return dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def is_unrolled(layers: str) -> bool:
    """Returns whether layers are separate arrays; "auto": on CPU, where that decodes 1.2-1.6 times faster."""
    return layers == "unrolled" or (layers == "auto" and jax.default_backend() == "cpu")


def engine_settings(runtime: RuntimeConfig, dtype: str) -> EngineSettings:
    """Returns the engine's fixed sizes; the number of adapter slots must be filled in (`RuntimeConfig.sized_for`)."""
    engine, bank = runtime.engine, runtime.bank
    assert bank.num_sampler_slots is not None
    return EngineSettings(
        num_decode_slots=engine.num_decode_slots,
        max_context=engine.max_context,
        num_adapter_slots=bank.num_sampler_slots,
        max_rank=bank.max_rank,
        decode_steps=engine.decode_steps,
        prefill_batch=engine.prefill_batch,
        context_buckets=engine.context_buckets,
        prefill_buckets=engine.prefill_buckets,
        dtype=dtype,
        max_device_snapshots=bank.max_device_snapshots,
        max_loaded_snapshots=bank.max_loaded_snapshots,
        reserved_slots=engine.reserved_slots or 0,
    )


@dataclasses.dataclass(frozen=True)
class Stages:
    """The two stages on one base, every program compiled, with what belongs to the base."""

    folder: Path
    model: ModelConfig
    dtype: str
    tokenizer: Tokenizer
    sampler: Sampler
    learner: Learner


Progress = Callable[[int, int], None]


def build_stages(runtime: RuntimeConfig, progress: Progress = lambda done, total: None, shelf: Shelf | None = None) -> Stages:
    """Returns the stages, warmed up; the learner's paged-out jobs wait on `shelf`, None: in host memory.

    `progress(done, total)` counts compiled programs. Raises UserError with one sentence.
    """
    use_compilation_cache()
    folder = source.resolve(runtime.model)
    dtype = resolve_dtype(runtime.dtype)
    model, params = load.load(folder, dtype, is_unrolled(runtime.layers))
    tokenizer = Tokenizer.load(folder, runtime.chat_template)
    sampler = Sampler(model, params, engine_settings(runtime, dtype), tokenizer, time.monotonic)
    learner = Learner.from_runtime(
        model,
        params,
        runtime,
        clock=time.monotonic,
        sampler_dtype=dtype,
        shelf=shelf,
    )
    total = learner.sizes.num_programs + len(sampler.engine.buckets.programs())
    done = 0
    start = time.monotonic()
    progress(0, total)

    def compiled(name: str) -> None:
        nonlocal done
        done += 1
        progress(done, total)
        log.info("program ready name=%r done=%d total=%d seconds=%.1f", name, done, total, time.monotonic() - start)

    learner.warmup(compiled)
    sampler.warmup(compiled)  # last: it counts compiles from here on
    log.info("all programs ready count=%d seconds=%.1f", total, time.monotonic() - start)
    return Stages(folder, model, dtype, tokenizer, sampler, learner)


def build(runtime: RuntimeConfig, pages: Path, progress: Progress = lambda done, total: None) -> ColocatedDevice:
    """Returns the device, warmed up; as `build_stages`. Paged-out jobs beyond `learner.max_host_bytes` wait in `pages`."""
    stages = build_stages(runtime, progress, Pages(pages, runtime.learner.max_host_bytes))
    template = None if runtime.chat_template is None else Path(runtime.chat_template).read_text()
    canary = stages.tokenizer.encode(CANARY_TEXT)[: min(CANARY_TOKENS, runtime.engine.max_context)]
    return ColocatedDevice(
        model=stages.model,
        sampler=stages.sampler,
        learner=stages.learner,
        identity=identity(stages.folder, template),
        base=Base(runtime.model, stages.folder),
        canary_ids=canary,
        dtype=stages.dtype,
        max_rank=runtime.bank.max_rank,
        clock=time.monotonic,
    )
