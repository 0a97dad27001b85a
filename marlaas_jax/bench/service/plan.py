"""The scripted day: which tenants there are, what they submit and when, and how each job has to end. Pure; drawn from a seed.

Four phases follow each other on one service:

    alone   a job per task kind and seed, one after the other: what the crowd's jobs are held against
    shares  tenants that are backlogged all the time, of equal weight and of weights 1:2:4, for a while; then they cancel.
            One of the equal ones wants more: it has three jobs, and gives each the largest weight there is
    flood   a tenant with many jobs of large batches, and beside it, once it has begun, a small one
    crowd   everybody else, arriving over time, while the flood goes on: the jobs of `alone` once more, tenants of all kinds,
            jobs that hang, raise, are cancelled, are paused and go on
"""

import dataclasses
import random
from pathlib import Path
from typing import Any

from marlaas_jax.bench.service import tenant_rewards

REWARDS = "rewards.py"  # the name under which a tenant's file is sent
# Every job has prompts of at most 32 tokens and turns of at most 12: one bucket each, so that starting costs few programs.
RUNTIME: dict[str, Any] = {
    "model": "tiny",
    "engine": {"num_decode_slots": 64, "max_context": 64, "context_buckets": [64], "prefill_buckets": [32]},
    "learner": {"prompt_buckets": [32], "suffix_buckets": [32]},
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of task: where its reward comes from."""

    env: str
    learning_rate: float
    is_uploaded: bool = False


KINDS = {
    "one turn": Kind("tiny:upper", 1e-3),
    "calculator, two turns": Kind("tiny:calc", 1e-3),
    "own reward": Kind(f"{REWARDS}:fast", 1e-3, True),
    "own slow reward": Kind(f"{REWARDS}:slow", 1e-3, True),
}
OTHERS = ("tiny:first", "tiny:last", "tiny:lower", "tiny:rev", "tiny:second", "tiny:swap", "tiny:max", "tiny:join")
GREEDY_JOBS = 3


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    kinds: tuple[str, ...]
    num_seeds: int  # per kind
    steps: int
    last_steps: int  # of them, whose mean is the final reward
    window_s: float  # in which shares are measured
    weights: tuple[float, ...]  # of the tenants in `shares`
    flood_jobs: int
    flood_steps: int
    small_steps: int
    num_others: int
    arrivals_s: float  # in which the crowd arrives


FULL = Sizes(tuple(KINDS), 3, 40, 10, 60.0, (1.0, 1.0, 1.0, 1.0, 2.0, 4.0), 8, 15, 40, 8, 90.0)
QUICK = Sizes(("one turn",), 2, 4, 2, 8.0, (1.0, 1.0, 2.0), 2, 3, 4, 1, 2.0)


@dataclasses.dataclass(frozen=True)
class Planned:
    """One job of the day."""

    name: str
    tenant: str
    phase: str  # alone, shares, flood, small, crowd
    kind: str  # in reports
    config: dict[str, Any]  # fields of a job file
    at_s: float = 0.0  # after its phase began
    ends: str = "succeeded"
    reason: tuple[str, ...] = ()  # one of these must be in the reason of a job that fails
    cancel_at: int | None = None  # its owner cancels it after this step
    pause_at: int | None = None  # its owner pauses it after this step, and lets it go on

    @property
    def files(self) -> dict[str, bytes]:
        """What is sent along."""
        is_uploaded = self.config["env"].startswith(REWARDS)
        return {REWARDS: Path(tenant_rewards.__file__).read_bytes()} if is_uploaded else {}


@dataclasses.dataclass(frozen=True)
class Day:
    """All of it."""

    seed: int
    sizes: Sizes
    jobs: tuple[Planned, ...]

    @property
    def tenants(self) -> dict[str, float]:
        """Their weights, by name."""
        weighted = {_sharer(number): weight for number, weight in enumerate(self.sizes.weights)}
        return {name: weighted.get(name, 1.0) for name in sorted({job.tenant for job in self.jobs})}

    def of(self, *phases: str) -> list[Planned]:
        """Returns the jobs of some phases."""
        return [job for job in self.jobs if job.phase in phases]


def plan(seed: int, sizes: Sizes = FULL) -> Day:
    """Returns the day of a seed."""
    rng = random.Random(seed)
    jobs = [*_alone(sizes), *_shares(sizes), *_flood(sizes), *_crowd(sizes, rng)]
    names = [job.name for job in jobs]
    assert len(names) == len(set(names)), names
    return Day(seed, sizes, tuple(jobs))


def _config(env: str, steps: int, seed: int, rate: float = 1e-3, **changes: Any) -> dict[str, Any]:
    return {
        "env": env,
        "steps": steps,
        "seed": seed,
        "sampling": {"max_tokens": 12},
        "optimizer": {"learning_rate": rate},
        "rollout": {"group_size": 8, "groups_per_batch": 4},
        "eval": {"num_items": 0},
    } | changes


def _measured(sizes: Sizes, phase: str) -> list[Planned]:
    """Returns a job per kind and seed."""
    return [
        Planned(
            f"{phase}-{number}-{seed}", f"kind{number}-{seed}", phase, name,
            _config(KINDS[name].env, sizes.steps, seed, KINDS[name].learning_rate),
        )
        for number, name in enumerate(sizes.kinds)
        for seed in range(sizes.num_seeds)
    ]  # fmt: skip


def _alone(sizes: Sizes) -> list[Planned]:
    return _measured(sizes, "alone")


def _shares(sizes: Sizes) -> list[Planned]:
    """Jobs without an end, so far ahead of the learner that a batch of each always waits there."""
    rollout = {"group_size": 8, "groups_per_batch": 4, "max_staleness": 3}
    return [
        Planned(
            f"share-{number}-{i}", _sharer(number), "shares", f"backlogged, weight {weight:g}",
            _config("tiny:upper", 100_000, number, 1e-4, rollout=rollout, weight=1000.0 if number == 0 else 1.0),
            ends="cancelled",
        )
        for number, weight in enumerate(sizes.weights)
        for i in range(GREEDY_JOBS if number == 0 else 1)
    ]  # fmt: skip


def _sharer(number: int) -> str:
    return f"share{number}"


def _flood(sizes: Sizes) -> list[Planned]:
    rollout = {"group_size": 16, "groups_per_batch": 16}
    flood = [
        Planned(f"flood-{number}", "flood", "flood", "flood",
                _config("tiny:double", sizes.flood_steps, number, 1e-4, rollout=rollout))
        for number in range(sizes.flood_jobs)
    ]  # fmt: skip
    kind = KINDS[sizes.kinds[0]]
    small = Planned("small", "small", "small", "beside the flood", _config(kind.env, sizes.small_steps, 0, kind.learning_rate))
    return [*flood, small]


def _crowd(sizes: Sizes, rng: random.Random) -> list[Planned]:
    """The measured jobs again, and among them everybody else, in an order and at times drawn by lot."""
    few = {"group_size": 4, "groups_per_batch": 2, "max_attempts": 2, "step_timeout_s": 2.0}
    broken = lambda name: _config(f"{REWARDS}:{name}", sizes.steps, 0, rollout=few)
    jobs = _measured(sizes, "crowd")
    jobs += [
        Planned("hangs", "hangs", "crowd", "hangs", broken("hangs"), ends="failed", reason=("timeout", "answered nothing")),
        Planned("raises", "raises", "crowd", "raises", broken("raises"), ends="failed", reason=("database is gone",)),
        Planned("gone", "gone", "crowd", "cancelled by its owner", _config("tiny:rev", 100_000, 0), ends="cancelled",
                cancel_at=max(1, sizes.steps // 4)),
        Planned("pause", "pause", "crowd", "paused and resumed", _config("tiny:swap", sizes.steps, 0),
                pause_at=max(1, sizes.steps // 4)),
    ]  # fmt: skip
    for number in range(sizes.num_others):
        env = rng.choice((*OTHERS, f"{REWARDS}:fast", f"{REWARDS}:slow"))
        steps = rng.randint(max(1, sizes.steps // 2), sizes.steps)
        seed = rng.randrange(1000)
        kind = f"any ({env.partition(':')[0]})"
        jobs.append(Planned(f"other-{number}", f"other{number}", "crowd", kind, _config(env, steps, seed)))
    return [dataclasses.replace(job, at_s=round(rng.uniform(0.0, sizes.arrivals_s), 1)) for job in jobs]
