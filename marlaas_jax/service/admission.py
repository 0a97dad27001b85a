"""Which queued jobs start next. Pure: no clock, no store.

Places for running jobs are shared between tenants by weight (fairness.Shares). Within a tenant the highest priority goes
first, then who came first. A tenant at a quota takes no turn, so it holds nobody up and saves nothing up.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from marlaas_jax.fairness import Shares
from marlaas_jax.service.quotas import Load, Quotas, why_queued


@dataclass(frozen=True)
class QueuedJob:
    """A job that waits for a place."""

    id: str
    tenant_id: str
    created: float
    priority: int = 0
    cost: float = 1.0  # what a start counts for its tenant, in any unit that is the same for all jobs


@dataclass(frozen=True)
class TenantState:
    """What decides whether a tenant's jobs may start."""

    quotas: Quotas
    load: Load
    weight: float = 1.0


class Admission:
    """Gives free places to tenants in turn; remembers what each was given."""

    def __init__(self) -> None:
        self._shares = Shares()
        self._known: set[str] = set()

    def choose(self, queued: Iterable[QueuedJob], tenants: Mapping[str, TenantState], free_places: int) -> list[QueuedJob]:
        """Returns the jobs that start now, in order, and counts them as started. Every job's tenant is in `tenants`."""
        self._follow(tenants)
        lines = _lines(queued)
        loads = {tenant: tenants[tenant].load for tenant in lines}
        chosen: list[QueuedJob] = []
        while free_places > len(chosen):
            able = [tenant for tenant in lines if lines[tenant] and not why_queued(tenants[tenant].quotas, loads[tenant], 1)]
            if not able:
                break
            tenant = self._shares.order(able)[0]
            job = lines[tenant].pop()
            self._shares.charge(tenant, job.cost)
            loads[tenant] = _with_one_more(loads[tenant])
            chosen.append(job)
        return chosen

    def charge(self, tenant: str, amount: float) -> None:
        """Corrects what a job was counted for at its start, once its true cost is known."""
        if tenant in self._shares:
            self._shares.charge(tenant, amount)

    def _follow(self, tenants: Mapping[str, TenantState]) -> None:
        for tenant in self._known - set(tenants):
            self._shares.remove(tenant)
        self._known = set(tenants)
        for tenant, state in tenants.items():
            self._shares.add(tenant, state.weight)


def reasons(queued: Iterable[QueuedJob], tenants: Mapping[str, TenantState], free_places: int) -> dict[str, str]:
    """Returns in one sentence, by job id, why each job waits; "" for one that may start at the next choice."""
    found = {}
    for tenant, line in _lines(queued).items():
        state = tenants[tenant]
        first = why_queued(state.quotas, state.load, free_places)
        for number, job in enumerate(reversed(line), 1):
            found[job.id] = first or (f"is number {number} in the queue of its tenant" if number > 1 else "")
    return found


def _lines(queued: Iterable[QueuedJob]) -> dict[str, list[QueuedJob]]:
    """Returns each tenant's jobs; the next is the last."""
    lines: defaultdict[str, list[QueuedJob]] = defaultdict(list)
    for job in sorted(queued, key=lambda job: (-job.priority, job.created, job.id), reverse=True):
        lines[job.tenant_id].append(job)
    return dict(lines)


def _with_one_more(load: Load) -> Load:
    return dataclasses.replace(load, running_jobs=load.running_jobs + 1, resident_adapters=load.resident_adapters + 1)
