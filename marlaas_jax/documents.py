"""What people write, as plain values: the one YAML reader, and the check that a value can be stored and sent everywhere.

A plain value is null, true or false, a number, text, a list, or a mapping whose keys are text: what JSON in UTF-8 can hold.
"""

import math
import os
from pathlib import Path
from typing import Any

import yaml

from marlaas_jax.errors import InvalidConfig, NotFound, cut, short

MAX_BYTES = 4 << 20  # of one file, and of all text in one document
MAX_VALUES = 200_000  # in one document: aliases can make a short file hold any number
MAX_DEPTH = 32
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4000  # of Linux, with room for a file's name after a folder's
_MAX_MERGED = 10_000  # keys that `<<` may bring into one mapping


def plain(document: Any) -> Any:
    """Returns a copy in which no two places share a value, so that to change one changes no other.

    Raises InvalidConfig, naming the field, for what is not a plain value, or is too large or too deep.
    """
    return _Copier().copy(document, "", 0)


class _Copier:
    """Counts while it copies."""

    def __init__(self):
        self._num_values = self._num_characters = 0

    def copy(self, value: Any, name: str, depth: int) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise InvalidConfig(f"{cut(name)}: too large: at most {MAX_VALUES} values are allowed, those of aliases counted")
        if depth > MAX_DEPTH:
            raise InvalidConfig(f"{cut(name)}: nested too deeply: {MAX_DEPTH} levels are allowed; an alias may hold itself")
        match value:
            case str():
                return self._text(value, name)
            case bool() | None:
                return value
            case int():
                if not -(2**63) <= value < 2**63:
                    raise InvalidConfig(f"{cut(name)}={short(value)}: whole numbers from -2**63 to 2**63 - 1 are allowed")
                return value
            case float():
                if not math.isfinite(value):
                    raise InvalidConfig(f"{cut(name)}={value}: must be a finite number")
                return value
            case list() | tuple():
                return [self.copy(entry, _join(name, i), depth + 1) for i, entry in enumerate(value)]
            case dict():
                return {self._key(key, name): self.copy(entry, _join(name, key), depth + 1) for key, entry in value.items()}
        kind = type(value).__name__
        raise InvalidConfig(f"{cut(name)}={short(value)}: a {kind} cannot be sent on; if text is meant, put it in quotes")

    def _text(self, value: str, name: str) -> str:
        self._num_characters += len(value)
        if self._num_characters > MAX_BYTES:
            raise InvalidConfig(f"{cut(name)}: too large: at most {MAX_BYTES} characters of text are allowed in all")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidConfig(
                f"{cut(name)}={short(value)}: must be text in UTF-8, without stray bytes or halves of surrogate pairs"
            ) from None
        return value

    def _key(self, key: Any, name: str) -> str:
        if not isinstance(key, str):
            raise InvalidConfig(f"{cut(name) or 'the file'}: the key {short(key)} must be text; put it in quotes")
        return self._text(key, _join(name, "key"))


def _join(name: str, part: Any) -> str:
    return f"{name}.{part}" if name else str(part)


def path_fault(path: str) -> str:
    """Returns why no file can have this path, "" if one can."""
    encoded = path.encode(errors="replace")
    if b"\0" in encoded:
        return "the name of a file or folder holds no NUL character"
    if len(encoded) > MAX_PATH_BYTES or any(len(part) > MAX_NAME_BYTES for part in encoded.split(b"/")):
        return f"too long: a path has at most {MAX_PATH_BYTES} bytes, and {MAX_NAME_BYTES} between slashes"
    return ""


def require_path(name: str, path: str) -> None:
    """Raises InvalidConfig for what cannot be a path or is not UTF-8."""
    plain({name: path})
    if fault := path_fault(path):
        raise InvalidConfig(f"{name}={short(path)}: {fault}")


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a file as plain values. Raises NotFound or InvalidConfig, one sentence."""
    if not os.path.isfile(path):
        raise NotFound(f"{cut(str(path))}: no such job file")
    if path.stat().st_size > MAX_BYTES:
        raise InvalidConfig(f"{path}: has {path.stat().st_size} bytes; at most {MAX_BYTES} are allowed")
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{path}: not readable as YAML (byte {error.start} is not UTF-8)") from None
    document = parse_yaml(text, str(path))
    if not isinstance(document, dict):
        raise InvalidConfig(f"{path}: must hold a mapping, got {type(document).__name__}")
    return document


def parse_yaml(text: str, where: str) -> Any:
    """Returns YAML text as plain values. Raises InvalidConfig, one sentence that starts with `where`."""
    try:
        return plain(yaml.load(text, _Loader))
    except InvalidConfig as error:
        raise InvalidConfig(f"{where}: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        problem = f"{line}{cut(' '.join((error.problem or '').split()))}"
    except yaml.YAMLError as error:
        problem = str(error).splitlines()[0]
    except RecursionError:
        problem = "nested too deeply"
    raise InvalidConfig(f"{where}: not readable as YAML ({problem})")


class _Loader(yaml.SafeLoader):
    """Refuses repeated keys, and gives every fault the place where it stands."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:  # as written: what `<<` merges may be repeated
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _fault(f"the key {short(key.value)} stands there twice", key)
                seen.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MAX_MERGED:
            raise _fault(f"`<<` makes a mapping of over {_MAX_MERGED} keys", node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError):  # what PyYAML's conversions let through
            kind = {"int": "whole number", "timestamp": "date"}.get(name := node.tag.rpartition(":")[2], name)
            raise _fault(f"{short(node.value)} is no {kind}", node) from None


def _fault(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
