"""`marlaas bench run`: what the service around one job costs, and how long decoding waits for training.

One job is trained twice from the same seeds, in turn: by `marlaas run` (controller, device process, environment and data
workers, queues, proofs, checkpoints), and by the loop that one would write by hand around the same sampler and learner in one
process. At `max_staleness: 0` both sample and train the very same tokens in the first batch. Later a rounding may turn a token,
for groups come in another order: the work is the same but for some percent. Both is checked; the times between their steps are
compared. Then two jobs run together, and the longest turns of the stages are read off.
"""

import asyncio
import dataclasses
import inspect
import itertools
import json as json_format
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from marlaas_envs import registry
from marlaas_envs.protocol import Action, Done
from marlaas_jax.bench import timing
from marlaas_jax.bench.report import Line, show
from marlaas_jax.bench.timing import Samples, ratio
from marlaas_jax.config import RunConfig, validate
from marlaas_jax.device import huge_pages
from marlaas_jax.errors import MarlaasError
from marlaas_jax.messages import Generate, Generated, LoadEnv, Sampling, StepDone, TrainBatch, TrainGroup, TrainRow
from marlaas_jax.rl.advantages import group_advantages
from marlaas_jax.rl.objective import resolve
from marlaas_jax.rollout.tickets import derive_seed
from marlaas_jax.workers.controller_files import read_lines

JOBS = {
    "smollm2-135m": {
        "runtime": {
            "model": "smollm2-135m",
            "engine": {"num_decode_slots": 32, "max_context": 80, "decode_steps": 6, "prefill_buckets": [40, 56]},
            "learner": {"prompt_buckets": [40, 56], "suffix_buckets": [8]},
        },
        "job": {"env": "words:last_word", "sampling": {"max_tokens": 6}},
    },
    "tiny": {
        "runtime": {"model": "tiny", "engine": {"num_decode_slots": 64, "max_context": 64}},
        "job": {"env": "tiny:upper", "sampling": {"max_tokens": 12}},
    },
}


MAX_DIFFERENCE = 0.05  # of the tokens of all batches


def run_config(model: str, num_jobs: int, steps: int, max_staleness: int) -> RunConfig:
    """Returns the run file of `num_jobs` equal jobs, that differ in their seeds."""
    parts = JOBS[model]
    shared = {"steps": steps, "rollout": {"max_staleness": max_staleness}, "eval": {"num_items": 0}}
    jobs = [{"name": f"job{i}", "seed": i} | parts["job"] | shared for i in range(num_jobs)]
    return validate(RunConfig, {"runtime": parts["runtime"], "jobs": jobs})


@dataclasses.dataclass(frozen=True)
class Step:
    """One trained batch: when it was done, and what it was made of."""

    time_s: float
    num_tokens: int
    reward_mean: float


# ---- the plain loop


class PlainLoop:
    """The run's one job, in this process and in one thread: sample all, score all, train, publish, again."""

    def __init__(self, config: RunConfig):
        from marlaas_jax.device import initial
        from marlaas_jax.device.build import build_stages
        from marlaas_jax.workers.data_worker import open_dataset

        (self._job,) = config.jobs
        job = self._job
        self._stages = build_stages(config.runtime.sized_for(config.jobs))
        spec = initial.spec_of_job(job)
        start = initial.weights(self._stages.model, spec, None, config.runtime.bank.max_rank, {})
        self._stages.learner.add_job(job.name, 1, job, spec, weights=start)
        self._stages.sampler.publish(self._stages.learner.snapshot(job.name))
        self._dataset, _ = open_dataset(LoadEnv(job.name, 1, job.env, job.env_args, b"", job.seed))
        self._family = registry.load(job.env)
        self._normalize_std = resolve(job.algorithm).normalize_std

    def step(self, number: int) -> Step:
        """Samples, scores and trains the batch of this number; returns it once its snapshot is published."""
        job, learner = self._job, self._stages.learner
        count = job.rollout.groups_per_batch
        scored = self._sample(range(number * count, (number + 1) * count))
        groups = tuple(group for group, _ in scored)
        rewards = [reward for _, found in scored for reward in found]
        mean = sum(rewards) / len(rewards)
        learner.submit(TrainBatch(job.name, 1, number, groups, b"", mean))
        trained: list[Any] = []
        while learner.has_work():
            trained += learner.step()
        assert [type(message) for message in trained] == [StepDone], trained
        self._stages.sampler.publish(learner.snapshot(job.name))
        return Step(time.time(), sum(len(row.token_ids) for group in groups for row in group.rows), mean)

    def _sample(self, tickets: range) -> list[tuple[TrainGroup, list[float]]]:
        """Returns each ticket's group, ready to train, and its rewards."""
        sampler, size = self._stages.sampler, self._job.rollout.group_size
        envs = {ticket: [self._make_env() for _ in range(size)] for ticket in tickets}
        prompts = {ticket: self._ask(ticket, envs[ticket]) for ticket in tickets}
        answers: dict[int, dict[int, tuple[Generated, float]]] = {ticket: {} for ticket in tickets}
        while sampler.has_work():
            for answer in sampler.step():
                ticket = int(answer.request_id)
                action = Action(answer.text, answer.finish_reason, len(answer.token_ids))
                done = _now(envs[ticket][answer.sample].step(action))
                assert isinstance(done, Done) and done.reward is not None, "an environment of one turn, with a reward"
                answers[ticket][answer.sample] = (answer, done.reward)
        groups = []
        for ticket in tickets:
            completions, rewards = zip(*(answers[ticket][sample] for sample in range(size)), strict=True)
            advantages = group_advantages(rewards, self._normalize_std)
            rows = tuple(_row(completion, float(a)) for completion, a in zip(completions, advantages, strict=True))
            groups.append((TrainGroup(ticket, 0, prompts[ticket], rows), list(rewards)))
        return groups

    def _make_env(self) -> Any:
        return registry.make(self._family, self._job.env, self._job.env_args)

    def _ask(self, ticket: int, envs: list[Any]) -> tuple[int, ...]:
        """Sends the request of one group; returns its prompt."""
        job, tokenizer = self._job, self._stages.tokenizer
        item, env_seed = self._dataset.item("train", ticket), derive_seed(job.seed, ticket, 0, -1, -1)
        first, *_ = [_now(env.reset(item, env_seed)) for env in envs]
        ids = tuple(tokenizer.render(first.messages) if first.text is None else tokenizer.encode_prompt(first.text))
        seeds = tuple(derive_seed(job.seed, ticket, 0, sample, 0) for sample in range(len(envs)))
        sampling = Sampling(**job.sampling.model_dump())
        sampling = msgspec.structs.replace(sampling, stop=(*sampling.stop, *first.stop))
        self._stages.sampler.submit(Generate(str(ticket), job.name, 1, ids, seeds, sampling))
        return ids


def _row(answer: Generated, advantage: float) -> TrainRow:
    count = len(answer.token_ids)
    versions = answer.version.to_bytes(4, "little", signed=True) * count
    return TrainRow(answer.token_ids, b"\1" * count, answer.logprobs, versions, advantage)


def _now(value: Any) -> Any:
    """Returns what an environment's method gives, plain or async."""
    return asyncio.run(_wait(value)) if inspect.isawaitable(value) else value


async def _wait(value: Any) -> Any:
    return await value


# ---- both in turn


def plain_steps(config: RunConfig) -> list[Step]:
    """Returns the steps of the plain loop, run in a process of its own, as `marlaas run` runs its device."""
    document = config.model_dump_json()
    environment = os.environ | huge_pages.environment(os.environ)
    command = [sys.executable, "-m", "marlaas_jax.bench.run"]
    done = subprocess.run(command, input=document, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise MarlaasError(f"the plain loop's process ended with code {done.returncode}; what it printed says why")
    return [Step(**step) for step in json_format.loads(done.stdout)]


def served_steps(config: RunConfig) -> tuple[list[Step], dict[str, float]]:
    """Returns the steps of `marlaas run`'s first job, and the device's last figures."""
    with tempfile.TemporaryDirectory(prefix="marlaas-bench-") as folder:
        file, directory = Path(folder) / "bench.yaml", Path(folder) / "run"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        command = [sys.executable, "-m", "marlaas_jax.cli.main", "run", str(file), "--dir", str(directory), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise MarlaasError(f"marlaas run ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        records = [json_format.loads(line) for line in done.stdout.splitlines()]
        trained = read_lines(directory / "jobs" / config.jobs[0].name / "metrics.jsonl")
    counters = [record["device_counters"] for record in records if record["type"] == "status"][-1]
    steps = [Step(x["time"], int(x["rollout/num_tokens"]), x["rollout/reward_mean"]) for x in trained]
    return steps, counters


def one_job_line(model: str, steps: int, rounds: int, log: Callable[[str], None]) -> Line:
    """Returns the seconds between steps of `marlaas run` over those of the plain loop."""
    config = run_config(model, 1, steps, 0)
    served: list[float] = []
    plain: list[float] = []
    for number in range(rounds):
        log(f"one job, round {number + 1} of {rounds}")
        ours, _ = served_steps(config)
        theirs = plain_steps(config)
        _require_same_work(ours, theirs)
        served += [b.time_s - a.time_s for a, b in itertools.pairwise(ours)]
        plain += [b.time_s - a.time_s for a, b in itertools.pairwise(theirs)]
    a, b = (Samples(tuple(seconds), (sum(seconds),)) for seconds in (served, plain))
    value = ratio(a, b)
    shown = f"{value.wall:.2f} (sums {sum(served) / sum(plain):.2f}; {a.median_s:.2f} / {b.median_s:.2f} s per step)"
    detail = {"run_s": served, "plain_s": plain, "sum_ratio": sum(served) / sum(plain)}
    return Line(f"{model}: one job, marlaas run / plain loop, time per step", value.wall, shown, "<= 1.1", detail)


def _require_same_work(ours: list[Step], theirs: list[Step]) -> None:
    first, other = ours[0], theirs[0]
    if first.num_tokens != other.num_tokens or abs(first.reward_mean - other.reward_mean) > 1e-6:
        raise MarlaasError(
            f"the loops sampled different tokens in the first batch ({first}, {other}): their times tell nothing"
        )
    a, b = (sum(step.num_tokens for step in steps) for steps in (ours, theirs))
    if len(ours) != len(theirs) or abs(a - b) > MAX_DIFFERENCE * b:
        raise MarlaasError(f"the loops trained {a} and {b} tokens, over {MAX_DIFFERENCE:.0%} apart: their times tell nothing")


def turn_lines(model: str, steps: int, wanted: str) -> list[Line]:
    """Returns, while two jobs run, the longest dispatch of the learner and the longest wait of decoding for its turn."""
    _, counters = served_steps(run_config(model, 2, steps, 1))
    ms = lambda name: f"{1e3 * counters[name]:.0f} ms"
    dispatch, wait = "learner/longest_dispatch_s", "sampler/longest_wait_s"
    return [
        Line(f"{model}: two jobs, longest learner dispatch, s", counters[dispatch], ms(dispatch), wanted, {}),
        Line(f"{model}: two jobs, longest wait of decoding for its turn, s", counters[wait], ms(wait), wanted, {}),
    ]


def run(json: bool = False, quick: bool = False, model: str = "smollm2-135m") -> dict[str, Any]:
    """Runs the benchmark, prints a table (or JSON) and returns the report. quick: `tiny`, a few steps."""
    log = lambda text: print(text, file=sys.stderr, flush=True)
    shape = "tiny" if quick else model
    steps, rounds = (4, 1) if quick else (8, 3)
    lines = [one_job_line(shape, steps, rounds, log)]
    log("two jobs")
    lines += turn_lines(shape, steps, "" if quick else "<= 0.3")
    report = {"machine": timing.machine(), "lines": [line.as_dict() for line in lines]}
    show(report, "run", json, figures="measured")
    return report


def main() -> None:
    """The plain loop's process: a run file as JSON in, its steps out."""
    config = validate(RunConfig, json_format.load(sys.stdin))
    loop = PlainLoop(config)
    print(json_format.dumps([dataclasses.asdict(loop.step(number)) for number in range(config.jobs[0].steps)]))


if __name__ == "__main__":
    main()
