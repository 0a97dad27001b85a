"""Chat templates: jinja2 in a sandbox, with the names that Hugging Face's templates expect.

A template turns messages into text. Sampled tokens are never rendered again: what follows a sampled turn is the template's text
after that turn, found by rendering a probe conversation. That is exact only if the template keeps earlier turns as they were
sampled; `followup` checks it on each call and `check_followups` before a job starts.
"""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from marlaas_jax.errors import InvalidRequest

Message = Mapping[str, Any]
_PROBE = "PROBE-ANSWER-7f3a"  # stands for a sampled turn; no template can take it for anything else
_OPENING = ({"role": "user", "content": "PROBE-QUESTION"},)


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}...{% endgeneration %}`, with which some templates mark the assistant's part."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[Any]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    # jinja2's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequest(f"chat template, line {error.lineno}: {error.message}") from None


class ChatTemplate:
    """One compiled template with the texts of the tokenizer's special tokens (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], end_texts: Sequence[str]):
        self.source = source
        self._template = _compile(source)
        self._special_tokens = dict(special_tokens)
        self._end_texts = tuple(end_texts)
        self._cached_followup = functools.lru_cache(maxsize=256)(self._followup_of_json)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), add_generation_prompt=True) -> str:
        """Returns the conversation as text, special tokens written out. Raises InvalidRequest with the template's own words."""
        try:
            return self._template.render(
                messages=_plain(list(messages)),
                tools=_plain(list(tools)) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error.message}") from None
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidRequest(f"the chat template fails on the messages: {error}") from None

    def followup(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, str]:
        """Returns (end token that closes the sampled turn, text after it): what the template puts after a sampled turn when
        `messages` come next and the assistant is to speak again.

        Raises InvalidRequest where the template would not keep the sampled turn and all before it as they were.
        """
        return self._cached_followup(json.dumps(_plain(list(messages))), json.dumps(_plain(list(tools))))

    def check_followups(self, roles: Sequence[str] = ("user",), tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Raises InvalidRequest unless conversations of several turns, with messages of these roles, only ever grow."""
        # Some templates take the thinking out of earlier turns, or write it where there was none.
        answers = [_PROBE, *([f"<think>\nPROBE-THOUGHT\n</think>\n\n{_PROBE}"] if "</think>" in self.source else [])]
        for role in roles:
            reply = {"role": role, "content": "PROBE-REPLY"}
            expected = "".join(self.followup([reply], tools))
            for answer in answers:
                conversation, text = list(_OPENING), self.render(_OPENING, tools)
                for _ in range(2):
                    conversation += [{"role": "assistant", "content": answer}, reply]
                    whole = self.render(conversation, tools)
                    if _grown(text, answer, whole) != expected:
                        raise InvalidRequest(_changes(role, "an earlier turn" if answer == _PROBE else "the thinking"))
                    text = whole

    def _followup_of_json(self, messages_json: str, tools_json: str) -> tuple[str, str]:
        messages, tools = json.loads(messages_json), json.loads(tools_json)
        role = messages[-1].get("role", "") if messages else ""
        whole = self.render([*_OPENING, {"role": "assistant", "content": _PROBE}, *messages], tools)
        rest = _grown(self.render(_OPENING, tools), _PROBE, whole)
        if rest is None:
            raise InvalidRequest(_changes(role, "what came before the sampled turn"))
        closing = next((text for text in self._end_texts if rest.startswith(text)), None)
        if closing is None:
            raise InvalidRequest(
                f"the chat template closes an assistant's turn with {rest[:20]!r}, which starts with none of the model's end "
                f"tokens ({', '.join(self._end_texts)}); give runtime.chat_template a file that does"
            )
        return closing, rest[len(closing) :]


def _grown(before: str, answer: str, whole: str) -> str | None:
    """Returns what `whole` has after `before` and `answer`, or None if it does not start with these.

    A space on either side of the answer is the model's to write, as in the formats of Llama 2 and Mistral.
    """
    match = re.match(f"{re.escape(before)} ?{re.escape(answer)} ?", whole)
    return None if match is None else whole[match.end() :]


def _changes(role: str, what: str) -> str:
    return (
        f"the chat template changes {what} when a message with role {role!r} follows, so tokens that were sampled would not be "
        f"those that are shown next; give runtime.chat_template a file that keeps earlier turns, or let the environment "
        f"answer with plain text"
    )


def _plain(value: Any) -> Any:
    """Returns the value as plain JSON types, so that a template meets no object with methods."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise InvalidRequest(f"messages hold a {type(value).__name__}; allowed: text, numbers, lists and mappings")
