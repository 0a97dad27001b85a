"""A device without JAX: a policy whose share of right answers rises with each batch, by its learning rate; runs as a process.

    python -m tests.workers.fakes --address A --runtime RUN/runtime.yaml --worker-id ID

Completions are "yes" or "no", decided by seed and version, so a run is reproducible. Each job's state is a JSON file per
committed step. $FAKE_DEVICE holds JSON; the first five are by job:
`die_at` exit hard, once, when that batch is trained and not yet reported; `marker` is a file that says that it happened;
`poison_at` exit hard, every time, when that batch is given to be trained; `commit_every` so many batches (2);
`wrong_weights_at` the version from which on completions name other weights; `fail_at` the step that fails the job;
`hang_at_start` says nothing at all, once, with the same marker; `train_s` seconds per batch.
"""

import argparse
import base64
import hashlib
import json
import os
import struct
import time
from pathlib import Path

from marlaas_jax.config import JobConfig, load_runtime
from marlaas_jax.messages import (
    AddJob,
    CancelGenerate,
    Checkpointed,
    DeviceStatus,
    FinishJob,
    Generate,
    Generated,
    JobFailed,
    JobFinished,
    JobPaused,
    JobReady,
    PauseJob,
    RemoveJob,
    Shutdown,
    StepDone,
    TrainBatch,
)  # fmt: skip
from marlaas_jax.model import source
from marlaas_jax.text.tokenizer import Tokenizer
from marlaas_jax.transport.client import Client
from marlaas_jax.workers import lifeline
from tests.workers.fake_sampling import FakeSampling


class FakeDevice:
    """Answers every message at once."""

    def __init__(self, tokenizer: Tokenizer, options: dict):
        self.options = options
        self.jobs: dict[str, dict] = {}
        self.sampling = FakeSampling(self, tokenizer)
        self.words = {word: tuple(tokenizer.encode(word)) + tokenizer.end_ids[:1] for word in ("yes", "no")}

    def handle(self, message) -> list:
        """Returns the answers to one message."""
        match message:
            case AddJob():
                return [self.add(message)]
            case Generate() if message.share:
                return self.sampling.submit(message)
            case Generate() if message.job in self.jobs:
                return [self.complete(message, sample) for sample in range(len(message.seeds))]
            case TrainBatch() if message.job in self.jobs:
                return self.train(message)
            case FinishJob() if message.job in self.jobs:
                return self.finish(message)
            case PauseJob() if message.job in self.jobs:
                job = self.jobs.pop(message.job)
                if not message.discard:
                    self.commit(job, base64.b64decode(job["ledger"]))
                return [JobPaused(message.job, message.incarnation, job["step"])]
            case RemoveJob():
                self.jobs.pop(message.job, None)
            case CancelGenerate():
                return self.sampling.cancel(message.request_id)
        return []

    def add(self, message: AddJob) -> JobReady:
        folder = Path(message.job_dir) / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        committed = sorted(folder.glob("step-*.json")) if message.resume else []
        while message.step >= 0 and committed[-1].name != f"step-{message.step:06d}.json":
            committed.pop().unlink()
        state = json.loads(committed[-1].read_text()) if committed else {"step": 0, "ledger": ""}
        config = JobConfig.model_validate_json(message.config)
        self.jobs[message.job] = state | {"folder": folder, "incarnation": message.incarnation, "config": config}
        version = state["step"]
        ledger = base64.b64decode(state["ledger"])
        return JobReady(message.job, message.incarnation, version, version, ledger, self.fingerprint(message.job, version), {})

    def complete(self, message: Generate, sample: int) -> Generated:
        version = message.version if message.version >= 0 else self.jobs[message.job]["step"]
        pace = self.jobs[message.job]["config"].optimizer.learning_rate / 2e-4  # 1 for the default
        digest = hashlib.blake2b(f"{message.seeds[sample]}".encode(), digest_size=4).digest()
        word = "yes" if int.from_bytes(digest, "big") / 2**32 < min(0.95, 0.3 + 0.12 * version * pace) else "no"
        ids = self.words[word]
        logprobs = struct.pack(f"<{len(ids)}f", *[-0.7] * len(ids))
        claimed = (
            "wrong"
            if version >= self.options.get("wrong_weights_at", {}).get(message.job, version + 1)
            else self.fingerprint(message.job, version)
        )
        return Generated(
            message.request_id, sample, message.job, message.incarnation, ids, logprobs, logprobs, "stop", version, version,
            claimed, text=word,
        )  # fmt: skip

    def train(self, batch: TrainBatch) -> list:
        job = self.jobs[batch.job]
        if batch.step != job["step"]:
            return []
        if self.options.get("poison_at", {}).get(batch.job) == batch.step + 1:
            os._exit(9)
        time.sleep(self.options.get("train_s", 0.0))
        job["step"] += 1
        if self.options.get("fail_at", {}).get(batch.job) == job["step"]:
            del self.jobs[batch.job]
            return [JobFailed(batch.job, batch.incarnation, "NonFinite", "3 gradients in a row were not finite")]
        answers: list = []
        if job["step"] % self.options.get("commit_every", {}).get(batch.job, 2) == 0:
            self.commit(job, batch.ledger)
            answers.append(Checkpointed(batch.job, batch.incarnation, job["step"]))
        job["ledger"] = base64.b64encode(batch.ledger).decode()
        marker = self.options.get("marker")
        if self.options.get("die_at", {}).get(batch.job) == job["step"] and marker and not Path(marker).exists():
            Path(marker).touch()
            os._exit(9)
        version = job["step"]
        metrics = {"learner/loss": 1.0 / version, "device/learner_s": 0.01, "device/publish_s": 0.005}
        metrics |= {"device/prefill_s_per_token": 0.001, "device/decode_s_per_token": 0.002}
        done = StepDone(batch.job, batch.incarnation, version, version, self.fingerprint(batch.job, version), metrics)
        return [done, *answers]

    def finish(self, message: FinishJob) -> list:
        job = self.jobs[message.job]
        folder = Path(message.export_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        return [JobFinished(message.job, message.incarnation, job["step"], str(folder))]

    def commit(self, job: dict, ledger: bytes) -> None:
        path = job["folder"] / f"step-{job['step']:06d}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"step": job["step"], "ledger": base64.b64encode(ledger).decode()}))
        os.replace(temporary, path)

    @staticmethod
    def fingerprint(job: str, version: int) -> str:
        return hashlib.blake2b(f"{job}/{version}".encode(), digest_size=8).hexdigest()


def main() -> None:
    """Serves until told to stop."""
    lifeline.hold()
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--runtime", type=Path, required=True)
    parser.add_argument("--worker-id", required=True)
    arguments = parser.parse_args()
    options = json.loads(os.environ.get("FAKE_DEVICE", "{}"))
    if options.get("hang_at_start") and not Path(options["marker"]).exists():
        Path(options["marker"]).touch()
        time.sleep(1000)
    client = Client(arguments.address, "device", arguments.worker_id)
    runtime = load_runtime(arguments.runtime)
    device = FakeDevice(Tokenizer.load(source.resolve(runtime.model)), options)
    reported = -1.0
    while True:
        message = client.receive(0.0 if device.sampling.running else 0.2)
        if isinstance(message, Shutdown):
            break
        for answer in device.handle(message) if message is not None else device.sampling.turn():
            client.send(answer)
        if time.monotonic() - reported > 0.5:
            reported = time.monotonic()
            counters = {
                "learner/open_jobs": float(len(device.jobs)),
                "engine/running_rows": float(len(device.sampling.running)),
            }
            status = DeviceStatus(arguments.worker_id, {"decode": 0.3, "idle": 0.2}, {}, counters, {}, 0)
            client.send(status)
    client.close(flush_s=1.0)


if __name__ == "__main__":
    main()
