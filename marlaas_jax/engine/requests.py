"""The host's side of a request: its samples, their tokens and text, and how each one ends."""

import dataclasses

import numpy as np

from marlaas_jax.engine.snapshots import SnapshotKey
from marlaas_jax.engine.state import CONTEXT, ERROR, FINISH_REASONS, LENGTH, RUNNING, STOP, Prefix, RowSettings
from marlaas_jax.engine.steps import Chunk
from marlaas_jax.lora.snapshot import Snapshot
from marlaas_jax.messages import Generate, Generated, GeneratedPart
from marlaas_jax.text.incremental import IncrementalText
from marlaas_jax.text.tokenizer import Tokenizer

NOT_FINITE = "the model gave logits that are not finite under this adapter"


@dataclasses.dataclass(eq=False)
class Request:
    """One Generate and where it stands."""

    message: Generate
    stop_ids: frozenset[int]  # the model's end ids and the request's own
    pinned_version: SnapshotKey | None = None  # a snapshot that was asked for by number, kept until the request ends
    snapshot: Snapshot | None = None  # set at admission; None is the base model
    adapter_slot: tuple[int, int] = (0, 0)  # slot of the bank, and how often it had been written; set at admission
    prefix: tuple[Prefix, int] | None = None  # kept while samples wait for decode slots
    is_admitted: bool = False
    submitted_s: float = 0.0  # when it was queued, by the sampler's clock
    num_started: int = 0
    num_ended: int = 0

    @property
    def num_samples(self) -> int:
        """Completions asked for."""
        return len(self.message.seeds)

    @property
    def share(self) -> str:
        """Who is charged for it: the job, or whoever waits for the answer."""
        return self.message.share or self.message.job

    def settings(self, sample: int) -> RowSettings:
        """Returns how one sample is drawn."""
        sampling = self.message.sampling
        return RowSettings(
            max_tokens=sampling.max_tokens,
            seed=self.message.seeds[sample],
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            stop_ids=tuple(sorted(self.stop_ids)),
        )


class Row:
    """One running sample. Tokens arrive a chunk at a time; what ends it is seen here or was seen on the device."""

    def __init__(self, request: Request, sample: int, slot: int, tokenizer: Tokenizer):
        self.request = request
        self.sample = sample
        self.slot = slot
        self.token_ids: list[int] = []
        self.finish_reason = ""
        self.charged_tokens = 0.0  # what the queue was charged for it in advance
        self._logprobs: list[float] = []
        self._sampled_logprobs: list[float] = []
        self._tokenizer = tokenizer
        stop = request.message.sampling.stop
        is_followed = bool(stop) or request.message.partial
        self._text = IncrementalText(tokenizer, stop) if is_followed else None  # None: decoded once, at the end
        self._ended_by_id = False
        self._num_told = 0  # tokens in the parts so far
        self._new_text = ""  # since the last part

    @property
    def num_positions(self) -> int:
        """Positions of the cache that are filled once the tokens known here have been fed in."""
        return len(self.request.message.prompt_ids) + len(self.token_ids)

    def take(self, chunk: Chunk) -> None:
        """Takes this row's tokens of a chunk, up to and including the one that ends it."""
        columns = (chunk.tokens_SN, chunk.logprobs_SN, chunk.sampled_logprobs_SN)
        is_sampled = chunk.is_sampled_SN[self.slot]
        for token, logprob, sampled in zip(*(column[self.slot][is_sampled].tolist() for column in columns), strict=True):
            self.token_ids.append(token)
            self._logprobs.append(logprob)
            self._sampled_logprobs.append(sampled)
            if token in self.request.stop_ids:
                self._ended_by_id = True
                self.finish_reason = FINISH_REASONS[STOP]
            elif self._text is not None:
                self._new_text += self._text.push(token)
                if self._text.stopped:
                    self.finish_reason = FINISH_REASONS[STOP]
            if self.finish_reason:
                return
        code = int(chunk.finish_S[self.slot])
        if code != RUNNING:
            self.finish_reason = FINISH_REASONS[code]

    def part(self) -> GeneratedPart:
        """Returns what was not in an earlier part."""
        start, self._num_told = self._num_told, len(self.token_ids)
        text, self._new_text = self._new_text, ""
        snapshot = self.request.snapshot
        return GeneratedPart(
            request_id=self.request.message.request_id,
            sample=self.sample,
            token_ids=tuple(self.token_ids[start:]),
            logprobs=np.asarray(self._logprobs[start:], "<f4").tobytes(),
            text=text,
            version=self.request.message.version if snapshot is None else snapshot.version,
            fingerprint="" if snapshot is None else snapshot.fingerprint,
        )

    def result(self, latest_version: int, error: str = "") -> Generated:
        """Returns the finished completion."""
        failed = self.finish_reason == FINISH_REASONS[ERROR]
        count = 0 if failed else len(self.token_ids)
        as_bytes = lambda values: np.asarray(values[:count], "<f4").tobytes()
        return answer(
            self.request,
            self.sample,
            self.finish_reason,
            latest_version,
            token_ids=tuple(self.token_ids[:count]),
            logprobs=as_bytes(self._logprobs),
            sampled_logprobs=as_bytes(self._sampled_logprobs),
            text="" if failed else self._final_text(),
            error=error or (NOT_FINITE if failed else ""),
        )

    def _final_text(self) -> str:
        if self._text is not None:
            self._text.finish()
            return self._text.text
        return self._tokenizer.decode(self.token_ids[:-1] if self._ended_by_id else self.token_ids)


def refusal(message: Generate, vocab_size: int, max_context: int) -> tuple[str, str]:
    """Returns (finish reason, error) of a request that ends before it starts, else two empty strings."""
    sampling = message.sampling
    checks = (
        ("prompt_ids", "[]", len(message.prompt_ids) > 0, "at least one token is needed"),
        ("temperature", sampling.temperature, 0 <= sampling.temperature <= 1e6, "0 to 1e6 is allowed"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 (off) or more is allowed"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "more than 0 and at most 1 is allowed"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p < 1, "0 or more and less than 1 is allowed"),
        ("max_tokens", sampling.max_tokens, 0 <= sampling.max_tokens < 2**31, "0 to 2**31 - 1 is allowed"),
        *(("stop_token_ids", t, 0 <= t < vocab_size, f"0 to {vocab_size - 1} are tokens") for t in sampling.stop_token_ids),
        *(("prompt_ids", t, 0 <= t < vocab_size, f"0 to {vocab_size - 1} are tokens") for t in message.prompt_ids),
        *(("seeds", s, 0 <= s < 2**63, "0 to 2**63 - 1 is allowed") for s in message.seeds),
    )
    for name, value, holds, allowed in checks:
        if not holds:
            return FINISH_REASONS[ERROR], f"{name}={value}: {allowed}"
    if len(message.prompt_ids) >= max_context:
        return FINISH_REASONS[CONTEXT], ""
    return (FINISH_REASONS[LENGTH], "") if sampling.max_tokens == 0 else ("", "")


def answer(
    request: Request,
    sample: int,
    finish_reason: str,
    latest_version: int,
    token_ids: tuple[int, ...] = (),
    logprobs: bytes = b"",
    sampled_logprobs: bytes = b"",
    text: str = "",
    error: str = "",
) -> Generated:
    """Returns the answer to one sample of a request."""
    message, snapshot = request.message, request.snapshot
    return Generated(
        request_id=message.request_id,
        sample=sample,
        job=message.job,
        incarnation=message.incarnation,
        token_ids=token_ids,
        logprobs=logprobs,
        sampled_logprobs=sampled_logprobs,
        finish_reason=finish_reason,
        version=message.version if snapshot is None else snapshot.version,
        latest_version=latest_version,
        fingerprint="" if snapshot is None else snapshot.fingerprint,
        text=text,
        error=error,
    )
