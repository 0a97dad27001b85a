"""`marlaas bench exact`: what `isolation: exact` costs, and whether it keeps its promise on this machine and backend.

The same requests and batches of several jobs run with all jobs shared, with one of them exact and with all of them exact, in
turn (see `timing`); a ratio is time with exact jobs over time without, printed as paired wall | CPU | best, and so tokens/s
without over tokens/s with. While an exact row decodes, all rows run in the exact form, so the crowd pays too. Then the exact
job's answers and its weights after the step are compared bit for bit with those of the job alone, and so are a shared job's.
"""

import dataclasses
import json as json_format
import os
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.bench import timing
from marlaas_jax.bench.engine import RANK, NoText, random_bank
from marlaas_jax.bench.learner import SPEC, Load, make_learner
from marlaas_jax.bench.report import SHAPES, Line, show
from marlaas_jax.bench.timing import interleave, ratio
from marlaas_jax.config import JobConfig
from marlaas_jax.device import huge_pages
from marlaas_jax.engine.engine import EngineSettings
from marlaas_jax.engine.sampler import Sampler
from marlaas_jax.errors import MarlaasError
from marlaas_jax.lora import bank as banks
from marlaas_jax.lora.snapshot import Snapshot
from marlaas_jax.messages import Generate, Sampling
from marlaas_jax.model import transformer
from marlaas_jax.model.config import ModelConfig

NUM_JOBS = 8
ROWS = 4  # of a job at once: one group
NEW_TOKENS = 32
MAX_CONTEXT = 256
LOAD = Load(NUM_JOBS, 2, 4, 16, 16)  # of each optimizer step: blocks of 80 tokens, three to a micro-batch

Answers = dict[tuple[str, int], tuple[tuple[int, ...], bytes]]


class Crowd:
    """A sampler with `NUM_JOBS` jobs of one group each, and a learner with one batch of each."""

    def __init__(self, config: ModelConfig):
        self._config = config
        params = transformer.init_params(config)
        settings = EngineSettings(NUM_JOBS * ROWS, MAX_CONTEXT, NUM_JOBS + 3, RANK)
        no_text: Any = NoText()
        self._sampler = Sampler(config, params, settings, no_text, time.perf_counter, run_ahead=False)
        bank = random_bank(config, NUM_JOBS + 1)
        for i in range(NUM_JOBS):
            weights, scale = banks.read(bank, jnp.int32(i + 1))
            self._sampler.publish(Snapshot(f"job{i}", 0, 0, weights, float(scale), ""))
        self._learner = make_learner(config, params, LOAD, 3, (1, 2, 4, 8))
        self._count = 0

    def sample(self, num_exact: int, jobs: tuple[int, ...] = tuple(range(NUM_JOBS))) -> Answers:
        """Returns the answers to one group of each job in `jobs`, the first `num_exact` jobs being exact."""
        self._count += 1
        sampling = Sampling(max_tokens=NEW_TOKENS)
        for i in jobs:
            rng = np.random.default_rng(i)
            prompt = tuple(int(t) for t in rng.integers(1, self._config.vocab_size, 8 + i))
            request = Generate(f"{i}/{self._count}", f"job{i}", 0, prompt, tuple(range(ROWS)), sampling, exact=i < num_exact)
            self._sampler.submit(request)
        answers: Answers = {}
        while self._sampler.has_work():
            for answer in self._sampler.step():
                answers[answer.job, answer.sample] = (answer.token_ids, answer.logprobs)
        return answers

    def train(self, num_exact: int, jobs: tuple[int, ...] = tuple(range(NUM_JOBS))) -> bytes:
        """Runs one optimizer step of each job in `jobs`, opened anew; returns the weights of job 0 after it."""
        for i in jobs:
            isolation = "exact" if i < num_exact else "shared"
            config = JobConfig.model_validate({"name": f"job{i}", "env": "none", "isolation": isolation})
            self._learner.remove_job(f"job{i}")
            self._learner.add_job(f"job{i}", 0, config, dataclasses.replace(SPEC, seed=i))
            self._learner.submit(LOAD.batch(self._config, f"job{i}", 0))
        while self._learner.has_work():
            self._learner.step()
        return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(self._learner.weights("job0")))


def price_lines(name: str, crowd: Crowd, repeats: int) -> list[Line]:
    """Returns what exact jobs cost the crowd in sampling and in training."""
    lines = []
    for what, run in (("sampling", crowd.sample), ("training", crowd.train)):
        times = interleave(
            {"shared": lambda run=run: run(0), "one": lambda run=run: run(1), "all": lambda run=run: run(NUM_JOBS)}, repeats
        )
        alone = interleave({"shared": lambda run=run: run(0, (0,)), "exact": lambda run=run: run(1, (0,))}, repeats)
        tokens = NUM_JOBS * (ROWS * NEW_TOKENS if what == "sampling" else LOAD.tokens_per_job)
        detail = {"tokens_per_s": {key: tokens / sample.median_s for key, sample in times.items()}}
        price = lambda key, times=times: ratio(times[key], times["shared"])
        lines += [
            Line.of_ratio(f"{name}: {what}, {NUM_JOBS} jobs, one exact / all shared", price("one"), "", detail),
            Line.of_ratio(f"{name}: {what}, {NUM_JOBS} jobs, all exact / all shared", price("all"), "", detail),
            Line.of_ratio(f"{name}: {what}, alone, exact / shared", ratio(alone["exact"], alone["shared"]), "", {}),
        ]
    return lines


def promise_lines(name: str, crowd: Crowd) -> list[Line]:
    """Returns how many neighbourhoods change a bit of the job's answers or update; wanted for the exact job alone is none."""
    neighbours = [(0, *range(1, n + 1)) for n in range(1, NUM_JOBS)] + [(*range(n, NUM_JOBS), 0) for n in range(1, NUM_JOBS)]
    own = lambda answers: {key: value for key, value in answers.items() if key[0] == "job0"}
    lines = []
    for label, num_exact, wanted in (("exact", 1, "<= 0"), ("shared", 0, "")):
        sampled, trained = own(crowd.sample(num_exact, (0,))), crowd.train(num_exact, (0,))
        changed = sum(own(crowd.sample(num_exact, jobs)) != sampled for jobs in neighbours)
        moved = sum(crowd.train(num_exact, jobs) != trained for jobs in neighbours)
        for what, count in (("ids or log-probs", changed), ("update", moved)):
            text = f"{name}: crowds of {len(neighbours)} that change the bits of a job's {what}, {label}"
            lines.append(Line(text, float(count), str(count), wanted, {"crowds": len(neighbours)}))
    return lines


def run(json: bool = False, quick: bool = False, model: str = "smollm2-135m") -> dict[str, Any]:
    """Runs the benchmark in a process of its own, prints a table (or JSON) and returns the report.

    quick: the tiny shape alone, few repeats.
    """
    options = {"quick": quick, "model": model}
    command = [sys.executable, "-m", "marlaas_jax.bench.exact", json_format.dumps(options)]
    environment = os.environ | huge_pages.environment(os.environ)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise MarlaasError(f"the benchmark's process ended with code {done.returncode}; what it printed says why")
    report = json_format.loads(done.stdout)
    show(report, "isolation: exact", json)
    return report


def measure(quick: bool, model: str) -> dict[str, Any]:
    """Returns the report."""
    lines: list[Line] = []
    for name in ["tiny"] if quick else ["tiny", model]:
        crowd = Crowd(SHAPES[name])
        for line in (*promise_lines(name, crowd), *price_lines(name, crowd, 2 if quick else 7)):
            print(f"{line.name}: {line.shown} {line.wanted and f'(wanted {line.wanted})'}", file=sys.stderr, flush=True)
            lines.append(line)
    return {"machine": timing.machine(), "lines": [line.as_dict() for line in lines]}


if __name__ == "__main__":
    print(json_format.dumps(measure(**json_format.loads(sys.argv[1]))))
