"""config.json: what is read, what is refused by name, and the way back."""

import json

import pytest

from marlaas_jax.errors import CorruptFile, InvalidConfig, NotFound
from marlaas_jax.model import hf_config
from marlaas_jax.model.config import RopeScaling
from tests.model.forward import MODELS

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_absent_fields_have_transformers_defaults():
    config = hf_config.parse(BASE)
    assert (config.num_kv_heads, config.head_dim, config.max_position) == (4, 16, 2048)
    assert (config.rope_theta, config.norm_eps, config.tied_embeddings) == (10000.0, 1e-6, False)
    assert hf_config.parse(BASE | {"num_key_value_heads": None}).num_kv_heads == 4
    mistral = hf_config.parse(BASE | {"architectures": ["MistralForCausalLM"], "num_attention_heads": 16})
    assert (mistral.num_kv_heads, mistral.sliding_window) == (8, 4096)
    assert hf_config.parse(BASE | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}).head_dim == 128


def test_architecture_from_model_type_when_the_list_is_absent():
    document = {k: v for k, v in BASE.items() if k != "architectures"} | {"model_type": "qwen2", "num_key_value_heads": 2}
    config = hf_config.parse(document)
    assert (config.architecture, config.qkv_bias) == ("qwen2", True)


@pytest.mark.parametrize("kind", [{"rope_type": "llama3"}, {"type": "llama3"}])
def test_rope_of_transformers_4_and_5_agree(kind):
    old = hf_config.parse(BASE | {"rope_theta": 500000.0, "rope_scaling": LLAMA3 | kind})
    new = hf_config.parse(BASE | {"rope_parameters": LLAMA3 | kind | {"rope_theta": 500000.0}})
    assert old == new
    assert old.rope_theta == 500000.0 and old.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


def test_linear_rope():
    scaling = hf_config.parse(BASE | {"rope_scaling": {"type": "linear", "factor": 4.0}}).rope_scaling
    assert scaling is not None and (scaling.kind, scaling.factor) == ("linear", 4.0)


def test_sliding_window_only_where_it_is_used():
    qwen = BASE | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "sliding_window": 32}
    assert hf_config.parse(qwen | {"use_sliding_window": False}).sliding_window is None
    assert hf_config.parse(qwen | {"use_sliding_window": True}).sliding_window is None  # all layers are below 28
    assert hf_config.parse(qwen | {"use_sliding_window": True, "max_window_layers": 0}).sliding_window == 32
    with pytest.raises(InvalidConfig, match="different attention"):
        hf_config.parse(qwen | {"use_sliding_window": True, "max_window_layers": 1})
    mistral = BASE | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert hf_config.parse(mistral | {"sliding_window": None}).sliding_window is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None, "model_type": "mamba"}, ["mamba", "MistralForCausalLM"]),
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "llama3"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, ["low_freq_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["rope_parameters"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4"]),
        ({"vocab_size": None}, ["vocab_size=None"]),
        ({"hidden_size": 64.0}, ["hidden_size=64.0"]),
        ({"rms_norm_eps": "1e-6"}, ["rms_norm_eps='1e-6'"]),
        ({"head_dim": 15}, ["head_dim=15"]),
    ],
)
def test_refusals_name_field_value_and_what_is_allowed(change, words):
    with pytest.raises(InvalidConfig) as error:
        hf_config.parse(BASE | change, "folder/config.json")
    message = str(error.value)
    assert message.startswith("folder/config.json") and "\n" not in message
    assert all(word in message for word in words)


def test_read_names_the_path(tmp_path):
    with pytest.raises(NotFound, match=r"config\.json"):
        hf_config.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CorruptFile, match=r"config\.json"):
        hf_config.read(tmp_path)


def test_all_end_ids_count(tmp_path):
    """H13: several ends, in either file, as a number or a list."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert hf_config.end_ids(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2, 0]}))
    assert hf_config.end_ids(tmp_path) == (0, 2, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ["</s>"]}))
    with pytest.raises(InvalidConfig, match="eos_token_id"):
        hf_config.end_ids(tmp_path)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in MODELS.glob("*/config.json")))
def test_round_trip_of_written_configurations(name):
    config = hf_config.read(MODELS / name)
    written = json.loads(json.dumps(hf_config.to_json(config, (2,), 1)))
    assert hf_config.parse(written) == config
    windowed = hf_config.to_json(hf_config.parse(BASE | {"rope_scaling": {"type": "linear", "factor": 2.0}}))
    assert hf_config.parse(windowed).rope_scaling == RopeScaling("linear", 2.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the reference libraries
@pytest.mark.parametrize("name", sorted(path.parent.name for path in MODELS.glob("*/config.json")))
def test_live_transformers_reads_what_is_written(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = hf_config.read(MODELS / name)
    (tmp_path / "config.json").write_text(json.dumps(hf_config.to_json(config, (2, 3), 1)))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    original = transformers.AutoConfig.from_pretrained(MODELS / name)
    for field in ("head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "sliding_window", "vocab_size"):
        if hasattr(original, field):  # Qwen2's configuration computes head_dim where it is used
            assert getattr(theirs, field) == getattr(original, field), field
    assert dict(theirs.rope_parameters) == dict(original.rope_parameters)
    assert theirs.eos_token_id == [2, 3]
