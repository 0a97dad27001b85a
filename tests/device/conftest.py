"""Makes the harness and the crowd of this folder fixtures."""

from tests.device.crowd import roomy  # noqa: F401  (a fixture)
from tests.device.harness import make  # noqa: F401  (a fixture)
