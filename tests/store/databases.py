"""Databases for the tests: SQLite always, Postgres where a server and psycopg are installed."""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from marlaas_jax.store import ids
from marlaas_jax.store.engine import Store


def _server_binaries() -> Path | None:
    """Returns the folder of a Postgres server's programs: Debian keeps them out of PATH."""
    on_path = shutil.which("postgres")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    folders = [*debian, *([Path(on_path).resolve().parent] if on_path else [])]
    return next((folder for folder in reversed(folders) if (folder / "initdb").exists()), None)


BINARIES = _server_binaries() if importlib.util.find_spec("psycopg") else None


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[sa.URL]:
    """A private server on a Unix socket, run by a user without privileges, since it refuses to be root."""
    if BINARIES is None:
        pytest.skip("needs a Postgres server (Debian: postgresql) and psycopg (pip install 'marlaas-jax[postgres]')")
    folder = Path(tempfile.mkdtemp(prefix="marlaas-pg-"))  # pytest's own folders are closed to other users
    user = {}
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    data = folder / "data"
    initdb = [BINARIES / "initdb", "-D", data, "-U", "marlaas", "--auth=trust", "-E", "UTF8", "--locale=C", "--no-sync"]
    subprocess.run(initdb, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=60, **user)
    with (folder / "log").open("w") as log:
        command = [BINARIES / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, **user)
    try:
        deadline = time.monotonic() + 30
        ready = [BINARIES / "pg_isready", "-q", "-h", folder]
        while subprocess.run(ready, timeout=10, check=False).returncode != 0:
            assert time.monotonic() < deadline and server.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        yield sa.URL.create("postgresql+psycopg", "marlaas", database="postgres", query={"host": str(folder)})
    finally:
        server.send_signal(signal.SIGQUIT)  # at once: nothing of it is kept
        server.wait(timeout=30)
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgres"] if BINARIES else ["sqlite"])  # one test says why it is skipped; that does
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    server: sa.URL = request.getfixturevalue("postgres_server")
    name = ids.new_id("test_").lower()
    engine = sa.create_engine(server)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {name}")
    engine.dispose()
    return server.update_query_dict({"options": f"-c search_path={name}"}).render_as_string(hide_password=False)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """An open store without tenants."""
    with Store.open(url) as opened:
        yield opened
