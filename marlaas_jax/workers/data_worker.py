"""Main loop of the data worker: the items of all jobs, by ticket, in one process of its own.

Each job has a thread: a data set that is slow to open, or a generator that hangs, holds up nobody else.
"""

import argparse
import logging
import os
import queue
import signal
import threading

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a user's file may import JAX; this process must never take an accelerator

import msgspec

from marlaas_envs import registry
from marlaas_envs.protocol import EnvLookupError
from marlaas_jax.config import DataConfig
from marlaas_jax.data import dataset
from marlaas_jax.errors import ProtocolMismatch, UserError, WorkerLost
from marlaas_jax.messages import EnvLoaded, GetItem, Item, LoadEnv, RemoveJob, Shutdown, encode_json
from marlaas_jax.transport.client import Client
from marlaas_jax.transport.memory import MemoryClient
from marlaas_jax.workers import lifeline, remote_worker
from marlaas_jax.workers.env_answers import MAX_ITEM_BYTES
from marlaas_jax.workers.remote_worker import Remote
from marlaas_jax.workers.supervisor import EXIT_BAD_CONFIG, EXIT_CONTROLLER_GONE, EXIT_OK
from marlaas_jax.workers.user_calls import bounded_traceback

log = logging.getLogger(__name__)


class DataWorker:
    """Handles the messages of one connection."""

    def __init__(self, client: Client | MemoryClient, remote: Remote | None = None):
        self._client = client
        self._remote = remote
        self._jobs: dict[str, _Job] = {}

    def run(self) -> int:
        """Serves until told to stop. Returns the exit code."""
        try:
            while True:
                message = self._client.receive()
                match message:
                    case LoadEnv():
                        self._on_load(message)
                    case GetItem():
                        self._on_get(message)
                    case RemoveJob():
                        self._drop(message.job, message.incarnation)
                    case Shutdown():
                        return EXIT_OK
                    case _:
                        log.warning("message ignored type=%s", type(message).__name__)
        except WorkerLost as error:
            log.warning("controller gone reason=%s", error)
            return EXIT_CONTROLLER_GONE

    def _on_load(self, message: LoadEnv) -> None:
        known = self._jobs.get(message.job)
        if known is not None and known.incarnation >= message.incarnation:
            if known.incarnation == message.incarnation:
                known.requests.put(message)  # said twice: answered twice
            return
        self._drop(message.job, message.incarnation)
        if self._remote is not None:
            message = msgspec.structs.replace(message, env=self._remote.env_for(message.env))
        job = self._jobs[message.job] = _Job(message, self._client)
        job.start()

    def _on_get(self, message: GetItem) -> None:
        job = self._jobs.get(message.job)
        if job is None or job.incarnation != message.incarnation:
            error = f"the data worker has not loaded job {message.job} ({message.incarnation})"
            self._client.send(Item(message.request_id, b"", error))
        else:
            job.requests.put(message)

    def _drop(self, name: str, incarnation: int) -> None:
        job = self._jobs.get(name)
        if job is not None and job.incarnation <= incarnation:
            job.requests.put(None)
            del self._jobs[name]


class _Job(threading.Thread):
    """One job's data set and the requests for it."""

    def __init__(self, load: LoadEnv, client: Client | MemoryClient):
        super().__init__(name=f"data-{load.job}", daemon=True)
        self.incarnation = load.incarnation
        self.requests: queue.SimpleQueue[LoadEnv | GetItem | None] = queue.SimpleQueue()
        self._load = load
        self._client = client
        self._dataset: dataset.JobDataset | None = None
        self._loaded = EnvLoaded(load.job, load.incarnation)

    def run(self) -> None:
        try:
            self._open()
            self._client.send(self._loaded)
            while (request := self.requests.get()) is not None:
                self._client.send(self._item(request) if isinstance(request, GetItem) else self._loaded)
        except WorkerLost:
            pass  # the main thread sees it too

    def _open(self) -> None:
        load = self._load
        try:
            self._dataset, prompt_once = open_dataset(load)
        except (UserError, EnvLookupError) as error:
            self._loaded = EnvLoaded(load.job, load.incarnation, error=str(error))
        except BaseException as error:  # a user's file may do anything
            self._loaded = EnvLoaded(load.job, load.incarnation, error=bounded_traceback(error))
        else:
            num_train, num_eval = self._dataset.num_train, self._dataset.num_eval
            self._loaded = EnvLoaded(load.job, load.incarnation, "", num_train, num_eval, prompt_once)
        log.info("data opened job=%s error=%s", load.job, self._loaded.error or "none")

    def _item(self, request: GetItem) -> Item:
        try:
            if self._dataset is None:
                return Item(request.request_id, b"", f"the data of job {request.job} could not be opened")
            item = encode_json(self._dataset.item(request.split, request.index))
            if len(item) > MAX_ITEM_BYTES:
                return Item(request.request_id, b"", f"the item takes {len(item)} bytes; {MAX_ITEM_BYTES} is the most allowed")
            return Item(request.request_id, item)
        except (UserError, EnvLookupError) as error:
            return Item(request.request_id, b"", str(error))
        except BaseException as error:
            return Item(request.request_id, b"", bounded_traceback(error))


def open_dataset(load: LoadEnv) -> tuple[dataset.JobDataset, bool]:
    """Returns the data set of a job and whether all episodes of an item start alike."""
    if load.data:
        return dataset.from_config(DataConfig.model_validate_json(load.data), load.seed), True
    family = registry.load(load.env)
    train, held_out = (registry.dataset(family, load.env, split, load.seed, load.env_args) for split in ("train", "eval"))
    return dataset.from_sources(train, held_out, load.seed), bool(family.prompt_once)


def main() -> None:
    """Entry point of the process."""
    lifeline.hold()
    parser = argparse.ArgumentParser(prog="marlaas_jax.workers.data_worker", description="Serves the items of all jobs.")
    parser.add_argument("--address", required=True, help="of the controller, as it printed it")
    parser.add_argument("--worker-id", default=None, help="new on every start; made up when left out")
    remote_worker.add_options(parser)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    remote = Remote.of(options)
    try:
        client = remote_worker.connect(options.address, "data", options.worker_id, remote)
    except (ProtocolMismatch, WorkerLost) as error:
        log.error("cannot join: %s", error)
        os._exit(EXIT_BAD_CONFIG if isinstance(error, ProtocolMismatch) else EXIT_CONTROLLER_GONE)
    if remote is not None:  # nobody over there sees this process end
        signal.signal(signal.SIGTERM, lambda number, frame: client.close(flush_s=0.2))
    code = DataWorker(client, remote).run()
    client.close(flush_s=1.0)
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
