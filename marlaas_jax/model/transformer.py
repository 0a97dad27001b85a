"""The decoder: one forward pass for prefill, decoding and training, unaware of caches and of LoRA.

Parameters are a dict:
    embed_VD, final_norm_D, unembed_DV (absent when tied), layers
and each layer a dict:
    attn_norm_D, q [D, N*H], k [D, K*H], v [D, K*H], o [N*H, D], mlp_norm_D, gate [D, F], up [D, F], down [F, D],
    q_bias, k_bias, v_bias (with qkv_bias), q_norm_H, k_norm_H (with qk_norm).
`layers` is a tuple of such dicts (unrolled) or one dict of arrays with a leading L (scanned); the form decides how they run.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.model import rope
from marlaas_jax.model.attention import Attend
from marlaas_jax.model.config import ModelConfig

Params = dict[str, Any]
# project(name, x, weight, side) -> x @ weight, plus whatever is laid over that projection; `side` is the layer's own data
Project = Callable[[str, jax.Array, jax.Array, Any], jax.Array]


def plain_project(name: str, x: jax.Array, weight: jax.Array, side: Any) -> jax.Array:
    """Returns x @ weight: the base model."""
    del name, side
    return x @ weight


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns x / rms(x) * weight over the last dim, computed in float32 (Zhang & Sennrich 2019)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


def _attention(config, x, layer, side, kv, cos, sin, attend, project):
    heads = (config.num_query_heads, config.num_kv_heads, config.num_kv_heads)
    qkv = []
    for name, num_heads in zip("qkv", heads, strict=True):
        y = project(name, x, layer[name], side)
        if config.qkv_bias:
            y = y + layer[f"{name}_bias"]
        y = y.reshape(*x.shape[:-1], num_heads, config.head_dim)
        if config.qk_norm and name != "v":
            y = rms_norm(y, layer[f"{name}_norm_H"], config.norm_eps)
        qkv.append(y if name == "v" else rope.rotate(y, cos, sin))
    out, kv = attend(*qkv, kv)
    return project("o", out, layer["o"], side), kv


def block(config: ModelConfig, x, layer, side, kv, cos, sin, attend: Attend, project: Project):
    """Returns (x, kv) after one layer; x [..., D]."""
    with jax.named_scope("attention"):
        h = rms_norm(x, layer["attn_norm_D"], config.norm_eps)
        out, kv = _attention(config, h, layer, side, kv, cos, sin, attend, project)
        x = x + out
    with jax.named_scope("mlp"):
        h = rms_norm(x, layer["mlp_norm_D"], config.norm_eps)
        h = jax.nn.silu(project("gate", h, layer["gate"], side)) * project("up", h, layer["up"], side)
        return x + project("down", h, layer["down"], side), kv


def forward(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    kv: Any = None,
    *,
    project: Project = plain_project,
    sides: Any = None,
    remat: bool = False,
) -> tuple[jax.Array, Any]:
    """Returns (hidden [..., D] after the final norm, kv per layer) for integer `tokens` and `positions` [...].

    `kv` and `sides` follow the form of params["layers"]: a tuple with one entry per layer (or None), or a pytree whose leaves
    lead with L. With `remat` only each layer's input is kept for the backward pass.
    """
    cos, sin = rope.angles(config, positions)

    def run(x, layer, side, kv):
        return block(config, x, layer, side, kv, cos, sin, attend, project)

    if remat:
        run = jax.checkpoint(run)
    x = jnp.take(params["embed_VD"], tokens, axis=0)
    layers = params["layers"]
    if isinstance(layers, dict):
        x, kv = jax.lax.scan(lambda x, xs: run(x, *xs), x, (layers, sides, kv))
    else:
        kept = []
        for i, layer in enumerate(layers):
            x, layer_kv = run(x, layer, None if sides is None else sides[i], None if kv is None else kv[i])
            kept.append(layer_kv)
        kv = tuple(kept)
    return rms_norm(x, params["final_norm_D"], config.norm_eps), kv


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
    """Returns logits [..., V] in float32 for hidden [..., D]."""
    weight = params.get("unembed_DV")
    if weight is None:
        return jnp.einsum("...d,vd->...v", hidden, params["embed_VD"], preferred_element_type=jnp.float32)
    return jnp.einsum("...d,dv->...v", hidden, weight, preferred_element_type=jnp.float32)


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array of one layer."""
    shapes: dict[str, tuple[int, ...]] = dict(config.projection_dims())
    shapes |= {"attn_norm_D": (config.model_dim,), "mlp_norm_D": (config.model_dim,)}
    if config.qkv_bias:
        shapes |= {f"{name}_bias": (shapes[name][1],) for name in "qkv"}
    if config.qk_norm:
        shapes |= {"q_norm_H": (config.head_dim,), "k_norm_H": (config.head_dim,)}
    return shapes


def init_params(config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> Params:
    """Returns random unrolled parameters: normal with variance 1/inputs, norms 1, biases small. For tests and `tiny`."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if "norm" in name:
            return jnp.ones(shape, dtype)
        scale = 0.02 if len(shape) == 1 else shape[0] ** -0.5
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) * scale, dtype)

    shapes = layer_shapes(config)
    params: Params = {
        "embed_VD": jnp.asarray(rng.standard_normal((config.vocab_size, config.model_dim), dtype=np.float32) * 0.02, dtype),
        "final_norm_D": jnp.ones((config.model_dim,), dtype),
        "layers": tuple({name: draw(name, shape) for name, shape in shapes.items()} for _ in range(config.num_layers)),
    }
    if not config.tied_embeddings:
        params["unembed_DV"] = draw("unembed", (config.model_dim, config.vocab_size))
    return params


def stack_layers(params: Params) -> Params:
    """Returns the scanned form of unrolled parameters."""
    return params | {"layers": jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])}


def unstack_layers(params: Params) -> Params:
    """Returns the unrolled form of scanned parameters."""
    count = len(params["layers"]["q"])
    return params | {"layers": tuple(jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(count))}
