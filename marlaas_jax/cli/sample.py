"""`marlaas sample` and `marlaas chat`: one model, at most one adapter, the engine that training uses."""

import dataclasses
import secrets
import time
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np

from marlaas_jax.config import SamplingConfig, validate
from marlaas_jax.device import build, initial
from marlaas_jax.documents import plain, require_path
from marlaas_jax.engine.engine import EngineSettings
from marlaas_jax.engine.sampler import BASE_MODEL, LATEST, Sampler
from marlaas_jax.errors import InvalidRequest
from marlaas_jax.lora.snapshot import Snapshot, fingerprint
from marlaas_jax.messages import Generate, Generated, Sampling
from marlaas_jax.model import load, source
from marlaas_jax.model.identity import identity
from marlaas_jax.text.tokenizer import Tokenizer

MAX_SLOTS = 32
MAX_SEED = 2**63
JOB = "sample"


@dataclasses.dataclass(frozen=True)
class Request:
    """What to draw."""

    n: int = 1
    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None  # None: fresh randomness
    chat: bool = False

    def sampling(self) -> Sampling:
        """Returns the settings as the sampler takes them. Raises InvalidConfig for what a job's `sampling` may not hold."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if name in SamplingConfig.model_fields}
        return Sampling(**validate(SamplingConfig, given).model_dump())

    def seeds(self) -> tuple[int, ...]:
        """Returns one seed per sample: all different, and the same again for the same `seed`."""
        if self.seed is None:
            return tuple(secrets.randbelow(MAX_SEED) for _ in range(self.n))
        rng = np.random.default_rng(self.seed)
        return tuple(int(s) for s in rng.integers(0, MAX_SEED, self.n, dtype=np.int64))


class Generator:
    """A loaded model with an adapter, ready to sample. Programs compile when first used."""

    def __init__(self, model: str, adapter: str | None, num_slots: int, max_context: int):
        require_path("--model", model)
        if adapter is not None:
            require_path("--adapter", adapter)
        build.use_compilation_cache()
        folder = source.resolve(model)
        dtype = build.resolve_dtype("auto")
        self.config, params = load.load(folder, dtype, build.is_unrolled("auto"))
        self.tokenizer = Tokenizer.load(folder)
        self.max_context = min(max_context, self.config.max_position)
        self.name = model if adapter is None else adapter
        spec = weights = None
        if adapter is not None:
            spec, weights = initial.read_adapter(adapter, self.config, None, identity(folder))
        settings = EngineSettings(
            num_decode_slots=num_slots,
            max_context=self.max_context,
            num_adapter_slots=3,
            max_rank=1 if spec is None else spec.rank,
            dtype=dtype,
        )
        self._sampler = Sampler(self.config, params, settings, self.tokenizer, time.monotonic)
        self._version = BASE_MODEL
        if spec is not None and weights is not None:
            mark = fingerprint(weights, spec.scale)
            self._sampler.publish(Snapshot(JOB, 0, 0, weights, spec.scale, mark))
            self._version = LATEST

    def generate(self, prompt_ids: list[int], request: Request) -> Iterator[Generated]:
        """Yields the completions as they end. Raises InvalidRequest where there is no room for one."""
        message = Generate("sample", JOB, 0, tuple(prompt_ids), request.seeds(), request.sampling(), self._version)
        self._sampler.submit(message)
        while self._sampler.has_work():
            for answer in self._sampler.step():
                if answer.finish_reason == "error":
                    raise InvalidRequest(answer.error)
                if answer.finish_reason == "context" and not answer.token_ids:
                    raise InvalidRequest(
                        f"prompt: {len(prompt_ids)} tokens leave no room for an answer within {self.max_context}"
                    )
                yield answer


def sample(prompt: str, model: str, adapter: str | None, request: Request) -> Iterator[dict[str, Any]]:
    """Yields one record per sample: text, finish reason, ids and log-probs of both distributions."""
    plain({"prompt": prompt})
    require_path("--model", model)
    request.sampling()
    tokenizer = Tokenizer.load(source.resolve(model))
    ids = tokenizer.render([{"role": "user", "content": prompt}]) if request.chat else tokenizer.encode_prompt(prompt)
    generator = Generator(model, adapter, min(request.n, MAX_SLOTS), len(ids) + request.max_tokens)
    for answer in generator.generate(ids, request):
        yield {
            "sample": answer.sample,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "token_ids": list(answer.token_ids),
            "logprobs": np.frombuffer(answer.logprobs, np.float32).tolist(),
            "sampled_logprobs": np.frombuffer(answer.sampled_logprobs, np.float32).tolist(),
            "model": generator.name,
        }


def chat(model: str, adapter: str | None, system: str | None, max_tokens: int, temperature: float, lines: TextIO) -> None:
    """Answers line by line until an empty line or the end of input."""
    plain({"--system": system})
    request = Request(max_tokens=max_tokens, temperature=temperature)
    request.sampling()
    generator = Generator(model, adapter, 1, 2048)
    messages = [{"role": "system", "content": system}] if system else []
    prompt = "> " if lines.isatty() else ""
    while True:
        print(prompt, end="", flush=True)
        try:
            line = lines.readline()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"standard input: byte {error.start} is not UTF-8") from None
        if not line.strip():
            return
        plain({"standard input": line})
        messages.append({"role": "user", "content": line.strip()})
        ids = generator.tokenizer.render(messages)
        (answer,) = generator.generate(ids, request)
        print(answer.text, flush=True)
        messages.append({"role": "assistant", "content": answer.text})
