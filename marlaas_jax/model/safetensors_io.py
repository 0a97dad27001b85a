"""Reading and writing safetensors files one tensor at a time, with plain reads instead of memory maps.

The format (https://github.com/huggingface/safetensors): 8 bytes with the header's length, little endian; the header, a JSON
object of name -> {dtype, shape, data_offsets} and "__metadata__" -> strings; then the tensors' bytes, little endian. Imports no
JAX.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from marlaas_jax.errors import CorruptFile, NotFound, short
from marlaas_jax.model.disk import atomic_file

FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor's place in its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


@dataclasses.dataclass(frozen=True)
class TensorFile:
    """The checked header of one file."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor in its stored type, in memory of its own."""
        entry = self.entries[name]
        if entry.dtype not in FLOATS:
            raise CorruptFile(f"{self.path}: {name} has type {entry.dtype}; read are {', '.join(FLOATS)}")
        array = np.empty(entry.shape, FLOATS[entry.dtype])
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(entry.begin)
                _read_into(file, array.reshape(-1).view(np.uint8))
        except (OSError, EOFError) as error:
            raise CorruptFile(f"{self.path}: {name} cannot be read: {error}") from error
        return array


def _read_into(file: Any, target: np.ndarray) -> None:
    view = target.data
    while len(view):
        count = file.readinto(view)
        if not count:
            raise EOFError(f"the file ends {len(view)} bytes early")
        view = view[count:]


def open_file(path: Path) -> TensorFile:
    """Returns the file's header. Raises CorruptFile if the header is damaged or the file is not as long as it says."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise CorruptFile(f"{path}: is not a safetensors file or is cut off in its header ({size} bytes)")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError(f"__metadata__={short(metadata)} must hold text only")
        entries = {name: _entry(fields, 8 + length) for name, fields in header.items()}
    except FileNotFoundError as error:
        raise NotFound(f"{path}: there is no such file") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptFile(f"{path}: its safetensors header cannot be read: {short(error, 160)}") from error
    wanted = max((entry.end for entry in entries.values()), default=8 + length)
    if size != wanted:
        state = "truncated" if size < wanted else "damaged"
        raise CorruptFile(f"{path}: the file is {state}: its header describes {wanted} bytes, it has {size}")
    return TensorFile(path, entries, metadata)


def _entry(fields: dict[str, Any], base: int) -> Entry:
    begin, end = fields["data_offsets"]
    entry = Entry(fields["dtype"], tuple(int(n) for n in fields["shape"]), base + begin, base + end)
    if not 0 <= begin <= end or min(entry.shape, default=0) < 0:
        raise ValueError(f"bad offsets {begin}..{end} or shape {list(entry.shape)}")
    if entry.dtype in FLOATS and math.prod(entry.shape) * FLOATS[entry.dtype].itemsize != end - begin:
        raise ValueError(f"shape {list(entry.shape)} of {entry.dtype} does not fill {end - begin} bytes")
    return entry


def write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    tensor: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes `tensor(name)`, rounded to `dtype` (a key of FLOATS), for each of `shapes`; one tensor is held at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * FLOATS[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # readers map the file: the data starts at a multiple of 8
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            array = np.asarray(tensor(name), FLOATS[dtype], order="C")
            assert array.shape == tuple(shape), f"{name}: {array.shape} instead of {shape}"
            file.write(array.reshape(-1).view(np.uint8).data)
