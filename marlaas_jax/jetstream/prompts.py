"""What a client of JetStream asks for, checked before the Driver sees it: there, any fault would end the whole process.

The schema of google-jetstream 0.2.2 has no word for an adapter. A client says which one it wants in one of three ways:
`lora_adapter_id`, the field that later schemas add to DecodeRequest (it arrives here as an unknown text field above
`metadata`, whatever its number), gRPC request metadata `lora-adapter-id: NAME`, or `session_cache` as `adapter:NAME`, which is
the one text that 0.2.2's own load tool can send. Nothing, or `base`, is the base model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from google.protobuf import unknown_fields

from marlaas_jax.errors import InvalidRequest, NotFound, short
from marlaas_jax.text.tokenizer import Tokenizer

BASE = "base"
METADATA_KEY = "lora-adapter-id"
CACHE_PREFIX = "adapter:"
_LAST_COMMON_FIELD = 7  # `metadata` of DecodeRequest; `lora_adapter_id` is the only text above it
_TEXT_WIRE_TYPE = 2


@dataclasses.dataclass(eq=False)
class Prompt:
    """One request as the Driver takes it. It stands in for JetStream's DecodeRequest, whose two other fields it carries."""

    token_ids: tuple[int, ...]
    adapter_slot: int
    max_tokens: int
    wants_text: bool  # the client sent text, and reads text beside the ids
    session_cache: str = ""  # always empty: there are no caches to go on from


class Reader:
    """Makes prompts of DecodeRequests for one base model and its adapters."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_context: int, adapters: Mapping[str, int]):
        """adapters: name -> adapter slot; the base model needs no entry."""
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._adapters = {"": 0, BASE: 0, **adapters}

    def read(self, request: Any, metadata: Mapping[str, Any]) -> Prompt:
        """Returns the prompt of a DecodeRequest. Raises NotFound for an adapter that is not served, else InvalidRequest."""
        slot = self._adapter_slot(request, metadata)
        if request.max_tokens < 1:
            raise InvalidRequest(f"max_tokens={request.max_tokens}: 1 or more is allowed")
        content = request.WhichOneof("content")
        if content == "text_content":
            ids = self.tokenizer.encode_prompt(request.text_content.text)
        elif content == "token_content":
            ids = list(request.token_content.token_ids)
        else:
            raise InvalidRequest("content: missing; text_content or token_content must be given")
        self._check_ids(content, ids)
        return Prompt(tuple(ids), slot, request.max_tokens, content == "text_content")

    def _check_ids(self, content: str, ids: list[int]) -> None:
        if not ids:
            raise InvalidRequest(f"{content}: empty; at least one token is needed")
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidRequest(f"{content}: token id {token}: 0 to {self._vocab_size - 1} are tokens")
        if len(ids) >= self._max_context:
            raise InvalidRequest(
                f"{content}: {len(ids)} tokens leave no room for an answer within engine.max_context={self._max_context}"
            )

    def _adapter_slot(self, request: Any, metadata: Mapping[str, Any]) -> int:
        named = {_adapter_field(request), metadata.get(METADATA_KEY, ""), _named_by_cache(request.session_cache)} - {""}
        if len(named) > 1:
            raise InvalidRequest(
                f"lora_adapter_id: given more than once, and not alike: {', '.join(sorted(map(short, named)))}"
            )
        name = named.pop() if named else ""
        if name not in self._adapters:
            known = ", ".join(sorted(set(self._adapters) - {"", BASE}))
            raise NotFound(f"lora_adapter_id={short(name)}: not served here; served: {BASE}{', ' if known else ''}{known}")
        return self._adapters[name]


def _adapter_field(request: Any) -> str:
    """Returns the later schemas' `lora_adapter_id`, or nothing."""
    for field in unknown_fields.UnknownFieldSet(request):
        if field.field_number > _LAST_COMMON_FIELD and field.wire_type == _TEXT_WIRE_TYPE:
            return field.data.decode(errors="replace")
    return ""


def _named_by_cache(session_cache: str) -> str:
    if session_cache and not session_cache.startswith(CACHE_PREFIX):
        raise InvalidRequest(
            f"session_cache={short(session_cache)}: no caches are kept here; leave it empty, or name an adapter: "
            f"{CACHE_PREFIX}NAME"
        )
    return session_cache.removeprefix(CACHE_PREFIX)
