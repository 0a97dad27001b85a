"""The child processes of a run: one device process, data workers, pools of environment workers.

Built-in environments share a pool per family; a job with a user's own file has a pool to itself, so that whatever its code
does stays its own affair. One data worker serves all jobs, a second one those whose items come out of a user's file. Workers
are retired when the last job that uses them is over.
"""

import asyncio
import os
import time
from pathlib import Path

from marlaas_jax.config import RunConfig
from marlaas_jax.device import huge_pages
from marlaas_jax.transport.server import Server
from marlaas_jax.workers.supervisor import Event, Supervisor, WorkerSpec

ENV_BACKOFF_S = 0.25
ENV_MAX_BACKOFF_S = 2.0
ENV_MAX_RESTARTS = 1_000_000  # the orchestrator counts deaths without progress and ends the jobs concerned


class Processes:
    """Starts, names and stops the workers of one run."""

    DEVICE = "device"

    def __init__(self, server: Server, config: RunConfig, run_dir: Path, device_module: str):
        self._server = server
        self._config = config
        self._run_dir = run_dir
        self._device_module = device_module
        self._supervisor = Supervisor()
        self._pools: dict[str, str] = {}  # worker name -> pool
        self._names: dict[str, str] = {}  # worker id -> worker name, of all that ever connected
        self._tasks: set[asyncio.Task[None]] = set()

    def start_device(self) -> None:
        """Starts the process that owns the accelerator."""
        args = ("--config", str(self._run_dir / "config.yaml"))
        self._start(self.DEVICE, self._device_module, args, huge_pages.environment(os.environ), max_restarts=5)

    def start_data_workers(self, names: set[str]) -> None:
        """Starts the processes that hold the items."""
        for name in sorted(names):
            self._start(name, "marlaas_jax.workers.data_worker", (), {}, max_restarts=5)

    def start_pools(self, pools: set[str]) -> None:
        """Starts the environment workers."""
        for pool in sorted(pools):
            for i in range(self._config.runtime.env_workers):
                name = f"{pool}-{i}"
                self._pools[name] = pool
                single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # many processes share the cores
                self._start(name, "marlaas_jax.workers.env_worker", (), single, max_restarts=ENV_MAX_RESTARTS)

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

    def pool_of(self, name: str) -> str:
        """Returns the pool of an environment worker, "" for others."""
        return self._pools.get(name, "")

    def worker_id_of(self, name: str) -> str:
        """Returns the id of the present process of a place."""
        worker = self._supervisor.workers.get(name)
        return worker.worker_id if worker else ""

    def make_sure_it_ends(self, worker_id: str) -> None:
        """Kills the process of a peer that counts as lost, if it still runs; the supervisor starts another."""
        worker = self._supervisor.workers.get(self.name_of(worker_id))
        if worker is not None and worker.worker_id == worker_id and worker.is_running:
            self._supervisor.kill(worker)

    def retire_unused(self, pools: set[str], data_workers: set[str]) -> None:
        """Stops the environment and data workers that no live job needs."""
        for name, worker in list(self._supervisor.workers.items()):
            needed = name == self.DEVICE or self._pools.get(name) in pools or name in data_workers
            if not needed:
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

    def _start(self, name: str, module: str, args: tuple[str, ...], env: dict[str, str], *, max_restarts: int) -> None:
        is_env = name in self._pools
        self._supervisor.start(
            WorkerSpec(
                name=name,
                module=module,
                args=("--address", self._server.address, *args),
                env=env,
                log_path=self._run_dir / "logs" / f"{name}.log",
                max_restarts=max_restarts,
                backoff_s=ENV_BACKOFF_S if is_env else 0.5,
                max_backoff_s=ENV_MAX_BACKOFF_S if is_env else 30.0,
            )
        )
