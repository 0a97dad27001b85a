"""`marlaas bench learner`: what training many jobs together costs against one at a time, what staged programs save in memory
and compile time, and what publishing costs.

Random weights of a model's shape: time does not depend on their values. Times come from alternatives run in turn (see
`timing`); a ratio is printed as paired wall | CPU | best. Where CPU time decides, as for training steps, the line says so.
"""

import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

from marlaas_jax.bench import timing
from marlaas_jax.bench.report import SHAPES, Line, show
from marlaas_jax.bench.timing import interleave, ratio
from marlaas_jax.config import JobConfig
from marlaas_jax.learner import state, steps
from marlaas_jax.learner.buckets import PROBE_TOKENS, LearnerSizes, layers_per_program, update_buckets
from marlaas_jax.learner.learner import Learner
from marlaas_jax.learner.rows import loss_rows
from marlaas_jax.lora import bank as banks
from marlaas_jax.lora import peft_format
from marlaas_jax.lora.adapter import AdapterSpec
from marlaas_jax.messages import TrainBatch, TrainGroup, TrainRow
from marlaas_jax.model import transformer
from marlaas_jax.model.attention import causal
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.rl.packing import BlockShape, lay_out_sequence

RANK = 8
SPEC = AdapterSpec(RANK, 16.0, ("q", "k", "v", "o", "gate", "up", "down"))
HEAD_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Load:
    """What each job trains in one step."""

    jobs: int
    groups: int
    rows: int
    prompt: int  # tokens of the prompt part (the prompt has one more)
    suffix: int  # tokens of each answer

    @property
    def tokens_per_job(self) -> int:
        """Tokens that pass through the layers for one job."""
        return self.groups * (self.prompt + self.rows * self.suffix)

    def batch(self, model: ModelConfig, job: str, step: int) -> TrainBatch:
        """Returns one batch of random tokens."""
        rng = np.random.default_rng(step)
        draw = lambda n: tuple(int(t) for t in rng.integers(0, model.vocab_size, n))
        logprobs = np.full(self.suffix, -np.log(model.vocab_size), "<f4").tobytes()
        versions = np.full(self.suffix, step, "<i4").tobytes()
        row = lambda: TrainRow(draw(self.suffix), b"\1" * self.suffix, logprobs, versions, float(rng.normal()))
        group = lambda ticket: TrainGroup(ticket, 0, draw(self.prompt + 1), tuple(row() for _ in range(self.rows)))
        return TrainBatch(job, 0, step, tuple(group(i) for i in range(self.groups)), b"", 0.0)


def make_learner(
    model: ModelConfig, params: Any, load: Load, blocks: int, updates: tuple[int, ...], max_dispatch_s: float = 1e9
) -> Learner:
    """Returns a learner with the load's jobs, its micro-batches `blocks` wide."""
    shape = BlockShape(load.prompt, load.suffix, load.rows, blocks)
    probe = BlockShape(PROBE_TOKENS, 1, 1, 1)
    sizes = LearnerSizes((shape,), probe, HEAD_CHUNK, layers_per_program(model.num_layers), updates, max_dispatch_s)
    learner = Learner(model, params, sizes, num_slots=load.jobs + 1, max_rank=RANK, clock=time.perf_counter)
    learner.warmup()
    for i in range(load.jobs):
        learner.add_job(f"job{i}", 0, JobConfig(name=f"job{i}", env="none"), dataclasses.replace(SPEC, seed=i))
    return learner


class _Steps:
    """One optimizer step of every job of a learner, together or one job after another."""

    def __init__(self, model: ModelConfig, learner: Learner, load: Load, together: bool):
        self._model, self._learner, self._load, self._together, self._step = model, learner, load, together, 0
        self.longest_dispatch_s = 0.0

    def __call__(self) -> None:
        batches = [self._load.batch(self._model, f"job{i}", self._step) for i in range(self._load.jobs)]
        done = 0
        for batch in batches:
            self._learner.submit(batch)
            if not self._together:
                done += self._drain()
        done += self._drain()
        assert done == self._load.jobs
        self._step += 1

    def _drain(self) -> int:
        done = 0
        while self._learner.has_work():
            start = time.perf_counter()
            done += len(self._learner.step())
            self.longest_dispatch_s = max(self.longest_dispatch_s, time.perf_counter() - start)
        return done


def together_line(name: str, load: Load, wanted: str, repeats: int) -> Line:
    """Returns the separate steps' time over the multi-job step's, each with the micro-batch width that suits it."""
    model = SHAPES[name]
    params = transformer.init_params(model)
    block = load.prompt + load.rows * load.suffix
    alone = max(min(256 // block, load.groups), 1)
    together = max(min(256 // block, load.groups * load.jobs), 1)
    updates = update_buckets(model, RANK)
    functions = {
        "separate": _Steps(model, make_learner(model, params, load, alone, (1,)), load, together=False),
        "together": _Steps(model, make_learner(model, params, load, together, updates), load, together=True),
    }
    times = interleave(functions, repeats)
    value = ratio(times["separate"], times["together"])
    label = f"{name}: {load.jobs} jobs x {load.tokens_per_job} tokens, separate steps / one multi-job step (CPU decides)"
    detail = {"seconds": {k: v.as_dict() for k, v in times.items()}, "ratio": value.as_dict(), "blocks": [alone, together]}
    return Line(label, value.cpu, str(value), wanted, detail)


def shared_prefix_line(name: str, repeats: int) -> Line:
    """Returns what rows that repeat their 44-token prompt cost against a group that holds it once; 5-token answers."""
    model = SHAPES[name]
    params = transformer.init_params(model)
    group, rows = Load(1, 1, 8, 43, 5), Load(1, 8, 1, 43, 5)
    functions = {
        "repeated": _Steps(model, make_learner(model, params, rows, 4, (1,)), rows, together=True),
        "once": _Steps(model, make_learner(model, params, group, 1, (1,)), group, together=True),
    }
    times = interleave(functions, repeats)
    value = ratio(times["repeated"], times["once"])
    detail = {"ratio": value.as_dict(), "tokens": [rows.tokens_per_job, group.tokens_per_job]}
    return Line(f"{name}: prompt in every row / once per group of 8", value.cpu, str(value), "", detail)


def plain_step(model: ModelConfig, prompt: int) -> Any:
    """Returns the plain form of a training step: whole rows, full logits, nothing recomputed; gradients of one adapter."""

    def loss(weights, params, tokens_BT, old_BT, advantage_B):
        def project(name, x, weight, side):
            return x @ weight + SPEC.scale * (x @ side[name]["down"].T) @ side[name]["up"]

        sides = tuple(jax.tree.map(lambda stack, i=i: stack[i], weights) for i in range(model.num_layers))
        positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
        length = jnp.full((len(tokens_BT),), tokens_BT.shape[1], jnp.int32)
        hidden, _ = transformer.forward(model, params, tokens_BT, positions, causal(length), project=project, sides=sides)
        log_p = jax.nn.log_softmax(transformer.unembed(params, hidden))
        log_p = jnp.take_along_axis(log_p[:, :-1], tokens_BT[:, 1:, None], axis=-1)[..., 0]
        ratio_BT = jnp.exp(log_p - old_BT[:, 1:])
        surrogate = jnp.minimum(ratio_BT * advantage_B[:, None], jnp.clip(ratio_BT, 0.8, 1.2) * advantage_B[:, None])
        return -jnp.mean(surrogate[:, prompt:])

    return jax.jit(jax.grad(loss))


class _Programs:
    """The programs of one micro-batch, lowered for their real arguments, and what lives between them."""

    def __init__(self, model: ModelConfig, learner: Learner):
        executor, sizes = learner._executor, learner.sizes
        shape = sizes.shapes[0]
        layout = lay_out_sequence(shape, np.zeros(2, np.int32), sizes.capacity)
        blank = np.full((sizes.num_rows, sizes.num_suffix), sizes.capacity, np.int32)
        self._model, self._layers_per_program = model, sizes.layers_per_program
        self._shape, self._layout, self._blank = shape, layout, blank
        self._rows = loss_rows(layout, [], *blank.shape)
        self._params, self._masters = executor._params, executor.masters
        self._buffers = executor._logprob_N, executor._entropy_N, executor._unit_ND
        self._x = jax.ShapeDtypeStruct((sizes.capacity, model.model_dim), executor._params["embed_VD"].dtype)
        self._index = np.zeros(sizes.head_chunk, np.int32)

    def lower(self) -> dict[str, Any]:
        """Returns the lowered programs by name."""
        model, shape, params, masters, x = self._model, self._shape, self._params, self._masters, self._x
        layers, slot_M = params["layers"][: self._layers_per_program], np.zeros(shape.blocks, np.int32)
        common = (model, shape, layers, masters.bank, np.int32(0), slot_M, self._layout.prompt_length_M)
        forward = steps.forward_jit.lower(*common, x)
        self._kept = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), forward.out_info[1])
        return {
            "forward": forward,
            "head": steps.head_jit.lower(model, params, x, self._index, self._index, *self._buffers),
            "finish": steps.finish_jit.lower(model, params, x, self._blank, self._rows, *self._buffers),
            "backward": steps.backward_jit.lower(*common, self._kept, x, masters.gradients),
        }

    def peak_bytes(self) -> int:
        """Returns the most temporary memory that a micro-batch needs: all layers' inputs, activations, the program running.

        Masters, moments, gradient accumulators and the base are not temporary, here as in the plain form.
        """
        temporary = [program.compile().memory_analysis().temp_size_in_bytes for program in self.lower().values()]
        size = lambda tree: sum(int(np.prod(s.shape)) * s.dtype.itemsize for s in jax.tree.leaves(tree))
        inputs = size(self._kept) * (self._model.num_layers // self._layers_per_program)
        return sum(buffer.nbytes for buffer in self._buffers) + inputs + 2 * size(self._x) + max(temporary)


def memory_lines(name: str, repeats: int, rows: int = 8, tokens: int = 256) -> list[Line]:
    """Returns the plain form's peak temporary memory over ours, and our time over its; same rows, no prompt shared."""
    model = SHAPES[name]
    params = transformer.init_params(model)
    prompt = tokens // 2
    load = Load(1, rows, 1, prompt, tokens - prompt)
    learner = make_learner(model, params, load, rows, (1,))
    ours = _Steps(model, learner, load, together=True)
    plain = plain_step(model, prompt)
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(0, model.vocab_size, (rows, tokens)).astype(np.int32)
    old_BT = np.full((rows, tokens), -np.log(model.vocab_size), np.float32)
    weights = jax.device_put(learner.weights("job0"))
    arguments = (weights, params, tokens_BT, old_BT, np.ones(rows, np.float32))
    compiled = plain.lower(*arguments).compile()
    plain_bytes = compiled.memory_analysis().temp_size_in_bytes
    our_bytes = _Programs(model, learner).peak_bytes()
    times = interleave({"ours": ours, "plain": lambda: compiled(*arguments)}, repeats)
    value = ratio(times["ours"], times["plain"])
    detail = {"bytes": {"plain": plain_bytes, "ours": our_bytes}, "ratio": value.as_dict()}
    label = f"{name}: {rows} rows x {tokens} tokens"
    shown = f"{plain_bytes / our_bytes:.1f} ({plain_bytes / 1e6:.0f} / {our_bytes / 1e6:.0f} MB)"
    return [
        Line(f"{label}, peak temporary memory, plain / ours", plain_bytes / our_bytes, shown, ">= 10", detail),
        Line(f"{label}, time, ours / plain (CPU decides)", value.cpu, str(value), "<= 1.4", detail),
    ]


def state_line(name: str) -> Line:
    """Returns how the bytes of masters, moments and accumulators grow from 8 to 32 adapters, per adapter."""
    shapes = lambda slots: jax.eval_shape(lambda: state.empty(SHAPES[name], slots, RANK))
    size = lambda slots: sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(shapes(slots)))
    few, many = size(8) / 8, size(32) / 32
    return Line(
        f"{name}: learner state per adapter, 32 adapters / 8", many / few, f"{many / few:.3f}", "<= 1.05", {"bytes": many}
    )


def publish_line(name: str, repeats: int) -> Line:
    """Returns what taking weights to the sampler's bank through a PEFT folder costs against a device copy and a slot write."""
    model = SHAPES[name]
    load = Load(1, 1, 1, 8, 8)
    learner = make_learner(model, transformer.init_params(model), load, 1, (1,))
    bank = [banks.empty(model, 9, RANK)]
    write = jax.jit(banks.write, donate_argnames=("bank",))
    folder = Path(tempfile.mkdtemp(prefix="marlaas-bench-"))
    scale = np.float32(SPEC.scale)

    def put(weights: Any) -> Any:
        bank[0] = write(bank[0], np.int32(1), weights, scale)
        return bank[0].scale_A

    def device() -> Any:
        return put(learner._executor.published(1, jnp.float32))

    def file() -> Any:
        peft_format.save(folder, model, SPEC, learner.weights("job0"), {"name": name})
        return put(peft_format.load(folder, model, RANK).weights)

    try:
        times = interleave({"file": file, "device": device, "proved": lambda: put(learner.snapshot("job0").weights)}, repeats)
    finally:
        shutil.rmtree(folder)
    value = ratio(times["file"], times["device"])
    detail = {"seconds": {k: v.as_dict() for k, v in times.items()}, "ratio": value.as_dict()}
    ms = {name: f"{1e3 * sample.median_s:.1f}" for name, sample in times.items()}
    shown = f"{value} ({ms['file']} / {ms['device']} ms; {ms['proved']} with the fingerprint)"
    return Line(f"{name}: publish through a file / on the device", value.wall, shown, ">= 10", detail)


def cache_line(name: str) -> Line:
    """Returns trace + lower + compile of the layer programs without the persistent cache over the same with it."""
    model = SHAPES[name]
    programs = _Programs(model, make_learner(model, transformer.init_params(model), Load(1, 1, 8, 64, 8), 1, (1,)))
    keys = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {key: getattr(jax.config, key) for key in keys}
    folder = tempfile.mkdtemp(prefix="marlaas-bench-")
    seconds = []
    try:
        for key, value in zip(keys, (folder, 0.0, -1), strict=True):
            jax.config.update(key, value)
        compilation_cache.reset_cache()
        for _ in range(4):  # the first fills the cache
            jax.clear_caches()
            start = time.process_time()
            for program in programs.lower().values():
                program.compile()
            seconds.append(time.process_time() - start)
    finally:
        for key, value in before.items():
            jax.config.update(key, value)
        compilation_cache.reset_cache()
        shutil.rmtree(folder)
    warm = statistics.median(seconds[1:])
    value = seconds[0] / warm
    shown = f"{value:.1f} ({seconds[0]:.2f} / {warm:.2f} s of CPU time)"
    label = f"{name}: trace + lower + compile, without / with the persistent cache"
    return Line(label, value, shown, ">= 8", {"seconds": seconds})


def dispatch_line(name: str, repeats: int, max_dispatch_s: float = 0.25) -> Line:
    """Returns the longest dispatch of a learner that is told to stay below `max_dispatch_s`."""
    model = SHAPES[name]
    load = Load(2, 2, 8, 48, 8)
    learner = make_learner(model, transformer.init_params(model), load, 2, update_buckets(model, RANK), max_dispatch_s)
    run = _Steps(model, learner, load, together=True)
    run()
    run.longest_dispatch_s = 0.0
    for _ in range(repeats):
        run()
    shown = f"{1e3 * run.longest_dispatch_s:.0f} ms"
    label = f"{name}: longest learner dispatch, s (aimed at {max_dispatch_s})"
    return Line(label, run.longest_dispatch_s, shown, "<= 0.3", {"aimed_at_s": max_dispatch_s})


def run(json: bool = False, quick: bool = False, cores: int = 1, model: str = "smollm2-135m") -> dict[str, Any]:
    """Runs the benchmark, prints a table (or JSON) and returns the report. Call it before anything starts jax's backend.

    quick: the tiny shape alone, few repeats: a check that everything runs.
    """
    pinned = timing.pin_to_cores(cores)
    console = Console(stderr=json)
    shape = "tiny" if quick else model
    repeats = 2 if quick else 5
    tasks: list[tuple[str, Callable[[], Line | list[Line]]]] = [
        ("persistent cache", lambda: cache_line(shape)),
        ("tiny, 32 jobs", lambda: together_line("tiny", Load(4 if quick else 32, 1, 2, 16, 8), ">= 0.9", repeats)),
        ("tiny, 8 jobs", lambda: together_line("tiny", Load(2 if quick else 8, 2, 8, 48, 8), ">= 0.9", repeats)),
    ]
    if not quick:
        tasks += [
            (f"{shape}, 8 jobs x 16 tokens", lambda: together_line(shape, Load(8, 1, 1, 8, 8), ">= 1.25", repeats)),
            (f"{shape}, 4 jobs", lambda: together_line(shape, Load(4, 2, 8, 48, 8), ">= 0.9", 3)),
        ]
    tasks += [
        ("shared prompt", lambda: shared_prefix_line(shape, repeats)),
        ("memory", lambda: memory_lines(shape, 1 if not quick else 2, *((4, 32) if quick else (8, 256)))),
        ("state", lambda: state_line(shape)),
        ("publishing", lambda: publish_line(shape, 3 * repeats)),
        ("dispatches", lambda: dispatch_line(shape, 1)),
    ]
    lines: list[Line] = []
    for label, task in tasks:
        console.print(f"[dim]{label}[/dim]", highlight=False)
        made = task()
        lines += made if isinstance(made, list) else [made]
    report = {
        "machine": timing.machine() | {"pinned_to_cores": cores if pinned else None},
        "lines": [line.as_dict() for line in lines],
    }
    show(report, "learner", json)
    return report
