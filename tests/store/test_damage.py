"""What dies, fills up or rots: each ends as stated, and what was acknowledged is there."""

import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from marlaas_jax.errors import CorruptFile, MarlaasError, StorageError
from marlaas_jax.store import events, schema
from marlaas_jax.store.engine import Store

WRITES_UNTIL_KILLED = """
import sys, threading
from marlaas_jax.store import events
from marlaas_jax.store.engine import Store

def add_pair(connection):
    first = events.add_event(connection, "first", now=1.0)
    return events.add_event(connection, "second", {"first": first.seq}, now=1.0).seq

def write():
    while True:
        seq = store.write(add_pair).result()
        with lock:
            print(seq, flush=True)

store, lock = Store.open(sys.argv[1]), threading.Lock()
for _ in range(8):
    threading.Thread(target=write).start()
"""


@pytest.mark.multiprocess
def test_what_was_acknowledged_survives_kill_9(url):
    with Store.open(url):
        pass
    for seed in range(2):
        process = subprocess.Popen([sys.executable, "-c", WRITES_UNTIL_KILLED, url], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(random.Random(seed).randint(20, 200))]
        os.kill(process.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in process.stdout.read().split("\n")[:-1]]
        process.wait(10)
        process.stdout.close()
        with Store.open(url) as store:
            found = read_all(store)
        assert set(acknowledged) <= {event.seq for event in found}
        firsts = {event.seq for event in found if event.kind == "first"}
        assert firsts == {event.data["first"] for event in found if event.kind == "second"}, "no transaction was halved"


def read_all(store: Store) -> list[events.EventRecord]:
    found: list[events.EventRecord] = []
    while page := store.read(events.list_events, tenant_id=None, after=found[-1].seq if found else 0):
        found += page
    return found


def filled(path: Path, num_events: int) -> None:
    with Store.open(f"sqlite:///{path}") as store:
        for future in [store.write(events.add_event, "k", {"text": "x" * 200}, now=1.0) for _ in range(num_events)]:
            future.result(20)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def test_a_file_that_is_no_database_is_named(tmp_path):
    path = tmp_path / "store.db"
    path.write_bytes(b"# not a database\n" * 1000)
    with pytest.raises(CorruptFile, match=rf"{path}: is damaged \(file is not a database\)"):
        Store.open(f"sqlite:///{path}")


def test_a_damaged_page_is_found_when_the_store_opens(tmp_path):
    path = tmp_path / "store.db"
    filled(path, 500)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(random.Random(0).randbytes(4096))
    with pytest.raises(CorruptFile, match=f"{path}: is damaged"):
        Store.open(f"sqlite:///{path}")


def test_a_page_damaged_while_the_store_is_open_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "store.db"
    filled(path, 500)
    with Store.open(f"sqlite:///{path}") as store:
        with path.open("r+b") as file:
            for page in range(8, path.stat().st_size // 4096):
                file.seek(page * 4096)
                file.write(b"\xff" * 4096)
        with pytest.raises(CorruptFile, match=f"{path}: is damaged"):
            store.read(events.list_events, tenant_id=None)


def test_flipped_bytes_give_an_answer_or_one_of_our_errors(tmp_path):
    """SQLite has no checksums: a changed value may be read as such; nothing else may get out."""
    path = tmp_path / "store.db"
    filled(path, 200)
    whole = path.read_bytes()
    for seed in range(30):
        dice = random.Random(seed)
        damaged = bytearray(whole)
        for _ in range(20):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        path.write_bytes(damaged)
        try:
            with Store.open(f"sqlite:///{path}") as store:
                store.read(events.list_events, tenant_id=None)
        except MarlaasError as error:
            assert str(path) in str(error)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MB that is gone after the test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_an_error_that_names_the_file_and_passes(small_disk):
    path = small_disk / "store.db"
    with Store.open(f"sqlite:///{path}") as store:
        kept = store.write(events.add_event, "before", now=1.0).result(10)
        ballast = small_disk / "ballast"
        with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        futures = [store.write(events.add_event, "full", {"text": "x" * 20_000}, now=1.0) for _ in range(20)]
        failed = [future for future in futures if future.exception(20)]
        assert failed
        for future in failed:
            with pytest.raises(StorageError, match=rf"{path}: cannot be used \(database or disk is full\)"):
                future.result(0)
        assert store.read(events.list_events, tenant_id=None)[0] == kept
        ballast.unlink()
        store.write(events.add_event, "after", now=1.0).result(10)
        found = store.read(events.list_events, tenant_id=None)
        assert [event.kind for event in found] == ["before", *["full"] * (20 - len(failed)), "after"]


def test_a_full_database_fails_each_write_of_a_group(tmp_path):
    """The same without a small disk: SQLite's own limit of pages."""
    path = tmp_path / "store.db"
    with Store.open(f"sqlite:///{path}") as store:

        def limit(connection: sa.Connection) -> None:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")

        store.write(limit).result(10)
        futures = [store.write(events.add_event, "full", {"text": "x" * 50_000}, now=1.0) for _ in range(10)]
        for future in futures:
            with pytest.raises(StorageError, match=f"{path}: cannot be used"):
                future.result(10)
        store.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count=100000").scalar()).result(10)
        store.write(events.add_event, "after", now=1.0).result(10)
        assert [event.kind for event in store.read(events.list_events, tenant_id=None)] == ["after"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="cannot be written"):
        Store.open(f"sqlite:///{tmp_path}/store.db")


def test_a_path_through_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/store.db: cannot be written"):
        Store.open(f"sqlite:///{tmp_path}/file/store.db")


def test_a_database_that_another_holds_is_an_error_after_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr("marlaas_jax.store.connections.BUSY_S", 0.1)
    path = tmp_path / "store.db"
    with Store.open(f"sqlite:///{path}") as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match=f"{path}: cannot be used .database is locked"):
            store.write(events.add_event, "k", now=1.0).result(10)
        other.execute("ROLLBACK")
        other.close()
        store.write(events.add_event, "k", now=1.0).result(10)


def test_the_file_is_closed_to_other_users(tmp_path):
    with Store.open(f"sqlite:///{tmp_path}/store.db") as store:
        store.write(events.add_event, "k", now=1.0).result(10)
        assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}


def test_memory_and_file_stay_flat_while_events_are_trimmed(tmp_path):
    path = tmp_path / "store.db"
    sizes, peaks = [], []
    with Store.open(f"sqlite:///{path}") as store:
        for _ in range(8):
            for future in [store.write(events.add_event, "k", {"text": "x" * 300}, now=1.0, job_id="j") for _ in range(300)]:
                future.result(20)
            store.write(events.trim_events, keep_per_job=200, keep_total=1000).result(20)
            sizes.append(store.read(lambda c: c.exec_driver_sql("PRAGMA page_count").scalar()))
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # KiB
        assert store.read(lambda c: c.execute(sa.select(sa.func.count()).select_from(schema.events)).scalar()) == 200
    assert max(sizes[2:]) == sizes[2]
    assert peaks[-1] - peaks[2] < 4096


@pytest.mark.multiprocess
def test_a_lost_connection_fails_what_is_under_way_and_no_more(postgres_server):
    def cut(connection: sa.Connection) -> None:
        connection.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    def cut_all_others(connection: sa.Connection) -> None:
        others = "FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = 'marlaas'"
        connection.execute(sa.text(f"SELECT pg_terminate_backend(pid) {others}"))

    with Store.open(postgres_server.render_as_string(hide_password=False)) as store:
        store.write(events.add_event, "before", now=1.0).result(10)
        assert store.read(events.last_seq) > 0
        started = threading.Event()
        store.write(lambda _: started.wait(10) and None)
        futures = [store.write(events.add_event, f"beside {i}", now=1.0) for i in range(2)]
        futures.insert(1, store.write(cut))
        started.set()
        with pytest.raises(StorageError, match=r"postgresql://marlaas@/postgres.*: cannot be used"):
            futures[1].result(10)
        assert [futures[i].result(10).kind for i in (0, 2)] == ["beside 0", "beside 1"]
        store.write(cut_all_others).result(10)
        store.write(events.add_event, "after", now=1.0).result(10)
        found = [event.kind for event in store.read(events.list_events, tenant_id=None)]
        assert found == ["before", "beside 0", "beside 1", "after"]
