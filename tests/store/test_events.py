"""Events: numbered once and for all, read on from any number, trimmed per job and in all."""

from marlaas_jax.store import events


def add(store, kind, **options):
    return store.write(events.add_event, kind, now=1.0, **options).result(10)


def kinds(store, **which):
    return [event.kind for event in store.read(events.list_events, **{"tenant_id": None} | which)]


def test_a_reader_goes_on_behind_the_last_number_it_saw(store):
    assert store.read(events.last_seq) == 0
    first = add(store, "a", tenant_id="t", job_id="j", data={"x": 1})
    add(store, "b", tenant_id="t", job_id="k")
    last = add(store, "c", tenant_id="u", job_id="j")
    assert store.read(events.list_events, tenant_id="t", limit=1) == [first]
    assert kinds(store) == ["a", "b", "c"] and kinds(store, limit=2) == ["a", "b"]
    assert kinds(store, after=first.seq) == ["b", "c"]
    assert kinds(store, tenant_id="t") == ["a", "b"] and kinds(store, job_id="j") == ["a", "c"]
    assert kinds(store, tenant_id="t", job_id="j") == ["a"]
    assert kinds(store, after=last.seq) == kinds(store, after=10**30) == []
    assert store.read(events.last_seq) == last.seq


def test_trimming_keeps_the_newest_of_each_job_and_in_all(store):
    for i in range(6):
        add(store, f"a{i}", job_id="a")
        add(store, f"b{i}", job_id="b")
        add(store, f"none{i}")
    add(store, "c", job_id="c")
    assert store.write(events.trim_events, keep_per_job=2, keep_total=100).result(10) == 8
    assert kinds(store, job_id="a") == ["a4", "a5"] and kinds(store, job_id="b") == ["b4", "b5"]
    assert len(kinds(store, job_id="")) == 6, "what concerns no job counts only in all"
    assert store.write(events.trim_events, keep_per_job=2, keep_total=3).result(10) == 8
    assert kinds(store) == ["b5", "none5", "c"]
    assert store.write(events.trim_events, keep_per_job=2, keep_total=3).result(10) == 0


def test_the_number_of_a_trimmed_event_is_not_used_again(store):
    last = add(store, "a")
    assert store.write(events.trim_events, keep_per_job=0, keep_total=0).result(10) == 1
    assert kinds(store) == []
    assert add(store, "b").seq > last.seq
