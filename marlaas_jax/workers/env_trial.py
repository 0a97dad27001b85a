"""Tries a job's environment before the job is queued: a process of its own, a few items, a canned completion, one answer.

    python -m marlaas_jax.workers.env_trial < JOB.json     # the job as JSON; the answer is a Tried as JSON on standard output

The process that starts it holds the deadline. Whatever the environment prints goes to standard error.
"""

import asyncio
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from marlaas_envs import registry
from marlaas_envs.protocol import Action, EnvFamily, EnvLookupError
from marlaas_envs.single_turn import RewardFunction
from marlaas_jax.config import JobConfig
from marlaas_jax.data.splits import open_splits
from marlaas_jax.errors import InvalidConfig, UserError
from marlaas_jax.messages import EnvDone, EnvError, encode_json
from marlaas_jax.workers import lifeline
from marlaas_jax.workers.env_answers import MAX_ITEM_BYTES, to_message
from marlaas_jax.workers.env_checks import check_environment
from marlaas_jax.workers.remote_worker import REMOTE
from marlaas_jax.workers.user_calls import Failure, UserCalls

COMPLETION = "The answer is 42."
NUM_ITEMS = {"train": 2, "eval": 1}
MAX_TURNS = 3  # of one conversation: the environment need not end it
LOAD_TIMEOUT_S = 300.0  # beyond any deadline of the one who waits
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')


class Tried(msgspec.Struct, frozen=True):
    """What came of it. `fault` is one sentence, empty where all went well; `reply_roles` as in messages.EnvLoaded."""

    fault: str = ""
    reply_roles: tuple[str, ...] = ()


class _Fault(Exception):
    """What is wrong, in one sentence."""


class _Trial:
    """One job's environment."""

    def __init__(self, job: JobConfig):
        self._job = job
        self._calls = UserCalls()
        self._rewards: list[float | None] = []
        self._is_function = False

    async def run(self) -> tuple[str, ...]:
        """Returns the reply roles. Raises _Fault, UserError or EnvLookupError."""
        job = self._job
        if job.env.startswith(REMOTE):  # it runs elsewhere; its items may be here
            if job.data is not None:
                open_splits(job.data)
            return ()
        check_environment(job)
        family = await self._call("it is loaded", LOAD_TIMEOUT_S, registry.load, job.env)
        roles: tuple[str, ...] = ()
        items = await self._call("its items are read", LOAD_TIMEOUT_S, lambda: list(_items(job, family)))
        trials = [self._converse(family, f"{split} item {index} is tried", item) for split, index, item in items]
        for found in await asyncio.gather(*trials):
            roles = roles or found
        if self._is_function and all(reward is None for reward in self._rewards):
            raise _Fault("it returned None for every item that was tried; return a number")
        return roles

    async def _converse(self, family: EnvFamily, when: str, item: Any) -> tuple[str, ...]:
        """One episode of at most a few turns; returns the reply roles."""
        job, limit_s = self._job, self._job.rollout.step_timeout_s
        env = await self._call(when, limit_s, registry.make, family, job.env, job.env_args)
        self._is_function = isinstance(env, RewardFunction)
        answer = await self._call(when, limit_s, env.reset, item, job.seed)
        for turn in range(min(MAX_TURNS, job.rollout.max_turns) + 1):
            message = to_message(answer, "trial", 0, turn)
            if isinstance(message, EnvError):
                raise _Fault(f"{message.text.strip().splitlines()[-1]}, when {when}")
            if isinstance(message, EnvDone):
                if message.reward is None and answer.reward is not None:
                    raise _Fault(f"{message.note}, when {when}")
                self._rewards.append(message.reward)
                break
            if turn < min(MAX_TURNS, job.rollout.max_turns):
                action = Action(COMPLETION, "stop", len(COMPLETION.split()))
                answer = await self._call(when, limit_s, env.step, action)
        if (close := getattr(env, "close", None)) is not None:
            await self._call("it is closed", limit_s, close)
        return tuple(map(str, getattr(env, "reply_roles", ())))

    async def _call(self, when: str, limit_s: float, function: Any, *args: Any) -> Any:
        result = await self._calls.run(None, function, *args, timeout_s=limit_s)
        if not isinstance(result, Failure):
            return result
        if result.kind == "timeout":
            raise _Fault(f"no answer within rollout.step_timeout_s={limit_s:g}, when {when}")
        raise _Fault(f"{where_raised(result.text, Path(self._job.env.rpartition(':')[0]).parent)}, when {when}")


def _items(job: JobConfig, family: EnvFamily) -> Iterator[tuple[str, int, Any]]:
    """Yields (split, index, item as a worker gets it). Raises a UserError or EnvLookupError where there is none."""
    if job.data is not None:
        splits = open_splits(job.data)
        sources = {"train": splits.train, "eval": splits.held_out}
        to_item = splits.to_item
    else:
        sources = {split: registry.dataset(family, job.env, split, job.seed, job.env_args) for split in NUM_ITEMS}
        to_item = dict
    for split, source in sources.items():
        if not len(source):
            raise InvalidConfig(f"env={job.env!r}: there is no {split} item")
        for index in range(min(len(source), NUM_ITEMS[split])):
            encoded = encode_json(to_item(source[index]))
            if len(encoded) > MAX_ITEM_BYTES:
                raise InvalidConfig(f"{split} item {index} takes {len(encoded)} bytes; {MAX_ITEM_BYTES} is the most allowed")
            yield split, index, msgspec.json.decode(encoded)


def where_raised(traceback: str, folder: Path) -> str:
    """Returns a traceback's last line with the file and line that it came from: the user's own, where one is there."""
    last = traceback.strip().splitlines()[-1][:400]
    if last.startswith("marlaas_envs.protocol.EnvLookupError: "):
        return last.partition(": ")[2]
    frames = _FRAME.findall(traceback)
    own = [frame for frame in frames if Path(frame[0]).is_relative_to(folder)] or frames
    return f"{last} ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else last


def main() -> None:
    """Entry point of the process."""
    lifeline.hold()
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # what the environment prints is no answer
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    job = JobConfig.model_validate_json(sys.stdin.buffer.read())
    asyncio.run(_answer(job, answer_fd))


async def _answer(job: JobConfig, answer_fd: int) -> None:
    """Ends the process itself: leaving the loop would wait for coroutines that refuse to be cancelled."""
    try:
        tried = Tried(reply_roles=await _Trial(job).run())
    except (_Fault, UserError, EnvLookupError) as error:
        text = " ".join(str(error).split())
        tried = Tried(text if text.startswith(("env", "data")) else f"env={job.env!r}: {text}")
    os.write(answer_fd, msgspec.json.encode(msgspec.structs.replace(tried, fault=tried.fault[:1000])))
    _exit()


def _exit() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
