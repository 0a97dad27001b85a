"""Adapters of ended jobs and of older steps, for requests that ask for them: read from disk beside the device's own work.

A request waits here until its adapter is in the sampler's store, then goes the way of every other. Reading happens in a thread,
one adapter at a time; what is left for the device's thread is one write into the bank. No learner slot is involved.
"""

import concurrent.futures
import logging
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.device import initial
from marlaas_jax.engine.requests import Request, answer
from marlaas_jax.engine.sampler import Sampler
from marlaas_jax.engine.snapshots import SnapshotKey
from marlaas_jax.errors import MarlaasError, NotFound
from marlaas_jax.lora.adapter import AdapterSpec, Weights
from marlaas_jax.lora.snapshot import Snapshot, fingerprint
from marlaas_jax.messages import Generate, Generated
from marlaas_jax.model.config import ModelConfig

log = logging.getLogger(__name__)

WAIT_S = 0.01  # of a device that has nothing else to do

Loading = concurrent.futures.Future[tuple[AdapterSpec, Weights]]


class StoredAdapters:
    """Takes Generate messages that name an adapter on disk and passes them on to the sampler."""

    def __init__(self, model: ModelConfig, sampler: Sampler, max_rank: int, identity: Mapping[str, str], dtype: str):
        self._model, self._sampler, self._max_rank, self._identity = model, sampler, max_rank, identity
        self._dtype = jnp.dtype(dtype)
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "marlaas-adapters")
        self._waiting: dict[SnapshotKey, list[Generate]] = {}  # in the order in which they are loaded
        self._loading: tuple[SnapshotKey, Loading] | None = None
        self._answers: list[Generated] = []

    def submit(self, message: Generate) -> None:
        """Passes a request on at once if its adapter is here, else once it is loaded; a repeat is ignored."""
        key = SnapshotKey(message.job, message.incarnation, message.version)
        if self._sampler.holds(*key):
            self._sampler.submit(message)
            return
        waiting = self._waiting.setdefault(key, [])
        if all(other.request_id != message.request_id for other in waiting):
            waiting.append(message)

    def cancel(self, request_id: str) -> None:
        """Answers "cancelled" for a request that still waits here. Others are ignored."""
        for key, messages in self._waiting.items():
            for message in [message for message in messages if message.request_id == request_id]:
                messages.remove(message)
                self._answers += _answers(message, "cancelled", "")
            if not messages and (self._loading is None or self._loading[0] != key):
                del self._waiting[key]
                return

    def has_work(self) -> bool:
        """True while something is being loaded or could be, or answers wait for `poll`."""
        return bool(self._loading or self._answers or (self._waiting and self._sampler.has_room_to_load))

    def poll(self) -> list[Generated]:
        """Passes on what waited for an adapter that is read, begins with the next; returns answers to what cannot be."""
        if self._loading is not None and self._loading[1].done():
            key, loaded = self._loading
            self._loading = None
            self._end(key, loaded)
        if self._loading is None and self._waiting and self._sampler.has_room_to_load:
            key, messages = next(iter(self._waiting.items()))
            self._loading = key, self._executor.submit(self._read, messages[0].adapter)
        answers, self._answers = self._answers, []
        return answers

    def wait(self) -> None:
        """Waits a moment for what is being read."""
        if self._loading is not None:
            concurrent.futures.wait([self._loading[1]], WAIT_S)

    def close(self) -> None:
        """Drops what waits."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _read(self, source: str) -> tuple[AdapterSpec, Weights]:
        """Returns an adapter as it goes into the bank: host arrays, padded, in the sampler's dtype. Runs in the thread."""
        spec, weights = initial.read_adapter(source, self._model, self._max_rank, self._identity)
        return spec, jax.tree.map(lambda array: np.asarray(array).astype(self._dtype), weights)

    def _end(self, key: SnapshotKey, loaded: Loading) -> None:
        messages = self._waiting.pop(key, [])
        try:
            spec, weights = loaded.result()
            self._sampler.load(Snapshot(*key, weights, spec.scale, fingerprint(weights, spec.scale)))
        except NotFound as error:  # it was pruned since somebody asked for it
            for message in messages:
                self._answers += _answers(message, "missing", str(error))
            return
        except Exception as error:  # whatever is wrong with one adapter is that of its requests alone
            if not isinstance(error, MarlaasError):
                log.error("adapter not loaded name=%s", key.job, exc_info=error)
            for message in messages:
                self._answers += _answers(message, "error", f"{type(error).__name__}: {error}")
            return
        for message in messages:
            self._sampler.submit(message)


def _answers(message: Generate, reason: str, error: str) -> list[Generated]:
    request = Request(message, frozenset())
    return [answer(request, i, reason, message.version, error=error) for i in range(request.num_samples)]
