"""The processes of one controller: which there are, how they are named, when they end.

Places: "device" owns the accelerator; "data" and "data-JOB" hold the items; "env-FAMILY-0" ... run the environments of one
pool, "job-NAME-0" ... those of a job whose environment is a user's file. Data and environment workers are started when the
first job needs them and retired when the last one is over; a place that is needed again while its worker still ends gets a
new name. A job that has a room (sandbox/sandbox.py) gets the workers that run its file confined to it. Workers that others
started are adopted: they have a name and a group, and end when they like.
"""

import asyncio
import dataclasses
import os
import time
from collections.abc import Collection
from pathlib import Path

from marlaas_jax.device import huge_pages
from marlaas_jax.transport.address import socket_folder
from marlaas_jax.workers.sandbox.sandbox import Room
from marlaas_jax.workers.supervisor import Event, Supervisor, WorkerSpec

ENV_BACKOFF_S = 0.25
ENV_MAX_BACKOFF_S = 2.0
ENV_MAX_RESTARTS = 1_000_000  # the orchestrator counts deaths without progress and ends the jobs concerned


@dataclasses.dataclass(frozen=True)
class Credentials:
    """What a worker must be and know to join as one that was started here."""

    token: str
    role: str
    is_confined: bool


class Processes:
    """Starts, names and stops the workers of one controller; `confined_address` is where confined ones connect."""

    DEVICE = "device"

    def __init__(
        self, address: str, confined_address: str, run_dir: Path, device_module: str, env_workers: int, device_restarts: int
    ):
        self._address = address
        self._confined_address = confined_address
        self._run_dir = run_dir
        self._device_module = device_module
        self._env_workers = env_workers
        self._device_restarts = device_restarts
        self._supervisor = Supervisor()
        self._groups: dict[str, str] = {}  # worker name -> its pool or data worker; gone once it is retired
        self._pools: set[str] = set()
        self._names: dict[str, str] = {}  # worker id -> worker name, of all that ever connected
        self._adopted: dict[str, str] = {}  # name -> group
        self._tasks: set[asyncio.Task[None]] = set()
        self._too_late: set[str] = set()  # worker ids that were killed before they ever connected

    @property
    def has_device(self) -> bool:
        """Whether the device's process was started."""
        return self.DEVICE in self._supervisor.workers

    def start_device(self, runtime_path: Path) -> None:
        """Starts the process that owns the accelerator."""
        args = ("--runtime", str(runtime_path))
        self._start(
            self.DEVICE, self._device_module, args, huge_pages.environment(os.environ), max_restarts=self._device_restarts
        )

    def start_data_worker(self, group: str, room: Room | None = None) -> None:
        """Starts a process that holds items, unless it is there."""
        if group not in self._groups.values():
            name = self._free_name(group)
            self._groups[name] = group
            self._start(name, "marlaas_jax.workers.data_worker", (), {}, max_restarts=5, room=room)

    def start_pool(self, pool: str, room: Room | None = None) -> None:
        """Starts the environment workers of a pool, unless they are there."""
        if pool in self._groups.values():
            return
        self._pools.add(pool)
        for i in range(self._env_workers):
            name = self._free_name(f"{pool}-{i}")
            self._groups[name] = pool
            single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # many processes share the cores
            self._start(name, "marlaas_jax.workers.env_worker", (), single, max_restarts=ENV_MAX_RESTARTS, room=room)

    def adopt(self, worker_id: str, group: str, *, is_pool: bool) -> None:
        """Takes in a worker that somebody else started, as one of the group."""
        name = f"{group}/{worker_id}"
        self._names[worker_id] = name
        self._adopted[name] = group
        if is_pool:
            self._pools.add(group)

    def abandon(self, worker_id: str) -> None:
        """Forgets an adopted worker; does nothing about others."""
        if (group := self._adopted.pop(self._names.get(worker_id, ""), None)) is not None:
            del self._names[worker_id]
            if group not in self._adopted.values():
                self._pools.discard(group)

    def adopted(self, group: str) -> list[str]:
        """Returns the worker ids of a group that were adopted."""
        return [worker_id for worker_id, name in self._names.items() if self._adopted.get(name) == group]

    def credentials(self, worker_id: str) -> Credentials | None:
        """Returns what the present process of a worker shows when it joins, None for one that does not run."""
        for name, worker in self._supervisor.workers.items():
            if worker.worker_id == worker_id and worker.is_running:
                role = "device" if name == self.DEVICE else "environment" if self.pool_of(name) else "data"
                return Credentials(worker.token, role, worker.spec.confined is not None)
        return None

    def is_adopted(self, name: str) -> bool:
        """Whether somebody else started the worker at a place."""
        return name in self._adopted

    def is_strange(self, name: str) -> bool:
        """Whether the worker at a place may be another program than ours: it is confined, or was adopted."""
        worker = self._supervisor.workers.get(name)
        return name in self._adopted or (worker is not None and worker.spec.confined is not None)

    async def next_event(self) -> Event:
        """Returns the next thing that happened to a process."""
        return await self._supervisor.next_event()

    def name_of(self, worker_id: str) -> str:
        """Returns the place that a worker id stands for, "" for a stranger's."""
        if worker_id not in self._names:
            for name, worker in self._supervisor.workers.items():
                if worker.worker_id == worker_id:
                    self._names[worker_id] = name
        return self._names.get(worker_id, "")

    def was_connected(self, worker_id: str) -> bool:
        """Whether this start of a worker ever said Hello."""
        return worker_id in self._names

    def group_of(self, name: str) -> str:
        """Returns the pool or data worker that a place belongs to, "" for others."""
        return self._groups.get(name) or self._adopted.get(name, "")

    def pool_of(self, name: str) -> str:
        """Returns the pool of an environment worker, "" for others."""
        group = self.group_of(name)
        return group if group in self._pools else ""

    def worker_id_of(self, group: str) -> str:
        """Returns the id of the present process of a data worker, "" if there is none."""
        name = next((name for name, other in self._groups.items() if other == group), "")
        if (worker := self._supervisor.workers.get(name)) is not None:
            return worker.worker_id
        return next(iter(self.adopted(group)), "")

    def make_sure_it_ends(self, worker_id: str) -> None:
        """Kills the process of a peer that counts as lost, if it still runs; the supervisor starts another."""
        worker = self._supervisor.workers.get(self.name_of(worker_id))
        if worker is not None and worker.worker_id == worker_id and worker.is_running:
            self._supervisor.kill(worker)

    def kill_unconnected(self, after_s: float) -> list[str]:
        """Kills processes that did not connect within so long of their start, and returns their places; others are started."""
        late = [
            worker
            for worker in self._supervisor.workers.values()
            if worker.is_running and worker.age_s > after_s and worker.worker_id not in self._too_late | self._names.keys()
        ]
        for worker in late:
            self._too_late.add(worker.worker_id)
            self._supervisor.kill(worker)
        return [worker.spec.name for worker in late]

    def retire_unused(self, needed: Collection[str]) -> None:
        """Stops the environment and data workers whose group is not among the needed ones."""
        for name, group in list(self._groups.items()):
            if group in needed:
                continue
            del self._groups[name]
            self._pools.discard(group)
            if (worker := self._supervisor.workers.get(name)) is not None:
                task = asyncio.create_task(self._supervisor.stop(worker))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def stop(self, timeout_s: float) -> None:
        """Ends all workers; the device, which was told to end, has `timeout_s` to finish its running saves."""
        device = self._supervisor.workers.get(self.DEVICE)
        others = [worker for worker in self._supervisor.workers.values() if worker is not device]
        ending = asyncio.gather(*(self._supervisor.stop(worker) for worker in others))
        end = time.monotonic() + timeout_s
        while device is not None and device.is_running and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await ending
        await self._supervisor.stop_all()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _free_name(self, name: str) -> str:
        """Returns the name, or with a number after it while a worker of that name still ends."""
        number, free = 1, name
        while free in self._supervisor.workers:
            number += 1
            free = f"{name}.{number}"
        return free

    def _start(
        self,
        name: str,
        module: str,
        args: tuple[str, ...],
        env: dict[str, str],
        *,
        max_restarts: int,
        room: Room | None = None,
    ) -> None:
        address = self._address if room is None else self._confined_address
        is_env = self.pool_of(name) != ""
        self._supervisor.start(
            WorkerSpec(
                name=name,
                module=module,
                args=("--address", address, *args),
                env=env,
                log_path=self._run_dir / "logs" / f"{name}.log",
                max_restarts=max_restarts,
                backoff_s=ENV_BACKOFF_S if is_env else 0.5,
                max_backoff_s=ENV_MAX_BACKOFF_S if is_env else 30.0,
                grace_s=0.0 if name == self.DEVICE else 5.0,  # it ends by Shutdown, or was given its time and is past it
                confined=None if room is None else room.place(name, socket_folder(address)),
            )
        )
