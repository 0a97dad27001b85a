"""Writes are durable and alone in their failure; reads see committed states; both from many threads."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from marlaas_jax.errors import InternalError, InvalidConfig, InvalidRequest, MarlaasError, NotFound
from marlaas_jax.store import events, jobs, schema, sweeps, tenants
from marlaas_jax.store.engine import Store


def count_events(connection):
    return connection.execute(sa.select(sa.func.count()).select_from(schema.events)).scalar()


def held_back(store):
    """Keeps the writer busy until the event is set, so that what is written meanwhile forms one group."""
    started, go_on = threading.Event(), threading.Event()

    def wait(_):
        started.set()
        go_on.wait(10)

    store.write(wait)
    started.wait(10)
    return go_on


def test_what_was_written_is_there_when_opened_again(url):
    with Store.open(url) as store:
        event = store.write(events.add_event, "started", {"n": 1}, now=5.0).result()
    with Store.open(url) as store:
        assert store.read(events.list_events, tenant_id=None) == [event]


def test_each_write_of_a_group_fails_alone(store):
    def fail(connection):
        events.add_event(connection, "half done", now=1.0)
        raise NotFound("nothing here")

    go_on = held_back(store)
    good = [store.write(events.add_event, "good", now=1.0)]
    bad = [store.write(fail), store.write(lambda c: c.execute(schema.schema_version.insert().values(version=1)))]
    good.append(store.write(events.add_event, "good", now=2.0))
    assert store.num_waiting_writes == 4
    go_on.set()
    assert [future.result(10).kind for future in good] == ["good", "good"]
    with pytest.raises(NotFound, match="nothing here"):
        bad[0].result(10)
    with pytest.raises(InternalError, match=r"(?i)unique"):
        bad[1].result(10)
    assert [event.kind for event in store.read(events.list_events, tenant_id=None)] == ["good", "good"]


def test_a_group_whose_transaction_the_database_ended_runs_one_by_one(store):
    def end_transaction(connection):
        connection.exec_driver_sql("ROLLBACK")
        connection.exec_driver_sql("SELECT * FROM nowhere")

    go_on = held_back(store)
    first = store.write(events.add_event, "kept", now=1.0)
    bad = store.write(end_transaction)
    last = store.write(events.add_event, "kept", now=1.0)
    go_on.set()
    with pytest.raises(InternalError, match="nowhere"):
        bad.result(10)
    assert first.result(10).seq < last.result(10).seq
    assert store.read(count_events) == 2


def test_a_cancelled_write_that_no_transaction_took_up_never_happens(store):
    go_on = held_back(store)
    future = store.write(events.add_event, "unwanted", now=1.0)
    assert future.cancel()
    go_on.set()
    store.write(events.add_event, "wanted", now=1.0).result(10)
    assert [event.kind for event in store.read(events.list_events, tenant_id=None)] == ["wanted"]


def test_a_read_cannot_write(store):
    with pytest.raises(MarlaasError, match=r"(?i)read.?only"):
        store.read(events.add_event, "sneaked in", now=1.0)


def test_a_read_sees_one_state_and_the_next_the_newest(store):
    def twice(connection):
        before = count_events(connection)
        store.write(events.add_event, "between", now=1.0).result(10)
        return before, count_events(connection)

    assert store.read(twice) == (0, 0)
    assert store.read(count_events) == 1


def test_twenty_threads_read_while_others_write(store):
    """Every transaction adds two events, so a reader that saw half of one would count an odd number."""
    stop = threading.Event()

    def add_pair(connection):
        events.add_event(connection, "a", now=1.0)
        events.add_event(connection, "b", now=1.0)

    def read():
        last = 0
        while not stop.is_set():
            count = store.read(count_events)
            assert count % 2 == 0 and count >= last
            last = count
        return last

    with ThreadPoolExecutor(20) as pool:
        readers = [pool.submit(read) for _ in range(20)]
        try:
            for _ in range(20):
                for future in [store.write(add_pair) for _ in range(10)]:
                    future.result(20)
        finally:
            stop.set()
        assert all(reader.result(20) <= 400 for reader in readers)
    assert store.read(count_events) == 400


def test_async_forms(store):
    async def main():
        added = await asyncio.gather(*(store.awrite(events.add_event, "k", {"i": i}, now=1.0) for i in range(50)))
        assert [event.seq for event in added] == sorted(event.seq for event in added)
        assert await store.aread(count_events) == 50
        with pytest.raises(NotFound, match="job_x: no such job"):
            await store.aread(jobs.get_job, "job_x", tenant_id=None)

    asyncio.run(main())


def test_close_finishes_what_was_submitted(url):
    store = Store.open(url)
    futures = [store.write(events.add_event, "k", now=1.0) for _ in range(500)]
    store.close()
    assert len({future.result(0).seq for future in futures}) == 500
    with pytest.raises(InternalError, match="closed"):
        store.write(events.add_event, "late", now=1.0)
    with pytest.raises(InternalError, match="closed"):
        store.read(count_events)
    store.close()


def test_two_processes_worth_of_stores_share_a_database(url):
    with Store.open(url) as one, Store.open(url) as other:
        futures = [store.write(events.add_event, "k", now=1.0) for _ in range(100) for store in (one, other)]
        assert len({future.result(20).seq for future in futures}) == 200


def test_hostile_values_are_stored_or_refused_in_a_sentence(store):
    tenant = store.write(tenants.create_tenant, "acme", now=1.0).result(10)
    event = store.write(events.add_event, "k", {"nan": float("nan"), "nul": "\0", "half": "\ud800"}, now=1.0).result(10)
    (read,) = store.read(events.list_events, tenant_id=None, job_id="")
    assert read.seq == event.seq and read.data == {"nan": None, "nul": "\0", "half": "\ud800"}
    job = store.write(jobs.create_job, tenant.id, name="n", config={}, steps=1, now=1.0).result(10)
    store.write(jobs.update_job, job.id, now=2.0, reason="lost \0 \ud800").result(10)
    assert store.read(jobs.get_job, job.id, tenant_id=tenant.id).reason == "lost \ufffd ?"
    for job_id in ("\0", "\ud800", "x" * 100_000, "'; DROP TABLE jobs; --"):
        with pytest.raises(NotFound):
            store.read(jobs.get_job, job_id, tenant_id=tenant.id)
    with pytest.raises(InvalidRequest, match="cannot be stored"):
        store.write(jobs.create_job, tenant.id, name="n", config={}, steps=10**30, now=1.0).result(10)


def test_tables_that_came_later_are_made_in_an_older_database(url):
    with Store.open(url) as store:
        tenant = store.write(tenants.create_tenant, "ann", now=1.0).result(10)
        for table in (schema.trials, schema.sweeps):
            store.write(lambda c, table=table: table.drop(c)).result(10)
    with Store.open(url) as store:
        assert store.read(sweeps.list_sweeps, tenant_id=None) == []
        assert store.read(tenants.list_tenants) == [tenant]


def test_a_newer_schema_is_refused(url):
    with Store.open(url) as store:
        store.write(lambda c: c.execute(schema.schema_version.update().values(version=schema.VERSION + 1)) and None).result(10)
    with pytest.raises(InvalidConfig, match=rf"version {schema.VERSION + 1}; this marlaas_jax reads version {schema.VERSION}"):
        Store.open(url)


def test_tables_of_something_else_are_refused(url):
    with Store.open(url) as store:
        store.write(lambda c: schema.schema_version.drop(c)).result(10)
    with pytest.raises(InvalidConfig, match="of something else"):
        Store.open(url)


@pytest.mark.parametrize(
    "url", ["", "store.db", "sqlite://", "sqlite:///:memory:", "mysql://u:geheim@h/d", "sqlite:///file:x?mode=ro&uri=true"]
)
def test_a_url_that_cannot_be_used_is_named_without_its_password(url):
    with pytest.raises(InvalidConfig, match="allowed: sqlite:///PATH") as caught:
        Store.open(url)
    assert "geheim" not in str(caught.value)
