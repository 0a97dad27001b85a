"""Snapshots that are kept for an evaluation: asked for by number while newer ones are published and used."""

from tests.engine.test_sampler import ask, check, drain, make, snapshot


def test_a_held_snapshot_answers_by_number_until_it_is_released_as_often_as_held(unrolled):
    sampler = make(unrolled)
    sampler.publish(snapshot(unrolled, "a", 1, 1))
    sampler.hold("a", 0, 1)
    sampler.hold("a", 0, 1)
    sampler.publish(snapshot(unrolled, "a", 2, 2))
    sampler.submit(ask("old", "a", version=1))
    sampler.submit(ask("new", "a"))
    answers = drain(sampler)
    check(unrolled, answers["old", 0], 1)
    check(unrolled, answers["new", 0], 2)
    sampler.release("a", 0, 1)
    sampler.submit(ask("still", "a", version=1))
    assert drain(sampler)["still", 0].version == 1
    sampler.release("a", 0, 1)
    sampler.release("a", 0, 1)  # once too often: ignored
    sampler.submit(ask("gone", "a", version=1))
    assert "version=1: not kept" in drain(sampler)["gone", 0].error
    assert sampler.counters()["engine/kept_snapshots"] == 1


def test_a_job_that_goes_takes_its_holds_along(unrolled):
    sampler = make(unrolled)
    for version in (1, 2, 3):
        sampler.publish(snapshot(unrolled, "a", version, version))
        sampler.hold("a", 0, version)
    assert sampler.counters()["engine/kept_snapshots"] == 3
    sampler.forget("a")
    assert sampler.counters()["engine/kept_snapshots"] == 0 and sampler.counters()["engine/resident_snapshots"] == 0
    sampler.publish(snapshot(unrolled, "a", 1, 1))
    sampler.release("a", 0, 1)
    sampler.submit(ask("x", "a"))
    assert drain(sampler)["x", 0].version == 1


def test_versions_asked_for_by_number_leave_slots_to_the_newest(unrolled):
    """Many old versions are asked for and rows of them run; those that follow the newest version start all the same."""
    sampler = make(unrolled)
    limit = sampler._max_by_number
    assert 1 <= limit < sampler._residency.max_pinned
    for version in range(1, 5):
        sampler.publish(snapshot(unrolled, "a", version, version))
        sampler.hold("a", 0, version)
    for version in range(1, 5):
        sampler.submit(ask(f"old{version}", "a", version=version, max_tokens=20))
    sampler.publish(snapshot(unrolled, "b", 1, 1))
    sampler.submit(ask("b", "b", max_tokens=20))
    most, answers = 0, {}
    while sampler.has_work():
        most = max(most, len(sampler._by_number))
        answers |= {done.request_id: done for done in sampler.step()}
    assert most == limit and len(answers) == 5 and not any(answer.error for answer in answers.values())
    assert [answers[f"old{version}"].version for version in range(1, 5)] == [1, 2, 3, 4]
