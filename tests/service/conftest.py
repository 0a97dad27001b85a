"""Makes the fixtures of the fake device, of the databases and of the small disk this folder's."""

from tests.disks import small_disk  # noqa: F401  (a fixture)
from tests.store.databases import postgres_server, url  # noqa: F401  (fixtures)
from tests.workers.faked import environment  # noqa: F401  (a fixture)
