"""Loading folders: tied and untied heads (H41), damaged ones, both layer forms, both dtypes, and the way back."""

import json
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from marlaas_jax.errors import CorruptFile, InvalidConfig, NotFound
from marlaas_jax.model import hf_names, transformer
from marlaas_jax.model.checkpoint import INDEX, SINGLE, open_checkpoint
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.load import load, save
from tests.model.forward import MODELS, assert_close, expected, logits

NAMES = sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def arrays_of(folder):
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name).astype(np.float32) for name in checkpoint.file_of}


@pytest.fixture
def edited(tmp_path):
    """Returns a function that copies a fixture with its tensors and configuration changed."""

    def edit(name, change=lambda arrays: None, **fields):
        folder = tmp_path / name
        folder.mkdir()
        arrays = arrays_of(MODELS / name)
        change(arrays)
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / SINGLE)
        document = json.loads((MODELS / name / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(document))
        return folder

    return edit


def same(first, second):
    return jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), first, second))


@pytest.mark.parametrize("name", NAMES)
def test_scanned_is_the_stacked_form_of_unrolled(name):
    _, unrolled = load(MODELS / name, "float32", unrolled=True)
    _, scanned = load(MODELS / name, "float32", unrolled=False)
    assert same(scanned, transformer.stack_layers(unrolled))
    assert same(unrolled, transformer.unstack_layers(scanned))


@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_those_of_the_model(name):
    config, params = load(MODELS / name)
    wanted = jax.eval_shape(lambda: transformer.init_params(config))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)


def test_bfloat16_keeps_the_stored_bits():
    _, full = load(MODELS / "llama3_tied", "float32")
    _, half = load(MODELS / "llama3_tied", jnp.bfloat16)
    assert half["embed_VD"].dtype == jnp.bfloat16
    assert same(jax.tree.map(lambda x: x.astype(jnp.float32), half), full)  # the fixture is stored in bfloat16
    with pytest.raises(InvalidConfig, match=r"float16.*float32, bfloat16"):
        load(MODELS / "llama3_tied", "float16")


@pytest.mark.parametrize("unrolled", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_saved_model_loads_to_the_same_bits(name, unrolled, tmp_path):
    config, params = load(MODELS / name, unrolled=unrolled)
    save(tmp_path, config, params, end_ids=(2, 5), bos_id=1)
    reloaded_config, reloaded = load(tmp_path, unrolled=unrolled)
    assert reloaded_config == config and same(reloaded, params)


def test_tied_model_with_the_head_stored_too(edited):
    """H41: the head's tensor is there and equal."""
    folder = edited("llama3_tied", lambda a: a.update({hf_names.HEAD: a[hf_names.EMBEDDING]}))
    config, params = load(folder)
    assert "unembed_DV" not in params
    reference = expected(MODELS / "llama3_tied")
    assert_close(logits(config, params, reference["tokens_T"]), reference["logits_TV"])


def test_tied_model_with_another_head_is_refused(edited):
    folder = edited("llama3_tied", lambda a: a.update({hf_names.HEAD: a[hf_names.EMBEDDING] + 1}))
    with pytest.raises(CorruptFile, match="tie_word_embeddings"):
        load(folder)
    document = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(document))
    assert "unembed_DV" in load(folder)[1]


def test_tied_model_without_the_embedding_takes_the_head(edited):
    """H41: only the head's tensor is there."""
    folder = edited("llama3_tied", lambda a: a.update({hf_names.HEAD: a.pop(hf_names.EMBEDDING)}))
    assert same(load(folder)[1], load(MODELS / "llama3_tied")[1])


@pytest.mark.parametrize("name", [hf_names.HEAD, hf_names.EMBEDDING, "model.layers.1.mlp.up_proj.weight"])
def test_missing_tensor_is_named(edited, name):
    folder = edited("llama2_untied", lambda a: a.pop(name))
    with pytest.raises(CorruptFile, match=f"missing: {name}"):
        load(folder)


def test_unknown_tensors_are_named_and_counted(edited):
    extra = {f"model.layers.{i}.self_attn.q_proj.bias": np.zeros(32, np.float32) for i in range(5)}
    with pytest.raises(CorruptFile, match=r"not part of a llama model: model\.layers\.0\.self_attn\.q_proj\.bias.* and 2 more"):
        load(edited("llama2_untied", lambda a: a.update(extra)))


def test_rotary_frequencies_of_old_exports_are_ignored(edited):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    folder = edited("llama2_untied", lambda a: a.update(extra))
    assert same(load(folder)[1], load(MODELS / "llama2_untied")[1])


def test_wrong_shape_is_named(edited):
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(CorruptFile, match=r"k_proj\.weight has shape \[8, 32\], config\.json says \[32, 32\]"):
        load(edited("llama2_untied", lambda a: a.update({name: a[name][:8]})))
    with pytest.raises(CorruptFile, match="missing"):
        load(edited("qwen2_tied", num_hidden_layers=3))


def test_damaged_shards_are_named(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(MODELS / "llama3_untied", folder)
    shards = sorted(folder.glob("model-*.safetensors"))
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    with pytest.raises(CorruptFile, match=f"{shards[1].name}: the file is truncated"):
        load(folder)
    shards[1].unlink()
    with pytest.raises(NotFound, match=shards[1].name):
        load(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][hf_names.HEAD] = "../x.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptFile, match="outside its own folder"):
        load(folder)
    index["weight_map"] = {"model.nowhere": shards[0].name}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptFile, match=r"lacks model\.nowhere"):
        load(folder)


def test_pickles_are_not_read(tmp_path):
    shutil.copy(MODELS / "llama2_untied" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(NotFound, match="pickle"):
        load(tmp_path)


def test_integer_weights_are_refused(edited):
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(CorruptFile, match="has type I8"):
        load(edited("llama2_untied", lambda a: a.update({name: a[name].astype(np.int8)})))


@pytest.mark.parametrize("unrolled", [True, False])
def test_host_memory_stays_below_a_few_tensors(tmp_path, unrolled):
    config = ModelConfig("llama", 12, 128, 4, 4, 32, 512, 64, 1e4, 1e-5, 128, True)
    params = transformer.init_params(config)
    save(tmp_path, config, params)
    largest = 128 * 512 * 4
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    load(tmp_path, jnp.bfloat16, unrolled)  # compiles
    tracemalloc.start()
    load(tmp_path, jnp.bfloat16, unrolled)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert whole > 40 * largest
    # On the CPU device an array may keep the host memory that it came from; that is the model itself, not a copy.
    assert peak < whole / 2 + 4 * largest
