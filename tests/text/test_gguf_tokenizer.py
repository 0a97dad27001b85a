"""What a GGUF file's metadata must say (ids against transformers are in test_tokenizer.py)."""

import pytest

from marlaas_jax.errors import CorruptFile, InvalidRequest
from marlaas_jax.text import gguf_tokenizer
from marlaas_jax.text.tokenizer import Tokenizer
from tests.text.conftest import write_folder


def test_settings_come_from_the_metadata(frozen, tmp_path):
    fields = frozen["byte_level"] | {"tokenizer.ggml.pre": "qwen2", "tokenizer.chat_template": "{{ 1 }}"}
    tokenizer = Tokenizer.load(write_folder(tmp_path, fields))
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    assert tokenizer.chat_template == "{{ 1 }}"
    assert not tokenizer.adds_bos
    fields["tokenizer.ggml.add_bos_token"] = True
    assert Tokenizer.load(write_folder(tmp_path, fields)).adds_bos
    # Older files lack the flag; Llama 3 and SentencePiece vocabularies want BOS then.
    assert gguf_tokenizer.build(frozen["byte_level"] | {"tokenizer.ggml.pre": "llama-bpe"})[1]["add_bos_token"]
    assert gguf_tokenizer.build(frozen["sentencepiece"])[1]["add_bos_token"]
    without = frozen["sentencepiece"] | {"tokenizer.ggml.add_bos_token": False}
    assert not gguf_tokenizer.build(without)[1]["add_bos_token"]


def test_a_file_without_a_space_before_every_text(frozen, tmp_path):
    fields = frozen["sentencepiece"] | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.load(write_folder(tmp_path, fields))
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"
    assert tokenizer.encode("hello") != tokenizer.encode(" hello")


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (
            {"tokenizer.ggml.pre": "chatglm"},
            InvalidRequest,
            r"ggml\.pre='chatglm' is not supported; allowed: default",
        ),
        (
            {"tokenizer.ggml.model": "bert"},
            InvalidRequest,
            r"ggml\.model='bert' is not supported; allowed: gpt2, llama",
        ),
        ({"tokenizer.ggml.tokens": []}, CorruptFile, "has no tokenizer"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, CorruptFile, "the same token twice"),
        ({"tokenizer.ggml.merges": []}, CorruptFile, "merges is missing"),
        ({"tokenizer.ggml.merges": ["a"]}, CorruptFile, "merges is missing or holds"),
        ({"tokenizer.ggml.eos_token_id": 99999}, CorruptFile, "eos_token_id=99999: the file has"),
        ({"tokenizer.ggml.token_type": [1]}, CorruptFile, "token_type has 1 entries"),
        ({"tokenizer.ggml.model": "llama"}, CorruptFile, "scores has 0 entries"),
    ],
)
def test_metadata_that_cannot_be_used_are_refused(frozen, change, error, reason):
    with pytest.raises(error, match=reason):
        gguf_tokenizer.build(frozen["byte_level"] | change)
