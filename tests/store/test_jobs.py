"""Jobs: owned, listed newest first page by page, moved only along allowed ways."""

import re

import pytest

from marlaas_jax.errors import InvalidRequest, NotFound
from marlaas_jax.store import events, jobs, tenants, usage
from marlaas_jax.store.jobs import JobFilter


@pytest.fixture
def owners(store):
    return [store.write(tenants.create_tenant, name, now=1.0).result(10) for name in ("acme", "other")]


def add(store, tenant, name="job", now=1.0, **options):
    return store.write(jobs.create_job, tenant.id, name=name, config={"name": name}, steps=5, now=now, **options).result(10)


def move(store, job, state, allowed_from, now=9.0, **options):
    options = {"tenant_id": None} | options
    return store.write(jobs.move_job, job.id, state, allowed_from=allowed_from, now=now, **options).result(10)


def test_a_job_is_kept_as_submitted(store, owners):
    job = add(store, owners[0], labels={"team": "blue"}, priority=3, parent="job_y", kind="sweep")
    assert re.fullmatch(r"job_[0-9A-Za-z]{22}", job.id) and job.state == "queued"
    assert store.read(jobs.get_job, job.id, tenant_id=owners[0].id) == job


def test_another_tenants_job_is_as_if_it_did_not_exist(store, owners):
    job, (_, other) = add(store, owners[0]), owners
    ask = [
        lambda job_id: store.read(jobs.get_job, job_id, tenant_id=other.id),
        lambda job_id: move(store, jobs.JobRecord(**vars(job) | {"id": job_id}), "cancelled", jobs.LIVE, tenant_id=other.id),
        lambda job_id: store.write(jobs.delete_job, job_id, tenant_id=other.id).result(10),
    ]
    for question in ask:
        for job_id in (job.id, "job_0000000000000000000000"):
            with pytest.raises(NotFound, match=f"^{job_id}: no such job$"):
                question(job_id)
    assert store.read(jobs.list_jobs, JobFilter(tenant_id=other.id)).jobs == []
    assert store.read(jobs.count_jobs, tenant_id=other.id) == {}
    assert store.read(jobs.get_job, job.id, tenant_id=None) == job


def test_a_job_moves_only_from_where_it_is_allowed(store, owners):
    job = add(store, owners[0])
    running = move(store, job, "running", ["queued"], now=2.0)
    assert (running.started, running.ended, running.updated) == (2.0, None, 2.0)
    move(store, job, "queued", ["running"], now=3.0, reason="the service restarts")
    assert move(store, job, "running", ["queued"], now=4.0).started == 2.0, "the first time counts"
    done = move(store, job, "succeeded", ["running"], now=5.0)
    assert (done.ended, done.reason) == (5.0, "")
    with pytest.raises(InvalidRequest, match="state='succeeded'; it can become cancelled from paused, queued, running"):
        move(store, job, "cancelled", jobs.LIVE)
    assert move(store, job, "queued", ["succeeded"], now=6.0).ended is None, "rolled back to run on"


def test_updates_change_what_is_given(store, owners):
    job = add(store, owners[0])
    store.write(jobs.update_job, job.id, now=7.0, step=4, reason="waits").result(10)
    store.write(jobs.update_job, job.id, now=8.0, priority=-1, config={"a": [1]}).result(10)
    found = store.read(jobs.get_job, job.id, tenant_id=None)
    assert (found.step, found.reason, found.priority, found.config, found.updated) == (4, "waits", -1, {"a": [1]}, 8.0)
    store.write(jobs.update_job, "job_gone", now=9.0, step=1).result(10)


def test_a_deleted_job_takes_its_events_and_leaves_its_usage(store, owners):
    job, other = add(store, owners[0]), add(store, owners[0])
    for each in (job, other):
        store.write(events.add_event, "k", now=1.0, tenant_id=owners[0].id, job_id=each.id).result(10)
    store.write(usage.add_usage, {(owners[0].id, job.id, "trained_tokens"): 5.0}, now=1.0).result(10)
    with pytest.raises(InvalidRequest, match="state='queued'; only a job that is succeeded, failed, cancelled can be deleted"):
        store.write(jobs.delete_job, job.id, tenant_id=owners[0].id).result(10)
    move(store, job, "cancelled", jobs.LIVE)
    store.write(jobs.delete_job, job.id, tenant_id=owners[0].id).result(10)
    with pytest.raises(NotFound):
        store.read(jobs.get_job, job.id, tenant_id=None)
    assert [event.job_id for event in store.read(events.list_events, tenant_id=None)] == [other.id]
    assert [used.amount for used in store.read(usage.list_usage, tenant_id=None)] == [5.0]


def test_pages_hold_every_job_once_newest_first_while_others_arrive(store, owners):
    times = [1.0, 2.0, 2.0, 2.0, 2.5, 1e9 / 3, 7.1]
    made = [add(store, owners[0], now=time) for time in times] + [add(store, owners[1])]
    which, found, cursor = JobFilter(tenant_id=owners[0].id), [], None
    while True:
        page = store.read(jobs.list_jobs, which, limit=2, cursor=cursor)
        found += page.jobs
        add(store, owners[0], now=2e9)
        if (cursor := page.next_cursor) is None:
            break
    assert found == sorted(made[:-1], key=lambda job: (job.created, job.id), reverse=True)
    assert len(store.read(jobs.list_jobs).jobs) == 12


def test_filters(store, owners):
    a = add(store, owners[0], "sweep_1", now=1.0, labels={"team": "blue", "a.b-c": "x"})
    b = add(store, owners[0], "Sweep_2", now=2.0, labels={"team": 'r"ed'})
    c = add(store, owners[1], "sweep%3", now=3.0, labels={"team": "blue"})
    move(store, b, "cancelled", jobs.LIVE)

    def ids(**which):
        return [job.id for job in store.read(jobs.list_jobs, JobFilter(**which)).jobs]

    assert ids() == [c.id, b.id, a.id]
    assert ids(name_prefix="sweep") == [c.id, a.id]
    assert ids(name_prefix="sweep_") == [a.id] and ids(name_prefix="%") == []
    assert ids(labels={"team": "blue"}) == [c.id, a.id]
    assert ids(labels={"team": "blue", "a.b-c": "x"}) == [a.id] and ids(labels={"none": "x"}) == []
    assert ids(labels={"team": 'r"ed'}) == [b.id]
    assert ids(states=("cancelled", "failed")) == [b.id]
    assert ids(tenant_id=owners[1].id, states=("queued",), labels={"team": "blue"}) == [c.id]
    assert [job.id for job in store.read(jobs.live_jobs)] == [a.id, c.id]
    assert store.read(jobs.count_jobs, tenant_id=owners[0].id) == {"queued": 1, "cancelled": 1}
    assert store.read(jobs.count_jobs, tenant_id=None) == {"queued": 2, "cancelled": 1}


def test_a_cursor_that_is_not_ours_is_refused_or_leads_nowhere(store, owners):
    add(store, owners[0])
    for cursor in (
        "",
        "x",
        "=",
        "bm9wZQ",
        "W10",
        "WzEsMl0",
        "WyJ4IiwgMV0",
        "\u00e9",
        "\ud800",
        "W" * 10_000,
        "e30",
        "WzFlOTk5LDFd",
    ):
        try:
            page = store.read(jobs.list_jobs, cursor=cursor)
        except InvalidRequest as error:
            assert "cursor=" in str(error)
        else:
            assert len(page.jobs) <= 1


def test_a_limit_that_is_not_allowed_is_refused(store):
    for limit in (0, -1, 201):
        with pytest.raises(InvalidRequest, match=f"limit={limit}: must be 1 to 200"):
            store.read(jobs.list_jobs, limit=limit)


def test_labels_that_are_not_allowed_are_refused(store, owners):
    for labels in ({"": "x"}, {'a"b': "x"}, {"a": "x" * 257}, {"a": "\0"}, {"a": "\n"}, {"a b": "x"}):
        with pytest.raises(InvalidRequest, match="labels"):
            add(store, owners[0], labels=labels)
        with pytest.raises(InvalidRequest, match="labels"):
            store.read(jobs.list_jobs, JobFilter(labels=labels))
