"""From a file's row to an item: every field of the row, and `prompt` and `answer` as the job's `data` section says."""

import string
from collections.abc import Mapping
from typing import Any

from marlaas_jax import patterns
from marlaas_jax.config import DataConfig
from marlaas_jax.errors import CorruptFile, InvalidConfig, short


def check(config: DataConfig) -> None:
    """Raises for a regular expression or a template that cannot work on any row."""
    if config.answer_regex is not None:
        try:
            groups = patterns.check(config.answer_regex)
        except patterns.PatternFault as error:
            raise InvalidConfig(f"data.answer_regex={short(config.answer_regex)}: {error}") from None
        if groups < 1:
            raise InvalidConfig(f"data.answer_regex={short(config.answer_regex)}: needs a group, as in '#### (.*)'")
        if config.answer_field is None:
            raise InvalidConfig("data.answer_regex: needs data.answer_field, which is null")
    if config.prompt_template is not None:
        _check_template(config.prompt_template)


def to_item(row: Mapping[str, Any], config: DataConfig) -> dict[str, Any]:
    """Returns the item of a row. Raises CorruptFile naming the field that is missing or of the wrong kind."""
    prompt = _field(row, config.prompt_field, "data.prompt_field")
    if not _is_prompt(prompt):
        kind = type(prompt).__name__
        raise CorruptFile(f"data.prompt_field={config.prompt_field!r}: must be a string or a list of messages, got {kind}")
    item = dict(row)
    if config.answer_field is not None:
        answer = _field(row, config.answer_field, "data.answer_field")
        if config.answer_regex is not None:
            try:
                match = patterns.search(config.answer_regex, str(answer))
            except patterns.PatternFault as error:
                raise CorruptFile(f"data.answer_regex={short(config.answer_regex)}: {error}") from None
            if match is None:
                raise CorruptFile(f"data.answer_regex={short(config.answer_regex)}: nothing in {str(answer)[-80:]!r} matches")
            answer = (match[1] or "").strip()
        item["answer"] = answer
    item["prompt"] = prompt
    if config.prompt_template is not None:
        try:
            item["prompt"] = config.prompt_template.format_map(item)
        except KeyError as error:
            raise CorruptFile(
                f"data.prompt_template={short(config.prompt_template)}: the item has no field {error}; it has {', '.join(row)}"
            ) from None
    return item


def _field(row: Mapping[str, Any], name: str, key: str) -> Any:
    if name not in row:
        raise CorruptFile(f"{key}={name!r}: the item has no such field; it has {', '.join(map(str, row)) or 'none'}")
    return row[name]


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(_is_message(m) for m in value))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _check_template(template: str) -> None:
    """Refuses all but names in braces: other forms reach into objects, or make a short template a very long text."""
    where = f"data.prompt_template={short(template)}: not a template of {{fields}}"
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidConfig(f"{where} ({error})") from None
    for _, name, form, conversion in parts:
        if name is not None and (form or conversion or not name or name.isdigit() or set(name) & set(".[")):
            raise InvalidConfig(f"{where} (in braces stands the name of a field and nothing else, not {short(name)})")
