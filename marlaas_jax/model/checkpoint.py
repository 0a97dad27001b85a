"""The weights of a Hugging Face folder as one set of named tensors, single file or sharded. Imports no JAX.

Everything that can be wrong with them is found from the headers, before the first tensor is read.
"""

import dataclasses
from pathlib import Path

import numpy as np

from marlaas_jax.errors import CorruptFile, NotFound
from marlaas_jax.model import hf_names
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.disk import read_json
from marlaas_jax.model.safetensors_io import FLOATS, TensorFile, open_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, wherever they lie."""

    folder: Path
    files: dict[str, TensorFile]  # by file name
    file_of: dict[str, str]  # tensor -> file name

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the stored shape of a tensor."""
        return self.files[self.file_of[name]].entries[name].shape

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in its stored type."""
        return self.files[self.file_of[name]].read(name)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Returns the folder's tensors. Raises NotFound or CorruptFile, naming the path."""
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
            raise CorruptFile(f"{folder / INDEX}: has no weight_map of tensor names to file names")
        names = sorted(set(index.values()))
        if any(Path(name).name != name for name in names):
            raise CorruptFile(f"{folder / INDEX}: names a file outside its own folder")
    elif (folder / SINGLE).exists():
        index, names = None, [SINGLE]
    else:
        other = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; {other[0]} is a pickle, which is not read: convert it to safetensors" if other else ""
        raise NotFound(f"{folder}: holds neither {SINGLE} nor {INDEX}{hint}")
    files = {name: open_file(folder / name) for name in names}
    held = {tensor: name for name, file in files.items() for tensor in file.entries}
    if index is not None:
        for tensor, name in index.items():
            if tensor not in files[name].entries:
                raise CorruptFile(f"{folder / name}: lacks {tensor}, which {INDEX} places there")
    return Checkpoint(folder, files, held)


def match(checkpoint: Checkpoint, config: ModelConfig) -> dict[hf_names.HfTensor, str]:
    """Returns which stored tensor fills each of the model's. Raises CorruptFile naming what is missing, unknown or misshapen.

    A tied model may store the embedding, the head or, with equal values, both.
    """
    wanted = {tensor.name: tensor for tensor in hf_names.tensors(config)}
    source = {name: name for name in wanted}
    # old exports hold the rotary frequencies, which are computed here
    stored = {name for name in checkpoint.file_of if not name.endswith("rotary_emb.inv_freq")}
    if config.tied_embeddings and hf_names.HEAD in stored:
        if hf_names.EMBEDDING not in stored:
            source[hf_names.EMBEDDING] = hf_names.HEAD
        elif not _equal(checkpoint, hf_names.EMBEDDING, hf_names.HEAD):
            raise CorruptFile(
                f"{checkpoint.folder}: tie_word_embeddings is true, but {hf_names.HEAD} differs from {hf_names.EMBEDDING}; "
                f"set it to false in config.json if the head is meant to be separate"
            )
        stored.discard(hf_names.HEAD)
        stored.add(hf_names.EMBEDDING)
    _refuse(checkpoint.folder, "are missing", [name for name in wanted if name not in stored])
    _refuse(checkpoint.folder, f"are not part of a {config.architecture} model", sorted(stored - set(wanted)))
    for name, tensor in wanted.items():
        entry = checkpoint.files[checkpoint.file_of[source[name]]].entries[source[name]]
        if entry.shape != tensor.shape:
            wanted_shape = list(tensor.shape)
            raise CorruptFile(f"{checkpoint.folder}: {name} has shape {list(entry.shape)}, config.json says {wanted_shape}")
        if entry.dtype not in FLOATS:
            raise CorruptFile(f"{checkpoint.folder}: {name} has type {entry.dtype}; supported: {', '.join(FLOATS)}")
    return {tensor: source[name] for name, tensor in wanted.items()}


def _refuse(folder: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CorruptFile(f"{folder}: tensors {what}: {', '.join(names[:3])}{more}")


def _equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    if checkpoint.shape(first) != checkpoint.shape(second):
        return False
    return bool(np.array_equal(checkpoint.read(first), checkpoint.read(second)))
