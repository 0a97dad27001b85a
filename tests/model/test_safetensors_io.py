"""Our reader and writer against the safetensors package, and every way in which a file can be damaged."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from marlaas_jax.errors import CorruptFile, NotFound, StorageError
from marlaas_jax.model.safetensors_io import open_file, write_file

ARRAYS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.asarray([[-1.5], [2.25]], np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.asarray(3.0, np.float32),
}
SHAPES = {name: array.shape for name, array in ARRAYS.items()}


def test_written_file_is_read_by_the_package(tmp_path):
    path = tmp_path / "new" / "x.safetensors"
    write_file(path, SHAPES, "F32", ARRAYS.__getitem__, {"marlaas": "note"})
    found = load_file(path)
    assert found.keys() == ARRAYS.keys() and all(np.array_equal(found[n], ARRAYS[n]) for n in ARRAYS)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt", "marlaas": "note"}
    assert [p.name for p in path.parent.iterdir()] == ["x.safetensors"]


def test_file_of_the_package_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(ARRAYS | {"half": np.asarray([1, 2], np.float16), "ids": np.arange(3)}, path, {"k": "v"})
    file = open_file(path)
    assert file.metadata == {"k": "v"}
    for name, array in ARRAYS.items():
        assert np.array_equal(file.read(name), array) and file.read(name).dtype == array.dtype
    assert file.read("half").dtype == np.float16
    with pytest.raises(CorruptFile, match="ids has type I64"):
        file.read("ids")


def test_bfloat16_rounds_to_nearest_and_keeps_bits(tmp_path):
    path = tmp_path / "x.safetensors"
    values = np.asarray([1.0, 1.00390625, 1.01171875, -0.0, np.inf], np.float32)
    write_file(path, {"x": (5,)}, "BF16", lambda _: values)
    found = open_file(path).read("x")
    assert found.dtype == ml_dtypes.bfloat16
    assert found.astype(np.float32).tolist() == [1.0, 1.0, 1.015625, -0.0, np.inf]
    write_file(path, {"x": (5,)}, "BF16", lambda _: found)
    assert np.array_equal(open_file(path).read("x").view(np.uint16), found.view(np.uint16))


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -9, -1])
def test_truncated_file_is_refused_with_its_path(tmp_path, keep):
    path = tmp_path / "x.safetensors"
    write_file(path, SHAPES, "F32", ARRAYS.__getitem__)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptFile, match=r"x\.safetensors"):
        open_file(path)


@pytest.mark.parametrize(
    "header",
    [
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"x": {"dtype": "F32", "shape": [1]}},
        {"x": 3},
        [],
    ],
)
def test_lying_header_is_refused(tmp_path, header):
    path, text = tmp_path / "x.safetensors", json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(CorruptFile, match=r"x\.safetensors"):
        open_file(path)


def test_longer_file_and_other_formats_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    write_file(path, SHAPES, "F32", ARRAYS.__getitem__)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CorruptFile, match="damaged"):
        open_file(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CorruptFile, match="not a safetensors file"):
        open_file(path)
    with pytest.raises(NotFound):
        open_file(tmp_path / "absent")


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    write_file(path, {"x": (1,)}, "F32", lambda _: np.ones(1))

    def fail(name):
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=r"x\.safetensors.*No space left"):
        write_file(path, {"x": (1,)}, "F32", fail)
    assert open_file(path).read("x").tolist() == [1.0]
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
