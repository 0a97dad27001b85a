"""Makes the small disk a fixture of this folder."""

from tests.disks import small_disk  # noqa: F401  (a fixture)
