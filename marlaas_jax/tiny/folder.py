"""The model folder of `tiny`: character tokenizer, configuration and weights, as any Hugging Face folder has them."""

import json
from pathlib import Path

import tokenizers

from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.load import save
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


def write(folder: Path, params: Params) -> None:
    """Writes the whole folder: weights in bfloat16, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, CONFIG, params, "bfloat16", (EOS,), BOS)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG.max_position,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD})


def _write_json(path: Path, document: dict) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")
