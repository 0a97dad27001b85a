"""The client for programs that have an event loop."""

import asyncio
import base64
import dataclasses
import json
import tempfile
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

from marlaas_jax.client import job_files, sampling
from marlaas_jax.client.records import Choice, Completion, Event, Job, Key, Sweep, Tenant
from marlaas_jax.client.wire import SUBMIT_TIMEOUT, Wire
from marlaas_jax.errors import InvalidConfig, StorageError, Unreachable

PAGE = 100


class AsyncClient:
    """Talks to a service; URL and key come from the arguments, else from MARLAAS_URL and MARLAAS_API_KEY.

    Requests that were not answered are sent again for at most `patience_s`. Exceptions are those of marlaas_jax.errors.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, *, patience_s: float = 30.0):
        self._wire = Wire(url, api_key, patience_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """Where the service is."""
        return self._wire.url

    async def close(self) -> None:
        """Closes all connections."""
        await self._wire.close()

    # ---- jobs

    async def submit(
        self,
        job: Mapping[str, Any] | str | Path,
        *,
        name: str | None = None,
        files: Mapping[str, bytes | Path] | None = None,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
    ) -> Job:
        """Queues a job: its fields, or a job file, which is sent together with the reward and data files it names.

        `files` (name -> content or path) are sent beside those, such as a module that the reward function imports.
        """
        packed = await asyncio.to_thread(_packed, job, files or {})
        body = {**packed.job, **({} if name is None else {"name": name}), "priority": priority, "labels": dict(labels or {})}
        body["files"] = _encoded(packed.files)
        return Job.of(await self._wire.json("POST", "/v1/jobs", body=body, timeout=SUBMIT_TIMEOUT))

    async def quote(
        self, job: Mapping[str, Any] | str | Path, *, files: Mapping[str, bytes | Path] | None = None
    ) -> dict[str, Any]:
        """Returns what a job would take and cost, with bands, without queueing it; arguments as for `submit`."""
        packed = await asyncio.to_thread(_packed, job, files or {})
        return await self._wire.json("POST", "/v1/quotes", body={**packed.job, "files": _encoded(packed.files)})

    async def jobs(
        self, *, state: Sequence[str] = (), name: str | None = None, labels: Mapping[str, str] | None = None
    ) -> AsyncIterator[Job]:
        """Yields jobs, the newest first: those in one of the states, whose name begins so, that have all the labels."""
        pairs = [f"{key}={value}" for key, value in (labels or {}).items()]
        params = {"state": list(state), "name": name, "label": pairs, "limit": PAGE}
        async for entry in self._pages("/v1/jobs", "jobs", params):
            yield Job.of(entry)

    async def job(self, job_id: str) -> Job:
        """Returns a job as it stands."""
        return Job.of(await self._wire.json("GET", _path(job_id)))

    async def why(self, job_id: str) -> str:
        """Returns in one line what a job waits for."""
        return (await self._wire.json("GET", f"{_path(job_id)}/why"))["why"]

    async def env_workers(self) -> dict[str, Any]:
        """Returns where your own environment workers join (`address`, `server_key`) and which have (`connected`)."""
        return await self._wire.json("GET", "/v1/env-workers")

    async def pause(self, job_id: str) -> Job:
        """Pauses a queued or running job."""
        return Job.of(await self._wire.json("POST", f"{_path(job_id)}/pause"))

    async def resume(self, job_id: str) -> Job:
        """Puts a paused job back into the queue."""
        return Job.of(await self._wire.json("POST", f"{_path(job_id)}/resume"))

    async def cancel(self, job_id: str) -> Job:
        """Ends a job for good; what it trained stays."""
        return Job.of(await self._wire.json("POST", f"{_path(job_id)}/cancel"))

    async def rollback(self, job_id: str, step: int) -> Job:
        """Takes a job back to a committed step, one of `checkpoints`. A running job goes on; any other waits to be resumed."""
        return Job.of(await self._wire.json("POST", f"{_path(job_id)}/rollback", body={"step": step}))

    async def clone(
        self,
        job_id: str,
        changes: Mapping[str, Any] | None = None,
        *,
        files: Mapping[str, bytes | Path] | None = None,
        priority: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Job:
        """Queues a new job like another but for the changes, nested as in a job file."""
        packed = await asyncio.to_thread(_packed, changes or {}, files or {})
        body = {"changes": packed.job, "files": _encoded(packed.files), "priority": priority, "labels": labels}
        return Job.of(await self._wire.json("POST", f"{_path(job_id)}/clone", body=body, timeout=SUBMIT_TIMEOUT))

    async def delete(self, job_id: str) -> None:
        """Deletes an ended job and all its files."""
        await self._wire.json("DELETE", _path(job_id))

    # ---- sweeps

    async def submit_sweep(
        self,
        sweep: Mapping[str, Any] | str | Path,
        *,
        files: Mapping[str, bytes | Path] | None = None,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
    ) -> Sweep:
        """Takes a sweep in: its fields, or a sweep file, which is sent together with the files that its job names."""
        packed = await asyncio.to_thread(_packed_sweep, sweep, files or {})
        body = {**packed.job, "priority": priority, "labels": dict(labels or {}), "files": _encoded(packed.files)}
        return Sweep.of(await self._wire.json("POST", "/v1/sweeps", body=body))

    async def sweeps(self) -> list[Sweep]:
        """Returns the newest sweeps, without their trials."""
        return [Sweep.of(entry) for entry in (await self._wire.json("GET", "/v1/sweeps"))["sweeps"]]

    async def sweep(self, sweep_id: str) -> Sweep:
        """Returns a sweep as it stands, with its trials."""
        return Sweep.of(await self._wire.json("GET", f"/v1/sweeps/{quote(sweep_id, safe='')}"))

    async def cancel_sweep(self, sweep_id: str) -> Sweep:
        """Ends a sweep and its trials that have not ended; what they trained stays."""
        return Sweep.of(await self._wire.json("POST", f"/v1/sweeps/{quote(sweep_id, safe='')}/cancel"))

    # ---- how they go

    async def events(self, job_id: str | None = None, after: int | None = None) -> AsyncIterator[Event]:
        """Yields events behind number `after` as they happen, across lost connections and restarts of the service.

        A job's begin with the oldest that is kept and end when the job is over; without a job those of all jobs, from now on.
        """
        async for entry in self._wire.events("/v1/events" if job_id is None else f"{_path(job_id)}/events", after):
            yield Event.of(entry)

    async def wait(self, job_id: str, on_event: Callable[[Event], object] | None = None) -> Job:
        """Returns the job once it is over; calls `on_event` with each of its events."""
        async for event in self.events(job_id):
            if on_event is not None:
                on_event(event)
        return await self.job(job_id)

    async def metrics(self, job_id: str, first_step: int = 0, last_step: int | None = None) -> list[dict[str, Any]]:
        """Returns the figures of each trained batch between two steps, inclusive."""
        params = {"from": first_step, "to": last_step}
        response = await self._wire.request("GET", f"{_path(job_id)}/metrics", params=params)
        return [json.loads(line) for line in response.text.splitlines()]

    async def episodes(
        self,
        job_id: str,
        *,
        step: int | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        outcome: str | None = None,
        split: str | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """Yields episodes, the oldest that is kept first."""
        params = {
            "step": step, "min_reward": min_reward, "max_reward": max_reward, "outcome": outcome, "split": split, "limit": PAGE,
        }  # fmt: skip
        async for entry in self._pages(f"{_path(job_id)}/episodes", "episodes", params):
            yield entry

    async def evaluations(self, job_id: str) -> list[dict[str, Any]]:
        """Returns the evaluations on held-out items so far."""
        return (await self._wire.json("GET", f"{_path(job_id)}/evaluations"))["evaluations"]

    async def checkpoints(self, job_id: str) -> list[dict[str, Any]]:
        """Returns the committed steps that are kept, the oldest first."""
        return (await self._wire.json("GET", f"{_path(job_id)}/checkpoints"))["checkpoints"]

    async def download_adapter(self, job_id: str, folder: str | Path) -> Path:
        """Writes the adapter of a job that has succeeded as a PEFT folder and returns it; the folder must not exist."""
        folder = Path(folder)
        if folder.exists():
            raise StorageError(f"{folder}: exists already; name a new folder")
        with tempfile.TemporaryFile() as file:
            async for block in self._wire.blocks(f"{_path(job_id)}/adapter"):
                file.write(block)
            await asyncio.to_thread(_extract, file, folder)
        return folder

    async def usage(
        self,
        *,
        first_day: str | None = None,
        last_day: str | None = None,
        job_id: str | None = None,
        by: Sequence[Literal["day", "job", "tenant"]] = (),
    ) -> dict[str, Any]:
        """Returns what was used and its cost: `usage` (rows), `total`, `prices`. `by`: "day", "job", "tenant"; days of UTC."""
        params = {"first_day": first_day, "last_day": last_day, "job": job_id, "by": list(by) or None}
        return await self._wire.json("GET", "/v1/usage", params=params)

    async def fairness(self, window_s: float = 60.0) -> dict[str, Any]:
        """Returns how long work waited in each stage, and how even the shares of the device were in the last seconds."""
        return await self._wire.json("GET", "/v1/fairness", params={"window_s": window_s})

    # ---- sampling

    async def models(self) -> list[str]:
        """Returns what can be sampled from: the base, and jobs with something trained, the newest first."""
        found, cursor = [], None
        while True:
            page = await self._wire.json("GET", "/v1/models", params={"cursor": cursor})
            found += [model["id"] for model in page["data"]]
            if (cursor := page["next_cursor"]) is None:
                return found

    async def complete(self, model: str, prompt: str | Sequence[int], **options: Any) -> Completion:
        """Continues a text or token ids with a model: the base's name, JOB or JOB@STEP.

        `options` are those of `POST /v1/completions`: max_tokens, temperature, top_p, top_k, min_p, n, stop, seed.
        """
        return sampling.completion(await self._wire.json("POST", sampling.TEXT, body=sampling.text(model, prompt, options)))

    async def chat(self, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Completion:
        """Answers a conversation with a model; `options` as of `complete`."""
        return sampling.completion(await self._wire.json("POST", sampling.CHAT, body=sampling.chat(model, messages, options)))

    async def stream_complete(self, model: str, prompt: str | Sequence[int], **options: Any) -> AsyncIterator[Choice]:
        """Does as `complete`; yields what choices grow by, as it comes."""
        async for chunk in self._wire.stream(sampling.TEXT, sampling.text(model, prompt, options)):
            for choice in sampling.choices(chunk):
                yield choice

    async def stream_chat(self, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> AsyncIterator[Choice]:
        """Does as `chat`; yields what choices grow by, as it comes."""
        async for chunk in self._wire.stream(sampling.CHAT, sampling.chat(model, messages, options)):
            for choice in sampling.choices(chunk):
                yield choice

    # ---- tenants, with an admin's key

    async def tenants(self) -> list[Tenant]:
        """Returns all tenants with their keys, without the secrets."""
        return [Tenant.of(entry) for entry in (await self._wire.json("GET", "/v1/tenants"))["tenants"]]

    async def create_tenant(
        self, name: str, *, is_admin: bool = False, weight: float = 1.0, quotas: Mapping[str, Any] | None = None
    ) -> Tenant:
        """Adds a tenant."""
        body = {"name": name, "is_admin": is_admin, "weight": weight, "quotas": dict(quotas or {})}
        return Tenant.of(await self._wire.json("POST", "/v1/tenants", body=body))

    async def change_tenant(
        self,
        tenant_id: str,
        *,
        weight: float | None = None,
        quotas: Mapping[str, Any] | None = None,
        is_disabled: bool | None = None,
    ) -> Tenant:
        """Changes what is not None of a tenant."""
        body = {"weight": weight, "quotas": quotas, "is_disabled": is_disabled}
        return Tenant.of(await self._wire.json("PATCH", f"/v1/tenants/{quote(tenant_id, safe='')}", body=body))

    async def create_key(self, tenant_id: str) -> Key:
        """Makes an API key for a tenant, by id or name; its `secret` cannot be had again."""
        return Key.of(await self._wire.json("POST", f"/v1/tenants/{quote(tenant_id, safe='')}/keys"))

    async def revoke_key(self, key_id: str) -> Key:
        """Ends a key at once and for good."""
        return Key.of(await self._wire.json("DELETE", f"/v1/keys/{quote(key_id, safe='')}"))

    async def _pages(self, path: str, field: str, params: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        cursor = None
        while True:
            page = await self._wire.json("GET", path, params={**params, "cursor": cursor})
            for entry in page[field]:
                yield entry
            if (cursor := page["next_cursor"]) is None:
                return


def _path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def _packed(job: Mapping[str, Any] | str | Path, files: Mapping[str, bytes | Path]) -> job_files.Packed:
    if isinstance(job, Mapping):
        packed = job_files.Packed(dict(job), {})
    else:
        found = job_files.read(Path(job))
        if len(found) != 1:
            raise InvalidConfig(f"{job}: holds {len(found)} jobs; submit takes one")
        packed = found[0]
    return _with(packed, files)


def _packed_sweep(sweep: Mapping[str, Any] | str | Path, files: Mapping[str, bytes | Path]) -> job_files.Packed:
    found = job_files.Packed(dict(sweep), {}) if isinstance(sweep, Mapping) else job_files.read_sweep(Path(sweep))
    return _with(found, files)


def _with(packed: job_files.Packed, files: Mapping[str, bytes | Path]) -> job_files.Packed:
    more = {name: content if isinstance(content, bytes) else content.read_bytes() for name, content in files.items()}
    return dataclasses.replace(packed, files=packed.files | more)


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def _extract(file: Any, folder: Path) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder)
    except zipfile.BadZipFile:
        raise Unreachable(f"{folder}: the download was cut off") from None
