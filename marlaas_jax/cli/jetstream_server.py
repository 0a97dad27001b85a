"""`marlaas jetstream-server`: JetStream's orchestrator and gRPC server on one base model and a fixed set of adapters."""

import importlib.util
import json as jsonlib
import logging
import os
import queue
import re
import signal
import threading
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import typer

from marlaas_jax.config import NAME_RULE, EngineSection, Section, set_key, split_override, validate
from marlaas_jax.documents import plain, require_path
from marlaas_jax.errors import InvalidConfig, short

STOP_S = 5.0  # for JetStream's threads to end after a signal; then this process ends without them
RESERVED_NAMES = ("base",)
_MISSING = "marlaas jetstream-server needs {}; pip install 'marlaas-jax[jetstream]'"


class ServerConfig(Section):
    """What `--set` may change. JetStream asks for one token and prefills one prompt at a time, whatever `engine` says of it."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    layers: Literal["auto", "scanned", "unrolled"] = "auto"
    engine: EngineSection = EngineSection()


def run(model: str, adapters: Sequence[str], host: str, port: int, overrides: Sequence[str], json: bool) -> None:
    """Serves until a signal or until one of JetStream's threads dies. Raises UserError for a bad start.

    Then says so in one sentence and raises SystemExit, within STOP_S: 143 after SIGTERM, 130 after SIGINT, 1 after a death.
    A second signal ends it at once.
    """
    plain({"--host": host})
    require_path("--model", model)
    sources = adapter_sources(adapters)
    config = read_config(overrides)
    for package in ("jetstream", "grpc"):
        if importlib.util.find_spec(package) is None:
            raise InvalidConfig(_MISSING.format({"jetstream": "google-jetstream", "grpc": "grpcio"}[package]))
    try:
        from marlaas_jax.jetstream import server
    except ModuleNotFoundError as error:
        raise InvalidConfig(_MISSING.format(error.name)) from None
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    ended: queue.SimpleQueue[int | str] = queue.SimpleQueue()  # a signal's number, or what died
    with server.reserve(host, port) as reserved:
        address = server.address_of(reserved)
        _tell(json, "starting", f"loading {model}; compiling its programs", address=address)
        engine, reader = load(model, sources, config)
        engine.warmup()
        _catch_signals(ended)
        try:
            running = server.start(engine, reader, address, ended.put)
        except Exception as error:  # JetStream's threads would keep the process alive without a server
            _leave(1, f"error: JetStream's server did not start: {error}")
        served = ", ".join([*RESERVED_NAMES, *sources])
        _tell(json, "ready", f"serving {model} ({served}) at {address}", address=address, model=model, adapters=[*sources])
        reason = ended.get()
        if isinstance(reason, str):
            code, sentence = 1, f"error: {reason}"
        else:
            code, sentence = 128 + reason, "interrupted" if reason == signal.SIGINT else "terminated"
        _stop(running, code, sentence)
    typer.echo(sentence, err=True)
    raise SystemExit(code)


def adapter_sources(adapters: Sequence[str]) -> dict[str, str]:
    """Returns name -> source of `NAME=SOURCE` texts. Raises InvalidConfig."""
    sources: dict[str, str] = {}
    for text in adapters:
        name, separator, source = text.partition("=")
        if not separator or not source:
            raise InvalidConfig(f"--adapter {short(text)}: must read NAME=SOURCE, as in mine=runs/first/mine@20")
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is None:
            raise InvalidConfig(f"--adapter {short(text)}: the name {short(name)}: {NAME_RULE}")
        if name in sources or name in RESERVED_NAMES:
            taken = "is the base model's" if name in RESERVED_NAMES else "is given twice"
            raise InvalidConfig(f"--adapter {short(text)}: the name {name!r} {taken}; name it otherwise")
        require_path("--adapter", source)
        sources[name] = source
    return sources


def read_config(overrides: Sequence[str]) -> ServerConfig:
    """Returns the configuration that `--set` makes; a leading `runtime.`, as job files have it, may be there or not."""
    document: dict[str, Any] = {}
    for override in overrides:
        key, value = split_override(override)
        set_key(document, key.removeprefix("runtime.").split("."), value, f"--set {short(override)}")
    return validate(ServerConfig, document)


def load(model: str, sources: dict[str, str], config: ServerConfig) -> tuple[Any, Any]:
    """Returns (engine, reader of requests) of a base model and its adapters. Raises UserError."""
    from marlaas_jax.device import build, initial
    from marlaas_jax.engine.engine import EngineSettings
    from marlaas_jax.jetstream.engine import ServedEngine
    from marlaas_jax.jetstream.prompts import Reader
    from marlaas_jax.model import load as models
    from marlaas_jax.model import source
    from marlaas_jax.model.identity import identity
    from marlaas_jax.text.tokenizer import Tokenizer

    build.use_compilation_cache()
    folder = source.resolve(model)
    dtype = build.resolve_dtype(config.dtype)
    model_config, params = models.load(folder, dtype, build.is_unrolled(config.layers))
    tokenizer = Tokenizer.load(folder)
    base = identity(folder) if sources else {}
    adapters = [initial.read_adapter(each, model_config, None, base) for each in sources.values()]
    max_rank = max((spec.rank for spec, _ in adapters), default=1)
    max_context = min(config.engine.max_context, model_config.max_position)
    settings = EngineSettings(
        num_decode_slots=config.engine.num_decode_slots,
        max_context=max_context,
        num_adapter_slots=1 + len(adapters),
        max_rank=max_rank,
        prefill_batch=1,
        context_buckets=config.engine.context_buckets,
        prefill_buckets=config.engine.prefill_buckets,
        dtype=dtype,
    )
    padded = [(spec, _padded(weights, max_rank)) for spec, weights in adapters]
    engine = ServedEngine(model_config, settings, params, padded, tokenizer.end_ids)
    slots = {name: slot for slot, name in enumerate(sources, start=1)}
    return engine, Reader(tokenizer, model_config.vocab_size, max_context, slots)


def _padded(weights: dict[str, dict[str, Any]], max_rank: int) -> dict[str, dict[str, Any]]:
    """Returns weights [L, R, ...] whose rank dim is filled up with zeros."""
    fill = lambda x: np.pad(x, ((0, 0), (0, max_rank - x.shape[1]), (0, 0)))
    return {target: {name: fill(np.asarray(x)) for name, x in factors.items()} for target, factors in weights.items()}


def _catch_signals(ended: "queue.SimpleQueue[int | str]") -> None:
    received: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        ended.put(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell has SIGINT for what it runs in the background
            signal.signal(number, on_signal)


def _stop(running: Any, code: int, sentence: str) -> None:
    """Ends JetStream's server; if a thread of it does not end within STOP_S, the process ends without waiting for it."""
    late = threading.Timer(STOP_S, _leave, (code, sentence))
    late.daemon = True
    late.start()
    running.stop()
    late.cancel()


def _leave(code: int, sentence: str) -> NoReturn:
    typer.echo(sentence, err=True)
    os._exit(code)


def _tell(json: bool, kind: str, text: str, **fields: Any) -> None:
    typer.echo(jsonlib.dumps({"type": kind, **fields}) if json else text)
