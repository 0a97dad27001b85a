"""What the identity of a base depends on, and what it does not."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from marlaas_jax.errors import InvalidConfig
from marlaas_jax.model import identity as module
from marlaas_jax.model.checkpoint import INDEX, open_checkpoint
from marlaas_jax.model.identity import PARTS, identity, require_same
from marlaas_jax.model.safetensors_io import open_file, write_file
from tests.model.forward import MODELS


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(MODELS / "llama3_untied", path)
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a"}))
    return path


def changed(before, after):
    return {part for part in PARTS if before[part] != after[part]}


def test_each_part_changes_its_own_hash(folder):
    first = identity(folder)
    assert set(first) == {"name", *PARTS} and all(len(first[part]) == 64 for part in PARTS)
    (folder / "tokenizer.json").write_text("{ }")
    assert changed(first, identity(folder)) == {"tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "b", "other": 1}))
    assert changed(first, identity(folder)) == {"tokenizer", "template"}
    (folder / "chat_template.jinja").write_text("a")  # the file comes first in transformers 5
    assert changed(first, identity(folder)) == {"tokenizer"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    assert changed(first, identity(folder)) == {"tokenizer", "config"}


def test_template_in_use_counts(folder):
    assert changed(identity(folder), identity(folder, "mine")) == {"template"}
    assert identity(folder, "a") == identity(folder)


def test_fields_of_no_consequence_do_not_count(folder):
    first = identity(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "9", "use_cache": False}))
    assert identity(folder) == first


def test_one_bit_of_one_weight_counts(folder):
    first = identity(folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert changed(first, identity(folder)) == {"weights"}


def test_sharding_and_metadata_do_not_count(folder):
    first = identity(folder)
    checkpoint = open_checkpoint(folder)
    arrays = {name: checkpoint.read(name) for name in checkpoint.file_of}
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    shapes = {name: arrays[name].shape for name in reversed(arrays)}
    write_file(folder / "model.safetensors", shapes, "BF16", arrays.__getitem__, {"any": "thing"})
    assert identity(folder) == first


def test_hash_is_remembered_until_a_file_changes(folder, cache, monkeypatch):
    first = identity(folder)
    with monkeypatch.context() as patch:
        patch.setattr(type(open_file(next(folder.glob("*.safetensors")))), "read", None)  # reading would fail
        assert identity(folder) == first
    for memo in (cache / "identity").iterdir():
        memo.write_text("{")
    assert identity(folder) == first


def test_unwritable_cache_costs_only_time(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path / "file"))
    assert identity(folder)["weights"] == module.identity(folder)["weights"]


def test_require_same():
    a = {"name": "m", "weights": "1" * 64, "config": "c", "tokenizer": "t", "template": "x"}
    require_same(a, a | {"name": "elsewhere"})
    for part in PARTS:
        with pytest.raises(InvalidConfig) as error:
            require_same(a, a | {part: "2" * 64}, "the checkpoint's", "the run's")
        message = str(error.value)
        assert part in message and "the checkpoint's" in message and "\n" not in message


def test_order_of_tensors_in_the_file_does_not_count(tmp_path):
    source = MODELS / "qwen2_tied"
    for name, reverse in (("a", False), ("b", True)):
        shutil.copytree(source, tmp_path / name)
        arrays = {n: open_file(source / "model.safetensors").read(n) for n in load_names(source)}
        items = sorted(arrays.items(), reverse=reverse)
        write_file(tmp_path / name / "model.safetensors", {n: x.shape for n, x in items}, "BF16", arrays.__getitem__)
    assert identity(tmp_path / "a")["weights"] == identity(tmp_path / "b")["weights"]


def load_names(folder):
    return list(open_file(folder / "model.safetensors").entries)


def test_stored_type_counts(tmp_path):
    """float32 and bfloat16 copies of one model are different bases: sums differ in their last bits."""
    source = MODELS / "qwen2_tied"
    shutil.copytree(source, tmp_path / "m")
    arrays = {n: open_file(source / "model.safetensors").read(n).astype(np.float32) for n in load_names(source)}
    save_file(arrays, tmp_path / "m" / "model.safetensors")
    assert len(load_file(tmp_path / "m" / "model.safetensors")) == len(arrays)
    assert changed(identity(source), identity(tmp_path / "m")) == {"weights"}
