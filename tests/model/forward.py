"""What the tests of models and adapters share: where the fixtures are, and a whole forward pass."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.model import attention, transformer
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.transformer import Params

FIXTURES = Path(__file__).parent.parent / "fixtures"
MODELS = FIXTURES / "models"
ADAPTERS = FIXTURES / "adapters"
TOLERANCE = 2e-4  # max abs difference of a logit from transformers' in float32


def logits(config: ModelConfig, params: Params, tokens_T, **hook) -> np.ndarray:
    """Returns the logits [T, V] of one sequence; `hook` is `project` and `sides`."""
    return np.asarray(_logits(config, params, jnp.asarray(tokens_T), **hook))


@functools.partial(jax.jit, static_argnames=("config", "project"))
def _logits(config, params, tokens_T, project=transformer.plain_project, sides=None):
    positions_BT = jnp.arange(tokens_T.shape[0])[None]
    attend = attention.causal(jnp.asarray([tokens_T.shape[0]]), config.sliding_window)
    hidden, _ = transformer.forward(config, params, tokens_T[None], positions_BT, attend, project=project, sides=sides)
    return transformer.unembed(params, hidden)[0]


def expected(folder: Path) -> dict[str, np.ndarray]:
    """Returns the arrays beside a fixture."""
    with np.load(folder / "expected.npz") as arrays:
        return dict(arrays)


def assert_close(found: np.ndarray, wanted: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """Fails unless every logit is within the tolerance."""
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < tolerance
