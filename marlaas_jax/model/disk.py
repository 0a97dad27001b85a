"""Files that appear whole or not at all, and the one sentence for a disk that refuses them. Imports no JAX."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from marlaas_jax.errors import CorruptFile, NotFound, StorageError


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into a StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Gives a file to write; it takes the place of `path` when the block ends well and is removed when it does not."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, document: Any) -> None:
    """Writes a JSON file for people to read."""
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object of a file. Raises NotFound or CorruptFile, naming the path."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFound(f"{path}: there is no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise CorruptFile(f"{path}: holds a {type(document).__name__}, not a JSON object")
    return document
