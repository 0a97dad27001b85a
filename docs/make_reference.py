"""Writes the pages that are made from code, so that they cannot be wrong:

    docs/configuration.md   from marlaas_jax/config.py: every key, its type, default, limits and comment
    docs/messages.md        from marlaas_jax/messages.py: every message of the wire protocol, its fields and comments

    python docs/make_reference.py           writes them
    python docs/make_reference.py --check   exits with 1 if one is not what it would write

The text beside a key is the comment on its line in the source, or the comment lines right above it.
"""

import inspect
import re
import sys
import types
import typing
from pathlib import Path

import msgspec
import pydantic

from marlaas_jax import config, messages

FOLDER = Path(__file__).parent
CONFIGURATION_HEAD = """# Configuration reference

<!-- Written by docs/make_reference.py from marlaas_jax/config.py; change those and run it again. -->

A file holds either one job, or `jobs:` (a list), and in both cases perhaps a `runtime:`. Unknown keys are errors. A value
comes from the defaults below, then the file, then `--set`, as in `--set runtime.engine.num_decode_slots=64`,
`--set jobs.NAME.steps=5` or `--set jobs.*.steps=5`. `marlaas run --check FILE` checks the model, the environments and the data
as far as that goes without running anything, and prints the resolved configuration.

Several files make one run, and a run has one runtime. It is enough that one of the files has a `runtime:`, whichever it is.
Where more than one has it, all must say the same, or the run is refused. Paths are relative to the file that they stand in.
"""
MESSAGES_HEAD = f"""# Messages

<!-- Written by docs/make_reference.py from marlaas_jax/messages.py; change those and run it again. -->

{(messages.__doc__ or "").strip()}

Protocol version {messages.PROTOCOL_VERSION}, exchanged in `Hello`. Fields without a default must be given;
unknown ones are refused.
"""


def configuration() -> str:
    """Returns the page of job files and the runtime."""
    parts = [CONFIGURATION_HEAD]
    parts += _tables(config.JobConfig, "", "A job")
    parts += _tables(config.RuntimeConfig, "runtime", "The runtime")
    return "\n".join(parts) + "\n"


def protocol() -> str:
    """Returns the page of messages, in the order and under the headings of the source."""
    parts = [MESSAGES_HEAD]
    for line in inspect.getsource(messages).splitlines():
        heading, struct = re.match(r"# ---- (.*)", line), re.match(r"class (\w+)\(", line)
        if heading:
            parts.append(f"\n## {heading[1].capitalize()}")
        elif struct and struct[1] != "Message":
            parts += _fields(getattr(messages, struct[1]))
    return "\n".join(parts) + "\n"


def _fields(struct: type[msgspec.Struct]) -> list[str]:
    """Returns a message's paragraph and table."""
    fields = msgspec.structs.fields(struct)
    comments = _comments(struct, {field.name for field in fields})
    lines = [f"\n### `{struct.__name__}`\n", inspect.cleandoc(struct.__doc__ or "")]
    if fields:
        lines += ["\n| field | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        kind = field.type.__name__ if isinstance(field.type, type) and not typing.get_args(field.type) else str(field.type)
        kind = kind.replace("marlaas_jax.messages.", "").replace("typing.", "")
        if field.default is not msgspec.NODEFAULT:
            default = f"`{field.default!r}`"
        else:
            default = f"`{field.default_factory()!r}`" if field.default_factory is not msgspec.NODEFAULT else ""
        lines.append(f"| `{field.name}` | `{_escape(kind)}` | {_escape(default)} | {_escape(comments.get(field.name, ''))} |")
    return lines


def _tables(section: type[pydantic.BaseModel], prefix: str, title: str) -> list[str]:
    """Returns the section's table, then those of the sections in it."""
    comments = _comments(section, set(section.model_fields))
    doc = inspect.cleandoc(section.__doc__ or "")
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


def _comments(section: type, names: set[str]) -> dict[str, str]:
    """Returns field -> comment: the one on its line, or the block above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(section).splitlines():
        text = line.strip()
        field = re.match(r"    (\w+):[^#]*(?:#\s*(.*))?$", line)
        if text.startswith("#"):
            above.append(text.lstrip("# "))
        elif field and field[1] in names:
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
    if isinstance(value, str):
        return f"`{_escape(value)}`"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


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
    """Writes or checks both pages; returns the exit code."""
    stale = 0
    for name, text in {"configuration.md": configuration(), "messages.md": protocol()}.items():
        path = FOLDER / name
        if path.is_file() and path.read_text() == text:
            continue
        stale += 1
        if "--check" in sys.argv[1:]:
            print(f"{path}: out of date; run python docs/make_reference.py", file=sys.stderr)
        else:
            path.write_text(text)
            print(f"wrote {path}")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
