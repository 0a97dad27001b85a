"""`marlaas jetstream-server` as a process of its own, on the tiny model."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZES = {"num_decode_slots": 4, "max_context": 64, "prefill_buckets": (64,), "context_buckets": (64,)}


@contextlib.contextmanager
def running_server(adapters, *more):
    """Yields (process, address) of a server that is ready."""
    arguments = ["jetstream-server", "--model", "tiny", "--port", "0", "--json"]
    for name, path in adapters.items():
        arguments += ["--adapter", f"{name}={path}"]
    for key, value in SIZES.items():
        arguments += ["--set", f"engine.{key}={json.dumps(value)}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "marlaas_jax.cli.main", *arguments, *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        starting, ready = (json.loads(process.stdout.readline() or "{}") for _ in range(2))
        assert (starting.get("type"), ready.get("type")) == ("starting", "ready"), process.communicate(timeout=60)
        assert ready["address"] == starting["address"] and ready["adapters"] == list(adapters)
        yield process, ready["address"]
    finally:
        process.kill()
        process.communicate(timeout=60)


def environment(*folders):
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "envs", *folders)))}


def decode(stub, pb2, adapter, ids, max_tokens):
    """Returns the ids that a client of JetStream's gets for a prompt of ids."""
    request = pb2.DecodeRequest(token_content=pb2.DecodeRequest.TokenContent(token_ids=ids), max_tokens=max_tokens)
    parts = stub.Decode(request, metadata=(("lora-adapter-id", adapter),) if adapter else None, timeout=100)
    return [token for part in parts for token in part.stream_content.samples[0].token_ids]
