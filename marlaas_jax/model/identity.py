"""What makes two base models the same: hashes of weights, configuration, tokenizer and chat template. Imports no JAX.

Every checkpoint and export carries the identity of its base. Weights are hashed by content (name, type, shape and bytes of each
tensor, in order of name), so sharding, file names and file metadata do not matter.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from marlaas_jax.errors import CorruptFile, InvalidConfig, MarlaasError, StorageError
from marlaas_jax.model import hf_config
from marlaas_jax.model.checkpoint import open_checkpoint
from marlaas_jax.model.disk import read_json, write_json
from marlaas_jax.model.source import cache_folder

PARTS = ("weights", "config", "tokenizer", "template")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


def identity(folder: Path, template: str | None = None) -> dict[str, str]:
    """Returns {"name", "weights", "config", "tokenizer", "template"}: the folder's name and four SHA-256 hashes.

    `template` is the chat template in use when it is not the folder's own. The hash of the weights is remembered in the cache
    folder under the sizes and times of the files, as model folders may be shared or read-only.
    """
    return {
        "name": folder.resolve().name,
        "weights": _weights(folder),
        "config": _sha256(json.dumps(dataclasses.asdict(hf_config.read(folder)), sort_keys=True).encode()),
        "tokenizer": _sha256(_bytes(folder / "tokenizer.json")),
        "template": _sha256((template if template is not None else _template(folder)).encode()),
    }


def require_same(a: Mapping[str, str], b: Mapping[str, str], a_label: str = "this", b_label: str = "the other") -> None:
    """Raises InvalidConfig with one sentence unless the two identities are of the same base."""
    for part in PARTS:
        if a.get(part) != b.get(part):
            first, second = (f"{x.get('name', '?')} ({part} {str(x.get(part))[:12]})" for x in (a, b))
            raise InvalidConfig(f"runtime.model: {a_label} base model is {first}, {b_label} is {second}: {part} must be equal")


def _weights(folder: Path) -> str:
    checkpoint = open_checkpoint(folder)
    stats = {name: file.path.stat() for name, file in checkpoint.files.items()}
    key = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    place = _sha256(str(folder.resolve()).encode())[:16]
    memo = cache_folder() / "identity" / f"{place}.json"
    with contextlib.suppress(MarlaasError, KeyError, TypeError):
        known = read_json(memo)
        if known["files"] == key:
            return known["weights"]
    digest = hashlib.sha256()
    for name in sorted(checkpoint.file_of):
        entry = checkpoint.files[checkpoint.file_of[name]].entries[name]
        digest.update(json.dumps([name, entry.dtype, list(entry.shape)]).encode())
        digest.update(checkpoint.read(name).reshape(-1).view(np.uint8).data)
    with contextlib.suppress(StorageError):  # a cache that cannot be written costs a second at the next start
        write_json(memo, {"folder": str(folder.resolve()), "files": key, "weights": digest.hexdigest()})
    return digest.hexdigest()


def _template(folder: Path) -> str:
    for name in _TEMPLATE_FILES:
        path = folder / name
        if not path.exists():
            continue
        template = path.read_text(encoding="utf-8") if path.suffix == ".jinja" else read_json(path).get("chat_template")
        if template:
            return template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return ""


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror}") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
