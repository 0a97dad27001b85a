"""Sampling over HTTP with the real device and `tiny`: the ids are the engine's own, and those of JetStream's server."""

import numpy as np
import pytest

from marlaas_jax.cli.sample import Generator, Request
from marlaas_jax.model import source
from marlaas_jax.text.tokenizer import Tokenizer
from marlaas_jax.workers.controller import DEVICE_MODULE
from tests.e2e.runs import RUNTIME, job
from tests.jetstream.running import decode, running_server
from tests.service.live import live
from tests.service.test_openai import client_of, until

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
PROMPT = "upper: hello world"
SEEDS = (11, 12, 13)


class Seeded(Request):
    """A request with given seeds."""

    def seeds(self):
        return SEEDS


def direct(adapter):
    """Returns (ids, log-probs, text) per seed from the engine, without a service."""
    generator = Generator("tiny", adapter, len(SEEDS), 64)
    prompt = generator.tokenizer.encode_prompt(PROMPT)
    answers = sorted(generator.generate(prompt, Seeded(n=3, max_tokens=24)), key=lambda answer: answer.sample)
    return [(list(a.token_ids), np.frombuffer(a.logprobs, "<f4"), a.text) for a in answers]


def over_jetstream(sources):
    """Returns the greedy ids of JetStream's own server and client for the base ("") and each adapter."""
    import grpc

    from marlaas_jax.engine.jetstream import import_quietly

    pb2 = import_quietly("jetstream.core.proto.jetstream_pb2")
    stubs = import_quietly("jetstream.core.proto.jetstream_pb2_grpc")
    prompt = Tokenizer.load(source.resolve("tiny")).encode_prompt(PROMPT)
    with running_server(sources) as (_, address), grpc.insecure_channel(address) as channel:
        stub = stubs.OrchestratorStub(channel)
        return {name: decode(stub, pb2, name, prompt, 12) for name in ("", *sources)}


def test_ids_over_http_are_those_of_the_engine(tmp_path):
    with live(tmp_path, device_module=DEVICE_MODULE, runtime=RUNTIME) as service, client_of(service, "ann") as ai:
        client = service.client("ann")
        trained = client.wait(client.submit(job("upper", steps=3, checkpoint={"every_steps": 1, "keep": 5})).id)
        assert trained.state == "succeeded", trained.reason
        long = client.submit(job("lower", steps=100_000))
        until(lambda: service.service.sampling.is_published(long), 120)
        steps = [entry["step"] for entry in client.checkpoints(trained.id)]
        first, last = steps[0], steps[-1]
        adapters = {"tiny": None, trained.id: last, f"{trained.id}@{first}": first}
        found = {}
        for model in adapters:
            for seed in SEEDS:
                answer = ai.completions.create(
                    model=model, prompt=PROMPT, seed=seed, max_tokens=24, logprobs=0, extra_body={"return_token_ids": True}
                )
                found[model, seed] = answer.choices[0]
                chunks = ai.completions.create(model=model, prompt=PROMPT, seed=seed, max_tokens=24, stream=True)
                assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
        greedy = {
            model: ai.completions.create(
                model=model, prompt=PROMPT, temperature=0, max_tokens=12, extra_body={"return_token_ids": True}
            ).choices[0]
            for model in adapters
        }
        live_answer = ai.completions.create(model=long.id, prompt=PROMPT, max_tokens=4)
        assert live_answer.version >= 0 and live_answer.system_fingerprint
        status = service.service.controller.status()
        assert status.compiles_since_warmup == 0
        until(lambda: service.service.controller.requests.num_open == 0)
        data_dir = service.service.data_dir
        client.cancel(long.id)
    for model, step in adapters.items():
        expected = direct(None if step is None else f"{data_dir}/{trained.id}@{step}")
        for seed, (ids, logprobs, text) in zip(SEEDS, expected, strict=True):
            choice = found[model, seed]
            assert (choice.token_ids, choice.text) == (ids, text), (model, seed)
            np.testing.assert_allclose(choice.logprobs.token_logprobs, logprobs, atol=1e-4)
    end_ids = Tokenizer.load(source.resolve("tiny")).end_ids  # which JetStream does not send
    sources = {f"step{step}": f"{data_dir}/{trained.id}@{step}" for step in adapters.values() if step is not None}
    assert over_jetstream(sources) == {
        "" if step is None else f"step{step}": [i for i in greedy[model].token_ids if i not in end_ids]
        for model, step in adapters.items()
    }
    texts = {model: [found[model, seed].token_ids for seed in SEEDS] for model in adapters}
    assert texts["tiny"] != texts[trained.id] or not np.allclose(
        found["tiny", 11].logprobs.token_logprobs, found[trained.id, 11].logprobs.token_logprobs, atol=1e-6
    )
