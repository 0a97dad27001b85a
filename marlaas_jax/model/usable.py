"""Whether a model can be used at all, from its configuration and the headers of its weights; no weight is read."""

from pathlib import Path

from marlaas_jax.errors import InvalidConfig
from marlaas_jax.model import checkpoint, hf_config, source
from marlaas_jax.model.config import ModelConfig


def require(model: str, max_context: int) -> tuple[Path, ModelConfig]:
    """Returns the model's folder and configuration. Raises a UserError for one that is missing, not supported or too short."""
    folder = source.resolve(model)
    config = hf_config.read(folder)
    checkpoint.match(checkpoint.open_checkpoint(folder), config)
    if max_context > config.max_position:
        raise InvalidConfig(f"runtime.engine.max_context={max_context}: {model} allows at most {config.max_position}")
    return folder, config
