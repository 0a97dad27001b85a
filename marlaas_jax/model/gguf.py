"""A GGUF file -> a Hugging Face folder in float32, one tensor at a time. Imports no JAX.

llama.cpp stores the query and key projections of its `llama` architecture with rotary pairs interleaved; that is undone here.
Its `qwen2` and `qwen3` files are stored as transformers has them.
"""

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np

from marlaas_jax.errors import CorruptFile, InvalidConfig, NotFound
from marlaas_jax.model import hf_config, hf_names
from marlaas_jax.model.checkpoint import SINGLE
from marlaas_jax.model.config import ModelConfig, RopeScaling
from marlaas_jax.model.disk import write_json, write_text
from marlaas_jax.model.frequencies import inverse_frequencies
from marlaas_jax.model.safetensors_io import write_file
from marlaas_jax.text import gguf_tokenizer

QUANTIZATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_OUTSIDE = {"embed_VD": "token_embd.weight", "final_norm_D": "output_norm.weight", "unembed_DV": "output.weight"}
_IN_LAYER = {
    "attn_norm_D": "attn_norm.weight",
    "mlp_norm_D": "ffn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm_H": "attn_q_norm.weight",
    "k_norm_H": "attn_k_norm.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_END_FIELDS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))


def convert(path: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors (float32), the tokenizer and the chat template of `path` into `folder`.

    Raises NotFound, CorruptFile or InvalidConfig naming the file and what in it is not supported, before writing weights.
    """
    reader = _open(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(path, fields, stored)
    wanted = hf_names.tensors(config)
    source = {tensor.name: stored[name] for tensor, name in _match(path, config, wanted, stored).items()}
    by_name = {tensor.name: tensor for tensor in wanted}

    def read(name: str) -> np.ndarray:
        array = _dequantize(source[name])
        key = by_name[name].key
        if config.architecture in ("llama", "mistral") and key in ("q", "k"):
            array = unpermute(array, config.num_query_heads if key == "q" else config.num_kv_heads)
        return array

    tokenizer, tokenizer_config = gguf_tokenizer.build(fields)
    end_ids = tuple(sorted({fields[name] for name in _END_FIELDS if name in fields}))
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    write_text(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    write_json(folder / "generation_config.json", {"bos_token_id": bos_id, "eos_token_id": list(end_ids)})
    write_file(folder / SINGLE, {tensor.name: tensor.shape for tensor in wanted}, "F32", read)
    write_json(folder / "config.json", hf_config.to_json(config, end_ids, bos_id))


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns a query or key weight [heads * H, D] with its rotary pairs in halves instead of interleaved."""
    return weight.reshape(num_heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _open(path: Path) -> Any:
    import gguf  # half a second, and needed only for the first start with a model

    if not path.exists():
        raise NotFound(f"{path}: there is no such file")
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
        raise CorruptFile(f"{path}: is not a GGUF file or is truncated: {error}") from error


def _dequantize(tensor: Any) -> np.ndarray:
    import gguf

    return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)


def _config(path: Path, fields: dict[str, Any], stored: dict[str, Any]) -> ModelConfig:
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise InvalidConfig(f"{path}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")

    def get(name: str, default: Any = None) -> Any:
        value = fields.get(f"{architecture}.{name}", default)
        if value is None:
            raise CorruptFile(f"{path}: lacks the field {architecture}.{name}")
        if isinstance(value, list):
            raise InvalidConfig(f"{path}: {architecture}.{name} differs from layer to layer, which is not supported")
        return value

    if get("expert_count", 0):
        raise InvalidConfig(f"{path}: {architecture}.expert_count={get('expert_count')}: mixtures of experts are not supported")
    if "token_embd.weight" not in stored:
        raise CorruptFile(f"{path}: lacks the tensor token_embd.weight")
    model_dim, num_heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", model_dim // num_heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise InvalidConfig(f"{path}: {architecture}.rope.dimension_count={get('rope.dimension_count')} must be {head_dim}")
    window = fields.get(f"{architecture}.attention.sliding_window")
    config = ModelConfig(
        architecture="mistral" if architecture == "llama" and window else architecture,  # Mistral files call themselves llama
        num_layers=get("block_count"),
        model_dim=model_dim,
        num_query_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        mlp_dim=get("feed_forward_length"),
        vocab_size=int(stored["token_embd.weight"].shape[1]),
        rope_theta=_clean(get("rope.freq_base", 10000.0)),
        norm_eps=_clean(get("attention.layer_norm_rms_epsilon")),
        max_position=get("context_length"),
        tied_embeddings="output.weight" not in stored,
        sliding_window=window or None,
    )
    config = dataclasses.replace(config, rope_scaling=_rope_scaling(path, config, architecture, fields, stored))
    return hf_config.parse(hf_config.to_json(config), str(path))  # the same checks as for a config.json


def _clean(value: float) -> float:
    """Returns the shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(
    path: Path, config: ModelConfig, architecture: str, fields: dict[str, Any], stored: dict[str, Any]
) -> RopeScaling | None:
    kind = fields.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", _clean(fields.get(f"{architecture}.rope.scaling.factor", 1.0)))
    if kind != "none":
        raise InvalidConfig(f"{path}: {architecture}.rope.scaling.type={kind!r} is not supported; allowed: none, linear")
    if _ROPE_FACTORS not in stored:
        return None
    # The file holds what each frequency is divided by, not the four numbers it came from. All published models share
    # Llama 3.1's band (factors 1 and 4 around 8192 positions) and differ in `factor`, which is the largest divisor.
    divisors = _dequantize(stored[_ROPE_FACTORS])
    scaling = RopeScaling("llama3", _clean(divisors.max()), 1.0, 4.0, 8192)
    expected = inverse_frequencies(config) / inverse_frequencies(dataclasses.replace(config, rope_scaling=scaling))
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-5):
        raise InvalidConfig(f"{path}: the divisors in {_ROPE_FACTORS} are not those of Llama 3.1, the only ones supported")
    return scaling


def _match(path: Path, config: ModelConfig, wanted: tuple[hf_names.HfTensor, ...], stored: dict[str, Any]) -> dict:
    """Returns the GGUF name of each tensor, once names, shapes and quantizations are known to be right."""
    names = {t: _OUTSIDE[t.key] if t.layer is None else f"blk.{t.layer}.{_IN_LAYER[t.key]}" for t in wanted}
    for tensor, name in names.items():
        if name not in stored:
            raise CorruptFile(f"{path}: lacks the tensor {name}")
        shape = tuple(int(n) for n in reversed(stored[name].shape))
        if shape != tensor.shape:
            raise CorruptFile(f"{path}: {name} has shape {list(shape)}, its metadata say {list(tensor.shape)}")
        kind = stored[name].tensor_type.name
        if kind not in QUANTIZATIONS:
            raise InvalidConfig(f"{path}: {name} is quantized as {kind}; supported: {', '.join(QUANTIZATIONS)}")
    extra = sorted(set(stored) - set(names.values()) - {_ROPE_FACTORS})
    if extra:
        raise InvalidConfig(f"{path}: the tensor {extra[0]} is not part of a {config.architecture} model")
    return names
