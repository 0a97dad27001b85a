"""What the service measured of the work of jobs: what a quote is made from. Bounded; pure.

Each batch's line of metrics adds one sample to the rates of the device and to what is known of its kind of job. Kinds are told
apart by environment, by tenant where that is a file of the tenant's, and for times of whole steps by their sizes.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from marlaas_jax.config import JobConfig

MAX_SAMPLES = 200
MAX_KINDS = 1000
MIN_SAMPLES = 3

Key = TypeVar("Key")


@dataclass(frozen=True)
class Range:
    """A figure with a band; `basis` says where it comes from."""

    low: float
    expected: float
    high: float
    basis: str = "measured"

    def __mul__(self, factor: float) -> "Range":
        return Range(self.low * factor, self.expected * factor, self.high * factor, self.basis)

    def __add__(self, other: "Range") -> "Range":
        basis = self.basis if self.basis == other.basis else "default"
        return Range(self.low + other.low, self.expected + other.expected, self.high + other.high, basis)

    def times(self, other: "Range") -> "Range":
        """Returns the product, bound by bound."""
        basis = self.basis if self.basis == other.basis else "default"
        return Range(self.low * other.low, self.expected * other.expected, self.high * other.high, basis)


class Samples:
    """The latest values of something."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=MAX_SAMPLES)

    def add(self, value: float) -> None:
        """Adds a value."""
        self._values.append(value)

    def range(self) -> Range | None:
        """Returns the first decile, the mean and the last decile; None for too few samples."""
        if len(self._values) < MIN_SAMPLES:
            return None
        ordered = sorted(self._values)
        mean, last = sum(ordered) / len(ordered), len(ordered) - 1
        return Range(min(mean, ordered[round(0.1 * last)]), mean, max(mean, ordered[round(0.9 * last)]))


class _Kinds(Generic[Key]):
    """Samples by kind; the kind that was not seen for longest is forgotten."""

    def __init__(self) -> None:
        self._samples: OrderedDict[Key, Samples] = OrderedDict()

    def add(self, key: Key, value: float) -> None:
        self._samples.setdefault(key, Samples()).add(value)
        self._samples.move_to_end(key)
        if len(self._samples) > MAX_KINDS:
            self._samples.popitem(last=False)

    def range(self, key: Key) -> Range | None:
        samples = self._samples.get(key)
        return None if samples is None else samples.range()


@dataclass(frozen=True)
class Known:
    """What was measured that bears on one job; None: not yet. Seconds on the device are per token; `step_s` is at load 1."""

    prefill_s: Range | None
    decode_s: Range | None
    train_s: Range | None
    publish_s: Range | None  # per step
    sampled_per_episode: Range | None
    prompt_per_group: Range | None
    env_s_per_episode: Range | None
    step_s: Range | None  # of jobs of the same environment and sizes


class Rates:
    """Measured by all jobs since the service started."""

    def __init__(self) -> None:
        self._device: dict[str, Samples] = {name: Samples() for name in ("prefill", "decode", "train", "publish")}
        self._kinds: _Kinds[tuple[str, ...]] = _Kinds()

    def observe(self, tenant_id: str, config: JobConfig, line: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
        """Takes a batch's line of metrics; `before` is the line of the batch before it."""
        kind = _kind(tenant_id, config)
        for name, rate in (("prefill", "device/prefill_s_per_token"), ("decode", "device/decode_s_per_token")):
            if value := line.get(rate):
                self._device[name].add(value)
        if (busy_s := line.get("device/learner_s")) and (trained := line.get("meter/trained_tokens")):
            self._device["train"].add(busy_s / trained)
        if publish_s := line.get("device/publish_s"):
            self._device["publish"].add(publish_s)
        episodes, groups = line.get("rollout/num_episodes"), line.get("rollout/num_groups")
        if episodes and groups:
            self._kinds.add(("sampled", *kind), (line.get("meter/sampled_tokens") or 0.0) / episodes)
            self._kinds.add(("prompt", *kind), (line.get("meter/prompt_tokens") or 0.0) / groups)
            self._kinds.add(("env", *kind), (line.get("meter/env_s") or 0.0) / episodes)
        start, end = (before or {}).get("job/active_s"), line.get("job/active_s")
        if start is not None and end is not None and end > start:
            load, busy = line.get("job/load") or 1.0, line.get("device/busy_share")
            self._kinds.add(("step", *kind, *_sizes(config)), (end - start) / load ** (1.0 if busy is None else busy))

    def known(self, tenant_id: str, config: JobConfig) -> Known:
        """Returns what bears on a job of this tenant."""
        kind = _kind(tenant_id, config)
        device = {name: samples.range() for name, samples in self._device.items()}
        return Known(
            device["prefill"], device["decode"], device["train"], device["publish"],
            self._kinds.range(("sampled", *kind)), self._kinds.range(("prompt", *kind)), self._kinds.range(("env", *kind)),
            self._kinds.range(("step", *kind, *_sizes(config))),
        )  # fmt: skip


def _kind(tenant_id: str, config: JobConfig) -> tuple[str, ...]:
    is_file = ".py:" in config.env
    return (tenant_id if is_file else "", config.env, str(config.sampling.max_tokens))


def _sizes(config: JobConfig) -> tuple[str, ...]:
    rollout = config.rollout
    return (str(rollout.group_size), str(rollout.groups_per_batch), str(rollout.max_staleness))
