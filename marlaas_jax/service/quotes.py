"""An estimate of time and cost before a job starts, with a band. Pure.

Tokens are the job's sizes (steps x groups x episodes, and the evaluations) times tokens per episode. Seconds on the device are
tokens times seconds per token. A step alone takes what steps of jobs of the same environment and sizes took, at a load of one;
without such jobs, its seconds on the device and the environment's answer, which overlaps with other steps where staleness
allows. Under the present load a step takes `load ** busy` times that on the device's side. What was never measured on this
service is a default, and `basis` says so: an episode of half of `max_tokens`, a device of FIRST_GUESS_OPS_PER_S.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from marlaas_jax.config import JobConfig
from marlaas_jax.eta import Span
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.service.prices import Prices
from marlaas_jax.service.rates import Known, Range

FIRST_GUESS_OPS_PER_S = 5e10  # of the device
GUESS_FACTOR = 10.0  # that guess may be so many times wrong, either way
ENV_GUESS_S = Range(0.0, 0.01, 1.0, "default")
PUBLISH_GUESS_S = Range(0.001, 0.02, 0.5, "default")
UNSEEN_FACTOR = 2.0  # the band is wider by that where no job of these sizes was seen
OVERHEAD_S = Range(0.0, 0.02, 0.5, "default")  # of a step, beside device and environment
FEWER_EVAL, MORE_EVAL = 0.5, 2.0


@dataclass(frozen=True)
class Load:
    """How busy the service is."""

    load: float  # one over its part of the device while it and all running jobs wait for it
    busy: float  # busy share of the device
    waits_for: str = ""  # why the job would wait in the queue; "" if it would start at once


@dataclass(frozen=True)
class Quote:
    """Ranges of what a job will use and how long it will take, once it has started."""

    amounts: dict[str, Range]  # by meter
    alone_s: Range
    now_s: Range  # under the present load
    step_now_s: Range
    load: Load

    @property
    def per_step(self) -> Span:
        """One step under the present load."""
        return Span(self.step_now_s.expected, self.step_now_s.low, self.step_now_s.high, "quote")

    def document(self, prices: Prices | None) -> dict[str, Any]:
        """Returns the quote as it is shown."""
        cost = None
        if prices is not None:
            low, expected, high = (
                prices.cost({meter: getattr(amount, bound) for meter, amount in self.amounts.items()})
                for bound in ("low", "expected", "high")
            )
            cost = {"low": low, "expected": expected, "high": high, "currency": prices.currency}
        return {
            "amounts": {meter: dataclasses.asdict(amount) for meter, amount in self.amounts.items()},
            "cost": cost,
            "alone_s": dataclasses.asdict(self.alone_s),
            "now_s": dataclasses.asdict(self.now_s),
            "load": self.load.load,
            "device_busy_share": self.load.busy,
            "waits_for": self.load.waits_for,
            "basis": self.now_s.basis,
        }


def quote(config: JobConfig, known: Known, model: ModelConfig, max_context: int, load: Load) -> Quote:
    """Returns the estimate."""
    rollout = config.rollout
    num_groups = config.steps * rollout.groups_per_batch
    num_episodes = num_groups * rollout.group_size
    num_eval = 2 * config.eval.num_items
    most = min(max_context, config.sampling.max_tokens * rollout.max_turns)
    half = min(max_context, config.sampling.max_tokens) / 2
    sampled = known.sampled_per_episode or Range(half / 16, half, float(most), "default")
    prompt = known.prompt_per_group or Range(max_context / 32, max_context / 4, float(max_context), "default")
    env_s = known.env_s_per_episode or ENV_GUESS_S
    evals = Range(num_eval * FEWER_EVAL, float(num_eval), num_eval * MORE_EVAL, sampled.basis)
    guess = _guesses(model)
    per_prompt, per_sampled = known.prefill_s or guess, known.decode_s or guess
    per_trained, publish_s = known.train_s or guess * 3, known.publish_s or PUBLISH_GUESS_S
    # What was measured counts evaluations with the batches: their tokens are in the averages already.
    beside = evals if known.sampled_per_episode is None else evals * 0.5
    prompt_tokens = prompt * num_groups + prompt.times(beside)
    sampled_tokens = sampled * num_episodes + sampled.times(beside)
    trained_tokens = sampled * num_episodes
    device_s = prompt_tokens.times(per_prompt) + sampled_tokens.times(per_sampled)
    device_s = device_s + trained_tokens.times(per_trained) + publish_s * config.steps
    amounts = {
        "prompt_tokens": prompt_tokens, "sampled_tokens": sampled_tokens, "trained_tokens": trained_tokens,
        "device_s": device_s, "env_s": env_s * (num_episodes + num_eval),
    }  # fmt: skip
    slower = load.load**load.busy
    if known.step_s is not None:
        alone, now = known.step_s, known.step_s * slower
    else:
        own = device_s * (1 / config.steps)
        other = env_s * (1 / (1 + rollout.max_staleness)) + OVERHEAD_S
        alone, now = _widened(own + other), _widened(own * slower + other)
    share = 1 + (num_eval / num_episodes if num_episodes else 0.0)  # the evaluations
    return Quote(amounts, alone * (config.steps * share), now * (config.steps * share), now, load)


def _widened(found: Range) -> Range:
    return dataclasses.replace(found, low=found.low / UNSEEN_FACTOR, high=found.high * UNSEEN_FACTOR)


def _guesses(model: ModelConfig) -> Range:
    """Returns seconds per token of a forward pass on a device that nothing is known of."""
    weights = model.num_layers * sum(d * f for d, f in model.projection_dims().values()) + model.vocab_size * model.model_dim
    seconds = 2.0 * weights / FIRST_GUESS_OPS_PER_S
    return Range(seconds / GUESS_FACTOR, seconds, seconds * GUESS_FACTOR, "default")
