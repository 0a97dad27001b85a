"""Sampling over HTTP with the real device and the tiny model: ids and log-probs are those of the engine used directly."""

import numpy as np
import pytest

from marlaas_jax.cli.sample import Generator, Request
from marlaas_jax.workers.controller import DEVICE_MODULE
from tests.e2e.runs import RUNTIME, job
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
    texts = {model: [found[model, seed].token_ids for seed in SEEDS] for model in adapters}
    assert texts["tiny"] != texts[trained.id] or not np.allclose(
        found["tiny", 11].logprobs.token_logprobs, found[trained.id, 11].logprobs.token_logprobs, atol=1e-6
    )
