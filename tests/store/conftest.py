"""Makes the databases fixtures of this folder."""

from tests.store.databases import postgres_server, store, url  # noqa: F401  (fixtures)
