"""Merged models: base plus adapter, the scale once (H03), tied embeddings untouched (H41)."""

import json

import numpy as np
import pytest

from marlaas_jax.errors import CorruptFile, InvalidConfig
from marlaas_jax.lora.adapter import AdapterSpec
from marlaas_jax.lora.merge import merge
from marlaas_jax.model import hf_names
from marlaas_jax.model.checkpoint import INDEX, open_checkpoint
from marlaas_jax.model.load import load
from tests.lora.test_peft_format import adapted_logits, random_adapter
from tests.model.forward import MODELS, assert_close, expected, logits

ALL = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.mark.parametrize("targets", [ALL, ("q", "v"), ("down",)])
@pytest.mark.parametrize("name", ["llama3_tied", "llama3_untied", "mistral_tied", "qwen2_untied", "qwen3_tied"])
def test_merged_model_has_the_logits_of_base_and_adapter(name, targets, tmp_path):
    config, params = load(MODELS / name)
    spec = AdapterSpec(3, 7.5, targets)
    weights = random_adapter(config, spec)
    merge(MODELS / name, tmp_path, spec, weights)
    merged_config, merged = load(tmp_path)
    assert merged_config == config
    tokens_T = expected(MODELS / name)["tokens_T"]
    wanted = adapted_logits(config, params, spec, weights, tokens_T)
    assert_close(logits(config, merged, tokens_T), wanted)
    assert np.abs(wanted - logits(config, params, tokens_T)).max() > 0.1


def test_each_tensor_by_hand(tmp_path):
    """W + alpha / rank * B A, in float64; what the adapter does not cover keeps its bits."""
    folder = MODELS / "llama3_tied"
    config, _ = load(folder)
    spec = AdapterSpec(4, 16.0, ("k", "down"))
    weights = random_adapter(config, spec)
    merge(folder, tmp_path, spec, weights)
    before, after = open_checkpoint(folder), open_checkpoint(tmp_path)
    assert before.file_of.keys() == after.file_of.keys() and hf_names.HEAD not in after.file_of
    for tensor in hf_names.tensors(config):
        old, new = before.read(tensor.name).astype(np.float64), after.read(tensor.name)
        assert new.dtype == np.float32
        if tensor.key in spec.targets:
            down, up = (weights[tensor.key][f][tensor.layer, :4].astype(np.float64) for f in ("down", "up"))
            np.testing.assert_allclose(new, old + 4.0 * (up.T @ down), rtol=0, atol=1e-6)
        else:
            assert np.array_equal(new, old)


def test_adapter_is_left_as_it_was(tmp_path):
    """H03: merging twice from the same adapter gives the same model."""
    config, _ = load(MODELS / "qwen3_tied")
    spec = AdapterSpec(2, 8.0, ALL)
    weights = random_adapter(config, spec)
    for name in ("a", "b"):
        merge(MODELS / "qwen3_tied", tmp_path / name, spec, weights)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_bfloat16_is_rounded_once(tmp_path):
    config, _ = load(MODELS / "qwen2_tied")
    spec = AdapterSpec(2, 8.0, ALL)
    weights = random_adapter(config, spec)
    merge(MODELS / "qwen2_tied", tmp_path / "full", spec, weights)
    merge(MODELS / "qwen2_tied", tmp_path / "half", spec, weights, "bfloat16")
    full, half = open_checkpoint(tmp_path / "full"), open_checkpoint(tmp_path / "half")
    for name in full.file_of:
        stored = half.read(name)
        assert np.array_equal(stored.view(np.uint16), full.read(name).astype(stored.dtype).view(np.uint16))
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_shards_tokenizer_and_template_come_along(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    for path in (MODELS / "llama3_untied").iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    (base / "tokenizer.json").write_text('{"a": 1}')
    (base / "chat_template.jinja").write_text("t")
    config, _ = load(base)
    spec = AdapterSpec(2, 8.0, ALL)
    merge(base, tmp_path / "out", spec, random_adapter(config, spec))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json", INDEX}
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    held = {name for path in (tmp_path / "out").glob("*.safetensors") for name in open_checkpoint(tmp_path / "out").file_of}
    assert set(index["weight_map"]) == held
    sizes = sum(e.end - e.begin for f in open_checkpoint(tmp_path / "out").files.values() for e in f.entries.values())
    assert index["metadata"]["total_size"] == sizes


def test_refusals(tmp_path):
    config, _ = load(MODELS / "qwen2_tied")
    spec = AdapterSpec(2, 8.0, ("q",))
    weights = random_adapter(config, spec)
    with pytest.raises(InvalidConfig, match=r"float16.*float32, bfloat16"):
        merge(MODELS / "qwen2_tied", tmp_path, spec, weights, "float16")
    with pytest.raises(InvalidConfig, match="a folder of its own"):
        merge(MODELS / "qwen2_tied", MODELS / "qwen2_tied", spec, weights)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_bytes((MODELS / "qwen2_tied" / "config.json").read_bytes())
    whole = (MODELS / "qwen2_tied" / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CorruptFile, match="truncated"):
        merge(base, tmp_path / "out", spec, weights)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the reference libraries
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama3_tied", "llama3_untied", "qwen2_untied", "qwen3_tied", "mistral_untied"])
def test_live_transformers_loads_the_merged_model(name, dtype, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config, _ = load(MODELS / name)
    spec = AdapterSpec(3, 7.5, ALL)
    merge(MODELS / name, tmp_path, spec, random_adapter(config, spec), dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert theirs.dtype == getattr(torch, dtype)
    tied = theirs.get_input_embeddings().weight.data_ptr() == theirs.get_output_embeddings().weight.data_ptr()
    assert tied == config.tied_embeddings
    tokens = np.random.default_rng(5).integers(0, config.vocab_size, 48)
    with torch.no_grad():
        wanted = theirs.float().eval()(torch.from_numpy(tokens)[None]).logits[0].numpy()
    assert_close(logits(*load(tmp_path), tokens), wanted)
