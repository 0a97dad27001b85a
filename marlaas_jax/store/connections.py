"""Opens a database by URL: one connection that writes, a few that only read."""

import contextlib
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc

from marlaas_jax.errors import CorruptFile, InvalidConfig, StorageError
from marlaas_jax.store import backup, schema
from marlaas_jax.store.failures import translated

NUM_READERS = 4
BUSY_S = 10.0  # how long another process may hold the file, or a reader wait for a connection
STATEMENT_S = 30.0  # the longest statement that a Postgres server works on
ALLOWED = "allowed: sqlite:///PATH, postgresql://USER:PASSWORD@HOST/NAME"


@dataclass(frozen=True)
class Database:
    """An open database with its schema."""

    place: str  # the file, or the server's URL without its password
    writing: sa.Engine  # one connection
    reading: sa.Engine  # NUM_READERS connections; each transaction sees one state of the database

    def close(self) -> None:
        """Closes all connections; none may be in use."""
        self.reading.dispose()
        self.writing.dispose()


def connect(url: str) -> Database:
    """Returns the database, its tables made if it is empty. Raises InvalidConfig, CorruptFile or StorageError."""
    try:
        parsed = sa.make_url(url)
    except (exc.ArgumentError, ValueError):
        raise InvalidConfig(f"db={url.partition(':')[0]!r}: is no URL of a database; {ALLOWED}") from None
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        database = _sqlite(parsed)
    elif parsed.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        database = _postgres(parsed.set(drivername="postgresql+psycopg"))
    else:
        raise InvalidConfig(f"db={parsed.render_as_string()!r}: cannot be used; {ALLOWED}")
    try:
        with translated(database.place), database.writing.begin() as connection:
            schema.prepare(connection, database.place)
    except Exception:
        database.close()
        raise
    return database


def _engine(url: sa.URL, size: int, **options: Any) -> sa.Engine:
    return sa.create_engine(url, pool_size=size, max_overflow=0, pool_timeout=BUSY_S, json_serializer=schema.to_json, **options)


def _sqlite(url: sa.URL) -> Database:
    if not url.database or url.database.startswith((":memory:", "file:")) or url.query:
        raise InvalidConfig(f"db={url.render_as_string()!r}: SQLite needs a plain path; {ALLOWED}")
    path = Path(url.database).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from None
    _check_file(path)
    options = {"connect_args": {"check_same_thread": False, "timeout": BUSY_S}}
    database = Database(
        place=str(path),
        writing=_engine(url.set(database=str(path)), 1, **options),
        reading=_engine(url.set(database=str(path)), NUM_READERS, **options),
    )
    _listen(database.writing, "BEGIN IMMEDIATE", "synchronous=FULL", "foreign_keys=ON")
    _listen(database.reading, "BEGIN", "query_only=ON")
    return database


def _check_file(path: Path) -> None:
    """Sets the journal mode, which stays with the file, and reads every page once."""
    with translated(str(path)), contextlib.closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if mode != "wal":
        raise StorageError(f"{path}: its file system cannot share memory (SQLite's WAL mode); name a local disk")
    if verdict != "ok":
        raise CorruptFile(f"{path}: is damaged ({' '.join(verdict.split())}); {backup.remedy(str(path))}")
    backup.make(path)


def _listen(engine: sa.Engine, begin: str, *pragmas: str) -> None:
    """Makes transactions begin where SQLAlchemy says so; sqlite3 alone would begin late and never for a SELECT."""

    def on_connect(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    def on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)


def _postgres(url: sa.URL) -> Database:
    place = url.set(drivername="postgresql").render_as_string(hide_password=True)
    options: dict[str, Any] = {
        "pool_pre_ping": True,  # a server that was restarted costs one failed write, not all that follow
        "connect_args": {
            "connect_timeout": int(BUSY_S),
            "tcp_user_timeout": int(STATEMENT_S * 1000),
            "options": f"{url.query.get('options', '')} -c statement_timeout={STATEMENT_S:.0f}s",
        },
    }
    try:
        writing = _engine(url, 1, **options)
        reading = _engine(url, NUM_READERS, isolation_level="REPEATABLE READ", **options)
    except ModuleNotFoundError:
        raise InvalidConfig(f"db={place}: needs psycopg; pip install 'marlaas-jax[postgres]'") from None
    return Database(place, writing, reading.execution_options(postgresql_readonly=True))
