"""A small random model with a bank of unlike adapters, and its plain reference: merged weights, no cache, no bank."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marlaas_jax.lora import bank as banks
from marlaas_jax.lora.adapter import AdapterSpec, Weights, init_weights
from marlaas_jax.model import attention, transformer
from marlaas_jax.model.config import ModelConfig

CONFIG = ModelConfig(
    architecture="llama",
    num_layers=2,
    model_dim=32,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    vocab_size=61,  # a prime: no block count divides it
    rope_theta=10000.0,
    norm_eps=1e-5,
    max_position=64,
    tied_embeddings=True,
)
SPECS = (
    AdapterSpec(4, 16.0, ("q", "k", "v", "o", "gate", "up", "down"), 1),
    AdapterSpec(2, 16.0, ("q", "v"), 2),
    AdapterSpec(1, 2.0, ("gate", "up", "down"), 3),
    AdapterSpec(3, 6.0, ("o", "down"), 4),
)
MAX_RANK = 4


def random_weights(spec: AdapterSpec, size: float = 0.3) -> Weights:
    """Returns an adapter whose `up` is not zero."""
    weights = init_weights(CONFIG, spec, MAX_RANK)
    rng = np.random.default_rng(spec.seed + 100)
    for target in spec.targets:
        up = weights[target]["up"]
        up[:, : spec.rank] = rng.standard_normal((up.shape[0], spec.rank, up.shape[2])) * size
    return weights


def fill(num_slots: int) -> banks.Bank:
    """Returns a bank with SPECS in its first slots."""
    bank = banks.empty(CONFIG, num_slots, MAX_RANK)
    for slot, spec in enumerate(SPECS, start=1):
        bank = banks.write(bank, slot, random_weights(spec), spec.scale)
    return bank


@dataclasses.dataclass(frozen=True)
class World:
    """One model in one form, with its bank."""

    config: ModelConfig
    params: transformer.Params
    bank: banks.Bank

    def merged(self, adapter_slot: int) -> transformer.Params:
        """Returns unrolled parameters with one adapter of the bank added to the weights."""
        params = transformer.unstack_layers(self.params) if isinstance(self.params["layers"], dict) else self.params
        weights, scale = banks.read(self.bank, adapter_slot)
        layers = []
        for i, layer in enumerate(params["layers"]):
            delta = {t: scale * f["down"][i].T @ f["up"][i] for t, f in weights.items()}
            layers.append({name: value + delta[name] if name in delta else value for name, value in layer.items()})
        return params | {"layers": tuple(layers)}

    def logprobs(self, adapter_slot: int, tokens: list[int]) -> np.ndarray:
        """Returns log-probabilities [T, V] of the token that follows each of `tokens`, by one whole forward pass."""
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(_logprobs(self.config, self.merged(adapter_slot), padded, np.int32([len(tokens)])))[: len(tokens)]


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(config, params, ids, length):
    positions = jnp.arange(ids.shape[1])[None]
    hidden, _ = transformer.forward(config, params, ids, positions, attention.causal(length))
    return jax.nn.log_softmax(transformer.unembed(params, hidden[0]), axis=-1)


@pytest.fixture(scope="session", params=["unrolled", "scanned"])
def world(request) -> World:
    """The model in both forms."""
    params = transformer.init_params(CONFIG)
    if request.param == "scanned":
        params = transformer.stack_layers(params)
    return World(CONFIG, params, fill(6))


@pytest.fixture(scope="session")
def unrolled() -> World:
    """The model in the form that CPUs use."""
    return World(CONFIG, transformer.init_params(CONFIG), fill(6))
