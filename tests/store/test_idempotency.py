"""A POST that is repeated is done once, whoever repeats it, whenever, and whatever died meanwhile."""

from concurrent.futures import ThreadPoolExecutor

from marlaas_jax.store import events, idempotency
from marlaas_jax.store.engine import Store
from marlaas_jax.store.idempotency import Conflict, Fresh, InProgress, Replay

DAY_S = 86400.0


def begin(store, tenant="t", key="k", route="POST /v1/jobs", request_hash="h", now=1000.0):
    return store.write(idempotency.begin, tenant, key, route, request_hash, now=now).result(10)


def test_a_finished_request_is_answered_as_before_h07(store):
    for i, response in enumerate([{"id": "job_x", "n": [1, None]}, None, "", []]):
        assert begin(store, key=f"k{i}") == Fresh()
        assert begin(store, key=f"k{i}") == InProgress()
        store.write(idempotency.finish, "t", f"k{i}", status=201, response=response).result(10)
        assert begin(store, key=f"k{i}") == Replay(201, response)


def test_a_key_used_for_another_request_is_a_conflict(store):
    begin(store)
    assert begin(store, request_hash="other") == begin(store, route="POST /v1/keys") == Conflict()
    store.write(idempotency.finish, "t", "k", status=200, response=1).result(10)
    assert begin(store, request_hash="other") == Conflict()
    assert begin(store, tenant="u", request_hash="other") == Fresh(), "keys are the tenant's own"


def test_an_abandoned_key_may_be_tried_again_and_a_finished_one_stays(store):
    begin(store)
    store.write(idempotency.abandon, "t", "k").result(10)
    assert begin(store) == Fresh()
    store.write(idempotency.finish, "t", "k", status=200, response=1).result(10)
    store.write(idempotency.abandon, "t", "k").result(10)
    assert begin(store) == Replay(200, 1)


def test_keys_expire_after_a_day_and_after_a_clock_was_set_back(store):
    begin(store)
    store.write(idempotency.finish, "t", "k", status=200, response=1).result(10)
    assert begin(store, now=1000 + DAY_S) == Replay(200, 1)
    assert begin(store, now=1001 + DAY_S) == Fresh()
    assert begin(store, now=999.0) == Fresh(), "a key from the future would otherwise stay for ever"
    begin(store, key="other", now=500.0)
    assert store.write(idempotency.expire, now=DAY_S + 600).result(10) == 1
    assert begin(store, now=1000.0) == InProgress()


def test_of_many_at_once_one_acts(store, url):
    with Store.open(url) as other_process, ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(begin, [store, other_process][i % 2], key=f"k{i // 16}") for i in range(160)]
        outcomes = [future.result(30) for future in futures]
    for key in range(10):
        assert sorted(str(outcome) for outcome in outcomes[16 * key : 16 * key + 16]) == ["Fresh()", *["InProgress()"] * 15]


def test_after_a_crash_the_keys_of_lost_requests_are_free_and_what_was_done_is_answered(store):
    def act_and_finish(connection):
        events.add_event(connection, "done", now=1.0)
        idempotency.finish(connection, "t", "k", status=201, response="done")

    def act_and_die(connection):
        events.add_event(connection, "done twice", now=1.0)
        idempotency.finish(connection, "t", "lost", status=201, response="done")
        raise KeyError("lost")

    begin(store)
    begin(store, key="lost")
    store.write(act_and_finish).result(10)
    assert isinstance(store.write(act_and_die).exception(10), KeyError)
    assert store.write(idempotency.abandon_all).result(10) == 1
    assert begin(store) == Replay(201, "done") and begin(store, key="lost") == Fresh()
    assert [event.kind for event in store.read(events.list_events, tenant_id=None)] == ["done"]
