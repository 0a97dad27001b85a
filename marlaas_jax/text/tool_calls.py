"""Tool calls in the text of a turn, in the formats that models were trained to write.

hermes     <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them (Hermes, Qwen2.5, Qwen3, SmolLM3)
llama3     the whole turn is {"name": ..., "parameters": {...}} or several joined by ";" (Llama 3.1 and later)
calc       <calc>23*47</calc> (`tiny`): a call of `calculator` with {"expression": "23*47"}
"""

import dataclasses
import json
import re
from typing import Any

from marlaas_jax.errors import InvalidRequest

FORMATS = ("hermes", "llama3", "calc")
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_CALC = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
    """A turn taken apart. A call that cannot be read is in `errors`, in words that may be shown to the model."""

    content: str  # the text outside the calls
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


def format_of(chat_template: str | None) -> str | None:
    """Returns the format that a chat template teaches, or None if it shows none."""
    if chat_template is None:
        return None
    if "<tool_call>" in chat_template:
        return "hermes"
    if "<tool>" in chat_template:
        return "calc"
    if _PYTHON_TAG in chat_template or '"parameters"' in chat_template:
        return "llama3"
    return None


def parse(text: str, tool_format: str) -> ParsedTurn:
    """Returns the turn's text and calls. Never raises on what a model wrote."""
    if tool_format == "hermes":
        return _collect(_HERMES.sub("", text).strip(), [match[1] for match in _HERMES.finditer(text)], "arguments")
    if tool_format == "llama3":
        return _parse_llama3(text)
    if tool_format == "calc":
        calls = tuple(ToolCall("calculator", {"expression": match[1]}) for match in _CALC.finditer(text))
        return ParsedTurn(_CALC.sub("", text), calls)
    raise InvalidRequest(f"tool_format={tool_format!r}: allowed: {', '.join(FORMATS)}")


def _parse_llama3(text: str) -> ParsedTurn:
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{"):
        return ParsedTurn(text)
    pieces, decoder, at = [], json.JSONDecoder(), 0
    while at < len(body):
        try:
            _, end = decoder.raw_decode(body, at)
        except ValueError:
            pieces.append(body[at:])
            break
        pieces.append(body[at:end])
        at = end
        while at < len(body) and body[at] in "; \r\n\t":
            at += 1
    if len(pieces) == 1 and not re.match(r'\{\s*"(name|type|function|parameters|arguments)"', body):
        return ParsedTurn(text)  # a JSON answer, not a call
    return _collect("", pieces, "parameters")


def _collect(content: str, pieces: list[str], arguments_key: str) -> ParsedTurn:
    calls, errors = [], []
    for piece in pieces:
        try:
            calls.append(_call(piece, arguments_key))
        except ValueError as error:
            errors.append(f"tool call {piece.strip()[:200]!r}: {error}")
    return ParsedTurn(content, tuple(calls), tuple(errors))


def _call(piece: str, arguments_key: str) -> ToolCall:
    try:
        document = json.loads(piece)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(document, dict):
        raise ValueError("a JSON object with `name` is expected")
    if isinstance(document.get("function"), dict):
        document = document["function"]
    name = document.get("name")
    other = "parameters" if arguments_key == "arguments" else "arguments"
    arguments = document.get(arguments_key, document.get(other, {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON within JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ValueError(f"`{arguments_key}` is not a JSON object") from None
    if not isinstance(name, str) or not name:
        raise ValueError("`name` is missing")
    if not isinstance(arguments, dict):
        raise ValueError(f"`{arguments_key}` is not a JSON object")
    return ToolCall(name, arguments)
