"""What a tenant may use, and how long it waits beyond that. Pure: the time is an argument.

A job beyond a quota waits in the queue with the reason shown; a request beyond one is refused with the time to retry after.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from marlaas_jax.config import Section

DAY_S = 86400
ROUNDING_S = 1e-6  # of sums of times


class Quotas(Section):
    """Limits of one tenant; None is no limit."""

    max_running_jobs: Annotated[int, Field(ge=0)] | None = 4
    max_queued_jobs: Annotated[int, Field(ge=0)] | None = 100
    max_resident_adapters: Annotated[int, Field(ge=0)] | None = 8
    max_queued_tokens: Annotated[int, Field(ge=0)] | None = 1_000_000  # prompt and max_tokens of requests that wait
    tokens_per_day: Annotated[int, Field(ge=0)] | None = None  # prefilled, sampled and trained, by UTC day
    requests_per_second: Annotated[float, Field(gt=0, le=10_000)] | None = 50.0
    burst: Annotated[int, Field(ge=1)] = 100  # requests at once after a pause


@dataclass(frozen=True)
class Load:
    """What a tenant uses now."""

    running_jobs: int = 0
    queued_jobs: int = 0
    resident_adapters: int = 0
    queued_tokens: int = 0
    tokens_today: float = 0.0


def why_queued(quotas: Quotas, load: Load, free_places: int) -> str:
    """Returns in one sentence why the tenant's next job waits, or "" if it may start: it takes a place and an adapter."""
    if is_reached(quotas.max_running_jobs, load.running_jobs):
        return f"max_running_jobs={quotas.max_running_jobs}: this tenant has {load.running_jobs} running"
    if is_reached(quotas.max_resident_adapters, load.resident_adapters):
        return f"max_resident_adapters={quotas.max_resident_adapters}: this tenant has {load.resident_adapters} resident"
    if is_reached(quotas.tokens_per_day, load.tokens_today):
        return f"tokens_per_day={quotas.tokens_per_day}: this tenant used {load.tokens_today:.0f} since 0:00 UTC"
    if free_places <= 0:
        return "all places for running jobs are taken"
    return ""


def why_refused(quotas: Quotas, load: Load, *, jobs: int = 0, tokens: int = 0) -> str:
    """Returns in one sentence why that many more jobs or tokens of requests cannot be queued, or ""."""
    if jobs and is_reached(quotas.max_queued_jobs, load.queued_jobs + jobs - 1):
        return f"max_queued_jobs={quotas.max_queued_jobs}: this tenant has {load.queued_jobs} waiting, {jobs} more asked"
    if tokens and is_reached(quotas.max_queued_tokens, load.queued_tokens + tokens - 1):
        return (
            f"max_queued_tokens={quotas.max_queued_tokens}: this tenant has {load.queued_tokens} waiting, {tokens} more asked"
        )
    if tokens and is_reached(quotas.tokens_per_day, load.tokens_today):
        return f"tokens_per_day={quotas.tokens_per_day}: this tenant used {load.tokens_today:.0f} since 0:00 UTC"
    return ""


class RateLimiter:
    """A token bucket per tenant, kept as the time at which it is full again (GCRA).

    Beyond `max_tenants` the bucket that was not used for longest is forgotten, which is to fill it.
    """

    def __init__(self, max_tenants: int = 10_000):
        self._full_at: OrderedDict[str, float] = OrderedDict()  # least recently used first
        self._max_tenants = max_tenants

    def admit(self, tenant: str, quotas: Quotas, now: float) -> float | None:
        """Counts a request and returns None, or returns the seconds after which to retry. `now` is monotonic, in seconds."""
        if quotas.requests_per_second is None:
            return None
        interval_s = 1 / quotas.requests_per_second
        capacity_s = quotas.burst * interval_s
        full_at = min(max(self._full_at.get(tenant, now), now), now + capacity_s)
        wait_s = full_at + interval_s - now - capacity_s
        is_admitted = wait_s <= ROUNDING_S
        self._full_at[tenant] = full_at + interval_s if is_admitted else full_at
        self._full_at.move_to_end(tenant)
        if len(self._full_at) > self._max_tenants:
            self._full_at.popitem(last=False)
        return None if is_admitted else wait_s


class DailyTokens:
    """Tokens of each tenant since 0:00 UTC. A clock that is set to another day starts a fresh count."""

    def __init__(self, now: float, used: Mapping[str, float] | None = None):
        self._day = now // DAY_S
        self._used = dict(used or {})

    def add(self, tenant: str, tokens: float, now: float) -> None:
        """Counts tokens; a negative number takes back."""
        self._used[tenant] = self.used(tenant, now) + tokens

    def used(self, tenant: str, now: float) -> float:
        """Returns the tenant's tokens on the day of `now`, seconds since 1970."""
        if now // DAY_S != self._day:
            self._day = now // DAY_S
            self._used.clear()
        return self._used.get(tenant, 0.0)

    def retry_after(self, tenant: str, quotas: Quotas, now: float) -> float | None:
        """Returns the seconds to the next day if the tenant has used its tokens, else None."""
        if not is_reached(quotas.tokens_per_day, self.used(tenant, now)):
            return None
        return DAY_S - now % DAY_S


def is_reached(limit: int | None, value: float) -> bool:
    """Whether a limit is used up; None is none."""
    return limit is not None and value >= limit
