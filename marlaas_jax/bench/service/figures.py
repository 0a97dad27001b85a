"""What the scripted day shows: outcomes, rewards against those alone, shares of the device, waits. Pure."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from marlaas_jax.bench.report import Line
from marlaas_jax.bench.service.driver import Record, Shares
from marlaas_jax.bench.service.plan import RUNTIME, Sizes
from marlaas_jax.config import RuntimeConfig, validate

# Quantiles of Student's t by degrees of freedom: two-sided 99%.
T_99 = {2: 9.925, 4: 4.604, 6: 3.707, 8: 3.355}


def outcome_line(records: Sequence[Record]) -> Line:
    """Returns how many jobs did not end as planned."""
    wrong = [
        f"{r.planned.name}: {r.job.state} at step {r.job.step} {r.job.reason}".strip() for r in records if not _as_planned(r)
    ]
    counts = Counter(record.job.state for record in records)
    shown = f"{len(wrong)} of {len(records)} (" + ", ".join(f"{counts[state]} {state}" for state in sorted(counts)) + ")"
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        kinds[record.planned.kind][record.job.state] += 1
    detail = {"wrong": wrong, "outcomes": {kind: dict(found) for kind, found in sorted(kinds.items())}}
    return Line("jobs that ended otherwise than they should", len(wrong), shown, "<= 0", detail)


def _as_planned(record: Record) -> bool:
    """Whether a job ended as it should: a healthy one with all its steps, a broken one for its own reason."""
    planned, job = record.planned, record.job
    if job.state != planned.ends:
        return False
    if job.state == "succeeded":
        return job.step == job.steps == len(record.rewards)
    return job.state != "failed" or any(text in job.reason for text in planned.reason)


def eta_line(records: Sequence[Record]) -> Line:
    """Returns which part of the bands that were forecast for jobs, at a fifth and half of their steps, held their ends."""
    checked = {r.planned.name: r.eta_within for r in records if r.eta_within}
    within = [is_within for found in checked.values() for is_within in found]
    share = statistics.fmean(within) if within else math.nan
    outside = sorted(name for name, found in checked.items() if not all(found))
    shown = f"{100 * share:.0f}% of {len(within)} bands of {len(checked)} jobs"
    return Line("jobs that ended within the band of their ETA", share, shown, ">= 0.9", {"outside": outside})


def final_reward(rewards: Sequence[float | None], last_steps: int) -> float:
    """Returns the mean reward of the last batches; NaN without any."""
    known = [reward for reward in rewards[-last_steps:] if reward is not None]
    return sum(known) / len(known) if known else math.nan


def seed_bound(a: Sequence[float], b: Sequence[float], episodes: int) -> float:
    """Returns by how much the means of two equal sets of seeds may differ by chance: 99% of Student's t.

    The variance of one final reward is that between seeds, pooled over both sets, but no less than what `episodes` rewards
    of 0 or 1 have by drawing alone: three seeds may agree by luck.
    """
    pooled = (statistics.variance(a) + statistics.variance(b)) / 2
    mean = statistics.fmean([*a, *b])
    drawn = max(mean * (1 - mean), 0.0) / episodes
    return T_99[len(a) + len(b) - 2] * math.sqrt(2 * max(pooled, drawn) / len(a))


def reward_lines(records: Sequence[Record], sizes: Sizes, alone: str = "alone", among: str = "crowd") -> list[Line]:
    """Returns per task kind how far the final rewards among others are from those alone, over what chance allows."""
    lines = []
    for kind in sizes.kinds:
        chosen = {
            phase: [r for r in records if r.planned.kind == kind and r.planned.phase == phase] for phase in (alone, among)
        }
        a, b = ([final_reward(r.rewards, sizes.last_steps) for r in found] for found in chosen.values())
        rollout = chosen[among][0].job.config["rollout"]
        bound = seed_bound(a, b, sizes.last_steps * rollout["group_size"] * rollout["groups_per_batch"])
        difference = statistics.fmean(b) - statistics.fmean(a)
        shown = f"{abs(difference) / bound:.2f} ({statistics.fmean(b):.3f} - {statistics.fmean(a):.3f}, chance {bound:.3f})"
        detail = {alone: a, among: b, "bound": bound}
        name = f"{kind}: final reward in the crowd less alone, over what {len(a)} seeds differ by chance"
        lines.append(Line(name, abs(difference) / bound, shown, "<= 1", detail))
    return lines


def jain(values: Sequence[float]) -> float:
    """Returns Jain's index of fairness (Jain, Chiu, Hawe 1984): 1 where all are equal, 1/n where one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


def share_lines(shares: Shares) -> list[Line]:
    """Returns Jain's index of the tenants of equal weight, and how far shares are from the weights at most."""
    base = min(shares.weights.values())
    equal = [shares.seconds[name] for name, weight in shares.weights.items() if weight == base]
    served, weight = sum(shares.seconds.values()), sum(shares.weights.values())
    off = {name: seconds / served / (shares.weights[name] / weight) - 1 for name, seconds in shares.seconds.items()}
    worst = max(off.values(), key=abs)
    index, worst_text = jain(equal), f"{100 * worst:+.1f}%"
    where = f"window {shares.window_s:.0f} s, {100 * shares.backlogged:.0f}% of looks: all had a batch at the learner"
    detail = {
        "device_s": shares.seconds,
        "weights": shares.weights,
        "window_s": shares.window_s,
        "backlogged": shares.backlogged,
    }
    spread = ", ".join(f"{w:g}: {100 * s:.1f}%" for w, s in sorted(_by_weight(shares).items()))
    name = f"Jain index of the device time of {len(equal)} equal tenants"
    return [
        Line(name, index, f"{index:.4f} ({where})", ">= 0.95", detail),
        Line("share of the device against the weight, largest deviation", abs(worst), f"{worst_text} ({spread})", "<= 0.1",
             {"deviations": off}),
    ]  # fmt: skip


def _by_weight(shares: Shares) -> dict[float, float]:
    """Returns the mean share of a tenant of each weight."""
    served = sum(shares.seconds.values())
    found: dict[float, list[float]] = defaultdict(list)
    for name, seconds in shares.seconds.items():
        found[shares.weights[name]].append(seconds / served)
    return {weight: statistics.fmean(parts) for weight, parts in found.items()}


def queue_waits(record: Record, pace_s: float) -> list[float]:
    """Returns the seconds that each turn waited: what it took beyond its tokens at the best pace that was seen alone.

    From outside only the time between request and completion is known. What a turn loses to others' dispatches while it decodes
    therefore counts as waiting too: the figure is no less than the wait in the queue.
    """
    return [max(0.0, s - pace_s * tokens) for s, tokens in zip(record.turn_s, record.turn_tokens, strict=True)]


def wait_line(alone: Record, beside: Record) -> Line:
    """Returns the p95 wait of the small tenant beside the flood over the most that it may be."""
    pace_s = min(s / tokens for s, tokens in zip(alone.turn_s, alone.turn_tokens, strict=True) if tokens)
    waits_alone, waits_beside = queue_waits(alone, pace_s), queue_waits(beside, pace_s)
    p95_alone, p95_beside = quantile(waits_alone, 0.95), quantile(waits_beside, 0.95)
    runtime: RuntimeConfig = validate(RuntimeConfig, RUNTIME)
    turn_s = runtime.engine.decode_steps * pace_s + runtime.learner.max_dispatch_s
    allowed = max(3 * p95_alone, turn_s)
    ms = lambda seconds: f"{1e3 * seconds:.0f} ms"
    shown = f"{p95_beside / allowed:.2f} ({ms(p95_beside)}; alone {ms(p95_alone)}; allowed {ms(allowed)})"
    detail = {"alone_s": p95_alone, "beside_s": p95_beside, "chunk_and_dispatch_s": turn_s, "pace_s_per_token": pace_s}
    return Line("small tenant beside a flood, p95 queue wait over what it may be", p95_beside / allowed, shown, "<= 1", detail)


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the least value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
