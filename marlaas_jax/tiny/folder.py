"""The model folder of `tiny`: character tokenizer, configuration and weights, as any Hugging Face folder has them."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.transformer import Params

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
TOOL = ("<calc>", "</calc>", "<tool>", "</tool>")  # ordinary tokens, so that they survive decoding
PAD, BOS, EOS = 0, 1, 2
VOCAB_SIZE = 128  # 4 special and 4 tool tokens, newline, the 95 printable ASCII characters; the rest is unused

CONFIG = ModelConfig(
    architecture="llama",
    num_layers=4,
    model_dim=128,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=384,
    vocab_size=VOCAB_SIZE,
    rope_theta=10000.0,
    norm_eps=1e-5,
    max_position=256,
    tied_embeddings=True,
)

# A conversation is the plain text that the model was trained on: user text as it is, each turn of the assistant closed by
# <eos>, each tool result in its own tokens. The generation prompt is empty.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ message.content }}{{ eos_token }}"
    "{% elif message.role == 'tool' %}<tool>{{ message.content }}</tool>"
    "{% elif message.role == 'user' %}{{ message.content }}"
    "{% else %}{{ raise_exception('tiny knows the roles user, assistant and tool, not ' ~ message.role) }}"
    "{% endif %}{% endfor %}"
)

_PROJECTIONS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def build_tokenizer() -> tokenizers.Tokenizer:
    """Returns the character tokenizer: one id per character and tool token, <bos> put before every text."""
    characters = ["\n", *(chr(c) for c in range(32, 127))]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *TOOL, *characters])}
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False, special=False) for token in TOOL])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json, config.json and generation_config.json."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    _write_json(
        folder / "tokenizer_config.json",
        special
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG.max_position,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    _write_json(
        folder / "config.json",
        ends
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": CONFIG.model_dim,
            "intermediate_size": CONFIG.mlp_dim,
            "num_hidden_layers": CONFIG.num_layers,
            "num_attention_heads": CONFIG.num_query_heads,
            "num_key_value_heads": CONFIG.num_kv_heads,
            "head_dim": CONFIG.head_dim,
            "vocab_size": CONFIG.vocab_size,
            "max_position_embeddings": CONFIG.max_position,
            "rms_norm_eps": CONFIG.norm_eps,
            "rope_theta": CONFIG.rope_theta,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
    )
    _write_json(folder / "generation_config.json", ends)


def write_weights(params: Params, path: Path) -> None:
    """Writes unrolled parameters as bfloat16 safetensors under Hugging Face's names; matrices as [out, in]."""
    bf16 = lambda x: np.ascontiguousarray(np.asarray(jnp.asarray(x, jnp.bfloat16)))
    tensors = {"model.embed_tokens.weight": bf16(params["embed_VD"]), "model.norm.weight": bf16(params["final_norm_D"])}
    for i, layer in enumerate(params["layers"]):
        prefix = f"model.layers.{i}"
        tensors[f"{prefix}.input_layernorm.weight"] = bf16(layer["attn_norm_D"])
        tensors[f"{prefix}.post_attention_layernorm.weight"] = bf16(layer["mlp_norm_D"])
        for name, hf_name in _PROJECTIONS.items():
            tensors[f"{prefix}.{hf_name}.weight"] = bf16(jnp.asarray(layer[name]).T)
    save_file(tensors, path, metadata={"format": "pt"})


def _write_json(path: Path, document: dict) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
