"""The names and layouts of a Hugging Face checkpoint, beside ours. Imports no JAX."""

import dataclasses

from marlaas_jax.model.config import ModelConfig

# LoRA target or projection -> module inside a decoder layer
LAYER_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class HfTensor:
    """One tensor of a checkpoint and where it lives in `transformer.Params`."""

    name: str
    shape: tuple[int, ...]  # as stored
    key: str  # ours, e.g. "embed_VD" or "q"
    layer: int | None = None  # None: outside the layers
    transposed: bool = False  # stored [out, in]; ours is [in, out]


def module_name(layer: int, target: str) -> str:
    """Returns the full name of a projection's module, e.g. model.layers.3.self_attn.q_proj."""
    return f"model.layers.{layer}.{LAYER_MODULES[target]}"


def tensors(config: ModelConfig) -> tuple[HfTensor, ...]:
    """Returns every tensor that a checkpoint of this shape holds; the head only when it is not tied."""
    d, v = config.model_dim, config.vocab_size
    dims = config.projection_dims()
    found = [HfTensor(EMBEDDING, (v, d), "embed_VD"), HfTensor("model.norm.weight", (d,), "final_norm_D")]
    if not config.tied_embeddings:
        found.append(HfTensor(HEAD, (v, d), "unembed_DV", transposed=True))
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}"
        found.append(HfTensor(f"{prefix}.input_layernorm.weight", (d,), "attn_norm_D", i))
        found.append(HfTensor(f"{prefix}.post_attention_layernorm.weight", (d,), "mlp_norm_D", i))
        for target in LAYER_MODULES:
            width_in, width_out = dims[target]
            found.append(HfTensor(f"{module_name(i, target)}.weight", (width_out, width_in), target, i, transposed=True))
        if config.qkv_bias:
            found += [HfTensor(f"{module_name(i, t)}.bias", (dims[t][1],), f"{t}_bias", i) for t in "qkv"]
        if config.qk_norm:
            found += [HfTensor(f"{prefix}.self_attn.{t}_norm.weight", (config.head_dim,), f"{t}_norm_H", i) for t in "qk"]
    return tuple(found)
