"""Builds tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

Two kinds: byte-level BPE (`tokenizer.ggml.model: gpt2`), whose splitting of text before the merges is only named in the file
(`tokenizer.ggml.pre`), so each name is a known pattern here; and SentencePiece BPE (`llama`), whose merges follow from the
scores. An unknown name is refused: a wrong split gives wrong ids without any error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from marlaas_jax.errors import CorruptFile, InvalidRequest

# GGUF token types
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = ("default", "gpt-2", "gpt2")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_TEKKEN = ("tekken",)
_DIGITS = ("smollm",)
PRE_TOKENIZERS = (*_GPT2, *_DIGITS, *_LLAMA3, *_QWEN2, *_TEKKEN)

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}


def build(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns (text of tokenizer.json, content of tokenizer_config.json) for a GGUF file's metadata as plain Python values.

    Raises InvalidRequest for a kind of tokenizer that is not supported and CorruptFile for metadata that contradict themselves.
    """
    kind = fields.get("tokenizer.ggml.model")
    tokens = fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CorruptFile("gguf: tokenizer.ggml.tokens is missing, so the file has no tokenizer")
    if len(set(tokens)) != len(tokens):
        raise CorruptFile("gguf: tokenizer.ggml.tokens holds the same token twice")
    config = _config(fields, tokens)
    if kind == "gpt2":
        tokenizer = _byte_level(fields, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(fields, tokens, config)
    else:
        raise InvalidRequest(f"gguf: tokenizer.ggml.model={kind!r} is not supported; allowed: gpt2, llama")
    _add_tokens(tokenizer, fields, tokens)
    if config["add_bos_token"]:
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    return tokenizer.to_str(), config


def _config(fields: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in _NAMED.items():
        number = fields.get(f"tokenizer.ggml.{key}")
        if number is None:
            continue
        if not 0 <= int(number) < len(tokens):
            raise CorruptFile(f"gguf: tokenizer.ggml.{key}={number}: the file has {len(tokens)} tokens")
        config[name] = tokens[int(number)]
    # Files older than the flag lack it; llama.cpp then adds BOS for SentencePiece and Llama 3 vocabularies.
    is_llama = fields.get("tokenizer.ggml.model") == "llama" or fields.get("tokenizer.ggml.pre") in _LLAMA3
    add_bos = fields.get("tokenizer.ggml.add_bos_token")
    config["add_bos_token"] = bool(is_llama if add_bos is None else add_bos) and "bos_token" in config
    if fields.get("tokenizer.chat_template"):
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise InvalidRequest(f"gguf: tokenizer.ggml.pre={pre!r} is not supported; allowed: {', '.join(PRE_TOKENIZERS)}")
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges", ())]
    if not merges or any(len(merge) != 2 for merge in merges):
        raise CorruptFile("gguf: tokenizer.ggml.merges is missing or holds something else than pairs")
    # Llama 3 and Tekken take a word that is a token whole, whatever the merges say.
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)}, merges, fuse_unk=False, ignore_merges=pre in (*_LLAMA3, *_TEKKEN)
    )
    tokenizer = tokenizers.Tokenizer(model)
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _split(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGITS:
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        return pre_tokenizers.Sequence([digits, words])
    pattern = _LLAMA3_SPLIT if pre in _LLAMA3 else _QWEN2_SPLIT if pre in _QWEN2 else _TEKKEN_SPLIT
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(fields: Mapping[str, Any], tokens: Sequence[str], config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    scores = fields.get("tokenizer.ggml.scores", ())
    if len(scores) != len(tokens):
        raise CorruptFile(f"gguf: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = fields.get("tokenizer.ggml.merges")
    pairs = [tuple(merge.split(" ")) for merge in merges] if merges else _merges_from_scores(vocab, scores)
    model = models.BPE(vocab, pairs, unk_token=config.get("unk_token"), fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    space_first = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if space_first else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if space_first else steps)
    return tokenizer


def _merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns every way to join two tokens into a third, the best-scored result first."""
    ranked = []
    for token, score in zip(vocab, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-float(score), -len(left), -len(right), vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_tokens(tokenizer: tokenizers.Tokenizer, fields: Mapping[str, Any], tokens: Sequence[str]) -> None:
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CorruptFile(f"gguf: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    whole = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in whole])
