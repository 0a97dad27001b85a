"""What the fake device answers to requests that somebody waits for: a text that depends on seed, prompt and weights only.

Four tokens of each sample a turn, cut at stop strings, in parts where these are asked for. Of $FAKE_DEVICE: `turn_s` seconds
per turn; `die_in_turn` exit hard in that turn of a request, once (`marker`).
"""

import hashlib
import os
import struct
import time
from pathlib import Path

from marlaas_jax.messages import BASE_MODEL, LATEST, Generate, Generated, GeneratedPart
from marlaas_jax.text.incremental import IncrementalText

TOKENS_A_TURN = 4


def text_of(seed, prompt_ids, weights):
    """Returns what the fake model says before its end token."""
    digest = hashlib.blake2b(f"{seed}/{prompt_ids}/{weights}".encode(), digest_size=3).hexdigest()
    return f"{digest} and so on until it is done."


class Sample:
    """One completion as it grows."""

    def __init__(self, message, number, ids, tokenizer):
        self.message, self.number, self.left, self.tokenizer = message, number, list(ids), tokenizer
        self.ids, self.reason = [], ""
        self.text = IncrementalText(tokenizer, message.sampling.stop)

    def logprobs(self, ids):
        return struct.pack(f"<{len(ids)}f", *[-(token % 7) / 8 for token in ids])

    def turn(self, version, fingerprint):
        """Returns the answer to one turn, None where there is nothing to tell."""
        new, shown = [], ""
        while len(new) < TOKENS_A_TURN and not self.reason:
            token = self.left.pop(0)
            new.append(token)
            if token in self.tokenizer.end_ids:
                self.reason = "stop"
            else:
                shown += self.text.push(token)
                if self.text.stopped:
                    self.reason = "stop"
            if not self.reason and len(self.ids) + len(new) == self.message.sampling.max_tokens:
                self.reason = "length"
        self.ids += new
        if self.reason:
            return self.end(version, fingerprint)
        if self.message.partial:
            request_id = self.message.request_id
            return GeneratedPart(request_id, self.number, tuple(new), self.logprobs(new), shown, version, fingerprint)
        return None

    def end(self, version, fingerprint):
        self.text.finish()
        return Generated(
            self.message.request_id, self.number, self.message.job, self.message.incarnation, tuple(self.ids),
            self.logprobs(self.ids), self.logprobs(self.ids), self.reason, version, version, fingerprint, text=self.text.text,
        )  # fmt: skip


class FakeSampling:
    """The requests that run."""

    def __init__(self, device, tokenizer):
        self.device, self.tokenizer = device, tokenizer
        self.running: dict[str, tuple[Generate, int, list[Sample]]] = {}
        self.loaded: list[str] = []
        self.num_turns = 0

    def version_of(self, message):
        """Returns which weights are meant, None for those that are not here."""
        if message.version == BASE_MODEL:
            return BASE_MODEL
        job = self.device.jobs.get(message.job)
        if message.version == LATEST:
            return job["step"] if job is not None and job["incarnation"] == message.incarnation else None
        folder, _, name = message.adapter.rpartition("/")
        job_id, _, step = name.partition("@")
        if not (Path(folder) / "jobs" / job_id / "checkpoints" / f"step-{int(step):06d}.json").is_file():
            return None
        self.loaded.append(message.adapter)
        return message.version

    def submit(self, message):
        version = self.version_of(message)
        if version is None:
            missing = [Sample(message, i, (), self.tokenizer) for i in range(len(message.seeds))]
            for sample in missing:
                sample.reason = "missing"
            return [sample.end(message.version, "") for sample in missing]
        weights = message.job.partition("@")[0], version
        ends = self.tokenizer.end_ids[:1]
        samples = [
            Sample(message, i, (*self.tokenizer.encode(text_of(seed, message.prompt_ids, weights)), *ends), self.tokenizer)
            for i, seed in enumerate(message.seeds)
        ]
        self.running[message.request_id] = message, version, samples
        return []

    def cancel(self, request_id):
        _, version, samples = self.running.pop(request_id, (None, 0, []))
        for sample in samples:
            sample.reason = "cancelled"
        return [sample.end(version, "") for sample in samples]

    def turn(self):
        """Returns what one turn of all that runs gives."""
        answers = []
        if self.running:
            time.sleep(self.device.options.get("turn_s", 0.0))
            self.num_turns += 1
            marker = self.device.options.get("marker")
            if self.device.options.get("die_in_turn") == self.num_turns and not Path(marker).exists():
                Path(marker).touch()
                os._exit(9)
        for request_id, (message, version, samples) in list(self.running.items()):
            print_of = "" if version == BASE_MODEL else self.device.fingerprint(message.job, version)
            told = [answer for sample in samples if (answer := sample.turn(version, print_of)) is not None]
            left = [sample for sample in samples if not sample.reason]
            self.running[request_id] = message, version, left
            if not left:
                del self.running[request_id]
            answers += told
        return answers
