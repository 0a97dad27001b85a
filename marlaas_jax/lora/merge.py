"""Base plus adapter as one ordinary model: a Hugging Face folder that needs neither this package nor PEFT.

W' = W + scale * (down.T @ up), computed in float32 and rounded once; everything else is copied as it is, so a tied embedding
stays tied and untouched. The base's sharding is kept and one tensor is held at a time.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from marlaas_jax.errors import InvalidConfig
from marlaas_jax.lora.adapter import AdapterSpec, Weights
from marlaas_jax.model import hf_config, hf_names
from marlaas_jax.model.checkpoint import INDEX, match, open_checkpoint
from marlaas_jax.model.disk import read_json, storage_errors, write_json
from marlaas_jax.model.safetensors_io import FLOATS, write_file

_STORED = {"float32": "F32", "bfloat16": "BF16"}
_OTHER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")


def merge(
    base_folder: Path,
    folder: Path,
    spec: AdapterSpec,
    weights: Weights,
    dtype: str = "float32",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes the merged model into `folder`. `weights` as in a bank, NumPy or JAX, without A; `extra` goes into the metadata.

    Raises InvalidConfig, NotFound, CorruptFile or StorageError with one sentence.
    """
    if dtype not in _STORED:
        raise InvalidConfig(f"dtype={dtype!r}: allowed: {', '.join(_STORED)}")
    if folder.resolve() == base_folder.resolve():
        raise InvalidConfig(f"{folder}: the merged model needs a folder of its own, not its base's")
    config = hf_config.read(base_folder)
    checkpoint = open_checkpoint(base_folder)
    adapted = {
        stored: tensor
        for tensor, stored in match(checkpoint, config).items()
        if tensor.key in spec.targets and tensor.layer is not None
    }
    metadata = {"marlaas": json.dumps({"merged": {"rank": spec.rank, "alpha": spec.alpha, "extra": dict(extra or {})}})}

    def read(name: str) -> np.ndarray:
        array = checkpoint.read(name)
        if name not in adapted:
            return array
        return array.astype(np.float32) + delta(spec, weights, adapted[name])

    for name, file in checkpoint.files.items():
        shapes = {tensor: entry.shape for tensor, entry in file.entries.items()}
        write_file(folder / name, shapes, _STORED[dtype], read, metadata)
    _write_rest(base_folder, folder, dtype)
    if (base_folder / INDEX).exists():
        index = read_json(base_folder / INDEX)
        size = sum(np.prod(e.shape, dtype=int) for file in checkpoint.files.values() for e in file.entries.values())
        index["metadata"] = {"total_size": int(size) * FLOATS[_STORED[dtype]].itemsize}
        write_json(folder / INDEX, index)


def delta(spec: AdapterSpec, weights: Weights, tensor: hf_names.HfTensor) -> np.ndarray:
    """Returns what an adapter adds to one stored projection [F, D], in float32."""
    down_RD = np.asarray(weights[tensor.key]["down"][tensor.layer, : spec.rank], np.float32)
    up_RF = np.asarray(weights[tensor.key]["up"][tensor.layer, : spec.rank], np.float32)
    return (up_RF.T @ down_RD) * np.float32(spec.scale)


def _write_rest(base_folder: Path, folder: Path, dtype: str) -> None:
    """Copies tokenizer, template and licence; config.json last, with the new dtype: a folder that has it is complete."""
    with storage_errors(folder):
        for path in sorted(path for pattern in _OTHER_FILES for path in base_folder.glob(pattern)):
            if path.name not in ("config.json", INDEX):
                shutil.copyfile(path, folder / path.name)
    document = read_json(base_folder / "config.json")
    document.pop("torch_dtype", None)
    document["dtype" if "rope_parameters" in document else "torch_dtype"] = dtype
    write_json(folder / "config.json", document)
