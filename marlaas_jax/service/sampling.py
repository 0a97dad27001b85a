"""Sampling for tenants who wait for the answer: which weights a name means, what may be asked, the way to the device and back.

A model is the base's name, JOB (its newest version: the published one while it runs, else the last that was committed) or
JOB@STEP (a committed step). All of a tenant's requests have one place in the sampler's queue, within the tenant's share, beside
its jobs' rollouts. A request that the device lost before anything of it was delivered is sent again; every wait ends
at the request's deadline.
"""

import asyncio
import contextlib
import logging
import re
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from marlaas_jax.errors import MarlaasError, NotFound, QuotaExceeded, WorkerLost
from marlaas_jax.fairness import Owner
from marlaas_jax.messages import BASE_MODEL, LATEST, Generate, Generated, GeneratedPart, Sampling
from marlaas_jax.service.job_folder import checkpoints
from marlaas_jax.service.metering import Metering
from marlaas_jax.service.quotas import Load, Quotas, why_refused
from marlaas_jax.store.jobs import JobRecord
from marlaas_jax.store.tenants import Tenant
from marlaas_jax.workers.controller import Controller
from marlaas_jax.workers.controller_requests import Answer, Ticket

log = logging.getLogger(__name__)

MAX_OPEN = 4096  # requests of all tenants
RETRY_S = 2.0  # after which a place may be free again
DEVICE_RETRY_S = 10.0
POLL_S = 0.05
SHARE = "interactive/"  # goes before a job of equal standing in the sampler's queue, which breaks ties by name


class NotServed(MarlaasError):
    """A request that was in order and could not be answered, or not in time."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = DEVICE_RETRY_S):
        super().__init__(message)
        self.status = status  # 500, 503 or 504
        self.retry_after_s = retry_after_s


class _Again(Exception):
    """What was sent is lost; it may be sent again."""


@dataclass(frozen=True)
class Model:
    """What a name means to a tenant."""

    name: str
    record: JobRecord | None = None  # None: the base
    step: int | None = None  # None: the newest


@dataclass(frozen=True)
class Order:
    """What somebody wants: for each prompt one choice per seed."""

    tenant: Tenant
    model: Model
    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    sampling: Sampling
    is_partial: bool = False  # choices are delivered as they grow

    @property
    def num_tokens(self) -> int:
        """Tokens that it may take."""
        return sum(map(len, self.prompts)) + len(self.prompts) * len(self.seeds) * self.sampling.max_tokens


@dataclass(frozen=True)
class Piece:
    """What a choice grew by. `finish_reason` is "" while it goes on, else "stop" or "length"."""

    choice: int  # prompt * number of seeds + seed
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    version: int | None  # of a running job its optimizer steps, of a committed step its number; None: the base
    fingerprint: str


class SamplingDesk:
    """Takes orders. For the event loop's thread."""

    def __init__(
        self,
        controller: Controller,
        data_dir: Path,
        timeout_s: float,
        find_job: Callable[[Tenant, str], Awaitable[JobRecord]],
        quotas_of: Callable[[Tenant], Quotas],
        metering: Metering,
    ):
        self.controller = controller
        self.timeout_s = timeout_s
        self._data_dir = data_dir
        self._find_job = find_job
        self._quotas_of = quotas_of
        self._metering = metering
        self._tokens: Counter[str] = Counter()  # of open requests, by tenant
        self._num_open = 0
        self._is_closed = False

    @property
    def base(self) -> str:
        """The name of the base model: its short name or hub id, of a path the last part."""
        model = self.controller.runtime.model
        return Path(model).name if Path(model).exists() else model

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model knows."""
        assert self.controller.model is not None, "before `serve` has called `started`"
        return self.controller.model.vocab_size

    @property
    def max_context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.controller.runtime.engine.max_context

    @property
    def num_open(self) -> int:
        """Requests that are not answered in full."""
        return self._num_open

    async def model(self, tenant: Tenant, name: str) -> Model:
        """Returns what a name means. Raises NotFound, also for another tenant's job."""
        if name == self.base:
            return Model(name)
        unknown = NotFound(f"model={name[:80]!r}: no such model; GET /v1/models lists those of this key")
        match = re.fullmatch(r"(job_[0-9A-Za-z]{1,64})(?:@([0-9]{1,12}))?", name)
        if match is None:
            raise unknown
        try:
            record = await self._find_job(tenant, match[1])
        except NotFound:
            raise unknown from None
        return Model(name, record, None if match[2] is None else int(match[2]))

    async def stored_steps(self, record: JobRecord) -> dict[int, tuple[str, int]]:
        """Returns where a job's weights are on disk, and when they were written, by committed step; the newest is last."""
        return await asyncio.to_thread(_stored_steps, self._data_dir, record)

    def is_published(self, record: JobRecord) -> bool:
        """Whether the device holds a version that the job published."""
        job = self.controller.jobs.get(record.id)
        return job is not None and job.is_live and job.device_ready is not None

    def take(self, order: Order) -> "Work":
        """Returns the order's work, which begins when it is asked for; close it. Raises QuotaExceeded or NotServed."""
        tenant, quotas = order.tenant, self._quotas_of(order.tenant)
        if self._is_closed:
            raise NotServed(503, "the service is ending")
        if self._num_open >= MAX_OPEN:
            raise NotServed(503, f"{MAX_OPEN} requests are open; no more are taken", RETRY_S)
        load = Load(queued_tokens=self._tokens[tenant.id], tokens_today=self._metering.tokens_today(tenant.id))
        if refused := why_refused(quotas, load, tokens=order.num_tokens):
            wait_s = self._metering.retry_after(tenant.id, quotas)
            raise QuotaExceeded(refused, RETRY_S if wait_s is None else wait_s)
        self._num_open += 1
        self._tokens[tenant.id] += order.num_tokens
        return Work(self, order)

    def close(self) -> None:
        """Takes no more orders; those that are open go on."""
        self._is_closed = True

    def give_back(self, order: Order) -> None:
        """An order's work is closed."""
        self._num_open -= 1
        self._tokens[order.tenant.id] -= order.num_tokens
        if not self._tokens[order.tenant.id]:
            del self._tokens[order.tenant.id]

    async def placed(self, order: Order) -> Generate:
        """Returns the order as the device takes it, but for the prompt. Waits for a job that is about to publish."""
        record, step = order.model.record, order.model.step
        tenant = order.tenant
        common = Generate(
            "", "", 0, (), order.seeds, order.sampling, version=BASE_MODEL, share=SHARE + tenant.id,
            owner=Owner(tenant.id, tenant.weight), partial=order.is_partial,
        )  # fmt: skip
        if record is None:
            return common
        while True:
            job = self.controller.jobs.get(record.id)
            if step is None and job is not None and self.is_published(record):
                return replace(common, job=record.id, incarnation=job.incarnation, version=LATEST)
            steps = await self.stored_steps(record)
            wanted = max(steps, default=None) if step is None else step
            if wanted in steps:
                source, written = steps[wanted]
                name = f"{record.id}@{wanted}"
                return replace(common, job=name, incarnation=written, version=wanted, adapter=source)
            if step is not None or job is None or not job.is_live:
                kept = ", ".join(map(str, steps)) or "none"
                raise NotFound(f"model={order.model.name!r}: no such committed step; committed and kept: {kept}")
            await asyncio.sleep(POLL_S)

    def count(self, order: Order, prompt: tuple[int, ...], done: list[Generated]) -> None:
        """Meters what the device computed for one prompt, wanted to the end or not."""
        sampled = sum(len(answer.token_ids) for answer in done)
        if not sampled and all(answer.finish_reason in ("cancelled", "missing", "error") for answer in done):
            return
        record = order.model.record
        used = {"prompt_tokens": len(prompt), "sampled_tokens": sampled, "job_id": "" if record is None else record.id}
        # Not here: this is within the handling of a message, and a fault of the books is not the device's.
        asyncio.get_running_loop().call_soon(lambda: self._metering.record_request(order.tenant.id, **used))


class Work:
    """One order on its way. `close` frees what it holds, on the device too."""

    def __init__(self, desk: SamplingDesk, order: Order):
        self.order = order
        self._desk = desk
        self._requests = desk.controller.requests
        self._deadline = asyncio.get_running_loop().time() + desk.timeout_s
        self._tickets: dict[str, tuple[int, Ticket]] = {}  # by request id: the prompt's index
        self._is_closed = False

    async def all(self) -> list[Piece]:
        """Returns all choices, each in one piece or more. Raises NotServed or NotFound."""
        while True:
            try:
                return [piece async for piece in self._attempt()]
            except _Again as lost:
                log.info("request sent again reason=%s", lost)
                await asyncio.sleep(POLL_S)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields pieces as they come; what is lost once one was delivered raises NotServed."""
        has_begun = False
        while True:
            try:
                async for piece in self._attempt():
                    has_begun = True
                    yield piece
                return
            except _Again as lost:
                if has_begun:
                    raise NotServed(503, f"the stream cannot go on: {lost}") from None
                log.info("request sent again reason=%s", lost)
                await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Cancels what has not ended. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._cancel()
            self._desk.give_back(self.order)

    async def _attempt(self) -> AsyncIterator[Piece]:
        order = self.order
        self._cancel()
        named = await self._in_time(self._ready())
        answers: asyncio.Queue[Answer | None] = asyncio.Queue()
        for index, prompt in enumerate(order.prompts):
            on_end = lambda done, prompt=prompt: self._desk.count(order, prompt, done)
            ticket = self._requests.start(replace(named, prompt_ids=prompt), answers, on_end)
            self._tickets[ticket.request_id] = index, ticket
        told = [(0, 0)] * (len(order.prompts) * len(order.seeds))  # tokens and characters in earlier pieces
        num_left = len(told)
        while num_left:
            answer = await self._in_time(answers.get())
            if answer is None:
                raise _Again("the device was lost")
            choice = self._tickets[answer.request_id][0] * len(order.seeds) + answer.sample
            if isinstance(answer, GeneratedPart):
                tokens, characters = told[choice]
                told[choice] = tokens + len(answer.token_ids), characters + len(answer.text)
                yield _piece(choice, answer, answer.token_ids, answer.logprobs, answer.text, "")
                continue
            if answer.finish_reason in ("missing", "cancelled"):
                raise _Again(answer.error or "it was cancelled")
            if answer.finish_reason == "error":
                log.error("request failed model=%s reason=%s", order.model.name, answer.error)
                raise NotServed(500, f"model={order.model.name!r}: cannot be sampled from; the service's log says why", None)
            tokens, characters = told[choice]
            reason = "stop" if answer.finish_reason == "stop" else "length"
            num_left -= 1
            rest = answer.logprobs[4 * tokens :]
            yield _piece(choice, answer, answer.token_ids[tokens:], rest, answer.text[characters:], reason)

    async def _ready(self) -> Generate:
        try:
            while not self._requests.has_device:
                await self._requests.device()
        except WorkerLost as error:
            raise NotServed(503, f"there is no device: {error}") from None
        return await self._desk.placed(self.order)

    async def _in_time(self, work: Any) -> Any:
        """Returns what the work does. Raises NotServed at the deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._deadline):
                return await work
        limit = f"not answered within request_timeout_s={self._desk.timeout_s:g}"
        compiled, total = self._desk.controller.programs
        if not self._requests.has_device or compiled < total:
            raise NotServed(503, f"{limit}: the device is starting ({compiled} of {total} programs compiled)")
        raise NotServed(504, f"{limit}: ask for fewer tokens, or later", RETRY_S)

    def _cancel(self) -> None:
        for _, ticket in self._tickets.values():
            ticket.cancel()
        self._tickets = {}


def _piece(choice: int, answer: Answer, token_ids: tuple[int, ...], logprobs: bytes, text: str, reason: str) -> Piece:
    version = None if answer.version == BASE_MODEL else answer.version
    return Piece(choice, token_ids, struct.unpack(f"<{len(token_ids)}f", logprobs), text, reason, version, answer.fingerprint)


def _stored_steps(data_dir: Path, record: JobRecord) -> dict[int, tuple[str, int]]:
    folder = data_dir / "jobs" / record.id
    source = str(data_dir / record.id)  # device.initial reads RUN_DIR/JOB@STEP, RUN_DIR/jobs/JOB being the job's folder
    steps = {entry["step"]: (f"{source}@{entry['step']}", int(entry["time"] * 1e6)) for entry in checkpoints(folder)}
    export = folder / "adapter" / "adapter_config.json"
    if not steps and record.state == "succeeded" and export.is_file():
        steps[record.step] = str(export.parent), int(export.stat().st_mtime * 1e6)
    return steps
