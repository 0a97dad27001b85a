"""Trains `tiny` by imitation and scores it. Fixed seeds and step counts: a rerun on the same machine repeats itself."""

import dataclasses
import random
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import tokenizers

from marlaas_envs import char_tasks
from marlaas_jax.model import transformer
from marlaas_jax.model.attention import Attend, causal
from marlaas_jax.tiny.demonstrator import Packed, demonstrate, encode, packed_batches
from marlaas_jax.tiny.folder import CONFIG, PAD, build_tokenizer

NUM_STEPS = 1500
CAREFUL_SHARE = 0.6  # of the steps, those with careful demonstrations
NUM_ROWS, NUM_TOKENS = 21, 96
LEARNING_RATE = 0.02  # of Muon, for the matrices; the embedding and the norms take Adam's
ADAM_LEARNING_RATE = 3e-3
NUM_SCORED = 256  # held-out items per task


@dataclasses.dataclass(frozen=True)
class Score:
    """One task on held-out items."""

    sampled: float  # expected reward when sampling at temperature 1: mean probability of the right turns
    greedy: float  # share of items that greedy decoding answers right


def packed_attention(segment_BT: jax.Array) -> Attend:
    """Attention within each demonstration of a packed row."""
    earlier = jnp.arange(segment_BT.shape[1])[:, None] >= jnp.arange(segment_BT.shape[1])[None, :]
    seen_BTT = earlier[None] & (segment_BT[:, :, None] == segment_BT[:, None, :])

    def attend(q, k, v, kv):
        del kv
        group = q.shape[2] // k.shape[2]
        q = q.reshape(*k.shape[:3], group, k.shape[3]) * k.shape[3] ** -0.5
        scores = jnp.where(seen_BTT[:, None, None], jnp.einsum("btkqh,bskh->bkqts", q, k), -1e30)
        out = jnp.einsum("bkqts,bskh->btkqh", jax.nn.softmax(scores, axis=-1), v)
        return out.reshape(*out.shape[:2], -1), None

    return attend


def imitation_loss(params: transformer.Params, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean negative log-probability of the demonstrator's tokens."""
    tokens = batch["tokens_BT"]
    attend = packed_attention(batch["segment_BT"][:, :-1])
    hidden, _ = transformer.forward(CONFIG, params, tokens[:, :-1], batch["positions_BT"][:, :-1], attend)
    logprobs = jax.nn.log_softmax(transformer.unembed(params, hidden))
    picked = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    weight = batch["is_imitated_BT"][:, 1:].astype(jnp.float32)
    return -jnp.sum(picked * weight) / jnp.sum(weight)


def train(seed: int, report: Callable[[str], None], num_steps: int = NUM_STEPS) -> transformer.Params:
    """Returns trained parameters, rounded to bfloat16 as they are shipped; `report` gets a line now and then."""
    params = transformer.init_params(CONFIG, seed)
    optimizer = _optimizer(params, num_steps)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        loss, gradient = jax.value_and_grad(imitation_loss)(params, batch)
        update, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, update), state, loss

    started = time.process_time()
    batches = packed_batches(build_tokenizer(), NUM_ROWS, NUM_TOKENS, int(num_steps * CAREFUL_SHARE), seed)
    for i in range(num_steps):
        params, state, loss = step(params, state, _arrays(next(batches)))
        if i % 100 == 99 or i == num_steps - 1:
            cpu_s = time.process_time() - started
            line = f"step {i + 1}/{num_steps} loss {float(loss):.3f} cpu {cpu_s:.0f} s"
            if i % 400 == 399 and i != num_steps - 1:
                line += f" {summary(score(params))}"
            report(line)
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)


def _optimizer(params: transformer.Params, num_steps: int) -> optax.GradientTransformation:
    """Returns Muon (Jordan 2024) for the layers' matrices and Adam for the rest: half the steps that AdamW needs here."""

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, min(60, num_steps // 2), num_steps, peak * 0.02)

    is_matrix = {
        "embed_VD": None,
        "final_norm_D": None,
        "layers": tuple(
            {name: optax.contrib.MuonDimensionNumbers() if x.ndim == 2 else None for name, x in layer.items()}
            for layer in params["layers"]
        ),
    }
    return optax.contrib.muon(
        schedule(LEARNING_RATE),
        adam_learning_rate=schedule(ADAM_LEARNING_RATE),
        adam_b2=0.98,
        muon_weight_dimension_numbers=is_matrix,
    )


def score(params: transformer.Params, num_items: int = NUM_SCORED) -> dict[str, Score]:
    """Returns every task's score on held-out items, without sampling noise.

    The expected reward of sampling is the probability of the right turns, and greedy decoding is right exactly when each
    token of the right turns is the likeliest after those before it; both come from one forward pass over the right episode.
    """
    tokenizer = build_tokenizer()
    return {task: _score_task(params, tokenizer, task, num_items) for task in char_tasks.TASKS}


def summary(scores: dict[str, Score]) -> str:
    """Returns the scores on one line."""
    means = [np.mean([getattr(s, kind) for s in scores.values()]) for kind in ("sampled", "greedy")]
    tasks = " ".join(f"{task}={s.sampled:.2f}/{s.greedy:.2f}" for task, s in scores.items())
    return f"sampled {means[0]:.3f} greedy {means[1]:.3f} | {tasks}"


@jax.jit
def _next_token_logprobs(params: transformer.Params, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1] - 1), (tokens_BT.shape[0], tokens_BT.shape[1] - 1))
    attend = causal(jnp.full((tokens_BT.shape[0],), tokens_BT.shape[1] - 1))
    hidden, _ = transformer.forward(CONFIG, params, tokens_BT[:, :-1], positions, attend)
    logprobs = jax.nn.log_softmax(transformer.unembed(params, hidden))
    picked = jnp.take_along_axis(logprobs, tokens_BT[:, 1:, None], axis=-1)[..., 0]
    return picked, picked >= jnp.max(logprobs, axis=-1)


def _score_task(params: transformer.Params, tokenizer: tokenizers.Tokenizer, task: str, num_items: int) -> Score:
    tokens = np.full((num_items, 48), PAD, np.int32)
    is_graded = np.zeros(tokens.shape, bool)
    for row in range(num_items):
        right = demonstrate(char_tasks.item(task, row, "eval"), 1.0, random.Random(0))
        ids, graded = encode(tokenizer, right)
        tokens[row, : len(ids)] = ids
        is_graded[row, : len(ids)] = graded
    logprobs, is_likeliest = map(np.asarray, _next_token_logprobs(params, tokens))
    graded = is_graded[:, 1:]
    sampled = np.exp(np.sum(logprobs, axis=1, where=graded))
    greedy = np.all(is_likeliest, axis=1, where=graded)
    return Score(round(float(sampled.mean()), 4), round(float(greedy.mean()), 4))


def _arrays(batch: Packed) -> dict[str, np.ndarray]:
    return dataclasses.asdict(batch)
