"""Tries a job's environment before the job is queued, so that a reward function that crashes never gets there.

Each trial is a short-lived process (workers/env_trial.py), confined where it runs a tenant's file. So many run at once, one of
each tenant; what was found good is remembered for a while, so that a sweep is tried once. Nothing here blocks the event loop.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from marlaas_jax.config import JobConfig
from marlaas_jax.errors import InvalidConfig, QuotaExceeded, StorageError
from marlaas_jax.service.files import localized, write_upload
from marlaas_jax.workers import lifeline
from marlaas_jax.workers.env_trial import Tried
from marlaas_jax.workers.output import OutputLog
from marlaas_jax.workers.sandbox.sandbox import Place, Sandbox
from marlaas_jax.workers.supervisor import Launch, describe_exit

MAX_WAITING = 16  # of one tenant
RETRY_S = 5.0
REMEMBERED, REMEMBERED_S = 1000, 600.0
TRIAL_MODULE = "marlaas_jax.workers.env_trial"


class EnvChecks:
    """All trials of a service; for the event loop's thread."""

    def __init__(self, timeout_s: float, max_at_once: int):
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(max_at_once)
        self._threads = ThreadPoolExecutor(max_at_once, "marlaas-env-trial")
        self._turns: dict[str, asyncio.Lock] = {}  # of the tenants that have a trial running or waiting
        self._waiting: Counter[str] = Counter()
        self._good: OrderedDict[bytes, tuple[float, Tried]] = OrderedDict()

    async def check(self, tenant_id: str, config: JobConfig, files: Mapping[str, bytes], sandbox: Sandbox | None) -> Tried:
        """Returns what the environment is like. Raises InvalidConfig, one sentence, for one that cannot be trained on."""
        key = await asyncio.to_thread(_digest, tenant_id, config, files)
        if (known := self._good.get(key)) is not None and time.monotonic() < known[0]:
            return known[1]
        if self._waiting[tenant_id] >= MAX_WAITING:
            raise QuotaExceeded(f"{MAX_WAITING} jobs of this tenant are being checked already", RETRY_S)
        self._waiting[tenant_id] += 1
        try:
            async with self._turns.setdefault(tenant_id, asyncio.Lock()), self._places:
                if (known := self._good.get(key)) is None or time.monotonic() >= known[0]:
                    loop = asyncio.get_running_loop()
                    tried = await loop.run_in_executor(self._threads, self._try, config, files, sandbox)
                    known = self._good[key] = time.monotonic() + REMEMBERED_S, tried
                    if len(self._good) > REMEMBERED:
                        self._good.popitem(last=False)
                return known[1]
        finally:
            self._waiting[tenant_id] -= 1
            if not self._waiting[tenant_id]:
                del self._waiting[tenant_id], self._turns[tenant_id]

    def close(self) -> None:
        """Lets no further trial start; those that run end by their deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _try(self, config: JobConfig, files: Mapping[str, bytes], sandbox: Sandbox | None) -> Tried:
        """One trial, in a thread."""
        is_file = config.env.rpartition(":")[0].endswith(".py")
        with contextlib.ExitStack() as stack:
            place = None
            launch = Launch((sys.executable, "-m"), os.environ)
            if is_file and sandbox is not None:
                room = sandbox.room(files)
                stack.callback(room.close)
                place, folder = room.place("trial", None), room.files
                stack.callback(place.close)
                launch = place.start()
            else:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="marlaas-trial-"))) / "files"
                write_upload(folder, files)
            tried = _run(localized(config, files, folder), launch, place, self._timeout_s)
        if tried.fault:
            raise InvalidConfig(tried.fault.replace(f"{folder}/", ""))
        return tried


def _run(config: JobConfig, launch: Launch, place: Place | None, timeout_s: float) -> Tried:
    """Runs the trial's process to its end or its deadline."""
    read_fd, write_fd = os.pipe()
    parent = "" if launch.is_wrapped else str(os.getpid())
    env = dict(launch.env) | {lifeline.FD_VARIABLE: str(read_fd), lifeline.PARENT_VARIABLE: parent}
    try:
        process = subprocess.Popen(
            [*launch.command, TRIAL_MODULE], env=env, cwd=launch.cwd, pass_fds=(read_fd,), start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        os.close(write_fd)
        raise StorageError(f"the environment cannot be tried: {error.strerror or error}") from None
    finally:
        os.close(read_fd)
    if place is not None:
        place.started(process.pid)
    answer, errors = OutputLog(None, 0), OutputLog(None, 0)
    work = [
        threading.Thread(target=function, args=args, name="marlaas-trial-io", daemon=True)
        for function, args in (
            (answer.read_from, (process.stdout,)),
            (errors.read_from, (process.stderr,)),
            (_write, (process.stdin, config.model_dump_json().encode())),
        )
    ]
    for thread in work:
        thread.start()
    fault = ""
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        fault = f"no answer within {timeout_s:g} s"
        code = 0
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
    process.wait()
    os.close(write_fd)
    killed_for = place.ended() if place is not None else ""
    for thread in work:
        thread.join(1.0)
    fault = killed_for or fault
    if not fault and not code:
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(answer.tail(), type=Tried)
    if not fault:
        last = errors.tail().strip().splitlines()[-1:] or [""]
        fault = f"its process ended without an answer, {describe_exit(code)}" + (f": {last[0][:300]}" if last[0] else "")
    return Tried(f"env={config.env!r}: {fault}, when it was tried")


def _write(pipe: IO[bytes], content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.write(content)


def _digest(tenant_id: str, config: JobConfig, files: Mapping[str, bytes]) -> bytes:
    """Returns what stands for all that a trial depends on."""
    relevant = config.model_dump(mode="json", include={"env", "env_args", "data", "seed", "rollout"})
    digest = hashlib.sha256(json.dumps([tenant_id, relevant], sort_keys=True).encode())
    for name, content in sorted(files.items()):
        digest.update(json.dumps([name, len(content)]).encode())
        digest.update(content)
    return digest.digest()
