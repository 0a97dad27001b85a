"""The tokenizer of a model folder: text to token ids and back, chat rendering, and the ids that end a turn.

Three routes lead to a prompt - text, messages, ids - and for one conversation they give the same ids, with exactly one
beginning-of-sequence token if the tokenizer wants one. Nothing is cleaned up on decoding.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from marlaas_jax.errors import CorruptFile, InvalidRequest, NotFound
from marlaas_jax.text.chat import ChatTemplate, Message

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer` with what the folder says about special tokens. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        end_ids: Sequence[int] = (),
        adds_bos: bool | None = None,
        chat_template: str | None = None,
    ):
        """`special_tokens` names the text of "bos_token", "eos_token", "pad_token", "unk_token"; `adds_bos` None: as the
        backend's own post-processor does."""
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.bos_id = self._named_id("bos_token")
        self.pad_id = self._named_id("pad_token")
        eos_id = self._named_id("eos_token")
        self.end_ids: tuple[int, ...] = tuple(dict.fromkeys([*end_ids, *([] if eos_id is None else [eos_id])]))
        if adds_bos is None:
            adds_bos = self.bos_id is not None and backend.encode("a").ids[:1] == [self.bos_id]
        self.adds_bos = adds_bos and self.bos_id is not None
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self._template = None
        if chat_template is not None:
            end_texts = [text for text in map(backend.id_to_token, self.end_ids) if text is not None]
            self._template = ChatTemplate(chat_template, self.special_tokens, end_texts)

    @classmethod
    def load(cls, folder: Path | str, chat_template: Path | str | None = None) -> "Tokenizer":
        """Returns the tokenizer of a Hugging Face folder; `chat_template` is a jinja2 file that replaces the model's own."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise NotFound(f"{folder}: has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for any malformed file
            raise CorruptFile(f"{path}: not a tokenizer file: {error}") from None
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
        _add_missing_tokens(backend, config.get("added_tokens_decoder", {}), special_tokens)
        return cls(
            backend,
            special_tokens,
            [*_end_ids(folder / "generation_config.json"), *_end_ids(folder / "config.json")],
            config.get("add_bos_token"),
            _template_source(folder, config, chat_template),
        )

    @property
    def chat_template(self) -> str | None:
        """The template's source, or None for a model without one."""
        return None if self._template is None else self._template.source

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Returns the ids of `text` and nothing else. Special tokens written in it are ordinary text unless `allow_special`."""
        backend = self.backend if allow_special else self._without_special
        return backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a prompt: special tokens in it count, and it starts with one BOS if the tokenizer wants one."""
        ids = self.encode(text, allow_special=True)
        if self.bos_id is None or not self.adds_bos or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Returns the text of `ids`. Ids that stand for no token give nothing; bytes that are not UTF-8 give U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Mapping] = (), add_generation_prompt: bool = True
    ) -> str:
        """Returns the conversation as the template writes it."""
        return self._chat.render(messages, tools, add_generation_prompt)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        """Returns the ids of the conversation."""
        return self.encode_prompt(self.render_text(messages, tools, add_generation_prompt))

    def render_followup(
        self, messages: Sequence[Message], tools: Sequence[Mapping] = (), last_id: int | None = None
    ) -> list[int]:
        """Returns the ids that follow a sampled turn when `messages` come next: prompt + sampled + these = the template's ids.

        `last_id` is the last sampled id. A turn that ran into a limit or a stop string, so that this is no end id, is closed
        first; None means that the turn ended as the template ends it. Raises InvalidRequest where the template forbids it.
        """
        closing, after = self._chat.followup(messages, tools)
        # The closing token is encoded along, so that what follows is not taken for the start of a text.
        ids = self.encode(closing + after, allow_special=True)
        return ids[1:] if last_id is None or last_id in self.end_ids else ids

    def check_followups(self, roles: Sequence[str] = ("user",), tools: Sequence[Mapping] = ()) -> None:
        """Raises InvalidRequest, before a job starts, if turns of these roles cannot be appended to sampled ones."""
        self._chat.check_followups(roles, tools)

    @property
    def _chat(self) -> ChatTemplate:
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template: give runtime.chat_template a jinja2 file, or use text prompts"
            )
        return self._template

    @functools.cached_property
    def _without_special(self) -> tokenizers.Tokenizer:
        # A copy, because this is a setting of the whole tokenizer and other threads may be encoding.
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise CorruptFile(f"{path}: a mapping is expected, not a {type(document).__name__}")
    return document


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the named special tokens; a file may write one as text or as {"content": text, ...}."""
    tokens = {}
    for name in _NAMED:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _add_missing_tokens(backend: tokenizers.Tokenizer, declared: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Adds tokens that tokenizer_config.json declares and tokenizer.json lacks, in the order of their ids."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, token in sorted(declared.items(), key=lambda entry: int(entry[0])):
        if token["content"] not in present:
            options = {key: bool(token.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "normalized", "special")}
            backend.add_tokens([tokenizers.AddedToken(token["content"], **options)])
            present.add(token["content"])
    for text in named.values():
        if text not in present:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def _end_ids(path: Path) -> list[int]:
    """Returns all end ids that one file names; it may give a number, a list or none."""
    value = _read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for number in ids:
        if not isinstance(number, int) or number < 0:
            raise CorruptFile(f"{path}: eos_token_id={value!r}: token ids of 0 or more are expected")
    return ids


def _template_source(folder: Path, config: Mapping[str, Any], override: Path | str | None) -> str | None:
    if override is not None:
        path = Path(override)
        if not path.is_file():
            raise NotFound(f"runtime.chat_template={override}: no such file")
        return path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", template[0]["template"] if template else None)
    return template
