"""Logits of every supported architecture against transformers in float32.

Frozen references (tests/fixtures/make_*.py) by default; the slow tests ask transformers itself.
"""

import importlib.metadata
from pathlib import Path

import numpy as np
import pytest

from marlaas_jax.model import source
from marlaas_jax.model.load import load
from marlaas_jax.text.tokenizer import Tokenizer
from tests.model.forward import FIXTURES, MODELS, TOLERANCE, assert_close, expected, logits

NAMES = sorted(path.parent.name for path in MODELS.glob("*/config.json"))


@pytest.mark.parametrize("unrolled", [True, False], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name, unrolled):
    config, params = load(MODELS / name, "float32", unrolled)
    reference = expected(MODELS / name)
    assert np.abs(reference["logits_TV"]).max() > 3  # the reference is not flat
    assert_close(logits(config, params, reference["tokens_T"]), reference["logits_TV"])


def test_fixtures_cover_every_architecture_tied_and_untied():
    found = {(config.architecture, config.tied_embeddings) for config, _ in (load(MODELS / name) for name in NAMES)}
    assert found == {(a, tied) for a in ("llama", "mistral", "qwen2", "qwen3") for tied in (True, False)}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    try:
        importlib.metadata.version(source.SMOLLM2_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs {source.SMOLLM2_WHEEL}: {source.SMOLLM2_INSTALL}")
    return source.resolve("smollm2-135m")


def test_smollm2_from_gguf_equals_transformers(smollm2):
    config, params = load(smollm2, unrolled=False)  # compiles faster than thirty unrolled layers
    with np.load(FIXTURES / "smollm2.npz") as reference:
        found = logits(config, params, reference["tokens_T"])
        stride = config.vocab_size // reference["logits"].shape[1]
        assert_close(found[reference["positions"], ::stride], reference["logits"])
        assert (found.argmax(-1) == reference["best_T"]).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the reference libraries
@pytest.mark.parametrize("name", NAMES)
def test_live_logits_equal_transformers(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config, params = load(MODELS / name)
    tokens = np.random.default_rng(7).integers(0, config.vocab_size, 64)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    assert_close(logits(config, params, tokens), wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the reference libraries
def test_live_smollm2_equals_transformers(smollm2):
    """transformers reads our converted folder as it reads any other: same numbers on a text, same end ids.

    The tolerance is as wide as float32's rounding over thirty layers, which differs by processor: transformers in float32 is up
    to 1e-4 from its float64, ours up to 2e-4. So one token in a hundred may be beyond it, by little.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config, params = load(smollm2)
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    tokens = np.array(Tokenizer.load(smollm2).encode(text)[:256])
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    off_T = np.abs(logits(config, params, tokens) - wanted).max(-1)
    assert np.quantile(off_T, 0.99) < TOLERANCE and off_T.max() < 2 * TOLERANCE
    assert model.generation_config.eos_token_id in (2, [2])
