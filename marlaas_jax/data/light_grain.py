"""Grain, imported without JAX where nobody has imported that yet.

Grain uses JAX for trees, sharding and profiling if it is there, and does without if it is not. We use its shuffles only.
Without JAX importing it takes 1.0 s of CPU instead of 3.8, and a service has a data worker per job with a user's own items.
What a user's file imports later is not touched.
"""

import logging
import sys

_absl = logging.getLogger("absl")
if "jax" in sys.modules or "grain" in sys.modules:
    import grain
else:
    _level = _absl.level
    _absl.setLevel(logging.ERROR)  # it says that there is no profiler
    sys.modules["jax"] = None  # pyright: ignore[reportArgumentType]  # an import of it raises ImportError
    try:
        import grain
    finally:
        del sys.modules["jax"]
        _absl.setLevel(_level)

MapDataset = grain.MapDataset
