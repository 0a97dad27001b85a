"""A sweep: one job in many variants, the worse of which are stopped early. What is written, which trials it means, who stops.

    name: rate
    job: {env: "tiny:upper", steps: 40}      # or the path of a job file
    grid: {optimizer.learning_rate: [1.0e-4, 1.0e-3], lora.rank: [4, 8]}
    halving: {min_steps: 5, eta: 2}

Instead of `grid` there may be `trials`, a list of the changes of each, or `random`, drawn from a seed.

Halving is the stopping variant of asynchronous successive halving (ASHA; Li et al. 2020, arXiv 1810.05934; the variant that
never pauses a trial is that of Ray Tune and Syne Tune). Rungs are at min_steps * eta**k steps. A trial's metric is taken
when it reaches a rung; of the n that have reached it, all but the best ceil(n / eta) are stopped, from n = eta on. Of equals
the first in the sweep goes on; those that equal the very best all do. Nobody waits for stragglers. One thing is added: a
trial that was among the best of those before it is judged again whenever another reaches its rung, until it reaches the next,
so that to be early is no advantage.
"""

import itertools
import math
import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from marlaas_jax.config import Count, JobConfig, Section, Seed, set_key, validate
from marlaas_jax.errors import InvalidConfig, short

MAX_TRIALS = 256
NUMBER_WIDTH = 3  # of a trial's number in its name
FIXED = ("name",)  # what no trial may change
Value = bool | int | float | str | list[Any] | None
Key = Annotated[str, Field(min_length=1, max_length=200)]
Bounds = tuple[float, float]


class Range(Section):
    """Where one key's values are drawn from: exactly one of these."""

    log_uniform: Bounds | None = None  # between two numbers above 0, evenly on a logarithmic scale; four digits are kept
    uniform: Bounds | None = None  # between two numbers
    integers: tuple[int, int] | None = None  # whole numbers, both ends included
    choice: Annotated[tuple[Value, ...], Field(min_length=1)] | None = None

    @pydantic.model_validator(mode="after")
    def _one(self) -> "Range":
        given = {name: value for name, value in self if value is not None}
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given) or 'nothing'} given: name exactly one of {', '.join(type(self).model_fields)}"
            )
        ((name, value),) = given.items()
        if name != "choice" and not value[0] < value[1]:
            raise ValueError(f"{name}=[{value[0]:g}, {value[1]:g}]: the first must be less than the second")
        if name == "log_uniform" and not value[0] > 0:
            raise ValueError(f"log_uniform=[{value[0]:g}, {value[1]:g}]: both must be more than 0")
        return self

    def draw(self, source: random.Random) -> Any:
        """Returns a value; takes one number from `source`."""
        share = source.random()
        if self.choice is not None:
            return self.choice[int(share * len(self.choice))]
        if self.integers is not None:
            low, high = self.integers
            return low + int(share * (high - low + 1))
        if self.uniform is not None:
            low, high = self.uniform
            return _within(low + share * (high - low), low, high)
        assert self.log_uniform is not None
        low, high = self.log_uniform
        return _within(math.exp(math.log(low) + share * (math.log(high) - math.log(low))), low, high)


class RandomSearch(Section):
    """Trials that are drawn; the same seed draws the same ones."""

    count: Annotated[int, Field(ge=1, le=MAX_TRIALS)]
    seed: Seed = 0
    space: Annotated[dict[Key, Range], Field(min_length=1)]  # dotted key of the job -> range


class HalvingConfig(Section):
    """When the worse trials are stopped; see the top of marlaas_jax/sweep.py."""

    eta: Annotated[int, Field(ge=2, le=100)] = 3  # of so many trials one goes on
    min_steps: Count  # the first rung


class SweepConfig(Section):
    """A sweep file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,59}$")]
    job: JobConfig  # what all trials share; its name is the sweep's
    grid: Annotated[dict[Key, Annotated[tuple[Value, ...], Field(min_length=1)]], Field(min_length=1)] | None = None
    trials: Annotated[tuple[Annotated[dict[Key, Value], Field(min_length=1)], ...], Field(min_length=1)] | None = None
    random: RandomSearch | None = None
    metric: Literal["train_reward", "eval_reward"] = "train_reward"  # train_reward: mean of the last three batches
    halving: HalvingConfig | None = None  # None: every trial runs to its end

    @pydantic.model_validator(mode="before")
    @classmethod
    def _named(cls, document: Any) -> Any:
        if isinstance(document, dict) and isinstance(document.get("job"), dict) and "name" in document:
            return document | {"job": document["job"] | {"name": document["name"]}}
        return document

    @pydantic.model_validator(mode="after")
    def _one(self) -> "SweepConfig":
        given = [name for name in ("grid", "trials", "random") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given) or 'none'} given: a sweep has exactly one of grid, trials, random")
        return self


def variants(sweep: SweepConfig) -> list[dict[str, Any]]:
    """Returns what each trial changes, as dotted key -> value, in order. Raises InvalidConfig for too many, or equal ones."""
    if sweep.grid is not None:
        count = math.prod(map(len, sweep.grid.values()))
        _require_count("grid", count)
        found = [dict(zip(sweep.grid, values, strict=True)) for values in itertools.product(*sweep.grid.values())]
    elif sweep.trials is not None:
        _require_count("trials", len(sweep.trials))
        found = [dict(values) for values in sweep.trials]
    else:
        assert sweep.random is not None
        source = random.Random(sweep.random.seed)
        keys = sorted(sweep.random.space)
        found = [{key: sweep.random.space[key].draw(source) for key in keys} for _ in range(sweep.random.count)]
    if sweep.random is None:
        seen: list[dict[str, Any]] = []
        for values in found:
            if values in seen:
                raise InvalidConfig(f"{'grid' if sweep.grid is not None else 'trials'}: two trials are both {short(values)}")
            seen.append(values)
    return found


def jobs_of(sweep: SweepConfig) -> list[tuple[dict[str, Any], JobConfig]]:
    """Returns each trial's changes and its job. Raises InvalidConfig, one sentence, if any of them is wrong."""
    found = []
    for number, values in enumerate(variants(sweep), 1):
        document = sweep.job.model_dump(mode="json")
        for key, value in values.items():
            if key.split(".")[0] in FIXED:
                raise InvalidConfig(f"{key}: cannot be swept; the trials' names come from the sweep's")
            set_key(document, key.split("."), value, key)
        document["name"] = f"{sweep.name}-{number:0{NUMBER_WIDTH}}"
        try:
            config = validate(JobConfig, document)
        except InvalidConfig as error:
            raise InvalidConfig(f"trial {number} ({described(values)}): {error}") from None
        if sweep.metric == "eval_reward" and not config.eval.every_steps:
            raise InvalidConfig(f"trial {number}: metric='eval_reward' takes eval.every_steps of at least 1, and it is 0")
        if sweep.halving is not None and sweep.halving.min_steps >= config.steps:
            raise InvalidConfig(
                f"halving.min_steps={sweep.halving.min_steps}: must be less than trial {number}'s steps={config.steps}"
            )
        found.append((values, config))
    return found


def described(values: Mapping[str, Any]) -> str:
    """Returns a trial's changes for people: "learning_rate=0.001 rank=8"."""
    return " ".join(f"{key.rpartition('.')[2]}={short(value, 30)}" for key, value in values.items())


def rungs(halving: HalvingConfig, steps: int) -> list[int]:
    """Returns the steps after which a trial of so many steps is judged."""
    found, rung = [], halving.min_steps
    while rung < steps:
        found.append(rung)
        rung *= halving.eta
    return found


def losers(eta: int, reached: Mapping[int, float], judged: Mapping[int, float]) -> list[int]:
    """Returns which of the trials `judged` are to be stopped.

    reached: the metric at a rung of every trial that ever reached it. judged: those of them that run and have not reached the
    next rung.
    """
    if len(reached) < eta:
        return []
    ranked = sorted(reached, key=lambda trial: (-reached[trial], trial))
    kept, best = set(ranked[: math.ceil(len(reached) / eta)]), reached[ranked[0]]
    return [trial for trial, value in judged.items() if trial not in kept and value < best]


def _require_count(field: str, count: int) -> None:
    if count > MAX_TRIALS:
        raise InvalidConfig(f"{field}: makes {count} trials; at most {MAX_TRIALS} are allowed")


def _within(value: float, low: float, high: float) -> float:
    """Returns the value with four digits, inside its bounds."""
    return min(max(float(f"{value:.4g}"), low), high)
