"""Logits of every supported architecture against transformers in float32 (frozen by tests/fixtures/make_models.py)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from marlaas_jax.model import attention, transformer
from marlaas_jax.model.load import load

MODELS = Path(__file__).parent.parent / "fixtures" / "models"
NAMES = sorted(path.parent.name for path in MODELS.glob("*/config.json"))
TOLERANCE = 2e-4  # max abs difference of a logit


def logits(config, params, tokens_T) -> np.ndarray:
    tokens_BT = jnp.asarray(tokens_T)[None]
    length_B = jnp.asarray([tokens_BT.shape[1]])
    positions_BT = jnp.arange(tokens_BT.shape[1])[None]
    attend = attention.causal(length_B, config.sliding_window)
    hidden, _ = transformer.forward(config, params, tokens_BT, positions_BT, attend)
    return np.asarray(transformer.unembed(params, hidden))[0]


@pytest.mark.parametrize("unrolled", [True, False], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name, unrolled):
    config, params = load(MODELS / name, "float32", unrolled)
    with np.load(MODELS / name / "expected.npz") as expected:
        found = logits(config, params, expected["tokens_T"])
        assert np.abs(expected["logits_TV"]).max() > 3  # the reference is not flat
        assert np.abs(found - expected["logits_TV"]).max() < TOLERANCE


def test_fixtures_cover_every_architecture_tied_and_untied():
    found = {(config.architecture, config.tied_embeddings) for config, _ in (load(MODELS / name) for name in NAMES)}
    assert found == {(a, tied) for a in ("llama", "mistral", "qwen2", "qwen3") for tied in (True, False)}
