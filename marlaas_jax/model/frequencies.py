"""The rotation speeds of rotary position embedding, with Llama 3's scaling. Imports no JAX."""

import numpy as np

from marlaas_jax.model.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns the rotation speeds [H/2] in radians per position, float32."""
    half = config.head_dim // 2
    inverse = 1.0 / config.rope_theta ** (np.arange(half, dtype=np.float64) / half)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse.astype(np.float32)
    if scaling.kind == "linear":
        return (inverse / scaling.factor).astype(np.float32)
    # Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, the band between interpolated.
    wavelength = 2 * np.pi / inverse
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    scaled = np.where(wavelength > low, inverse / scaling.factor, np.where(wavelength < high, inverse, between))
    return scaled.astype(np.float32)
