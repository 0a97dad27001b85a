"""The meter: what tenants used, counted once, in memory for the quotas and in the store for the bill.

A job is billed by its committed history. Each batch's line of metrics holds what the batch used; a line is billed when it is
there and its step is beyond the last one billed, which the store keeps (`store.usage.add_metered`) and moves in the transaction
that adds the amounts. So a step that is trained again after a crash is not billed again, one whose bill was lost by a crash is
billed when the job goes on, and a bill that was written without our knowing is not written twice. What the job used after its
last batch is billed as one step more when it has succeeded. A step whose seconds on the device were not told is billed
without them.

Requests that end outside of jobs are added up and written about once a second; a crash loses that second, to the tenant's gain.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from marlaas_jax.errors import MarlaasError
from marlaas_jax.rollout import meters
from marlaas_jax.service.prices import TOKEN_METERS
from marlaas_jax.service.quotas import DailyTokens, Quotas
from marlaas_jax.store import usage as usage_table
from marlaas_jax.store.engine import Store
from marlaas_jax.store.usage import Bill
from marlaas_jax.workers.controller_jobs import Job
from marlaas_jax.workers.controller_status import SUCCEEDED

log = logging.getLogger(__name__)

WRITE_INTERVAL_S = 1.0
RETRY_S = 5.0
FOLD_INTERVAL_S = 3600.0
DAY_S = 86400.0


class Metering:
    """Bills jobs and requests. For the event loop's thread; `run` writes."""

    def __init__(self, store: Store, clock: Callable[[], float], keep_days: int):
        self._store = store
        self._clock = clock
        self._keep_days = keep_days
        self._billed: dict[str, int] = {}  # job -> last step billed, of jobs that may be billed more
        self._tenant_of: dict[str, str] = {}
        self._used: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))  # job -> meter, so far
        self._pending: list[Bill] = []
        self._requests: defaultdict[tuple[str, str, str], float] = defaultdict(float)  # (tenant, job, meter), not in a bill yet
        self._source = f"process:{secrets.token_hex(8)}"
        self._seq = 0
        self._daily = DailyTokens(clock())
        self._billed_tokens: defaultdict[tuple[str, str], float] = defaultdict(float)  # (tenant, meter), since the start
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()

    async def start(self) -> None:
        """Reads how far jobs are billed and what tenants used today."""

        def read(connection: Any) -> tuple[dict[str, int], dict[str, float], dict[str, dict[str, float]]]:
            day = usage_table.utc_day(self._clock())
            billed = usage_table.billed_steps(connection)
            used = usage_table.used_by_job(connection, list(billed))
            return billed, usage_table.used_on_day(connection, day=day, meters=TOKEN_METERS), used

        self._billed, today, used = await self._store.aread(read)
        self._daily = DailyTokens(self._clock(), today)
        for job, amounts in used.items():
            self._used[job].update(amounts)

    # ---- what is used

    def open_job(self, job_id: str, tenant_id: str) -> None:
        """Says whose a job is, before it is billed."""
        self._tenant_of[job_id] = tenant_id
        self._billed.setdefault(job_id, 0)

    def collect(self, job: Job) -> None:
        """Bills what a job has used and was not billed for yet."""
        if (tenant := self._tenant_of.get(job.name)) is None:
            return
        due = []
        for line in reversed(job.files.metrics):
            if line["step"] <= self._billed[job.name]:
                break
            due.append(line)
        for line in reversed(due):
            self._bill(job.name, tenant, line["step"], amounts_of(line), line.get("time") or self._clock())
        last = job.config.steps + 1
        if job.state == SUCCEEDED and self._billed[job.name] < last:
            line = job.files.metrics[-1] if job.files.metrics else {}
            used = job.files.state.get("used_after")
            self._bill(job.name, tenant, last, amounts_after(used if isinstance(used, dict) else {}, line), self._clock())

    def close_job(self, job_id: str) -> None:
        """Forgets a job that is over; its last bill may still wait to be written."""
        self._tenant_of.pop(job_id, None)
        self._billed.pop(job_id, None)
        self._used.pop(job_id, None)

    def record_request(
        self, tenant_id: str, *, prompt_tokens: int, sampled_tokens: int, job_id: str = "", device_s: float = 0.0
    ) -> None:
        """Bills a request that was answered, outside of any job's training: call it once per request, when it has ended.

        job_id: whose adapter answered; "" is the base model. prompt_tokens: once, however many samples.
        A request that failed on our side, or that we repeated, is not to be recorded for what the first try did.
        """
        amounts = {"prompt_tokens": prompt_tokens, "sampled_tokens": sampled_tokens, "device_s": device_s}
        for meter, amount in amounts.items():
            if amount:
                self._requests[tenant_id, job_id, meter] += amount
                if job_id in self._tenant_of:
                    self._used[job_id][meter] += amount
        self._count(tenant_id, amounts)
        self._daily.add(tenant_id, prompt_tokens + sampled_tokens, self._clock())
        self._wake.set()

    def rolled_back(self, job_id: str, step: int) -> None:
        """Lets the steps behind `step` be billed again, as the store does by now: their owner has them trained anew."""
        if job_id in self._billed:
            self._billed[job_id] = min(self._billed[job_id], step)

    # ---- what was used

    def tokens_today(self, tenant_id: str) -> float:
        """Returns a tenant's tokens since 0:00 UTC: prompts, sampled and trained."""
        return self._daily.used(tenant_id, self._clock())

    def retry_after(self, tenant_id: str, quotas: Quotas) -> float | None:
        """Returns the seconds until a tenant may use tokens again; None: it may now."""
        return self._daily.retry_after(tenant_id, quotas, self._clock())

    def billed_tokens(self) -> dict[tuple[str, str], float]:
        """Returns the tokens billed since the service started, by (tenant, meter)."""
        return dict(self._billed_tokens)

    def used_by(self, job_id: str) -> dict[str, float]:
        """Returns what a job that is not over was billed for so far, by meter."""
        return dict(self._used.get(job_id, {}))

    @property
    def num_unwritten(self) -> int:
        """Bills that are not in the store yet."""
        return len(self._pending) + bool(self._requests)

    # ---- writing

    async def run(self) -> None:
        """Writes bills as they come, about once a second, and folds old ones together; until cancelled."""
        fold_at = self._clock()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), FOLD_INTERVAL_S)
            self._wake.clear()
            try:
                await self.flush()
                if self._clock() >= fold_at or fold_at > self._clock() + FOLD_INTERVAL_S:  # or the clock was set back
                    fold_at = self._clock() + FOLD_INTERVAL_S
                    oldest = usage_table.utc_day(self._clock() - self._keep_days * DAY_S)
                    await self._store.awrite(usage_table.fold_usage, before_day=oldest, own_source=self._source)
                await asyncio.sleep(WRITE_INTERVAL_S)
            except MarlaasError as error:
                log.warning("use not written bills=%d reason=%s", self.num_unwritten, error)
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def flush(self) -> None:
        """Writes what there is, in one transaction. Raises StorageError; then all of it is tried again the next time."""
        async with self._writing:
            if self._requests:
                self._seq += 1
                amounts, self._requests = dict(self._requests), defaultdict(float)
                self._pending.append(Bill(self._source, self._seq, amounts, self._clock()))
            if bills := tuple(self._pending):
                await self._store.awrite(usage_table.add_metered, bills)
                del self._pending[: len(bills)]

    def _count(self, tenant_id: str, amounts: Mapping[str, float]) -> None:
        for meter in TOKEN_METERS:
            self._billed_tokens[tenant_id, meter] += amounts.get(meter, 0.0)

    def _bill(self, job_id: str, tenant_id: str, step: int, amounts: Mapping[str, float], now: float) -> None:
        by_meter = {(tenant_id, job_id, meter): amount for meter, amount in amounts.items() if amount}
        self._pending.append(Bill(job_id, step, by_meter, now))
        self._billed[job_id] = step
        for meter, amount in amounts.items():
            self._used[job_id][meter] += amount
        self._count(tenant_id, amounts)
        if now // DAY_S == self._clock() // DAY_S:
            self._daily.add(tenant_id, sum(amounts[meter] for meter in TOKEN_METERS), self._clock())
        self._wake.set()


def amounts_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns what a batch used by meter, from its line of metrics."""
    used = {meter: line.get(meters.PREFIX + meter) or 0.0 for meter in meters.METERS}
    own_s = sum(line.get(name) or 0.0 for name in ("device/learner_s", "device/publish_s"))
    return amounts_after(used, line) | {"device_s": own_s + _sampler_s(used, line)}


def amounts_after(used: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, float]:
    """Returns what was used beside batches, at the seconds per token that the last batch's line tells."""
    amounts = {meter: float(used.get(meter) or 0.0) for meter in meters.METERS}
    return amounts | {"device_s": _sampler_s(amounts, line)}


def _sampler_s(used: Mapping[str, float], line: Mapping[str, Any]) -> float:
    """Returns the sampler's seconds for the tokens that are billed: those of attempts that were replaced are left out."""
    pairs = (("prompt_tokens", "device/prefill_s_per_token"), ("sampled_tokens", "device/decode_s_per_token"))
    return sum(used.get(meter, 0.0) * (line.get(rate) or 0.0) for meter, rate in pairs)
