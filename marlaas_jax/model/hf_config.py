"""config.json of a Hugging Face folder -> ModelConfig, and back. Imports no JAX.

What the decoder cannot do is refused by name before any weight is read. Fields that are absent have the defaults of
transformers' configuration classes.
"""

import math
from pathlib import Path
from typing import Any

from marlaas_jax.errors import InvalidConfig
from marlaas_jax.model.config import ModelConfig, RopeScaling
from marlaas_jax.model.disk import read_json

# transformers' class -> (our architecture, defaults that differ: max_position_embeddings, num_key_value_heads)
ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", 2048, None),
    "MistralForCausalLM": ("mistral", 131072, 8),
    "Qwen2ForCausalLM": ("qwen2", 32768, 32),
    "Qwen3ForCausalLM": ("qwen3", 32768, 32),
}
ROPE_TYPES = ("default", "linear", "llama3")
# fields that would change the computation -> the values under which they do not
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False, None),
}


def read(folder: Path) -> ModelConfig:
    """Returns the model's shape and variant. Raises NotFound, CorruptFile or InvalidConfig, naming the file and the field."""
    path = folder / "config.json"
    return parse(read_json(path), str(path))


def parse(document: dict[str, Any], origin: str = "config.json") -> ModelConfig:
    """Returns the ModelConfig of a config.json's content; `origin` names it in messages."""
    name = _architecture(document, origin)
    architecture, max_position, default_kv_heads = ARCHITECTURES[name]
    for field, allowed in _NEUTRAL.items():
        if document.get(field) not in allowed:
            raise InvalidConfig(f"{origin}: {field}={document[field]!r} is not supported; allowed: {allowed[0]!r}")
    model_dim = _positive(document, "hidden_size", origin)
    num_query_heads = _positive(document, "num_attention_heads", origin)
    kv_heads_absent = num_query_heads if default_kv_heads is None or "num_key_value_heads" in document else default_kv_heads
    num_kv_heads = _positive(document, "num_key_value_heads", origin, default=kv_heads_absent)
    head_dim = _positive(document, "head_dim", origin, default=128 if architecture == "qwen3" else model_dim // num_query_heads)
    if num_query_heads % num_kv_heads:
        raise InvalidConfig(f"{origin}: num_key_value_heads={num_kv_heads} must divide num_attention_heads={num_query_heads}")
    if head_dim % 2:
        raise InvalidConfig(f"{origin}: head_dim={head_dim} must be even")
    theta, scaling = _rope(document, origin)
    return ModelConfig(
        architecture=architecture,
        num_layers=_positive(document, "num_hidden_layers", origin),
        model_dim=model_dim,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_dim=_positive(document, "intermediate_size", origin),
        vocab_size=_positive(document, "vocab_size", origin),
        rope_theta=theta,
        norm_eps=_number(document.get("rms_norm_eps", 1e-6), "rms_norm_eps", origin),
        max_position=_positive(document, "max_position_embeddings", origin, default=max_position),
        tied_embeddings=bool(document.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        rope_scaling=scaling,
        sliding_window=_sliding_window(document, architecture, origin),
    )


def _architecture(document: dict[str, Any], origin: str) -> str:
    names = document.get("architectures") or []
    if not names:  # a folder saved from the bare model, or by hand
        names = [name for name, (kind, *_) in ARCHITECTURES.items() if kind == document.get("model_type")]
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        shown = ", ".join(map(str, names)) or f"model_type {document.get('model_type')!r}"
        raise InvalidConfig(f"{origin}: the architecture {shown} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return names[0]


def _positive(document: dict[str, Any], field: str, origin: str, default: int | None = None) -> int:
    value = document.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidConfig(f"{origin}: {field}={value!r} must be a whole number above 0")
    return value


def _number(value: Any, field: str, origin: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise InvalidConfig(f"{origin}: {field}={value!r} must be a number above 0")
    return float(value)


def _rope(document: dict[str, Any], origin: str) -> tuple[float, RopeScaling | None]:
    """Returns (theta, scaling) from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    field = "rope_parameters" if document.get("rope_parameters") else "rope_scaling"
    rope = document.get(field) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise InvalidConfig(f"{origin}: {field}={rope!r} must be one flat object for all layers")
    theta = _number(rope.get("rope_theta", document.get("rope_theta", 10000.0)), "rope_theta", origin)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise InvalidConfig(f"{origin}: {field}.rope_type={kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = rope.get("partial_rotary_factor")
    if partial not in (1, None):
        raise InvalidConfig(f"{origin}: {field}.partial_rotary_factor={partial!r} is not supported; allowed: 1")
    if kind == "default":
        return theta, None
    factor = _number(rope.get("factor"), f"{field}.factor", origin)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    low = _number(rope.get("low_freq_factor"), f"{field}.low_freq_factor", origin)
    high = _number(rope.get("high_freq_factor"), f"{field}.high_freq_factor", origin)
    if high <= low:
        raise InvalidConfig(f"{origin}: {field}.high_freq_factor={high:g} must be above low_freq_factor={low:g}")
    return theta, RopeScaling("llama3", factor, low, high, _positive(rope, "original_max_position_embeddings", origin))


def _sliding_window(document: dict[str, Any], architecture: str, origin: str) -> int | None:
    kinds = set(document.get("layer_types") or ())
    if architecture == "mistral":
        window = document.get("sliding_window", 4096)
    else:
        window = document.get("sliding_window") if document.get("use_sliding_window") else None
        if window is not None and not kinds:  # the first max_window_layers layers see everything
            full = min(document.get("max_window_layers", 28), document["num_hidden_layers"])
            kinds = {"full_attention"} if full else set()
            kinds |= {"sliding_attention"} if full < document["num_hidden_layers"] else set()
    if len(kinds) > 1 or not kinds <= {"full_attention", "sliding_attention"}:
        raise InvalidConfig(f"{origin}: layers of different attention ({', '.join(sorted(kinds))}) are not supported")
    if window is None or kinds == {"full_attention"}:
        return None
    return _positive({"sliding_window": window}, "sliding_window", origin)


def end_ids(folder: Path) -> tuple[int, ...]:
    """Returns every end-of-sequence id that config.json or generation_config.json names, ascending."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            value = read_json(folder / name).get("eos_token_id")
            values = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
                raise InvalidConfig(f"{folder / name}: eos_token_id={value!r} must be a token id or a list of token ids")
            found.update(values)
    return tuple(sorted(found))


def to_json(
    config: ModelConfig, end_ids: tuple[int, ...] = (), bos_id: int | None = None, dtype: str = "float32"
) -> dict[str, Any]:
    """Returns a config.json that transformers 4 and 5 and `parse` read as `config`."""
    name = next(name for name, (kind, *_) in ARCHITECTURES.items() if kind == config.architecture)
    document: dict[str, Any] = {
        "architectures": [name],
        "model_type": config.architecture,
        "hidden_size": config.model_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": bos_id,
        "eos_token_id": end_ids[0] if len(end_ids) == 1 else list(end_ids) or None,
        "torch_dtype": dtype,
    }
    scaling = config.rope_scaling
    if scaling is not None:
        document["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            document["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
    if config.architecture == "mistral":
        document["sliding_window"] = config.sliding_window
    elif config.architecture in ("qwen2", "qwen3"):
        windowed = config.sliding_window is not None
        document |= {"use_sliding_window": windowed, "sliding_window": config.sliding_window}
        document["max_window_layers"] = 0 if windowed else config.num_layers
    return document
