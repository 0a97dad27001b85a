"""A Hugging Face folder -> (ModelConfig, Params), one tensor at a time, and Params -> a folder."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.errors import InvalidConfig
from marlaas_jax.model import hf_config, hf_names
from marlaas_jax.model.checkpoint import SINGLE, match, open_checkpoint
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.disk import write_json
from marlaas_jax.model.safetensors_io import write_file
from marlaas_jax.model.transformer import Params

_STORED = {"float32": "F32", "bfloat16": "BF16"}


def load(folder: Path, dtype: Any = "float32", unrolled: bool = True) -> tuple[ModelConfig, Params]:
    """Returns the folder's model with parameters of `dtype` on the default device.

    Host memory stays below two tensors. Raises NotFound, InvalidConfig or CorruptFile before reading weights where possible.
    """
    dtype = np.dtype(dtype)
    if dtype.name not in _STORED:
        raise InvalidConfig(f"dtype={dtype.name}: allowed: {', '.join(_STORED)}")
    config = hf_config.read(folder)
    checkpoint = open_checkpoint(folder)
    params: Params = {}
    layers: list[dict[str, jax.Array]] = [{} for _ in range(config.num_layers)]
    stacks: dict[str, jax.Array] = {}
    for tensor, stored in match(checkpoint, config).items():
        array = checkpoint.read(stored)
        if tensor.transposed:
            array = array.T
        array = jnp.asarray(np.ascontiguousarray(array, dtype))
        if tensor.layer is None:
            params[tensor.key] = array
        elif unrolled:
            layers[tensor.layer][tensor.key] = array
        else:
            if tensor.key not in stacks:
                stacks[tensor.key] = jnp.zeros((config.num_layers, *array.shape), dtype)
            stacks[tensor.key] = _put_layer(stacks[tensor.key], array, tensor.layer)
    params["layers"] = tuple(layers) if unrolled else stacks
    return config, params


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)


def hf_tensor(params: Params, tensor: hf_names.HfTensor) -> np.ndarray:
    """Returns one tensor of a checkpoint, in its stored layout, out of unrolled or scanned parameters."""
    layers = params["layers"]
    if tensor.layer is None:
        array = params[tensor.key]
    elif isinstance(layers, dict):
        array = layers[tensor.key][tensor.layer]
    else:
        array = layers[tensor.layer][tensor.key]
    array = np.asarray(array)
    return array.T if tensor.transposed else array


def save(
    folder: Path,
    config: ModelConfig,
    params: Params,
    dtype: str = "float32",
    end_ids: tuple[int, ...] = (),
    bos_id: int | None = None,
) -> None:
    """Writes config.json and model.safetensors as transformers would; the tokenizer's files are the caller's."""
    tensors = {tensor.name: tensor for tensor in hf_names.tensors(config)}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_file(folder / SINGLE, shapes, _STORED[dtype], lambda name: hf_tensor(params, tensors[name]))
    write_json(folder / "config.json", hf_config.to_json(config, end_ids, bos_id, dtype))
