"""A small model, batches for it, and a plain training pass to compare with: whole sequences, nothing shared, one program."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.config import JobConfig
from marlaas_jax.learner.buckets import LearnerSizes
from marlaas_jax.learner.learner import Learner
from marlaas_jax.lora.adapter import AdapterSpec, init_weights
from marlaas_jax.messages import JobFailed, StepDone, TrainBatch, TrainGroup, TrainRow
from marlaas_jax.model import transformer
from marlaas_jax.model.attention import causal
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.rl.packing import BlockShape

MODEL = ModelConfig("llama", 2, 16, 4, 2, 4, 24, 32, 1e4, 1e-5, 64, True)
MAX_RANK = 4
SHAPES = (BlockShape(6, 4, 4, 2), BlockShape(6, 9, 2, 2))
SIZES = LearnerSizes(
    SHAPES, BlockShape(8, 1, 1, 1), head_chunk=8, layers_per_program=1, update_buckets=(1, 2), max_dispatch_s=1e9
)
SPEC = AdapterSpec(4, 8.0, ("q", "k", "v", "o", "gate", "up", "down"), seed=1)


class Clock:
    """Time that passes by a fixed amount with every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


def params(seed: int = 0, model: ModelConfig = MODEL) -> Any:
    return transformer.init_params(model, seed)


def trained_weights(spec: AdapterSpec, seed: int = 5, max_rank: int = MAX_RANK, model: ModelConfig = MODEL) -> Any:
    """Returns an adapter whose `up` is not zero any more."""
    rng = np.random.default_rng(seed)
    weights = init_weights(model, spec, max_rank)
    for target in spec.targets:
        up = weights[target]["up"]
        up[:, : spec.rank] = rng.normal(0, 0.2, up[:, : spec.rank].shape)
    return weights


def make_learner(model_params: Any = None, sizes: LearnerSizes = SIZES, num_slots: int = 4, **options: Any) -> Learner:
    return Learner(
        MODEL, params() if model_params is None else model_params, sizes, num_slots=num_slots, max_rank=MAX_RANK, clock=Clock(),
        **options,
    )  # fmt: skip


def make_job(name: str = "a", **sections: Any) -> JobConfig:
    optimizer = {"learning_rate": 0.01, "weight_decay": 0.1} | sections.pop("optimizer", {})
    return JobConfig.model_validate({"name": name, "env": "none", "optimizer": optimizer, **sections})


def make_row(
    rng: np.random.Generator, length: int, *, version: int = 0, advantage: float | None = None, **changes: Any
) -> TrainRow:
    mask = np.ones(length, np.uint8)
    if length > 3:
        mask[1] = 0  # an environment's token in between
    fields = {
        "token_ids": tuple(int(t) for t in rng.integers(0, MODEL.vocab_size, length)),
        "loss_mask": mask.tobytes(),
        "logprobs": (rng.normal(-3.5, 0.3, length) * mask).astype("<f4").tobytes(),
        "versions": np.where(mask, version, -1).astype("<i4").tobytes(),
        "advantage": float(rng.normal()) if advantage is None else advantage,
    }
    return TrainRow(**(fields | changes))


def make_batch(job: str = "a", step: int = 0, seed: int = 0, groups: int = 3, rows: int = 5, **changes: Any) -> TrainBatch:
    """Returns a batch of groups with prompts and answers of many lengths."""
    rng = np.random.default_rng([seed, step])
    made = []
    for ticket in range(groups):
        prompt = tuple(int(t) for t in rng.integers(0, MODEL.vocab_size, rng.integers(1, 8)))
        own = tuple(make_row(rng, int(rng.integers(1, 10)), **changes) for _ in range(rows))
        made.append(TrainGroup(ticket, 0, prompt, own))
    return TrainBatch(job, 0, step, tuple(made), b"ledger", 0.0)


def run(learner: Learner, *batches: TrainBatch) -> list[StepDone | JobFailed]:
    """Submits batches and steps until nothing is left."""
    for batch in batches:
        assert learner.submit(batch)
    done: list[StepDone | JobFailed] = []
    while learner.has_work():
        done += learner.step()
    return done


def flat(learner: Learner, job: str) -> dict[str, np.ndarray]:
    """Returns the job's state arrays."""
    return learner.state(job)["arrays"]


@functools.partial(jax.jit, static_argnums=0)
def _plain_forward(
    model: ModelConfig, model_params: Any, weights: Any, scale: Any, tokens: jax.Array, length: jax.Array
) -> jax.Array:
    def project(name, x, weight, side):
        return x @ weight + scale * (x @ side[name]["down"].swapaxes(0, 1)) @ side[name]["up"]

    sides = tuple(jax.tree.map(lambda stack, i=i: stack[i], weights) for i in range(model.num_layers))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = transformer.forward(model, model_params, tokens, positions, causal(length), project=project, sides=sides)
    return jax.nn.log_softmax(transformer.unembed(model_params, hidden))


def plain_log_softmax(
    model_params: Any, weights: Any, scale: float, sequences: Sequence[Sequence[int]], model: ModelConfig = MODEL
) -> jax.Array:
    """Returns log-probs [rows, 20, V] of a plain causal pass over whole sequences, the adapter applied as its formula says."""
    tokens = np.zeros((len(sequences), 20), np.int32)
    for b, ids in enumerate(sequences):
        tokens[b, : len(ids)] = ids
    return _plain_forward(model, model_params, weights, scale, tokens, np.array([len(ids) for ids in sequences], np.int32))


def plain_logprobs(model_params: Any, weights: Any, scale: float, token_ids: Sequence[int]) -> np.ndarray:
    """Returns log-probs of token_ids[1:]."""
    out = np.asarray(plain_log_softmax(model_params, weights, scale, [token_ids]))[0]
    return out[np.arange(len(token_ids) - 1), np.asarray(token_ids[1:])]


def plain_grpo(
    model_params: Any, weights: Any, scale: float, batch: TrainBatch, model: ModelConfig = MODEL, clip: float = 0.2
) -> tuple[float, Any]:
    """Returns GRPO's loss of a whole batch and its gradient: the mean over rows of each row's mean over its sampled tokens."""
    rows = [(group.prompt_ids, row) for group in batch.groups for row in group.rows]
    sequences = [(*prompt, *row.token_ids) for prompt, row in rows]
    shape = (len(rows), 20)
    target, old, share = np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for b, (prompt, row) in enumerate(rows):
        mask = np.frombuffer(row.loss_mask, np.uint8).astype(bool)
        times = len(prompt) - 1 + mask.nonzero()[0]  # where the sampled tokens are predicted
        target[b, times], old[b, times] = np.array(row.token_ids)[mask], np.frombuffer(row.logprobs, "<f4")[mask]
        share[b, times] = 1 / (mask.sum() * len(rows))
    advantage = np.array([[row.advantage] for _, row in rows], np.float32)

    @jax.jit
    def loss(weights):
        log_softmax = plain_log_softmax(model_params, weights, scale, sequences, model)
        ratio = jnp.exp(jnp.take_along_axis(log_softmax, target[..., None], axis=-1)[..., 0] - old)
        return -jnp.sum(share * jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage))

    value, gradient = jax.value_and_grad(loss)(weights)
    return float(value), jax.device_get(gradient)
