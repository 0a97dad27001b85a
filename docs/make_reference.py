"""Writes docs/configuration.md from marlaas_jax/config.py: every key, its type, default, limits and comment.

    python docs/make_reference.py          write the page
    python docs/make_reference.py --check  exit with 1 if the page is not what it would write

The text beside a key is the comment on its line in config.py, or the comment lines right above it.
"""

import inspect
import re
import sys
import types
import typing
from pathlib import Path

import pydantic

from marlaas_jax import config

PAGE = Path(__file__).parent / "configuration.md"
HEAD = """# Configuration reference

<!-- Written by docs/make_reference.py from marlaas_jax/config.py; change those and run it again. -->

A file holds either one job, or `jobs:` (a list) with an optional `runtime:`. Unknown keys are errors. A value comes from the
defaults below, then the file, then `--set`, as in `--set runtime.engine.num_decode_slots=64`, `--set jobs.NAME.steps=5` or
`--set jobs.*.steps=5`. `marlaas run --check FILE` prints the resolved configuration and runs nothing.
"""


def page() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    parts += _tables(config.JobConfig, "", "A job")
    parts += _tables(config.RuntimeConfig, "runtime", "The runtime")
    return "\n".join(parts)


def _tables(section: type[pydantic.BaseModel], prefix: str, title: str) -> list[str]:
    """Returns the section's table, then those of the sections in it."""
    comments = _comments(section)
    doc = (section.__doc__ or "").strip()
    rows = [f"\n## {title}\n", doc + "\n", "| key | type | default | meaning |", "|---|---|---|---|"]
    nested: list[str] = []
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        key = f"{prefix}.{name}" if prefix else name
        if inner is not None:
            default = "not given" if field.default is None else "see below"
            rows.append(f"| `{name}` | section | {default} | see `{key}` |")
            nested += _tables(inner, key, f"`{key}`")
        else:
            default = "**required**" if field.is_required() else f"`{_plain(field.default)}`"
            kind = _type(field.annotation, field.metadata)
            rows.append(f"| `{name}` | {kind} | {default} | {_escape(comments.get(name, ''))} |")
    return [*rows, *nested]


def _comments(section: type[pydantic.BaseModel]) -> dict[str, str]:
    """Returns field -> comment: the one on its line, or the block above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(section).splitlines():
        text = line.strip()
        field = re.match(r"    (\w+):[^#]*(?:#\s*(.*))?$", line)
        if text.startswith("#"):
            above.append(text.lstrip("# "))
        elif field and field[1] in section.model_fields:
            found[field[1]] = " ".join([*above, field[2] or ""]).strip()
            above = []
        else:
            above = []
    return found


def _section_of(annotation: object) -> type[pydantic.BaseModel] | None:
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, pydantic.BaseModel):
            return candidate
    return None


def _type(annotation: object, metadata: list[object]) -> str:
    """Returns a type as a reader of YAML would say it, limits included."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0], [*arguments[1:], *metadata])
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if a is type(None) else _type(a, metadata) for a in arguments)
    if origin is typing.Literal:
        return " / ".join(f"`{a}`" for a in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0], [])}"
    if origin is dict:
        return "mapping"
    name = {int: "integer", float: "number", str: "text", bool: "true / false"}.get(
        typing.cast(type, annotation), str(annotation)
    )
    limits = _limits(metadata)
    return f"{name}, {limits}" if limits else name


def _limits(metadata: list[object]) -> str:
    words = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >=", "pattern": "matching"}
    found: list[str] = []
    for entry in metadata:
        for item in [entry, *getattr(entry, "metadata", ())]:
            found += [f"{sign} {_quote(v)}" for k, sign in words.items() if (v := getattr(item, k, None)) is not None]
    return ", ".join(dict.fromkeys(found))


def _quote(value: object) -> str:
    return f"`{_escape(value)}`" if isinstance(value, str) else f"{value}"


def _plain(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(str(v) for v in value) + "]"
    return str(value)


def _escape(text: object) -> str:
    return str(text).replace("|", "\\|")


def main() -> int:
    text = page() + "\n"
    if "--check" in sys.argv[1:]:
        current = PAGE.is_file() and PAGE.read_text() == text
        if not current:
            print(f"{PAGE}: out of date; run python docs/make_reference.py", file=sys.stderr)
        return 0 if current else 1
    PAGE.write_text(text)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
