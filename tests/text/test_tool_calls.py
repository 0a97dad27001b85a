"""Tool calls as models write them, right and wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlaas_jax.errors import InvalidRequest
from marlaas_jax.text.tool_calls import FORMATS, ToolCall, format_of, parse

WEATHER = ToolCall("weather", {"city": "Paris", "days": 2})


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>', "", [WEATHER]),
        ("hermes", 'Let me see. <tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{"name": "b"}</tool_call>',
         "Let me see.", [ToolCall("a", {}), ToolCall("b", {})]),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 2}"}</tool_call>', "",
         [WEATHER]),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1}}', "", [ToolCall("a", {"x": 1})]),  # cut at the end token
        ("hermes", "No call here", "No call here", []),
        ("llama3", '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}', "", [WEATHER]),
        ("llama3", '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": "}"}}', "",
         [ToolCall("a", {}), ToolCall("b", {"x": "}"})]),
        ("llama3", '{"type": "function", "function": {"name": "a", "parameters": {"x": 1}}}', "", [ToolCall("a", {"x": 1})]),
        ("llama3", '{"answer": 3}', '{"answer": 3}', []),
        ("llama3", "Paris is nice {really}", "Paris is nice {really}", []),
        ("calc", "<calc>23*47</calc>", "", [ToolCall("calculator", {"expression": "23*47"})]),
        ("calc", "1081", "1081", []),
    ],
)  # fmt: skip
def test_calls_are_read(tool_format, text, content, calls):
    turn = parse(text, tool_format)
    assert (turn.content, list(turn.calls), turn.errors) == (content, calls, ())


@pytest.mark.parametrize(
    ("tool_format", "text", "error"),
    [
        ("hermes", "<tool_call>weather(Paris)</tool_call>", "not JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "a JSON object with `name` is expected"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "`name` is missing"),
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "`arguments` is not a JSON object"),
        ("hermes", '<tool_call>{"name": "a", "arguments": "{"}</tool_call>', "`arguments` is not a JSON object"),
        ("llama3", '{"name": "a", "parameters": {"x": ', "not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_in_words(tool_format, text, error):
    turn = parse(text, tool_format)
    assert turn.calls == () and len(turn.errors) == 1
    assert error in turn.errors[0]


@given(st.text(alphabet='{}[]":;,<>/ abname_toolcrgus1|python\n') | st.text(), st.sampled_from(FORMATS))
def test_nothing_that_a_model_writes_raises(text, tool_format):
    parse(text, tool_format)
    parse("<tool_call>" + text, tool_format)
    parse('{"name": ' + text, tool_format)


def test_the_format_is_recognised_by_the_template(frozen):
    assert format_of(frozen["templates"]["tools"]) == "hermes"
    assert format_of("<|python_tag|>") == "llama3"
    assert format_of(frozen["templates"]["chatml"]) is None
    assert format_of(None) is None
    with pytest.raises(InvalidRequest, match="tool_format='xml': allowed: hermes"):
        parse("", "xml")
