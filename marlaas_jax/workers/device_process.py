"""The process that owns the accelerator: loads the base once, runs sampler and learner on it, answers the controller.

One thread does everything on the device: it takes in what arrived, runs one bounded dispatch, sends what that finished, and
again. Started by the supervisor as `python -m marlaas_jax.workers.device_process --address A --runtime RUN/runtime.yaml`.
"""

import argparse
import collections
import logging
import signal
import sys
import time
import traceback
from pathlib import Path

from marlaas_jax.errors import MarlaasError, UserError, WorkerLost
from marlaas_jax.messages import DeviceStatus, Message, Shutdown, WorkerFailed
from marlaas_jax.transport.client import Client
from marlaas_jax.workers import lifeline
from marlaas_jax.workers.supervisor import EXIT_BAD_CONFIG, EXIT_CONTROLLER_GONE, EXIT_CRASHED, EXIT_OK

STATUS_INTERVAL_S = 1.0
IDLE_WAIT_S = 0.5

log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Runs until the controller says Shutdown or is gone; returns the exit code."""
    lifeline.hold()
    parser = argparse.ArgumentParser(prog="device_process")
    parser.add_argument("--address", required=True)
    parser.add_argument("--runtime", type=Path, required=True)
    parser.add_argument("--worker-id", required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):  # as systemd sends them to all; the controller decides when we end
        signal.signal(number, signal.SIG_IGN)
    try:
        client = Client(options.address, "device", options.worker_id)
    except MarlaasError:
        traceback.print_exc()
        return EXIT_CONTROLLER_GONE
    try:
        return _serve(client, options.runtime, options.worker_id)
    except WorkerLost as error:
        log.warning("controller gone reason=%s", error)
        return EXIT_CONTROLLER_GONE
    except Exception as error:  # the one broad catch of this process: the reason must reach the run's record
        traceback.print_exc()
        client.send(WorkerFailed(options.worker_id, type(error).__name__, str(error) or type(error).__name__))
        return EXIT_BAD_CONFIG if isinstance(error, UserError) else EXIT_CRASHED
    finally:
        client.close()


def _serve(client: Client, runtime_path: Path, worker_id: str) -> int:
    from marlaas_jax.config import load_runtime
    from marlaas_jax.device.build import build
    from marlaas_jax.engine import compiles

    runtime = load_runtime(runtime_path)
    waiting: collections.deque[Message] = collections.deque()

    def report(done: int, total: int) -> None:
        client.send(DeviceStatus(worker_id, {}, {}, {"programs_compiled": done, "programs_total": total}, {}, 0))

    start = time.monotonic()
    device = build(runtime, runtime_path.parent / "pages", report)
    reporter = _Reporter(worker_id)
    from_cache, compiled = compiles.cached()
    figures = {"programs_from_cache": from_cache, "programs_compiled_anew": compiled, "start_s": time.monotonic() - start}
    client.send(DeviceStatus(worker_id, {}, {}, figures, {}, 0))
    log.info("device ready model=%s %s", runtime.model, " ".join(f"{name}={value:.4g}" for name, value in figures.items()))
    while True:
        timeout_s = 0.0 if device.has_work() or waiting else IDLE_WAIT_S
        idle_since = time.monotonic()
        message = client.receive(timeout_s)
        if timeout_s:
            reporter.idle_s += time.monotonic() - idle_since
        while message is not None:
            if isinstance(message, Shutdown):
                for answer in device.close():
                    client.send(answer)
                return EXIT_OK
            for answer in device.handle(message):
                client.send(answer)
            message = client.receive(0)
        for answer in device.step():
            client.send(answer)
        if (status := reporter.due(device)) is not None:
            client.send(status)


class _Reporter:
    """Makes a DeviceStatus of the differences since the last one, once per interval."""

    def __init__(self, worker_id: str):
        self._worker_id = worker_id
        self._sent_at = time.monotonic()
        self._before: dict[str, float] = {}
        self.idle_s = 0.0

    def due(self, device) -> DeviceStatus | None:
        """Returns the status if the interval is over."""
        now = time.monotonic()
        if now - self._sent_at < STATUS_INTERVAL_S:
            return None
        self._sent_at = now
        totals = device.totals() | {"busy/idle": self.idle_s}
        change = {name: value - self._before.get(name, 0.0) for name, value in totals.items()}
        self._before = totals
        gauges = device.gauges()
        return DeviceStatus(
            worker_id=self._worker_id,
            busy_s={name.removeprefix("busy/"): value for name, value in change.items() if name.startswith("busy/")},
            busy_by_job_s={name.removeprefix("job/"): s for name, s in change.items() if name.startswith("job/") and s},
            counters={name: value for name, value in change.items() if "/" not in name} | gauges,
            queued=device.queued(),
            compiles_since_warmup=device.compiles_since_warmup(),
            backlogged=device.take_backlogged(),
            waits=device.take_waits(),
        )


if __name__ == "__main__":
    sys.exit(main())
