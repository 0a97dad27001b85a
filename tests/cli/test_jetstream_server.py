"""`marlaas jetstream-server`: what it refuses before it loads anything, and the real server with JetStream's own load tool."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from marlaas_jax.cli import jetstream_server
from marlaas_jax.cli.main import app
from marlaas_jax.device import initial
from marlaas_jax.engine.engine import EngineSettings
from marlaas_jax.engine.sampler import BASE_MODEL, LATEST, Sampler
from marlaas_jax.lora import peft_format
from marlaas_jax.lora.adapter import AdapterSpec, init_weights
from marlaas_jax.lora.snapshot import Snapshot, fingerprint
from marlaas_jax.messages import Generate, Sampling
from marlaas_jax.model import hf_config, load, source
from marlaas_jax.model.identity import identity
from marlaas_jax.text.tokenizer import Tokenizer
from tests.jetstream.running import SIZES, decode, environment, running_server

RANKS = {"first": 2, "second": 4}
needs_jetstream = pytest.mark.skipif(importlib.util.find_spec("jetstream") is None, reason="google-jetstream is not installed")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--adapter", "runs/x"], ["--adapter 'runs/x'", "NAME=SOURCE"]),
        (["--adapter", "a="], ["--adapter 'a='", "NAME=SOURCE"]),
        (["--adapter", "a b=runs/x"], ["the name 'a b'", "1 to 64 letters"]),
        (["--adapter", "base=runs/x"], ["the name 'base' is the base model's"]),
        (["--adapter", "a=runs/x", "--adapter", "a=runs/y"], ["the name 'a' is given twice"]),
        (["--set", "engine.num_decode_slot=4"], ["engine.num_decode_slot: unknown key", "num_decode_slots"]),
        (["--set", "runtime.engine.max_context=4"], ["engine.max_context=4", "greater than or equal to 8"]),
        (["--set", "bank.max_rank=4"], ["bank: unknown key", "dtype, engine, layers"]),
        (["--set", "dtype"], ["--set 'dtype'", "KEY=VALUE"]),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, words):
    assert_refused(arguments, words)


@needs_jetstream
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "192.0.2.1"], ["--host 192.0.2.1 --port 0: cannot be listened on"]),
        (["--adapter", "a=no/where"], ["'no/where': no job 'where' in no"]),
        (["--model", "no-such-model/"], ["no-such-model"]),
    ],
)
def test_a_bad_start_is_one_sentence(arguments, words):
    assert_refused(arguments, words)


def test_without_the_extra_it_names_the_remedy(monkeypatch):
    real = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == "jetstream" else real(name, *rest)
    monkeypatch.setattr(jetstream_server.importlib.util, "find_spec", hidden)
    assert_refused([], ["needs google-jetstream; pip install 'marlaas-jax[jetstream]'"])


def assert_refused(arguments, words):
    result = CliRunner().invoke(app, ["jetstream-server", "--model", "tiny", "--port", "0", *arguments])
    assert result.exit_code == 2, (result.output, result.exception)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert all(word in lines[0] for word in words), lines[0]


# ---- the real server (slow)

# Of what JetStream's load tool imports, what is absent here stands in: seqio's vocabulary reads our tokenizer, and shows ids
# as numbers, so that the tool's report holds them. pandas, nltk and evaluate are for other data sets than the one used.
STAND_INS = {
    "seqio/__init__.py": "",
    "seqio/vocabularies.py": """
from marlaas_jax.text.tokenizer import Tokenizer

class Ids:
    def __init__(self, folder):
        self.encode = Tokenizer.load(folder).encode_prompt
    def decode(self, ids):
        return " ".join(map(str, ids))

class Vocabulary: ...

class SentencePieceVocabulary(Vocabulary):
    sp_model = None
    def __init__(self, folder, extra_ids):
        self.tokenizer = Ids(folder)
""",
    "pandas.py": "",
    "nltk.py": "",
    "evaluate.py": "",
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two PEFT folders of unlike adapters, by name."""
    folder = source.resolve("tiny")
    config = hf_config.read(folder)
    out = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank) in enumerate(RANKS.items()):
        spec = AdapterSpec(rank, 2.0 * rank, ("q", "v", "down"), seed)
        weights = init_weights(config, spec, rank)
        rng = np.random.default_rng(seed)
        for target in spec.targets:
            weights[target]["up"] = (rng.standard_normal(weights[target]["up"].shape) * 0.2).astype(np.float32)
        peft_format.save(out / name, config, spec, weights, identity(folder), "tiny", {})
    return {name: out / name for name in RANKS}


@pytest.fixture(scope="module")
def answers(adapters):
    """Our own request loop: (adapter or "", prompt ids, max_tokens) -> greedy ids, without the token that ends them."""
    folder = source.resolve("tiny")
    config, params = load.load(folder, "float32", unrolled=True)
    tokenizer = Tokenizer.load(folder)
    settings = EngineSettings(**SIZES, num_adapter_slots=4, max_rank=max(RANKS.values()))
    sampler = Sampler(config, params, settings, tokenizer, time.monotonic)
    for name, path in adapters.items():
        spec, weights = initial.read_adapter(str(path), config, settings.max_rank, identity(folder))
        sampler.publish(Snapshot(name, 0, 0, weights, spec.scale, fingerprint(weights, spec.scale)))

    def answer(adapter, prompt, max_tokens):
        version = LATEST if adapter else BASE_MODEL
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        sampler.submit(Generate("x", adapter, 0, tuple(prompt), (0,), sampling, version))
        while sampler.has_work():
            for done in sampler.step():
                assert not done.error
                ids = list(done.token_ids)
        return ids[:-1] if ids and ids[-1] in tokenizer.end_ids else ids

    return answer


def load_tool(address, adapter, folder):
    """Runs JetStream's load tool with its own flags and returns (what it printed, prompt -> ids as it saved them)."""
    script = Path(importlib.util.find_spec("benchmarks").submodule_search_locations[0]) / "benchmark_serving.py"
    saved = folder / f"requests-{adapter or 'base'}.json"
    host, port = address.split(":")
    command = [sys.executable, script, "--server", host, "--port", port, "--dataset", "test", "--total-mock-requests", "32"]
    command += ["--tokenizer", source.resolve("tiny"), "--disable-tqdm", "--seed", str(len(adapter))]
    command += ["--save-request-outputs", "--request-outputs-file-path", saved]
    command += ["--session-cache", f"adapter:{adapter}" if adapter else ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout, [(r["prompt"], list(map(int, r["generated_text"].split()))) for r in json.loads(saved.read_text())]


@needs_jetstream
@pytest.mark.slow
@pytest.mark.multiprocess
def test_jetstreams_load_tool_gets_the_ids_of_our_own_loop(adapters, answers, tmp_path):
    """Three of it at once, for the base and two adapters, 32 requests each on four slots; then SIGTERM."""
    for name, text in STAND_INS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    encode = Tokenizer.load(source.resolve("tiny")).encode_prompt
    with running_server(adapters) as (process, address):
        with ThreadPoolExecutor(3) as threads:
            reports = {name: threads.submit(load_tool, address, name, tmp_path) for name in ("", *adapters)}
        for name, report in reports.items():
            printed, requests = report.result()
            num_empty = sum(not ids for _, ids in requests)  # ended by their first token; the tool does not count those
            assert len(requests) == 32 and f"Successful requests: {32 - num_empty}\n" in printed, printed
            for prompt, ids in requests:
                longest = answers(name, encode(prompt), 10)  # the tool draws 1 to 10 tokens per request and does not say
                assert ids == longest[: len(ids)] and (ids or not longest), (name, prompt)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
        assert process.stderr.read().strip() == "terminated"


@needs_jetstream
@pytest.mark.slow
@pytest.mark.multiprocess
def test_ids_of_base_and_adapters_are_those_of_our_own_loop(adapters, answers):
    """Ids in, ids out, every adapter at once from 24 threads, none lost; a taken port; an interrupt."""
    import grpc

    from marlaas_jax.engine.jetstream import import_quietly

    pb2 = import_quietly("jetstream.core.proto.jetstream_pb2")
    stubs = import_quietly("jetstream.core.proto.jetstream_pb2_grpc")
    rng = np.random.default_rng(7)
    names = ["", *adapters]
    asked = [
        (names[i % 3], rng.integers(3, 120, int(n)).tolist(), int(m)) for i, (n, m) in enumerate(rng.integers(1, 30, (48, 2)))
    ]
    with running_server(adapters) as (process, address), grpc.insecure_channel(address) as channel:
        stub = stubs.OrchestratorStub(channel)

        def ask(wanted):
            return decode(stub, pb2, *wanted)

        with ThreadPoolExecutor(24) as threads:
            theirs = list(threads.map(ask, asked))
        assert theirs == [answers(*wanted) for wanted in asked]
        hello = Tokenizer.load(source.resolve("tiny")).encode_prompt("hello world")
        assert len({tuple(ask((name, hello, 12))) for name in names}) == 3  # the adapters do differ
        assert_refused(["--port", address.split(":")[1]], ["cannot be listened on", "in use"])
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr.read().strip() == "interrupted"
