"""Plays the scripted day on a running service through the client of each tenant, and notes what came of every job."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import httpx

from marlaas_jax.bench.service.plan import Day, Planned
from marlaas_jax.bench.service.served import UNLIMITED, Served, gauges
from marlaas_jax.client.asynchronous import AsyncClient
from marlaas_jax.client.records import Job
from marlaas_jax.errors import InternalError, MarlaasError

SNAPSHOT_INTERVAL_S = 5.0  # of how each running job stands
SHARE_INTERVAL_S = 0.5
BEGUN_STEPS = 2  # after which a job has work in all stages


@dataclasses.dataclass(frozen=True)
class Record:
    """What came of one job."""

    planned: Planned
    job: Job
    rewards: list[float | None]  # mean of each trained batch
    turn_s: list[float]  # from a turn's request to its last token, one per completion; of the phases that need it
    turn_tokens: list[int]
    eta_within: list[bool]  # per band that was forecast, whether the job ended in it

    def as_dict(self) -> dict[str, Any]:
        """Returns the record for a JSON file."""
        job = {name: value for name, value in vars(self.job).items() if name not in ("config", "status", "why")}
        planned = {name: value for name, value in vars(self.planned).items() if name != "config"}
        return {
            "planned": planned, "job": job, "config": self.job.config, "rewards": self.rewards, "eta_within": self.eta_within,
        }  # fmt: skip


@dataclasses.dataclass
class Shares:
    """Device seconds of each counted tenant in the window."""

    seconds: dict[str, float]  # by the tenant's name
    weights: dict[str, float]
    window_s: float
    backlogged: float  # share of the looks at which every job had a batch waiting or in training


class Driver:
    """One day on one service; `log` is told where it stands. A job may take `patience_s` until its end."""

    def __init__(self, day: Day, service: Served, log: Callable[[str], None], patience_s: float = 60.0):
        self.day = day
        self.records: list[Record] = []
        self.jobs: dict[str, Job] = {}  # by the plan's name, once submitted
        self._service = service
        self._log = log
        self._patience_s = patience_s
        self._clients: dict[str, AsyncClient] = {}
        self._steps: dict[str, int] = {}  # by the plan's name
        self._eta_within: dict[str, list[bool]] = {}
        self._started = time.monotonic()

    @contextlib.asynccontextmanager
    async def tenants(self) -> AsyncIterator[None]:
        """Makes the tenants with their keys, and looks at their jobs again and again, as long as the context is open."""
        async with self._service.client(self._service.admin_key, self._patience_s) as admin:
            for name, weight in {"warmup": 1.0, **self.day.tenants}.items():
                tenant = await admin.create_tenant(name, weight=weight, quotas=UNLIMITED)
                key = await admin.create_key(tenant.id)
                self._clients[name] = self._service.client(key.secret or "", self._patience_s)
            looking = asyncio.create_task(self._look(admin))
            try:
                yield
            finally:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
                for client in self._clients.values():
                    await client.close()

    # ---- phases

    async def warm_up(self) -> None:
        """Returns once the device has compiled everything and trained a first batch."""
        config = self.day.jobs[0].config | {"steps": 1}
        record = await self.play(Planned("warmup", "warmup", "start", "warm-up", config), keep=False)
        if record.job.state != "succeeded":
            raise InternalError(f"the first job did not train: {record.job.reason}")

    async def alone(self) -> None:
        """Runs the jobs of `alone`, one after the other."""
        for planned in self.day.of("alone"):
            await self.play(planned, reads_turns=planned is self._twin)

    async def shares(self) -> Shares:
        """Runs the jobs of `shares` until all are backlogged, then for the window, and cancels them."""
        jobs = self.day.of("shares")
        async with self._playing(jobs) as tasks:
            await self._begun(jobs, tasks)
            shares = await self._measure(jobs)
            for planned in jobs:
                await self.cancel(planned)
        return shares

    async def flood_and_crowd(self) -> None:
        """Lets the flood begin, the small job run beside it, and then the crowd come."""
        flood, crowd = self.day.of("flood"), self.day.of("crowd")
        async with self._playing(flood) as tasks:
            await self._begun(flood[:1], tasks)
            await self.play(self.day.of("small")[0], reads_turns=True)
            self._log("the crowd arrives")
            async with self._playing(crowd):
                pass

    async def crowd(self) -> None:
        """Lets only the crowd come."""
        async with self._playing(self.day.of("crowd")):
            pass

    @property
    def _twin(self) -> Planned | None:
        """The job of `alone` that is the small one's own."""
        for small in self.day.of("small"):
            return next(job for job in self.day.of("alone") if job.config["env"] == small.config["env"])
        return None

    # ---- one job

    async def play(self, planned: Planned, *, keep: bool = True, reads_turns: bool = False) -> Record:
        """Submits a job, does to it what its owner would, and returns its record once it is over."""
        await asyncio.sleep(planned.at_s)
        client = self._clients[planned.tenant]
        job = await client.submit(planned.config, name=planned.name, files=planned.files, labels={"phase": planned.phase})
        self.jobs[planned.name] = job
        async with asyncio.TaskGroup() as group:
            owner = group.create_task(self._own(planned, client, job.id))
            job = await client.wait(job.id, lambda event: self._on_event(planned, event.kind, event.data))
            owner.cancel()
        rows = await client.metrics(job.id)
        turns = [turn async for turn in self._turns(client, job.id)] if reads_turns else []
        record = Record(
            planned, job, [row.get("rollout/reward_mean") for row in rows],
            [turn["generate_s"] for turn in turns], [turn["num_tokens"] for turn in turns],
            self._eta_within.get(planned.name, []),
        )  # fmt: skip
        if keep:
            self.records.append(record)
        elapsed_s = time.monotonic() - self._started
        self._log(f"{elapsed_s:5.0f} s  {planned.phase}: {planned.name} {job.state} at step {job.step}  {job.reason}".rstrip())
        return record

    def _on_event(self, planned: Planned, kind: str, data: dict[str, Any]) -> None:
        if kind == "step":
            self._steps[planned.name] = max(self._steps.get(planned.name, 0), int(data["step"] or 0))
        if kind == "eta_checked":
            self._eta_within.setdefault(planned.name, []).append(bool(data["is_within"]))

    async def cancel(self, planned: Planned) -> None:
        """Cancels a job that was submitted."""
        await self._clients[planned.tenant].cancel(self.jobs[planned.name].id)

    async def reached(self, planned: Planned, step: int) -> None:
        """Returns once the job has trained so many batches."""
        while self._steps.get(planned.name, 0) < step:
            await asyncio.sleep(0.1)

    async def _own(self, planned: Planned, client: AsyncClient, job_id: str) -> None:
        """Cancels, or pauses and resumes, once the job is as far as planned."""
        if planned.cancel_at is None and planned.pause_at is None:
            return
        await self.reached(planned, planned.cancel_at or planned.pause_at or 0)
        if planned.cancel_at is not None:
            await client.cancel(job_id)
            return
        await client.pause(job_id)
        while (job := await client.job(job_id)).state != "paused":
            if job.is_over:
                return  # it was quicker
            await asyncio.sleep(0.2)
        await client.resume(job_id)

    @staticmethod
    async def _turns(client: AsyncClient, job_id: str) -> AsyncIterator[dict[str, Any]]:
        async for episode in client.episodes(job_id, split="train"):
            for turn in episode["turns"]:
                yield turn

    # ---- many jobs

    @contextlib.asynccontextmanager
    async def _playing(self, jobs: Iterable[Planned]) -> AsyncIterator[list[asyncio.Task[Record]]]:
        """Plays jobs while the context is open and waits for their ends; a fault of one ends all."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.play(planned)) for planned in jobs]
            yield tasks

    async def _begun(self, jobs: list[Planned], tasks: list[asyncio.Task[Record]]) -> None:
        await asyncio.gather(*(self.reached(planned, BEGUN_STEPS) for planned in jobs))
        if any(task.done() for task in tasks):
            raise InternalError("a job that was to stay for a phase has ended before it began; give it more steps")

    async def _measure(self, jobs: list[Planned]) -> Shares:
        """Returns the device seconds of each tenant in the window that begins now: the device's reports, summed."""
        by_id = {self.jobs[planned.name].id: planned.tenant for planned in jobs}
        seconds = dict.fromkeys(by_id.values(), 0.0)
        looks = backlogged = 0
        begin = last = time.monotonic()
        async with httpx.AsyncClient(trust_env=False) as http, self._service.client(self._service.admin_key) as admin:
            while last - begin < self.day.sizes.window_s:
                await asyncio.sleep(SHARE_INTERVAL_S)
                found = await gauges(http, self._service)
                now = time.monotonic()
                for name, labels, value in found:
                    if name == "marlaas_job_device_share" and labels["job"] in by_id:
                        seconds[by_id[labels["job"]]] += value * (now - last)
                last = now
                statuses = [(await admin.job(job_id)).status for job_id in by_id]
                looks += 1
                backlogged += all(status and status["queues"].get("training_batches") for status in statuses)
        weights = {name: self.day.tenants[name] for name in seconds}
        return Shares(seconds, weights, last - begin, backlogged / looks)

    async def _look(self, admin: AsyncClient) -> None:
        """Writes down, every few seconds, how each job stands."""
        path = self._service.folder / "snapshots.jsonl"
        with path.open("a", encoding="utf-8") as file:
            while True:
                await asyncio.sleep(SNAPSHOT_INTERVAL_S)
                live = [job for job in list(self.jobs.values()) if job.name not in self._over()]
                for job in live:
                    try:
                        now = await admin.job(job.id)
                    except MarlaasError as error:  # the service is away: the next look is soon
                        self._log(f"no look at {job.name}: {error}")
                        break
                    line = {"time": time.time(), "name": job.name, "state": now.state, "status": now.status, "why": now.why}
                    await asyncio.to_thread(_append, file, line)

    def _over(self) -> set[str]:
        return {record.planned.name for record in self.records}


def _append(file: Any, record: dict[str, Any]) -> None:
    file.write(json.dumps(record) + "\n")
    file.flush()


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Writes a line of JSON per job."""
    path.write_text("".join(json.dumps(record.as_dict()) + "\n" for record in records), encoding="utf-8")


def run_with_timeout(work: Coroutine[Any, Any, Any], timeout_s: float, what: str) -> Any:
    """Runs the coroutine in a new event loop. Raises InternalError, naming what it was, after so long.

    Of several faults at once the first is raised.
    """

    async def bounded() -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            raise InternalError(f"{what}: no end within {timeout_s:.0f} s") from None

    try:
        return asyncio.run(bounded())
    except BaseExceptionGroup as group:
        raise _first(group) from group


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
