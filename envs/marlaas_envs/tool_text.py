"""Finds tool calls in a turn's text, in the forms that models write them.

<calc>23*47</calc>                                             a call of `calculator`, also without the closing tag
<tool_call>{"name": ..., "arguments": {...}}</tool_call>       Hermes, Qwen; any number of them
{"name": ..., "parameters": {...}}                             Llama 3: the whole turn
"""

import dataclasses
import json
import re
from typing import Any

_CALC = re.compile(r"<calc>(.*?)(?:</calc>|\Z)", re.DOTALL)
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call as written; `error` says why it cannot be made."""

    name: str = ""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""


def find_calls(text: str) -> list[Call]:
    """Returns the calls in `text`, in order; a turn without any is an answer."""
    if calc := _CALC.findall(text):
        return [Call("calculator", {"expression": expression}) for expression in calc]
    if tagged := _TAGGED.findall(text):
        return [_parse(body) for body in tagged]
    whole = text.strip().removeprefix("<|python_tag|>").strip()
    if whole.startswith("{") and '"name"' in whole:
        return [_parse(whole)]
    return []


def _parse(body: str) -> Call:
    try:
        call = json.loads(body)
        name = call["name"]
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Call(error='a call must read {"name": ..., "arguments": {...}}')
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Call(error='a call must read {"name": ..., "arguments": {...}}')
    return Call(name, arguments)
