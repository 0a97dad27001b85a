"""A controller whose jobs are added, paused, resumed and cancelled while it serves; real workers, a fake device."""

import pytest

from marlaas_jax.workers.controller_files import read_lines
from tests.workers.faked import serve, steps_of, tickets_of

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_jobs_are_added_while_others_run_and_their_workers_come_and_go(tmp_path, rewards):
    async def story(served):
        first = served.add("first", f"{rewards}:good", steps=4)
        await served.until(lambda: first.step >= 1)
        second = served.add("second", f"{rewards}:good", steps=2)
        broken = served.add("broken", f"{rewards}:nothing_of_that_name")
        await served.until(lambda: first.is_over and second.is_over and broken.is_over)
        assert (first.state, second.state, broken.state) == ("succeeded", "succeeded", "failed")
        assert broken.kind == "InvalidConfig" and "nothing_of_that_name" in broken.reason
        await served.until(lambda: set(served.controller.orchestrator.pools) == set())
        served.controller.forget("second")
        again = served.add("again", f"{rewards}:good", steps=1)  # after every worker but the device was retired
        await served.until(lambda: again.is_over)
        assert again.state == "succeeded"

    serve(tmp_path / "run", story)


def test_a_paused_job_goes_on_where_it_stopped_and_its_neighbour_notices_nothing(tmp_path, rewards):
    async def story(served):
        paused = served.add("paused", f"{rewards}:good", steps=30)
        other = served.add("other", f"{rewards}:good", steps=30)
        await served.until(lambda: paused.step >= 3)
        served.controller.pause("paused")
        served.controller.pause("paused")
        await served.until(lambda: paused.state == "paused")
        step = paused.step
        await served.until(lambda: other.is_over)
        assert paused.step == step < 30
        served.controller.unpause("paused")
        await served.until(lambda: paused.is_over)
        assert (paused.state, other.state) == ("succeeded", "succeeded")

    serve(tmp_path / "run", story)
    for name in ("paused", "other"):
        assert steps_of(tmp_path / "run", name) == list(range(1, 31))
        assert tickets_of(tmp_path / "run", name) == list(range(60))


@pytest.mark.slow
def test_a_cancelled_job_ends_at_once_and_keeps_its_records(tmp_path, rewards):
    async def story(served):
        cancelled = served.add("cancelled", f"{rewards}:good", steps=1000)
        before_it_starts = served.add("early", f"{rewards}:good", steps=1000)
        served.controller.cancel("early", "not wanted")
        await served.until(lambda: cancelled.step >= 2)
        served.controller.cancel("cancelled", "seen enough")
        assert cancelled.is_over and before_it_starts.is_over
        other = served.add("other", f"{rewards}:good", steps=2)
        await served.until(lambda: other.is_over)

    serve(tmp_path / "run", story)
    assert len(steps_of(tmp_path / "run", "cancelled")) >= 2
    kinds = [event["kind"] for event in read_lines(tmp_path / "run" / "events.jsonl")]
    assert kinds.count("job_cancelled") == 2 and "job_failed" not in kinds
