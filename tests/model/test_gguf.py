"""GGUF files written here with the `gguf` package and with blocks laid out by hand, against plain NumPy."""

import gguf
import numpy as np
import pytest

from marlaas_jax.errors import CorruptFile, InvalidConfig, NotFound
from marlaas_jax.model import hf_config, hf_names
from marlaas_jax.model.config import RopeScaling
from marlaas_jax.model.gguf import convert, unpermute
from marlaas_jax.model.load import load
from marlaas_jax.model.safetensors_io import open_file
from tests.model.forward import MODELS, assert_close, expected, logits

BYTES = [chr(b) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255 else None for b in range(256)]


def vocabulary(size):
    """Returns `size` tokens: the GPT-2 byte alphabet as far as it goes, the one merged token "!!" last."""
    spare = iter(range(256, 512))
    alphabet = [(c if c is not None else chr(next(spare))) for c in BYTES]
    alphabet += [f"<extra{i}>" for i in range(size - 256)]
    return [*alphabet[: size - 1], "!!"]


def permute(weight, num_heads):
    """llama.cpp's own conversion of query and key weights (convert_hf_to_gguf.py)."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


GGUF_NAMES = {"embed_VD": "token_embd.weight", "final_norm_D": "output_norm.weight", "unembed_DV": "output.weight"}
GGUF_LAYER_NAMES = {
    "attn_norm_D": "attn_norm.weight",
    "mlp_norm_D": "ffn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm_H": "attn_q_norm.weight",
    "k_norm_H": "attn_k_norm.weight",
}


def write_gguf(path, config, tensors, architecture, quantization=None, extra=None, fields=None):
    """Writes HF tensors as llama.cpp would; `quantization` names the type of the matrices."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.model_dim)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_query_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    for name, value in (fields or {}).items():
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary(config.vocab_size))
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_chat_template("{{ messages[0].content }}")
    for tensor in hf_names.tensors(config):
        array = tensors[tensor.name]
        if architecture == "llama" and tensor.key in ("q", "k"):
            array = permute(array, config.num_query_heads if tensor.key == "q" else config.num_kv_heads)
        name = GGUF_NAMES[tensor.key] if tensor.layer is None else f"blk.{tensor.layer}.{GGUF_LAYER_NAMES[tensor.key]}"
        if quantization and array.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantization]
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array.astype(np.float32))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def fixture(name):
    """Returns (config, HF tensors in float32) of a committed model, with its vocabulary cut or not."""
    config = hf_config.read(MODELS / name)
    file = open_file(MODELS / name / "model.safetensors")
    return config, {tensor: file.read(tensor).astype(np.float32) for tensor in file.entries}


@pytest.mark.parametrize("name", ["llama2_untied", "mistral_tied", "qwen2_tied", "qwen2_untied", "qwen3_tied", "qwen3_untied"])
def test_converted_model_has_the_original_bits_and_logits(name, tmp_path):
    """The permutation of llama.cpp is undone for llama and only for llama; biases and q/k norms come along."""
    config, tensors = fixture(name)
    architecture, fields = config.architecture, {}
    if architecture == "mistral":
        architecture, fields = "llama", {"llama.attention.sliding_window": config.sliding_window}
    write_gguf(tmp_path / "m.gguf", config, tensors, architecture, fields=fields)
    convert(tmp_path / "m.gguf", tmp_path / "m")
    assert hf_config.read(tmp_path / "m") == config
    found = open_file(tmp_path / "m" / "model.safetensors")
    assert found.entries.keys() == tensors.keys()
    assert all(np.array_equal(found.read(tensor), array) for tensor, array in tensors.items())
    reference = expected(MODELS / name)
    assert_close(logits(*load(tmp_path / "m"), reference["tokens_T"]), reference["logits_TV"])
    assert hf_config.end_ids(tmp_path / "m") == (2, 3)  # H13: end of text and end of turn
    assert {p.name for p in (tmp_path / "m").iterdir()} >= {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}


def test_unpermute_is_the_inverse_of_llama_cpp():
    weight = np.random.default_rng(0).standard_normal((6 * 8, 5)).astype(np.float32)
    assert np.array_equal(unpermute(permute(weight, 6), 6), weight)
    assert not np.array_equal(permute(weight, 6), weight)


def test_rope_divisors_of_llama_3(tmp_path):
    """What llama.cpp writes for Llama 3.1 (convert_hf_to_gguf.py), computed frequency by frequency."""
    config, tensors = fixture("llama2_untied")
    theta, head_dim = 500000.0, config.head_dim
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / 32 + smooth))
    config = config.__class__(**{**config.__dict__, "rope_theta": theta})
    extra = {"rope_freqs.weight": np.asarray(divisors, np.float32)}
    write_gguf(tmp_path / "m.gguf", config, tensors, "llama", extra=extra)
    convert(tmp_path / "m.gguf", tmp_path / "m")
    assert hf_config.read(tmp_path / "m").rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    extra = {"rope_freqs.weight": np.asarray([1.0, 2.0, 3.0, 32.0], np.float32)}
    write_gguf(tmp_path / "n.gguf", config, tensors, "llama", extra=extra)
    with pytest.raises(InvalidConfig, match="rope_freqs"):
        convert(tmp_path / "n.gguf", tmp_path / "n")


def q8_0(raw):
    """Block of 32: float16 scale, 32 int8."""
    return np.frombuffer(raw[:2], np.float16)[0].astype(np.float32) * np.frombuffer(raw[2:34], np.int8).astype(np.float32)


def q4_0(raw):
    """Block of 32: float16 scale, 16 bytes; low nibbles first, minus 8."""
    scale = np.frombuffer(raw[:2], np.float16)[0].astype(np.float32)
    nibbles = [b & 15 for b in raw[2:18]] + [b >> 4 for b in raw[2:18]]
    return np.asarray([scale * np.float32(n - 8) for n in nibbles], np.float32)


def q4_1(raw):
    """Block of 32: float16 scale and minimum, 16 bytes; low nibbles first."""
    scale, least = np.frombuffer(raw[:4], np.float16).astype(np.float32)
    nibbles = [b & 15 for b in raw[4:20]] + [b >> 4 for b in raw[4:20]]
    return np.asarray([scale * np.float32(n) + least for n in nibbles], np.float32)


def q4_k(raw):
    """Block of 256 (ggml-quants.c, dequantize_row_q4_K): eight scales and minima of 6 bits packed in 12 bytes."""
    scale, least = np.frombuffer(raw[:4], np.float16).astype(np.float32)
    packed, quants, out = raw[4:16], raw[16:144], []
    for j in range(8):
        if j < 4:
            sc, m = packed[j] & 63, packed[j + 4] & 63
        else:
            sc, m = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4), (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4)
        part = quants[32 * (j // 2) : 32 * (j // 2) + 32]
        out += [scale * np.float32(sc) * np.float32(b >> 4 if j % 2 else b & 15) - least * np.float32(m) for b in part]
    return np.asarray(out, np.float32)


def q6_k(raw):
    """Block of 256 (ggml-quants.c, dequantize_row_q6_K): 4 low bits, 2 high bits, sixteen int8 scales, a float16 scale."""
    low, high, scales = raw[:128], raw[128:192], np.frombuffer(raw[192:208], np.int8)
    scale, out = np.frombuffer(raw[208:210], np.float16)[0].astype(np.float32), np.zeros(256, np.float32)
    for half in range(2):
        ql, qh, sc = low[64 * half :], high[32 * half :], scales[8 * half :]
        for i in range(32):
            values = (
                (ql[i] & 15) | (((qh[i] >> 0) & 3) << 4),
                (ql[i + 32] & 15) | (((qh[i] >> 2) & 3) << 4),
                (ql[i] >> 4) | (((qh[i] >> 4) & 3) << 4),
                (ql[i + 32] >> 4) | (((qh[i] >> 6) & 3) << 4),
            )
            for part, value in enumerate(values):
                out[128 * half + 32 * part + i] = scale * np.float32(sc[i // 16 + 2 * part]) * np.float32(value - 32)
    return out


BLOCKS = {  # type -> (bytes of a block, where its float16 numbers are, reference)
    "Q8_0": (34, (0,), q8_0),
    "Q4_0": (18, (0,), q4_0),
    "Q4_1": (20, (0, 2), q4_1),
    "Q4_K": (144, (0, 2), q4_k),
    "Q6_K": (210, (208,), q6_k),
}


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_quantized_blocks_are_read_as_published(kind, tmp_path):
    """Random blocks in the embedding, decoded byte by byte after ggml's published layout."""
    num_bytes, halves, decode = BLOCKS[kind]
    rng = np.random.default_rng(3)
    config, tensors = fixture("qwen2_tied")
    config = config.__class__(**{**config.__dict__, "model_dim": 256, "vocab_size": 260, "num_layers": 1, "head_dim": 8})
    tensors = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in hf_names.tensors(config)}
    blocks_per_row = 256 // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    raw = rng.integers(0, 256, (config.vocab_size, blocks_per_row, num_bytes)).astype(np.uint8)
    for offset in halves:
        values = rng.standard_normal(raw.shape[:2]).astype(np.float16)
        raw[..., offset : offset + 2] = values.view(np.uint8).reshape(*raw.shape[:2], 2)

    class Writer(gguf.GGUFWriter):
        def add_tensor(self, name, array, raw_shape=None, raw_dtype=None):
            if name == "token_embd.weight":
                array, raw_dtype = raw.reshape(config.vocab_size, -1), gguf.GGMLQuantizationType[kind]
            super().add_tensor(name, array, raw_shape, raw_dtype)

    original, gguf.GGUFWriter = gguf.GGUFWriter, Writer
    try:
        write_gguf(tmp_path / "m.gguf", config, tensors, "qwen2")
    finally:
        gguf.GGUFWriter = original
    convert(tmp_path / "m.gguf", tmp_path / "m")
    found = open_file(tmp_path / "m" / "model.safetensors").read(hf_names.EMBEDDING)
    for row in (0, 17, config.vocab_size - 1):
        wanted = np.concatenate([decode(bytes(block)) for block in raw[row]])
        np.testing.assert_allclose(found[row], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 1e-3), ("BF16", 0), ("Q8_0", 0.02), ("Q4_0", 0.4), ("Q4_1", 0.3)])
def test_whole_model_in_each_type(kind, tolerance, tmp_path):
    config, tensors = fixture("llama2_untied")
    rng = np.random.default_rng(0)
    config = config.__class__(**{**config.__dict__, "mlp_dim": 64})  # rows of whole blocks
    tensors = {
        t.name: tensors[t.name] if tensors[t.name].shape == t.shape else rng.standard_normal(t.shape).astype(np.float32)
        for t in hf_names.tensors(config)
    }
    if kind == "BF16":
        tensors = {name: (array.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, array in tensors.items()}
    write_gguf(tmp_path / "m.gguf", config, tensors, "llama", kind)
    convert(tmp_path / "m.gguf", tmp_path / "m")
    found = open_file(tmp_path / "m" / "model.safetensors")
    for name, array in tensors.items():
        assert np.abs(found.read(name) - array).max() <= tolerance * max(1, np.abs(array).max())


def test_unsupported_quantization_lists_the_supported(tmp_path):
    config, tensors = fixture("llama2_untied")
    config = config.__class__(**{**config.__dict__, "mlp_dim": 64})
    tensors = {t.name: np.ones(t.shape, np.float32) for t in hf_names.tensors(config)}
    write_gguf(tmp_path / "m.gguf", config, tensors, "llama", "Q5_1")
    with pytest.raises(InvalidConfig, match="quantized as Q5_1; supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K"):
        convert(tmp_path / "m.gguf", tmp_path / "m")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"general.architecture": "mamba"}, "'mamba'.*llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "expert_count=8"),
        ({"llama.rope.dimension_count": 4}, "dimension_count=4 must be 8"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
    ],
)
def test_refusals(fields, words, tmp_path):
    config, tensors = fixture("llama2_untied")
    architecture = fields.pop("general.architecture", "llama")
    write_gguf(tmp_path / "m.gguf", config, tensors, architecture, fields=fields)
    with pytest.raises(InvalidConfig, match=words):
        convert(tmp_path / "m.gguf", tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    config, tensors = fixture("llama2_untied")
    write_gguf(tmp_path / "m.gguf", config, tensors, "llama", extra={"blk.0.attn_q.bias": np.zeros(32, np.float32)})
    with pytest.raises(InvalidConfig, match=r"blk\.0\.attn_q\.bias"):
        convert(tmp_path / "m.gguf", tmp_path / "m")
    deeper = config.__class__(**{**config.__dict__, "num_layers": 3})
    more = tensors | {t.name: np.ones(t.shape, np.float32) for t in hf_names.tensors(deeper) if t.name not in tensors}
    more.pop("model.layers.2.mlp.up_proj.weight")
    more["model.layers.2.mlp.up_proj.weight"] = np.ones((4, 32), np.float32)
    write_gguf(tmp_path / "n.gguf", deeper, more, "llama")
    with pytest.raises(CorruptFile, match=r"blk\.2\.ffn_up\.weight has shape \[4, 32\]"):
        convert(tmp_path / "n.gguf", tmp_path / "n")


@pytest.mark.parametrize("keep", [0, 10, 500, 5000, -100])
def test_truncated_file_is_refused_with_its_path(keep, tmp_path):
    config, tensors = fixture("llama2_untied")
    write_gguf(tmp_path / "m.gguf", config, tensors, "llama")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:keep])
    with pytest.raises(CorruptFile, match=r"m\.gguf"):
        convert(tmp_path / "m.gguf", tmp_path / "m")
    with pytest.raises(NotFound):
        convert(tmp_path / "absent.gguf", tmp_path / "m")
