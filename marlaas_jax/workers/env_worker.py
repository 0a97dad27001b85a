"""Main loop of an environment worker: many episodes of many jobs in one process, without JAX and without a tokenizer.

A user's plain functions run in threads and its coroutines in the event loop, each call under its own time limit. Heartbeats
have their own thread, so a slow environment never looks like a dead worker. A coroutine that blocks the loop beyond its limit
costs the process: the watchdog names the episode, says so, and exits; the supervisor starts a new one.

    python -m marlaas_jax.workers.env_worker --address ipc:///...   (also by hand, for a pool elsewhere)
"""

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import msgspec

from marlaas_envs import registry
from marlaas_envs.protocol import Action, EnvFamily, EnvLookupError
from marlaas_jax.errors import InternalError, ProtocolMismatch, WorkerLost
from marlaas_jax.messages import (
    EnvClose,
    EnvDone,
    EnvError,
    EnvLoaded,
    EnvReset,
    EnvStep,
    LoadEnv,
    Message,
    RemoveJob,
    Shutdown,
    WorkerFailed,
)
from marlaas_jax.transport.client import Client
from marlaas_jax.transport.memory import MemoryClient
from marlaas_jax.workers import lifeline, remote_worker
from marlaas_jax.workers.env_answers import to_message
from marlaas_jax.workers.remote_worker import Remote
from marlaas_jax.workers.supervisor import EXIT_BAD_CONFIG, EXIT_BLOCKED, EXIT_CONTROLLER_GONE, EXIT_CRASHED, EXIT_OK
from marlaas_jax.workers.user_calls import Failure, TooManyAbandoned, UserCalls, bounded_traceback

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 300.0  # imports of environment libraries take up to half a minute on a busy machine
CLOSE_TIMEOUT_S = 5.0
_TICK_S = 0.25
_GRACE_S = 1.0  # of the watchdog, beyond a call's own limit


@dataclasses.dataclass
class _Loaded:
    """A job's environment."""

    incarnation: int
    name: str
    args: dict[str, Any]
    family: EnvFamily
    reply_roles: tuple[str, ...]


@dataclasses.dataclass
class _Episode:
    """One episode in progress. `task` is the call it waits for."""

    episode_id: str
    attempt: int
    job: str
    env: Any = None
    turn: int = 0  # of the completion that it waits for next
    task: asyncio.Task[None] | None = None


class EnvWorker:
    """Handles the messages of one connection; every method runs in the event loop, except the two threads'."""

    def __init__(self, client: Client | MemoryClient, remote: Remote | None = None):
        self._client = client
        self._remote = remote
        self._calls = UserCalls()
        self._loaded: dict[str, _Loaded] = {}
        self._episodes: dict[str, _Episode] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._stopped: asyncio.Future[int] | None = None
        self._ticked = time.monotonic()

    async def run(self) -> int:
        """Serves until told to stop. Returns the exit code."""
        loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        threading.Thread(target=self._pump, args=(loop,), name="marlaas-pump", daemon=True).start()
        threading.Thread(target=self._watch, args=(loop,), name="marlaas-watchdog", daemon=True).start()
        self._tick(loop)
        code = await self._stopped
        for episode in list(self._episodes.values()):
            self._end(episode)
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)
        return code

    def stop(self) -> None:
        """Ends `run`, which says goodbye."""
        self._stop(EXIT_OK)

    # ---- messages

    def _on_message(self, message: Message) -> None:
        match message:
            case LoadEnv():
                self._start(self._load(message))
            case EnvReset():
                self._on_reset(message)
            case EnvStep():
                self._on_step(message)
            case EnvClose():
                episode = self._episodes.get(message.episode_id)
                if episode is not None and episode.attempt <= message.attempt:
                    self._end(episode)
            case RemoveJob():
                loaded = self._loaded.get(message.job)
                if loaded is not None and loaded.incarnation <= message.incarnation:
                    self._drop_job(message.job)
            case Shutdown():
                self._stop(EXIT_OK)
            case _:
                log.warning("message ignored type=%s", type(message).__name__)

    async def _load(self, message: LoadEnv) -> None:
        known = self._loaded.get(message.job)
        if known is not None and known.incarnation > message.incarnation:
            return
        if known is None or known.incarnation < message.incarnation:
            self._drop_job(message.job)
            env = message.env if self._remote is None else self._remote.env_for(message.env)
            found = await self._calls.run(None, _find_family, env, message.env_args, timeout_s=LOAD_TIMEOUT_S)
            if isinstance(found, Failure):
                log.warning("environment not loaded job=%s env=%s kind=%s", message.job, message.env, found.kind)
                text = (
                    found.text if found.kind == "raised" else f"env={message.env!r}: loading it took over {LOAD_TIMEOUT_S:g} s"
                )
                self._send(EnvLoaded(message.job, message.incarnation, error=text))
                return
            if isinstance(found, str):
                self._send(EnvLoaded(message.job, message.incarnation, error=found))
                return
            family, roles = found
            known = self._loaded[message.job] = _Loaded(message.incarnation, env, message.env_args, family, roles)
            log.info("environment loaded job=%s env=%s", message.job, message.env)
        retry = getattr(known.family, "retry", "") != "never"
        prompt_once = bool(known.family.prompt_once)
        self._send(
            EnvLoaded(
                message.job, message.incarnation, prompt_once=prompt_once, retry_lost=retry, reply_roles=known.reply_roles
            )
        )

    def _on_reset(self, message: EnvReset) -> None:
        known = self._episodes.get(message.episode_id)
        if known is not None:
            if known.attempt >= message.attempt:
                return  # said twice, or late
            self._end(known)
        loaded = self._loaded.get(message.job)
        if loaded is None or loaded.incarnation != message.incarnation:
            text = f"this worker has not loaded job {message.job} ({message.incarnation})"
            self._send(EnvError(message.episode_id, message.attempt, "lost", text))
            return
        episode = self._episodes[message.episode_id] = _Episode(message.episode_id, message.attempt, message.job)
        episode.task = self._start(self._reset(episode, loaded, message))

    def _on_step(self, message: EnvStep) -> None:
        episode = self._episodes.get(message.episode_id)
        if episode is None:
            self._send(EnvError(message.episode_id, message.attempt, "lost", "this worker does not know the episode"))
        elif episode.attempt == message.attempt and message.turn == episode.turn and episode.task is None:
            episode.turn += 1
            episode.task = self._start(self._step(episode, message))
        # else said twice, or late: a step is never taken again

    async def _reset(self, episode: _Episode, loaded: _Loaded, message: EnvReset) -> None:
        end = time.monotonic() + message.timeout_s
        item = msgspec.json.decode(message.item)
        env = await self._calls.run(
            episode, registry.make, loaded.family, loaded.name, loaded.args, timeout_s=message.timeout_s
        )
        if not isinstance(env, Failure):
            episode.env = env
            left_s = max(0.001, end - time.monotonic())
            env = await self._calls.run(episode, env.reset, item, message.seed, timeout_s=left_s)
        self._answer(episode, env)

    async def _step(self, episode: _Episode, message: EnvStep) -> None:
        action = Action(message.text, message.finish_reason, message.num_tokens)
        self._answer(episode, await self._calls.run(episode, episode.env.step, action, timeout_s=message.timeout_s))

    def _answer(self, episode: _Episode, result: Any) -> None:
        if self._episodes.get(episode.episode_id) is not episode:
            return  # closed meanwhile
        if isinstance(result, Failure):
            answer = EnvError(episode.episode_id, episode.attempt, result.kind, result.text)
        else:
            answer = to_message(result, episode.episode_id, episode.attempt, episode.turn)
        episode.task = None
        if isinstance(answer, EnvDone | EnvError):
            self._end(episode)
        self._send(answer)

    # ---- life and death

    def _end(self, episode: _Episode) -> None:
        """Forgets an episode; a call in progress is cancelled, its answer ignored."""
        if self._episodes.get(episode.episode_id) is episode:
            del self._episodes[episode.episode_id]
        if episode.task is not None:
            episode.task.cancel()
            episode.task = None
        close = getattr(episode.env, "close", None)
        if close is not None:
            self._start(self._close(episode, close))

    async def _close(self, episode: _Episode, close: Any) -> None:
        result = await self._calls.run(episode, close, timeout_s=CLOSE_TIMEOUT_S)
        if isinstance(result, Failure):
            log.warning(
                "close failed job=%s episode_id=%s kind=%s text=%s", episode.job, episode.episode_id, result.kind, result.text
            )

    def _drop_job(self, job: str) -> None:
        self._loaded.pop(job, None)
        for episode in [e for e in self._episodes.values() if e.job == job]:
            self._end(episode)

    def _start(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        self._background.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # ours, not the user's
            kind = "Exhausted" if isinstance(error, TooManyAbandoned) else type(error).__name__
            log.error("worker fails kind=%s\n%s", kind, bounded_traceback(error))
            self._send(WorkerFailed(self._client.worker_id, kind, bounded_traceback(error)))
            self._stop(EXIT_CRASHED)

    def _send(self, message: Message) -> None:
        try:
            self._client.send(message)
        except WorkerLost:
            self._stop(EXIT_CONTROLLER_GONE)

    def _stop(self, code: int) -> None:
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(code)

    # ---- threads

    def _pump(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are done
            while True:
                try:
                    message = self._client.receive()
                except WorkerLost as error:
                    log.warning("controller gone reason=%s", error)
                    loop.call_soon_threadsafe(self._stop, EXIT_CONTROLLER_GONE)
                    return
                if message is not None:
                    loop.call_soon_threadsafe(self._on_message, message)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticked = time.monotonic()
        loop.call_later(_TICK_S, self._tick, loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        main_thread = threading.main_thread().ident
        last = time.monotonic()
        allowance = 0.0  # for time in which the whole process was stopped
        while not loop.is_closed():
            time.sleep(_TICK_S)
            now = time.monotonic()
            allowance = allowance + (now - last - _TICK_S) if now - last > 4 * _TICK_S else allowance
            last = now
            blocked_s = now - self._ticked - allowance
            if blocked_s < 2 * _TICK_S:
                allowance = 0.0
            task = asyncio.current_task(loop)
            call = self._calls.running.get(task) if task is not None else None
            if call is None or blocked_s <= call.timeout_s + _GRACE_S:
                continue
            frames = sys._current_frames().get(main_thread or 0)
            stack = "".join(traceback.format_stack(frames)[-8:]) if frames else ""
            text = f"it blocked the worker's event loop for {blocked_s:.1f} s (limit {call.timeout_s:g} s):\n{stack}"
            log.error("environment blocks the worker text=%s", text)
            with contextlib.suppress(InternalError):
                if isinstance(call.label, _Episode):
                    self._client.send(EnvError(call.label.episode_id, call.label.attempt, "timeout", text), timeout_s=1.0)
                self._client.send(WorkerFailed(self._client.worker_id, "Blocked", text), timeout_s=1.0)
            self._client.close(flush_s=1.0)
            _exit(EXIT_BLOCKED)


def _find_family(name: str, args: dict[str, Any]) -> tuple[EnvFamily, tuple[str, ...]] | str:
    """Returns (family, the roles its environments reply in) after trying its arguments, or one sentence."""
    try:
        family = registry.load(name)
        env = registry.make(family, name, args)
    except EnvLookupError as error:
        return str(error)
    close = getattr(env, "close", None)
    if close is not None and not asyncio.iscoroutinefunction(close):
        close()
    return family, tuple(map(str, getattr(env, "reply_roles", ())))


async def _serve(client: Client, remote: Remote | None) -> None:
    """Ends the process itself: leaving the loop would wait for coroutines that refuse to be cancelled."""
    worker = EnvWorker(client, remote)
    if remote is not None:  # nobody over there sees this process end
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    code = await worker.run()
    client.close(flush_s=1.0)
    _exit(code)


def _exit(code: int) -> NoReturn:
    """Ends the process at once: threads of users' that hang must not hold it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Entry point of the process."""
    lifeline.hold()
    parser = argparse.ArgumentParser(
        prog="marlaas_jax.workers.env_worker", description="Runs the episodes of a pool of environments."
    )
    parser.add_argument("--address", required=True, help="of the controller, as it printed it")
    parser.add_argument("--worker-id", default=None, help="new on every start; made up when left out")
    remote_worker.add_options(parser)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    remote = Remote.of(options)
    try:
        client = remote_worker.connect(options.address, "environment", options.worker_id, remote)
    except ProtocolMismatch as error:
        log.error("cannot join: %s", error)
        _exit(EXIT_BAD_CONFIG)
    except WorkerLost as error:
        log.error("cannot join: %s", error)
        _exit(EXIT_CONTROLLER_GONE)
    asyncio.run(_serve(client, remote))


if __name__ == "__main__":
    main()
