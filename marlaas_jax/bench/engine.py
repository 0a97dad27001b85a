"""`marlaas bench engine`: what many adapters cost while decoding, what batching and sharing a prompt save, and how that stands
against transformers and peft on the same machine.

Everything is timed on one core, alternatives in turn (see `timing`), on random weights of a model's shape: time does not depend
on their values. A ratio is printed as paired wall | CPU | best, and each with the share of the measured peaks that it reaches.
"""

import dataclasses
import json as json_format
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.bench import timing
from marlaas_jax.bench.report import SHAPES, Line, show
from marlaas_jax.bench.timing import Measured, Samples, interleave, ratio
from marlaas_jax.device import huge_pages
from marlaas_jax.engine.buckets import Form
from marlaas_jax.engine.engine import EngineParams, EngineSettings, MarlaasEngine
from marlaas_jax.engine.plan import Plan
from marlaas_jax.engine.sampler import BASE_MODEL, Sampler
from marlaas_jax.engine.state import RowSettings
from marlaas_jax.errors import MarlaasError
from marlaas_jax.lora import bank as banks
from marlaas_jax.lora.bank import Bank
from marlaas_jax.lora.snapshot import Snapshot
from marlaas_jax.messages import Generate, Sampling
from marlaas_jax.model import transformer
from marlaas_jax.model.config import ModelConfig

RANK = 8
NUM_ADAPTERS = 32
CONTEXT = 128
PROMPT = 16
GROUP_PROMPT = 64


class NoText:
    """A tokenizer for ids alone, without end ids, so that every completion has its full length."""

    end_ids = ()

    def decode(self, ids: Any) -> str:
        """Returns nothing."""
        return ""


def step_flops(config: ModelConfig, num_rows: int, num_context: int) -> float:
    """Returns the floating point operations of one decode step of the base model."""
    linear = config.num_layers * sum(d * f for d, f in config.projection_dims().values())
    attention = 2 * config.num_layers * config.num_query_heads * config.head_dim * num_context
    return 2.0 * num_rows * (linear + attention + config.vocab_size * config.model_dim)


def weight_bytes(config: ModelConfig) -> float:
    """Returns the bytes of float32 weights that one decode step reads."""
    linear = config.num_layers * sum(d * f for d, f in config.projection_dims().values())
    return 4.0 * (linear + config.vocab_size * config.model_dim)


def prefill_flops(config: ModelConfig, num_tokens: int) -> float:
    """Returns the floating point operations of one prompt's prefill, which asks for the logits of its last token only."""
    linear = config.num_layers * sum(d * f for d, f in config.projection_dims().values())
    attention = 2 * config.num_layers * config.num_query_heads * config.head_dim * num_tokens
    return 2.0 * (num_tokens * (linear + attention) + config.vocab_size * config.model_dim)


def _shares(flops: float, read_bytes: float, seconds: float, peaks: dict[str, float]) -> dict[str, float]:
    """Returns what of the machine's peaks the base model's own work takes; the adapters' comes on top."""
    return {
        "share_of_matmul_peak": flops / seconds / peaks["matmul_flops_per_s"],
        "share_of_read_bandwidth": read_bytes / seconds / peaks["read_bytes_per_s"],
    }


def random_bank(config: ModelConfig, num_slots: int) -> Bank:
    """Returns a bank full of adapters, slot 0 zero."""
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.standard_normal(x.shape, dtype=np.float32) * 0.02).at[0].set(0)
    empty = banks.empty(config, num_slots, RANK)
    return Bank(jax.tree.map(draw, empty.weights), empty.scale_A.at[1:].set(2.0))


class _Decoder:
    """Decode dispatches of one engine, always from the same positions."""

    def __init__(self, config: ModelConfig, num_slots: int, num_steps: int):
        settings = EngineSettings(num_slots, CONTEXT, NUM_ADAPTERS + 1, RANK, num_steps)
        self.engine = MarlaasEngine(config, settings)
        self._base = transformer.init_params(config)
        self.params = self.engine.load_params(self._base, random_bank(config, NUM_ADAPTERS + 1))
        self._state = self.engine.init_decode_state()
        self._num_slots = num_slots
        self.num_context = self.engine.buckets.context_lengths[0]

    def in_bank(self, num_adapters: int) -> EngineParams:
        """Returns the parameters with a smaller bank."""
        return dataclasses.replace(self.params, bank=jax.tree.map(lambda x: x[:num_adapters], self.params.bank))

    def blocks(self, params: EngineParams, adapters: list[int]) -> Any:
        """Returns blocks with these adapters in them."""
        changes = dict(enumerate(adapters))
        return self.engine.place_blocks(params, self.engine.empty_blocks(params, len(adapters)), changes)

    def dispatch(self, sides: Any, num_blocks: int) -> jax.Array:
        """Runs the steps of all slots and returns what they sampled."""
        slots = self._num_slots
        state = dataclasses.replace(
            self._state,
            active_S=np.ones(slots, bool),
            position_S=np.full(slots, PROMPT, np.int32),
            remaining_S=np.full(slots, 1 << 30, np.int32),
        )
        plan = Plan(Form(slots, slots // num_blocks), tuple(range(slots)), (0,) * num_blocks)
        self._state, result = self.engine.decode(self.params, state, sides, plan, self.num_context, np.ones(slots, bool))
        return result.data


def adapter_line(name: str, num_slots: int, block: int, wanted: str, repeats: int, peaks: dict[str, float]) -> Line:
    """Returns the cost of a decode step with all adapters in use, against the base model's own."""
    config = SHAPES[name]
    num_steps = 4
    decoder = _Decoder(config, num_slots, num_steps)
    adapters = [1 + i % NUM_ADAPTERS for i in range(num_slots // block)]
    sides = decoder.blocks(decoder.params, adapters)
    times = interleave(
        {"base": lambda: decoder.dispatch(None, 1), "adapters": lambda: decoder.dispatch(sides, len(adapters))}, repeats
    )
    label = f"{name}: decode step, {num_slots} slots, {len(set(adapters))} adapters in blocks of {block} / base only"
    detail = _step_detail(config, num_slots, decoder.num_context, times, num_steps, peaks)
    return Line.of_ratio(label, ratio(times["adapters"], times["base"]), wanted, detail)


def bank_size_line(name: str, num_slots: int, repeats: int, peaks: dict[str, float]) -> Line:
    """Returns what one job's decoding costs in a bank of 33 against a bank of 2, one adapter placed in each dispatch."""
    config = SHAPES[name]
    num_steps = 4
    decoder = _Decoder(config, num_slots, num_steps)

    def in_bank(num_adapters: int) -> Callable[[], jax.Array]:
        params = decoder.in_bank(num_adapters)
        sides = [decoder.blocks(params, [1])]

        def dispatch() -> jax.Array:
            sides[0] = decoder.engine.place_blocks(params, sides[0], {0: 1})
            return decoder.dispatch(sides[0], 1)

        return dispatch

    times = interleave({"base": in_bank(NUM_ADAPTERS + 1), "small": in_bank(2)}, repeats)
    label = f"{name}: one job, bank of {NUM_ADAPTERS + 1} / bank of 2"
    detail = _step_detail(config, num_slots, decoder.num_context, times, num_steps, peaks)
    return Line.of_ratio(label, ratio(times["base"], times["small"]), "<= 1.05", detail)


def _step_detail(
    config: ModelConfig,
    num_slots: int,
    num_context: int,
    times: dict[str, Samples],
    num_steps: int,
    peaks: dict[str, float],
) -> dict[str, Any]:
    best_s = times["base"].best_s / num_steps
    seconds = {"step_s": {name: sample.median_s / num_steps for name, sample in times.items()}}
    return seconds | _shares(step_flops(config, num_slots, num_context), weight_bytes(config), best_s, peaks)


def group_line(name: str, group: int, wanted: str, repeats: int, peaks: dict[str, float]) -> Line:
    """Returns what `group` separate prefills cost against one prefill inserted `group` times."""
    config = SHAPES[name]
    settings = EngineSettings(group, CONTEXT, 3, RANK, prefill_batch=1, prefill_buckets=(GROUP_PROMPT,))
    engine = MarlaasEngine(config, settings)
    params = engine.load_params(transformer.init_params(config))
    state = [engine.init_decode_state()]
    prompt = list(range(2, GROUP_PROMPT + 2))
    rows = [RowSettings(8, seed=i) for i in range(group)]

    def insert(prefix: Any, slots: range) -> None:
        state[0] = engine.insert_rows(state[0], prefix, [(slot, 0, rows[slot]) for slot in slots])

    def shared() -> Any:
        insert(engine.prefill_rows(params, [prompt], [1]), range(group))
        return state[0].token_S

    def separate() -> Any:
        for slot in range(group):
            insert(engine.prefill_rows(params, [prompt], [1]), range(slot, slot + 1))
        return state[0].token_S

    times = interleave({"shared": shared, "separate": separate}, repeats)
    label = f"{name}: {group} prefills of {GROUP_PROMPT} tokens / one for the group"
    shares = _shares(prefill_flops(config, GROUP_PROMPT), weight_bytes(config), times["shared"].best_s, peaks)
    detail = {"seconds": {k: v.median_s for k, v in times.items()}} | shares
    return Line.of_ratio(label, ratio(times["separate"], times["shared"]), wanted, detail)


class _Batch:
    """A sampler that answers `num_rows` greedy requests of equal length at once."""

    def __init__(self, config: ModelConfig, params: Any, num_rows: int, num_adapters: int, new_tokens: int):
        settings = EngineSettings(num_rows, CONTEXT, num_adapters + 3, RANK, prefill_batch=num_rows, prefill_buckets=(PROMPT,))
        no_text: Any = NoText()
        self._sampler = Sampler(config, params, settings, no_text, lambda: 0.0, run_ahead=False)
        self._num_rows, self._new_tokens, self._count = num_rows, new_tokens, 0
        self._jobs = [f"job{i}" for i in range(num_adapters)]
        bank = random_bank(config, num_adapters + 1)
        for i, job in enumerate(self._jobs):
            weights, scale = banks.read(bank, jnp.int32(i + 1))
            self._sampler.publish(Snapshot(job, 0, 0, weights, float(scale), ""))

    def run(self) -> None:
        """Generates `new_tokens` for each row."""
        for row in range(self._num_rows):
            self._count += 1
            job = self._jobs[row % len(self._jobs)] if self._jobs else "base"
            version = -1 if self._jobs else BASE_MODEL
            prompt = tuple(range(2 + row, 2 + row + PROMPT))
            sampling = Sampling(temperature=0.0, max_tokens=self._new_tokens)
            self._sampler.submit(Generate(str(self._count), job, 0, prompt, (self._count,), sampling, version))
        done = 0
        while self._sampler.has_work():
            for answer in self._sampler.step():
                assert len(answer.token_ids) == self._new_tokens, answer
                done += 1
        assert done == self._num_rows


class Reference:
    """A process that generates with transformers, under an interpreter of its own."""

    def __init__(self, python: str, config: ModelConfig, num_adapters: int):
        shape = {
            "hidden_size": config.model_dim,
            "intermediate_size": config.mlp_dim,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_query_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position,
            "tie_word_embeddings": config.tied_embeddings,
        }
        script = Path(__file__).with_name("reference.py")
        command = [python, str(script), json_format.dumps(shape), str(RANK), str(num_adapters)]
        environment = {name: value for name, value in os.environ.items() if name != huge_pages.VARIABLE}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self.versions = self._read()

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the reference process ended with code {self._process.wait()}")
        return json_format.loads(line)

    def generate(self, batch: int, new_tokens: int) -> Measured:
        """Generates greedily for `batch` prompts and returns the time that took."""
        request = {"batch": batch, "prompt_tokens": PROMPT, "new_tokens": new_tokens}
        self._requests.write(json_format.dumps(request) + "\n")
        self._requests.flush()
        return Measured(**self._read())

    def close(self) -> None:
        """Ends the process."""
        self._requests.close()
        self._process.wait(timeout=30)


def missing_reference(python: str, modules: str) -> str:
    """Returns why the interpreter cannot run the reference, or nothing."""
    done = subprocess.run([python, "-c", f"import {modules}"], capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it does not start"])[-1]


def generation_lines(name: str, python: str, repeats: int, log: Callable[[str], None], peaks: dict[str, float]) -> list[Line]:
    """Returns tokens per second at 32 rows against 1, and both against transformers; 32 adapters against peft."""
    config = SHAPES[name]
    params = transformer.init_params(config)
    many, few, short = 32, 64, 32  # rows; new tokens of each; new tokens with 32 adapters
    ours = {
        "ours, 1 row": _Batch(config, params, 1, 1, few).run,
        "ours, 32 rows": _Batch(config, params, many, 1, few).run,
        "ours, 32 adapters": _Batch(config, params, many, NUM_ADAPTERS, short).run,
    }
    references: list[Reference] = []
    theirs: dict[str, Callable[[], Measured]] = {}
    if reason := missing_reference(python, "torch, transformers"):
        log(f"transformers is left out: {python}: {reason}")
    else:
        merged = Reference(python, config, 0)
        references.append(merged)
        log(f"reference: {merged.versions}")
        theirs |= {"theirs, 1 row": lambda: merged.generate(1, few), "theirs, 32 rows": lambda: merged.generate(many, few)}
    if reason := missing_reference(python, "torch, transformers, peft"):
        log(f"peft is left out: {python}: {reason}")
    else:
        mixed = Reference(python, config, NUM_ADAPTERS)
        references.append(mixed)
        theirs |= {"theirs, 32 adapters": lambda: mixed.generate(many, short)}
    try:
        times = interleave(ours | theirs, repeats)
    finally:
        for reference in references:
            reference.close()
    sizes = {"1 row": (1, few), "32 rows": (many, few), "32 adapters": (many, short)}  # rows, new tokens of each
    speed = {key: math.prod(sizes[key.split(", ")[1]]) / sample.median_s for key, sample in times.items()}

    def detail(case: str) -> dict[str, Any]:
        rows, new = sizes[case]
        flops = rows * prefill_flops(config, PROMPT) + (new - 1) * step_flops(config, rows, PROMPT + new // 2)
        return {"tokens_per_s": speed} | _shares(flops, new * weight_bytes(config), times[f"ours, {case}"].best_s, peaks)

    # Seconds per token: the ratio of times at equal work is that of speeds.
    scaled = lambda sample: Samples(tuple(x * many for x in sample.wall_s), tuple(x * many for x in sample.cpu_s))
    gain = ratio(scaled(times["ours, 1 row"]), times["ours, 32 rows"])
    lines = [Line.of_ratio(f"{name}: tokens/s at 32 slots / at 1", gain, ">= 6", detail("32 rows"))]
    for case, wanted, whom in (
        ("1 row", ">= 1.6", "transformers generate, merged"),
        ("32 rows", ">= 1.15", "transformers generate, merged"),
        ("32 adapters", ">= 3", "transformers + peft adapter_names"),
    ):
        if f"theirs, {case}" in times:
            value = ratio(times[f"theirs, {case}"], times[f"ours, {case}"])
            lines.append(Line.of_ratio(f"{name}: tokens/s, {case}, ours / {whom}", value, wanted, detail(case)))
    return lines


def run(
    json: bool = False, quick: bool = False, reference_python: str | None = None, cores: int = 1, model: str = "smollm2-135m"
) -> dict[str, Any]:
    """Runs the benchmark in a process of its own, prints a table (or JSON) and returns the report.

    quick: the tiny shape alone, few repeats, no references: a check that everything runs. reference_python: an interpreter with
    torch, transformers and peft; None: this one. Our process has huge pages, as `marlaas run` gives to its device process;
    theirs starts as their users start it.
    """
    options = {"quick": quick, "python": reference_python or sys.executable, "cores": cores, "model": model}
    command = [sys.executable, "-m", "marlaas_jax.bench.engine", json_format.dumps(options)]
    environment = os.environ | huge_pages.environment(os.environ)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise MarlaasError(f"the benchmark's process ended with code {done.returncode}; what it printed says why")
    report = json_format.loads(done.stdout)
    peaks = report["peaks"]
    title = f"engine, {peaks['matmul_flops_per_s'] / 1e9:.0f} GFLOP/s, {peaks['read_bytes_per_s'] / 1e9:.1f} GB/s"
    shares = (("of matmul peak", "share_of_matmul_peak"), ("of bandwidth", "share_of_read_bandwidth"))
    show(report, title, json, shares)
    return report


def measure(quick: bool, python: str, cores: int, model: str) -> dict[str, Any]:
    """Returns the report. Binds this process to `cores` cores; nothing may have started jax's backend before."""
    pinned = timing.pin_to_cores(cores)
    log = lambda text: print(text, file=sys.stderr, flush=True)
    peaks = {
        "matmul_flops_per_s": timing.matmul_peak(size=256 if quick else 1024),
        "read_bytes_per_s": timing.read_bandwidth(16 if quick else 256),
    }
    shape = "tiny" if quick else model
    repeats = 2 if quick else 7
    lines: list[Line] = []

    def add(*new: Line) -> None:
        lines.extend(new)
        for line in new:
            log(f"{line.name}: {line.shown} (wanted {line.wanted})")

    add(adapter_line(shape, 32, 1, "<= 1.7" if shape == "tiny" else "<= 1.2", repeats, peaks))
    add(bank_size_line(shape, 32, repeats, peaks))
    if not quick:
        add(adapter_line("tiny", 32, 1, "<= 1.7", 2 * repeats, peaks))
        add(adapter_line("tiny", 128, 4, "<= 1.4", 2 * repeats, peaks))
    add(group_line(shape, 8, ">= 4.5", repeats, peaks))
    if not quick:
        add(*generation_lines(shape, python, 5, log, peaks))
    return {
        "machine": timing.machine() | {"pinned_to_cores": cores if pinned else None},
        "peaks": peaks,
        "lines": [line.as_dict() for line in lines],
    }


if __name__ == "__main__":
    print(json_format.dumps(measure(**json_format.loads(sys.argv[1]))))
