"""Items of files by index: JSON lines (read by byte offset, not held in memory), a JSON list, parquet (needs pyarrow)."""

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from marlaas_jax.errors import CorruptFile, InvalidConfig, NotFound, short

KINDS = ("jsonl", "json", "parquet")


class Source(Protocol):
    """Items by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


def open_source(uri: str) -> Source:
    """Returns the items of "jsonl:PATH", "json:PATH" or "parquet:PATH". Raises one sentence for what cannot be read."""
    kind, _, path_text = uri.partition(":")
    if kind not in KINDS or not path_text:
        raise InvalidConfig(f"data.source={short(uri)}: must read {', '.join(f'{k}:PATH' for k in KINDS)}")
    path = Path(path_text)
    if not os.path.isfile(path):
        raise NotFound(f"data.source={short(uri)}: no such file")
    source = {"jsonl": JsonlSource, "json": _json_list, "parquet": _parquet}[kind](path)
    if not len(source):
        raise CorruptFile(f"{path}: it holds no items")
    return source


class JsonlSource:
    """One JSON object per line; blank lines do not count. Only the lines' offsets are in memory. Thread-safe.

    The file must stay as it is while it is read: an item's ticket would otherwise stand for two items.
    """

    def __init__(self, path: Path):
        self._path = path
        offsets, numbers, at = [], [], 0
        with path.open("rb") as file:
            self._version = _version(file)
            for number, line in enumerate(file, 1):
                if line.strip():
                    offsets.append(at)
                    numbers.append(number)
                at += len(line)
        self._offsets = np.asarray(offsets, np.int64)
        self._line_numbers = np.asarray(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._path.open("rb") as file:
            if _version(file) != self._version:
                raise CorruptFile(f"{self._path}: it was changed while a job reads it")
            file.seek(int(self._offsets[index]))
            line = file.readline()
        return _parse_object(line, f"{self._path}: line {self._line_numbers[index]}")


class ListSource:
    """Items in memory."""

    def __init__(self, rows: list[Any], path: Path):
        self._rows = rows
        self._path = path

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _object(self._rows[index], f"{self._path}: item {index}")


def _version(file: IO[bytes]) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _json_list(path: Path) -> ListSource:
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(rows, list):
        raise CorruptFile(f"{path}: must hold a list of objects, got {type(rows).__name__}")
    return ListSource(rows, path)


def _parquet(path: Path) -> ListSource:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InvalidConfig(
            f"data.source='parquet:{path}': reading it needs pyarrow; install it: pip install pyarrow"
        ) from None
    try:
        return ListSource(parquet.read_table(path).to_pylist(), path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise CorruptFile(f"{path}: not readable as parquet ({str(error).splitlines()[0]})") from None


def _parse_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise CorruptFile(f"{where} is not JSON: {line[:60]!r}") from None
    return _object(row, where)


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise CorruptFile(f"{where} must be an object, got {type(row).__name__}")
    return row
