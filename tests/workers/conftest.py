"""Makes the fixtures of the fake device this folder's."""

from tests.workers.faked import environment, rewards  # noqa: F401  (fixtures)
