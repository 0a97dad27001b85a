"""Fairness as it is measured: who waited how long in each stage, what each tenant was given, and how even that was.

Stages: "generate" (a sample, until it has a decode slot), "environment" (an episode, from when its group could have started
until a worker has it), "train" (a batch, until its first block is computed).

A share of the device means something only among those that wanted more of it. A tenant is *backlogged* in a report's second
where one of its jobs had, at every dispatch of that second, something waiting for the sampler or with the learner. Counted over
a window are the tenants that were backlogged in every second of it in which the device worked; x = device seconds over weight
for each, weight being the tenant's; and Jain's index (Jain, Chiu, Hawe 1984) is (sum x)^2 / (n sum x^2): 1
where all had their share, 1/n where one had all. With fewer than two such tenants there is no index.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marlaas_jax.fairness import Owner
from marlaas_jax.messages import DeviceStatus
from marlaas_jax.waits import BOUNDS_S, Waits

STAGES = ("generate", "environment", "train")
WINDOW_S = 60.0  # of the index where nothing else is asked for
MAX_WINDOW_S = 600.0
MAX_TENANTS = 500  # told apart; who was served longest ago is added to OTHERS beyond that
MAX_ENDED_JOBS = 1000  # whose last reports may still come
OTHERS = "others"
SHOWN_BOUNDS_S = BOUNDS_S[::4]  # in Prometheus: 1 ms, 4 ms, ... 1049 s


def jain(shares: Sequence[float]) -> float | None:
    """Returns Jain's index of at least two shares, None for fewer or where nobody has anything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if len(shares) > 1 and squares else None


@dataclass
class Received:
    """What a tenant was given since the service started."""

    device_s: float = 0.0
    waits: dict[str, Waits] = field(default_factory=dict)  # by stage


@dataclass(frozen=True)
class _Second:
    """One report of the device."""

    time: float
    device_s: dict[str, float]  # by tenant
    weights: dict[str, float]  # of the backlogged tenants


@dataclass(frozen=True)
class Window:
    """The last so many seconds, as far as there are reports. `shares`: device seconds of the counted tenants."""

    seconds: float
    num_reports: int
    device_s: dict[str, float]
    shares: dict[str, float]
    weights: dict[str, float]
    jain: float | None


class FairShare:
    """Takes the reports of the device and the waits of the environments; knows whose jobs are whose."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, str] = OrderedDict()  # job -> tenant
        self._weights: dict[str, float] = {}  # of tenants
        self._ended: OrderedDict[str, None] = OrderedDict()  # of those, the oldest first
        self._received: OrderedDict[str, Received] = OrderedDict()  # by tenant; who was served longest ago first
        self._seconds: deque[_Second] = deque()

    def weigh(self, owner: Owner) -> None:
        """Says what a tenant's share counts, from now on."""
        self._weights[owner.name] = owner.weight

    def open_job(self, job_id: str, owner: Owner) -> None:
        """Says whose a job is."""
        self._jobs[job_id] = owner.name
        self.weigh(owner)
        self._ended.pop(job_id, None)

    def close_job(self, job_id: str) -> None:
        """Says that a job is over; what is told of it late still counts."""
        if job_id in self._jobs:
            self._ended[job_id] = None
        while len(self._ended) > MAX_ENDED_JOBS:
            self._jobs.pop(self._ended.popitem(last=False)[0], None)

    def report(self, status: DeviceStatus, waits: Mapping[str, Mapping[str, Waits]], now: float) -> None:
        """Takes what the device did since its last report, and what waited for environments. `now` is monotonic."""
        for stages in (status.waits, waits):
            for stage, by_job in stages.items():
                for job, entry in by_job.items():
                    if job in self._jobs and stage in STAGES:
                        self._of(self._jobs[job]).waits.setdefault(stage, Waits()).merge(entry)
        device_s: defaultdict[str, float] = defaultdict(float)
        for job, seconds in status.busy_by_job_s.items():
            if job in self._jobs:
                device_s[self._jobs[job]] += seconds
                self._of(self._jobs[job]).device_s += seconds
        weights = {tenant: self._weights[tenant] for job in status.backlogged if (tenant := self._jobs.get(job)) is not None}
        if device_s:  # else the device did nothing: nobody was kept waiting for another
            self._seconds.append(_Second(now, dict(device_s), weights))
        while self._seconds and now - self._seconds[0].time > MAX_WINDOW_S:
            self._seconds.popleft()

    def received(self) -> dict[str, Received]:
        """Returns what each tenant was given since the service started."""
        return dict(self._received)

    def window(self, now: float, seconds: float = WINDOW_S) -> Window:
        """Returns who had which share lately."""
        lately = [second for second in self._seconds if now - second.time <= seconds]
        counted = set.intersection(*(set(second.weights) for second in lately)) if lately else set[str]()
        device_s: defaultdict[str, float] = defaultdict(float)
        weights: defaultdict[str, float] = defaultdict(float)
        for second in lately:
            for tenant, spent in second.device_s.items():
                device_s[tenant] += spent
            for tenant in counted:
                weights[tenant] += second.weights[tenant] / len(lately)
        shares = {tenant: device_s[tenant] for tenant in sorted(counted)}
        index = jain([shares[tenant] / weights[tenant] for tenant in shares])
        return Window(seconds, len(lately), dict(device_s), shares, dict(weights), index)

    def document(self, now: float, tenant_id: str | None, names: Mapping[str, str], seconds: float) -> dict[str, Any]:
        """Returns all this as it is shown: to a tenant its own figures and the index, with None all tenants'."""
        window = self.window(now, seconds)
        whole = sum(window.shares.values())
        entitled = sum(window.weights.values())
        tenants = []
        for tenant, received in self._received.items():
            if tenant_id not in (None, tenant):
                continue
            is_counted = tenant in window.shares
            tenants.append({
                "tenant_id": tenant,
                "tenant": names.get(tenant, tenant),
                "device_s": received.device_s,
                "window_device_s": window.device_s.get(tenant, 0.0),
                "is_backlogged": is_counted,
                "share": window.shares[tenant] / whole if is_counted and whole else None,
                "entitled_share": window.weights[tenant] / entitled if is_counted and entitled else None,
                "waits": {stage: summary(received.waits.get(stage, Waits())) for stage in STAGES},
            })  # fmt: skip
        return {
            "window_s": seconds, "num_reports": window.num_reports, "num_backlogged": len(window.shares),
            "jain": window.jain, "tenants": tenants,
        }  # fmt: skip

    def _of(self, tenant: str) -> Received:
        if tenant not in self._received and len(self._received) >= MAX_TENANTS:
            oldest, received = next((key, value) for key, value in self._received.items() if key != OTHERS)
            del self._received[oldest]
            others = self._received.setdefault(OTHERS, Received())
            others.device_s += received.device_s
            for stage, waits in received.waits.items():
                others.waits.setdefault(stage, Waits()).merge(waits)
        found = self._received.setdefault(tenant, Received())
        self._received.move_to_end(tenant)
        return found


def summary(waits: Waits) -> dict[str, float | int | None]:
    """Returns the figures of a histogram that people read."""
    return {
        "number": waits.number, "mean_s": waits.sum_s / waits.number if waits.number else None,
        "p50_s": waits.quantile_s(0.5), "p95_s": waits.quantile_s(0.95), "max_s": waits.max_s if waits.number else None,
    }  # fmt: skip
