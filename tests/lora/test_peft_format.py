"""PEFT folders: what peft writes is read, what is written is what peft reads, and nothing loads without effect (H39, H40)."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from marlaas_jax.errors import CorruptFile, InvalidConfig, NotFound
from marlaas_jax.lora import apply, peft_format
from marlaas_jax.lora.adapter import AdapterSpec, init_weights
from marlaas_jax.lora.bank import empty, write
from marlaas_jax.model import hf_config
from marlaas_jax.model.load import load
from tests.model.forward import ADAPTERS, MODELS, assert_close, expected, logits

BASE = {"name": "base", "weights": "1" * 64, "config": "2" * 64, "tokenizer": "3" * 64, "template": "4" * 64}
NAMES = ("attention", "all_linear", "mlp_regex")
CONFIG = hf_config.read(MODELS / "llama3_tied")
MAX_RANK = 6


def adapted_logits(config, params, spec, weights, tokens_T):
    @jax.jit
    def sides(weights, scale):
        bank = write(empty(config, 3, MAX_RANK), jnp.asarray(2), weights, scale)
        return apply.gather_blocks(bank, jnp.asarray([2]), unrolled=True)

    in_bank = sides(jax.tree.map(jnp.asarray, weights), jnp.float32(spec.scale))
    return logits(config, params, tokens_T, project=apply.block_project, sides=in_bank)


def random_adapter(config, spec, seed=0):
    rng = np.random.default_rng(seed)
    weights = init_weights(config, spec, MAX_RANK)
    for target in spec.targets:
        for array in weights[target].values():
            array[:, : spec.rank] = rng.standard_normal(array[:, : spec.rank].shape).astype(np.float32) * 0.2
    return weights


def same(first, second):
    return jax.tree.all(jax.tree.map(np.array_equal, first, second))


@pytest.mark.parametrize("name", NAMES)
def test_adapter_saved_by_peft_gives_peft_s_logits(name):
    reference = expected(ADAPTERS / name)
    folder = MODELS / str(reference["model"])
    config, params = load(folder)
    found = peft_format.load(ADAPTERS / name, config, MAX_RANK)
    tokens_T = expected(folder)["tokens_T"]
    assert np.abs(reference["logits_TV"] - expected(folder)["logits_TV"]).max() > 1  # the adapter shows
    wanted = reference["logits_TV"]
    tolerance = 2e-5 * np.abs(wanted).max()  # of fp32 sums, whose order differs between processors
    assert_close(adapted_logits(config, params, found.spec, found.weights, tokens_T), wanted, tolerance)


def test_settings_and_report_of_a_peft_folder():
    found = peft_format.load(ADAPTERS / "attention", CONFIG, MAX_RANK)
    assert (found.spec.rank, found.spec.alpha, found.spec.targets) == (4, 12.0, ("q", "k", "v", "o"))
    assert len(found.match.matched) == 8 and found.match.matched[0] == "model.layers.0.self_attn.q_proj"
    assert found.match.unmatched == found.match.missing == () and found.base is None
    assert not found.weights["q"]["down"][:, 4:].any() and not found.weights["up"]["down"].any()
    mistral = hf_config.read(MODELS / "mistral_tied")
    assert peft_format.load(ADAPTERS / "mlp_regex", mistral, MAX_RANK).spec.targets == ("up", "down")
    qwen = hf_config.read(MODELS / "qwen3_untied")
    assert len(peft_format.load(ADAPTERS / "all_linear", qwen, MAX_RANK).spec.targets) == 7


@pytest.mark.parametrize("targets", [("q", "v"), ("q", "k", "v", "o", "gate", "up", "down"), ("down",)])
@pytest.mark.parametrize("as_jax", [False, True])
def test_round_trip_is_exact(targets, as_jax, tmp_path):
    spec = AdapterSpec(3, 7.5, targets, seed=11)
    weights = random_adapter(CONFIG, spec)
    given = jax.tree.map(jnp.asarray, weights) if as_jax else weights
    peft_format.save(tmp_path, CONFIG, spec, given, BASE, extra={"job": "a", "version": 4})
    found = peft_format.load(tmp_path, CONFIG, MAX_RANK, BASE)
    assert found.spec == spec and same(found.weights, weights)
    assert found.base == BASE and found.extra == {"job": "a", "version": 4}
    peft_format.save(tmp_path / "again", CONFIG, found.spec, found.weights, found.base, extra=found.extra)
    for name in (peft_format.CONFIG, peft_format.TENSORS):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_wider_bank_changes_nothing_but_padding(tmp_path):
    """H04: a small rank in a wide bank."""
    spec = AdapterSpec(2, 4.0, ("q",))
    weights = random_adapter(CONFIG, spec)
    peft_format.save(tmp_path, CONFIG, spec, weights, BASE)
    wide = peft_format.load(tmp_path, CONFIG, 16).weights
    assert wide["q"]["up"].shape[1] == 16 and not wide["q"]["up"][:, 2:].any()
    assert np.array_equal(wide["q"]["up"][:, :2], weights["q"]["up"][:, :2])


def test_keys_fields_and_types_are_those_of_peft(tmp_path):
    """H39: against a folder that peft itself wrote, for the same rank and targets."""
    found = peft_format.load(ADAPTERS / "attention", CONFIG, MAX_RANK)
    peft_format.save(tmp_path, CONFIG, found.spec, found.weights, BASE, base_name="llama3_tied")
    ours, theirs = load_file(tmp_path / peft_format.TENSORS), load_file(ADAPTERS / "attention" / peft_format.TENSORS)
    assert ours.keys() == theirs.keys()
    assert all(ours[key].dtype == theirs[key].dtype == np.float32 and np.array_equal(ours[key], theirs[key]) for key in ours)
    document = json.loads((tmp_path / peft_format.CONFIG).read_text())
    reference = json.loads((ADAPTERS / "attention" / peft_format.CONFIG).read_text())
    for field, value in document.items():
        is_list = isinstance(value, list)
        assert (sorted(value) if is_list else value) == (sorted(reference[field]) if is_list else reference[field]), field
    with safe_open(tmp_path / peft_format.TENSORS, "np") as file:
        assert json.loads(file.metadata()["marlaas"])["base"] == BASE


def test_whole_alpha_is_written_as_peft_does(tmp_path):
    for alpha, written in ((16.0, "16"), (7.5, "7.5")):
        spec = AdapterSpec(2, alpha, ("q",))
        peft_format.save(tmp_path, CONFIG, spec, random_adapter(CONFIG, spec), BASE)
        assert f'"lora_alpha": {written},' in (tmp_path / peft_format.CONFIG).read_text()


def test_nothing_is_dropped_on_export(tmp_path):
    weights = random_adapter(CONFIG, AdapterSpec(4, 4.0, ("q", "v")))
    for spec in (AdapterSpec(3, 4.0, ("q", "v")), AdapterSpec(4, 4.0, ("q",))):
        with pytest.raises(AssertionError, match="not zero outside"):
            peft_format.save(tmp_path, CONFIG, spec, weights, BASE)


def test_other_base_is_refused(tmp_path):
    spec = AdapterSpec(2, 4.0, ("q",))
    peft_format.save(tmp_path, CONFIG, spec, random_adapter(CONFIG, spec), BASE)
    with pytest.raises(InvalidConfig, match=r"its base model is base \(weights 1{12}\), the run.s is"):
        peft_format.load(tmp_path, CONFIG, MAX_RANK, BASE | {"weights": "9" * 64})


@pytest.fixture
def edited(tmp_path):
    """Returns a function that copies the attention adapter with its tensors and configuration changed."""

    def edit(change=lambda tensors: None, **fields):
        folder = tmp_path / "adapter"
        shutil.copytree(ADAPTERS / "attention", folder, dirs_exist_ok=True)
        tensors = load_file(folder / peft_format.TENSORS)
        change(tensors)
        save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / peft_format.TENSORS)
        document = json.loads((folder / peft_format.CONFIG).read_text()) | fields
        (folder / peft_format.CONFIG).write_text(json.dumps(document))
        return folder

    return edit


def renamed(old, new):
    def change(tensors):
        for key in list(tensors):
            if old in key:
                tensors[key.replace(old, new)] = tensors.pop(key)

    return change


def test_edit_without_a_change_loads(edited):
    assert peft_format.load(edited(), CONFIG, MAX_RANK).spec.rank == 4


@pytest.mark.parametrize(
    "change",
    [
        renamed("model.layers", "transformer.h"),  # another family's names
        renamed("base_model.model.", "base_model.model.module."),  # a wrapper prefix
        renamed("self_attn.q_proj", "self_attn.0"),  # a numeric sub-module
        renamed(".lora_A.weight", ".lora_A.default.weight"),  # peft's name of the adapter kept in
        renamed("layers.1.", "layers.7."),  # a layer that this model lacks
        renamed("base_model.model.", ""),
    ],
)
def test_names_that_match_nothing_are_refused(change, edited):
    """H40: no adapter loads and does nothing, and none loads in part."""
    with pytest.raises(InvalidConfig, match=r"belongs to no module of this model.*unmatched") as error:
        peft_format.load(edited(change), CONFIG, MAX_RANK)
    assert "\n" not in str(error.value)


def test_one_extra_tensor_is_refused(edited):
    extra = {"base_model.model.lm_head.lora_A.weight": np.zeros((4, 32), np.float32)}
    with pytest.raises(InvalidConfig, match=r"lm_head.*8 modules matched, 1 tensors unmatched, 0 missing"):
        peft_format.load(edited(lambda t: t.update(extra)), CONFIG, MAX_RANK)


def test_tensors_of_targets_that_the_config_does_not_name_are_refused(edited):
    with pytest.raises(InvalidConfig, match=r"o_proj.*belongs to no module"):
        peft_format.load(edited(target_modules=["q_proj", "k_proj", "v_proj"]), CONFIG, MAX_RANK)


def test_missing_tensor_is_named(edited):
    key = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    with pytest.raises(InvalidConfig, match=f"{key} is missing.*7 modules matched"):
        peft_format.load(edited(lambda t: t.pop(key)), CONFIG, MAX_RANK)
    with pytest.raises(InvalidConfig, match=r"gate_proj.*is missing"):
        peft_format.load(edited(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]), CONFIG, MAX_RANK)


def test_no_tensors_at_all_are_refused(edited):
    with pytest.raises(InvalidConfig, match="0 modules matched"):
        peft_format.load(edited(lambda t: t.clear()), CONFIG, MAX_RANK)


def swapped(tensors):
    key = "base_model.model.model.layers.0.self_attn.k_proj"
    tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = (
        tensors[f"{key}.lora_B.weight"],
        tensors[f"{key}.lora_A.weight"],
    )


@pytest.mark.parametrize("arguments", [{"change": swapped}, {"r": 5}, {"r": 2}])
def test_wrong_shapes_are_named_with_the_wanted(arguments, edited):
    """H40: swapped factors; a rank in the configuration that is not the tensors'."""
    with pytest.raises(InvalidConfig, match=r"lora_A\.weight is F32 \[\d+, \d+\]; this model and r=\d need a float tensor"):
        peft_format.load(edited(**arguments), CONFIG, MAX_RANK)


def test_rank_above_the_bank_is_refused_with_the_limit(edited):
    """H04."""
    with pytest.raises(InvalidConfig, match=r"r=4 is above the bank's limit, runtime\.bank\.max_rank=3"):
        peft_format.load(edited(), CONFIG, 3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_rslora": True}, "use_rslora=True"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'.*'none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"something_of_2027": {"a": 1}}, "something_of_2027"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.*changes the base"),
        ({"peft_type": "IA3"}, "peft_type='IA3'.*LORA"),
        ({"r": 0}, "r=0"),
        ({"lora_alpha": 0}, "lora_alpha=0"),
        ({"target_modules": ["q_proj", "c_attn"]}, "'c_attn' matches no module.*q_proj"),
        ({"target_modules": r".*\.h\..*"}, "matches no module"),
        ({"target_modules": r"(["}, "regular expression"),
        ({"target_modules": None}, "names no module"),
        ({"target_modules": ["model.layers.0.self_attn.q_proj"]}, r"leaves out model\.layers\.1"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(fields, words, edited):
    """H05."""
    with pytest.raises(InvalidConfig, match=words) as error:
        peft_format.load(edited(**fields), CONFIG, MAX_RANK)
    assert "\n" not in str(error.value)


def test_damaged_folders(edited, tmp_path):
    folder = edited()
    tensors = folder / peft_format.TENSORS
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptFile, match=r"adapter_model\.safetensors: the file is truncated"):
        peft_format.load(folder, CONFIG, MAX_RANK)
    tensors.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(NotFound, match="pickle"):
        peft_format.load(folder, CONFIG, MAX_RANK)
    with pytest.raises(NotFound, match="not a PEFT adapter"):
        peft_format.load(tmp_path, CONFIG, MAX_RANK)


def test_values_that_are_not_finite_are_refused(edited):
    key = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    with pytest.raises(CorruptFile, match="not finite"):
        peft_format.load(edited(lambda t: t[key].fill(np.nan)), CONFIG, MAX_RANK)


def test_half_precision_adapters_are_read(edited):
    folder = edited(lambda t: t.update({key: value.astype(np.float16) for key, value in t.items()}))
    found = peft_format.load(folder, CONFIG, MAX_RANK).weights["q"]["down"]
    exact = peft_format.load(ADAPTERS / "attention", CONFIG, MAX_RANK).weights["q"]["down"]
    assert found.dtype == np.float32 and np.array_equal(found, exact.astype(np.float16).astype(np.float32))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what the reference libraries deprecate in each other is theirs
@pytest.mark.parametrize("name", ["llama3_tied", "llama2_untied", "mistral_untied", "qwen2_tied", "qwen3_untied"])
@pytest.mark.parametrize("targets", [("q", "k", "v", "o"), ("q", "k", "v", "o", "gate", "up", "down"), ("up",)])
def test_live_peft_loads_the_export_and_gives_our_logits(name, targets, tmp_path):
    """H39: no missing or unexpected keys, same numbers."""
    torch, transformers, peft = (pytest.importorskip(m) for m in ("torch", "transformers", "peft"))
    config, params = load(MODELS / name)
    spec = AdapterSpec(3, 7.5, targets)
    weights = random_adapter(config, spec)
    peft_format.save(tmp_path, config, spec, weights, BASE, base_name=str(MODELS / name))
    base = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig.from_pretrained(tmp_path))
    result = peft.set_peft_model_state_dict(model, peft.utils.load_peft_weights(str(tmp_path), device="cpu"))
    assert result.unexpected_keys == [] and not [key for key in result.missing_keys if "lora_" in key]
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32), tmp_path
    ).eval()
    tokens = np.random.default_rng(5).integers(0, config.vocab_size, 48)
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    assert_close(adapted_logits(config, params, spec, weights, tokens), wanted)
    assert np.abs(wanted - logits(config, params, tokens)).max() > 0.1
