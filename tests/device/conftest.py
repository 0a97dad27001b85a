"""Makes the harness of this folder a fixture."""

from tests.device.harness import make  # noqa: F401  (a fixture)
