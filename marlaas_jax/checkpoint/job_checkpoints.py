"""The checkpoints of one job: weights, moments, counters and ledger of one moment as one atomic orbax step.

A step exists once orbax has renamed it into place; a half-written one is never listed and is removed when the job's owner
opens the folder next. Saving runs in the background; its outcome is asked for by `poll` and is never lost. A failed save is
forgotten, so that the next one happens. Which steps are kept is decided here, by rewards that the steps themselves hold:
orbax forgets its metrics with the process.
"""

import base64
import dataclasses
import errno
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from marlaas_jax.errors import CorruptFile, StorageError

SCHEMA_VERSION = 1
MAX_CLOSE_TRIES = 3  # the manager's own wait, its checkpointer's, and one that succeeds

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class JobState:
    """What is committed together after `step` batches."""

    step: int
    arrays: dict[str, np.ndarray]  # flat: adapter, moments
    counters: dict[str, int]  # optimizer steps and the like
    ledger: bytes
    identity: dict[str, Any]  # of the base model; resume refuses another
    spec: dict[str, Any]  # of the adapter: rank, alpha, targets, seed


@dataclasses.dataclass
class _NewestAndBest(checkpoint_managers.PreservationPolicy):
    """Keeps the newest `num_newest` steps and the one with the highest reward, the newer of equals."""

    num_newest: int
    rewards: Mapping[int, float]  # by step, of those that have one; grows with every save

    def should_preserve(
        self,
        checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> Sequence[bool]:
        """Returns for each checkpoint whether it stays."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = max((step for step in steps if step in self.rewards), key=lambda step: (self.rewards[step], step), default=None)
        return [step == best or step in sorted(steps)[-self.num_newest :] for step in steps]


class JobCheckpoints:
    """Reads and writes `directory`; keeps the newest `keep` steps and the one with the highest reward.

    One process at a time owns the folder. Any other opens it `read_only`, which neither makes nor removes anything.
    """

    def __init__(self, directory: Path, keep: int = 2, *, read_only: bool = False):
        self.directory = directory
        self._pending: int | None = None
        self._read_only = read_only
        self._rewards: dict[int, float] = {}
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_NewestAndBest(keep, self._rewards), create=not read_only, cleanup_tmp_directories=not read_only
        )
        try:
            self._manager = ocp.CheckpointManager(directory.resolve(), options=options)
        except OSError as error:
            raise StorageError(f"{directory}: cannot hold checkpoints ({error.strerror or error})") from error
        for step in () if read_only else self.steps():
            self._recall_reward(step)

    @property
    def busy(self) -> bool:
        """True while a save is running or its outcome was not asked for."""
        return self._pending is not None

    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: JobState, reward: float) -> None:
        """Starts writing `state`; returns once the arrays are copied. Raises StorageError if this or the last save failed."""
        assert not self._read_only, self.directory
        self.wait()
        self._rewards.pop(state.step, None)
        if math.isfinite(reward):
            self._rewards[state.step] = float(reward)
        meta = {
            "schema_version": SCHEMA_VERSION,
            "step": state.step,
            "reward": self._rewards.get(state.step),
            "counters": state.counters,
            "ledger": base64.b64encode(state.ledger).decode(),
            "identity": state.identity,
            "spec": state.spec,
        }
        arguments = ocp.args.Composite(arrays=ocp.args.PyTreeSave(state.arrays), meta=ocp.args.JsonSave(meta))
        self._pending = state.step
        self._guarded(lambda: self._manager.save(state.step, args=arguments, force=True))

    def poll(self) -> int | None:
        """Returns the step whose save has just been committed, or None. Raises StorageError if it failed."""
        if self._pending is None or self._manager.is_saving_in_progress():
            return None
        return self.wait()

    def wait(self) -> int | None:
        """Waits for the running save; returns its step, or None when there was none. Raises StorageError if it failed."""
        if self._pending is None:
            return None
        step = self._pending
        self._guarded(self._manager.wait_until_finished)
        self._guarded(self._manager.check_for_errors)
        self._pending = None
        if step not in self._manager.all_steps():
            raise StorageError(f"{self.directory / str(step)}: the checkpoint was not committed")
        return step

    def restore(self, step: int | None = None, *, repair: bool = False) -> JobState | None:
        """Returns the state after `step` batches; None asks for the newest that can be read. None when there is none.

        `repair` removes newer steps that cannot be read, so that they can be written again: for the job's owner only.
        """
        assert not (repair and self._read_only), self.directory
        candidates = self.steps()[::-1] if step is None else [step]
        for i, candidate in enumerate(candidates):
            try:
                state = self._read(candidate)
            except CorruptFile as error:
                if step is not None or i + 1 == len(candidates):
                    raise
                _log.warning("checkpoint unreadable, using the one before step=%d error=%s", candidate, error)
                continue
            for unreadable in candidates[:i] if repair else ():
                self._manager.delete(unreadable)
            return state
        return None

    def remove_after(self, step: int) -> None:
        """Removes every step newer than `step`, the newest first. Raises StorageError."""
        assert not self._read_only, self.directory
        for newer in [kept for kept in self.steps()[::-1] if kept > step]:
            try:
                self._manager.delete(newer)
            except OSError as error:
                raise StorageError(f"{self.directory / str(newer)}: cannot be removed ({error.strerror or error})") from error
            self._rewards.pop(newer, None)

    def close(self) -> None:
        """Waits for the running save and frees the manager. Raises StorageError if the save failed."""
        try:
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        """Frees the manager, which stops closing wherever it learns once more of a save that failed."""
        for _ in range(MAX_CLOSE_TRIES):
            try:
                return self._manager.close()
            except Exception as error:  # the same many types as below; `wait` has told of it
                _log.warning("checkpoints not closed directory=%s error=%s", self.directory, _cause(error))

    def _read(self, step: int) -> JobState:
        path = self.directory / str(step)
        arguments = ocp.args.Composite(arrays=ocp.args.PyTreeRestore(), meta=ocp.args.JsonRestore())
        try:
            found = self._manager.restore(step, args=arguments)
            meta = found["meta"]
            arrays = {name: np.asarray(array) for name, array in found["arrays"].items()}
            if meta["schema_version"] != SCHEMA_VERSION:
                raise CorruptFile(f"{path}: checkpoint schema {meta['schema_version']}, this version reads {SCHEMA_VERSION}")
            ledger = base64.b64decode(meta["ledger"])
            return JobState(meta["step"], arrays, meta["counters"], ledger, meta["identity"], meta["spec"])
        except CorruptFile:
            raise
        except Exception as error:  # orbax and tensorstore raise many types for a damaged step
            raise CorruptFile(
                f"{path}: the checkpoint cannot be read ({type(error).__name__}: {_first_line(error)})"
            ) from error

    def _recall_reward(self, step: int) -> None:
        """Learns the reward of a step of an earlier life; one that cannot be read has none."""
        try:
            reward = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"].get("reward")
        except Exception as error:  # the same many types as below; `restore` tells its owner
            _log.warning("reward of a checkpoint unreadable step=%d error=%s", step, _first_line(error))
            return
        if isinstance(reward, int | float):
            self._rewards[step] = reward

    def _guarded(self, action: Any) -> None:
        try:
            action()
        except Exception as error:  # a full or read-only disk surfaces as OSError, ValueError or a runtime error of tensorstore
            step, self._pending = self._pending, None
            raise StorageError(f"{self.directory / str(step)}: the checkpoint was not written ({_cause(error)})") from error


def _cause(error: Exception) -> str:
    """Returns the system's own words where the message holds them among many others, else its first line."""
    names = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG, errno.EIO)
    return next((words for words in map(os.strerror, names) if words in str(error)), "") or _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
