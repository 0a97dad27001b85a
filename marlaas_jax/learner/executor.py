"""Owns the learner's device arrays and turns micro-batches into chains of program calls. No jobs and no clock here."""

# NumPy arrays are given where JAX arrays are named.
# pyright: reportArgumentType=false

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.learner import optimizer, state, steps
from marlaas_jax.learner.buckets import LearnerSizes
from marlaas_jax.learner.cost import Unit, layer_ops, projection_ops
from marlaas_jax.learner.optimizer import Hyperparameters
from marlaas_jax.lora.adapter import Weights
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.rl.losses import LossRows
from marlaas_jax.rl.packing import Layout


class Chain:
    """The program calls of one micro-batch, run one after another; `results` is complete when `calls` is empty."""

    def __init__(self, layout: Layout, adapter_slot_M: np.ndarray):
        self.layout = layout
        self.calls: deque[tuple[Unit, Callable[[], Any]]] = deque()
        self.results: dict[str, Any] = {}
        self._slots = np.asarray(adapter_slot_M, np.int32)
        self.adapter_slot_M = jax.device_put(self._slots)

    def redirect(self, slot: int) -> None:
        """Points the blocks of an adapter that is being wiped at the null adapter: what they still give is zero."""
        self._slots = np.where(self._slots == slot, 0, self._slots).astype(np.int32)
        self.adapter_slot_M = jax.device_put(self._slots)

    def run(self) -> tuple[Unit, Any]:
        """Runs the next call; returns what it was and an array to wait for."""
        unit, call = self.calls.popleft()
        return unit, call()


class Executor:
    """The base's parameters (shared, never written), the masters (donated from call to call) and scratch buffers."""

    def __init__(self, model: ModelConfig, params: Any, sizes: LearnerSizes, num_slots: int, max_rank: int):
        self.model, self.sizes, self.max_rank = model, sizes, max_rank
        self._params = params
        self.masters = state.empty(model, num_slots, max_rank)
        self.zeros = state.zeros_of(model, max_rank)
        capacity = sizes.capacity
        self._logprob_N = jnp.zeros((capacity,), jnp.float32)
        self._entropy_N = jnp.zeros((capacity,), jnp.float32)
        self._unit_ND = jnp.zeros((capacity, model.model_dim), jnp.float32)
        layers = params["layers"]
        k = model.num_layers if isinstance(layers, dict) else sizes.layers_per_program
        starts = range(0, model.num_layers, k)
        self._first_layer = [jax.device_put(np.int32(i)) for i in starts]
        self._layers = [layers] if isinstance(layers, dict) else [layers[i : i + k] for i in starts]
        self._layers_per_call = k

    # ---- chains

    def train_chain(self, layout: Layout, adapter_slot_M: np.ndarray, rows: LossRows) -> Chain:
        """Returns forward and backward of one micro-batch; results: "metrics" (per-row sums [B])."""
        chain = Chain(layout, adapter_slot_M)
        hidden = self._forward_calls(chain, keep=True)
        index_BT, rows = jax.device_put((layout.index_BT, rows))

        def head(index, target):
            buffers = self._logprob_N, self._entropy_N, self._unit_ND
            buffers = steps.head_jit(self.model, self._params, hidden["x"], index, target, *buffers)
            self._logprob_N, self._entropy_N, self._unit_ND = buffers
            return self._unit_ND

        ops = 2 * projection_ops(self.model, self.sizes.head_chunk)
        for index, target in self._head_chunks(layout):
            chain.calls.append((Unit("head", ops), lambda i=index, t=target: head(i, t)))

        def finish():
            buffers = self._logprob_N, self._entropy_N, self._unit_ND
            out = steps.finish_jit(self.model, self._params, hidden.pop("x"), index_BT, rows, *buffers)
            hidden["dx"], chain.results["metrics"] = out
            return hidden["dx"]

        chain.calls.append((Unit("finish", 0.0), finish))

        def backward(i):
            masters = self.masters
            hidden["dx"], gradients = steps.backward_jit(
                self.model, layout.shape, self._layers[i], masters.bank, self._first_layer[i], chain.adapter_slot_M,
                hidden["lengths"], hidden["kept"].pop(), hidden["dx"], masters.gradients,
            )  # fmt: skip
            self.masters = dataclasses.replace(masters, gradients=gradients)
            return hidden["dx"]

        ops = 2 * self._layers_per_call * layer_ops(self.model, layout.shape)
        for i in reversed(range(len(self._layers))):
            chain.calls.append((Unit("backward", ops), lambda i=i: backward(i)))
        return chain

    def score_chain(self, layout: Layout, adapter_slot_M: np.ndarray) -> Chain:
        """Returns the forward pass of one micro-batch; results: "logprobs", a list of chunks over layout.position."""
        chain = Chain(layout, adapter_slot_M)
        hidden = self._forward_calls(chain, keep=False)
        chain.results["logprobs"] = []

        def head(index, target):
            logprob_C = steps.score_head_jit(self.model, self._params, hidden["x"], index, target)
            chain.results["logprobs"].append(logprob_C)
            return logprob_C

        ops = projection_ops(self.model, self.sizes.head_chunk)
        for index, target in self._head_chunks(layout):
            chain.calls.append((Unit("score_head", ops), lambda i=index, t=target: head(i, t)))
        return chain

    def _forward_calls(self, chain: Chain, keep: bool) -> dict[str, Any]:
        """Queues embedding and layers; returns the holder of what they leave: "x" [N, D] and with `keep` the layers' inputs."""
        layout = chain.layout
        hidden: dict[str, Any] = {"kept": []}

        def embed():
            hidden["lengths"] = jax.device_put(layout.prompt_length_M)
            hidden["x"] = steps.embed_jit(self._params, layout.token_N)
            return hidden["x"]

        def forward(i):
            hidden["x"], kept = steps.forward_jit(
                self.model, layout.shape, self._layers[i], self.masters.bank, self._first_layer[i], chain.adapter_slot_M,
                hidden["lengths"], hidden["x"],
            )  # fmt: skip
            if keep:
                hidden["kept"].append(kept)
            return hidden["x"]

        chain.calls.append((Unit("embed", 0.0), embed))
        ops = self._layers_per_call * layer_ops(self.model, layout.shape)
        for i in range(len(self._layers)):
            chain.calls.append((Unit("forward", ops), lambda i=i: forward(i)))
        return hidden

    def _head_chunks(self, layout: Layout) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (flat index, target) of the loss positions in chunks of fixed size, padded with index N."""
        size, count = self.sizes.head_chunk, len(layout.position)
        num_chunks = -(-count // size)
        index = np.full(num_chunks * size, self.sizes.capacity, np.int32)
        target = np.zeros(num_chunks * size, np.int32)
        index[:count], target[:count] = layout.position, layout.target
        return list(zip(index.reshape(-1, size), target.reshape(-1, size), strict=True))

    # ---- optimizer and slots

    def update(self, slots: Sequence[int], hyper: Sequence[dict[str, Any]], at_least: int = 1) -> jax.Array:
        """Steps the adapters in `slots`, at most one bucket of them; returns their gradient norms, padded to the bucket."""
        size = min(bucket for bucket in self.sizes.update_buckets if bucket >= max(len(slots), at_least))
        padding = {
            "learning_rate": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 1.0, "weight_decay": 0.0, "max_norm": np.inf, "count": 0,
            "is_due": False,
        }  # fmt: skip
        columns = [*({**one, "is_due": True} for one in hyper), *[padding] * (size - len(slots))]
        types = {"count": np.int32, "is_due": np.bool_}
        stacked = {name: np.array([one[name] for one in columns], types.get(name, np.float32)) for name in padding}
        slot_U = np.array([*slots, *[0] * (size - len(slots))], np.int32)
        m = self.masters
        bank, first, second, gradients, norm_U = optimizer.update_jit(
            m.bank, m.first, m.second, m.gradients, slot_U, Hyperparameters(**stacked)
        )
        self.masters = state.Masters(bank, first, second, gradients)
        return norm_U

    def place(self, slot: int, weights: Weights, first: Weights, second: Weights, scale: float) -> None:
        """Puts an adapter and its moments into `slot`; whatever was there is gone."""
        self.masters = state.place_jit(self.masters, np.int32(slot), weights, first, second, np.float32(scale))

    def wipe(self, slot: int) -> None:
        """Clears a slot whole."""
        self.place(slot, self.zeros, self.zeros, self.zeros, 0.0)

    @contextlib.contextmanager
    def guest(self, weights: Weights, scale: float) -> Iterator[int]:
        """Lends slot 0 to an adapter that has no slot, so that it can be read; then slot 0 is the null adapter again."""
        self.place(0, weights, self.zeros, self.zeros, scale)
        try:
            yield 0
        finally:
            self.wipe(0)

    def published(self, slot: int, dtype: Any) -> Weights:
        """Returns a copy of the slot's adapter, on the device."""
        return state.published_jit(self.masters.bank, np.int32(slot), dtype)

    def extract(self, slot: int) -> tuple[Weights, Weights, Weights]:
        """Returns (weights, first, second) of the slot as NumPy arrays."""
        return jax.device_get(state.extract_jit(self.masters, np.int32(slot)))
