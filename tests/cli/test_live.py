"""What a person sees of a run, at the widths of real terminals."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from marlaas_jax.cli import live, status_table
from marlaas_jax.config import JobConfig
from marlaas_jax.workers.controller_status import JobResult, JobStatus, RunResult, RunStatus

WAITS = "train: batch 3 (and 1 more), since 46.3 s (limit 900 s); 7 more wait"


def job(name, **changes) -> JobStatus:
    figures = {"reward": 0.61, "reward_first": 0.25, "reward_last3": 0.6, "eval_before": 0.3, "eval_after": None}
    more = {"live_share": 0.88, "staleness": 0.5, "tokens_per_s": 143.2, "tokens": 9000, "queues": {}, "device_share": 0.31}
    texts = {"state": "running", "step": 7, "steps": 40, "episodes": {"done": 512, "running": 64}, "waits_for": WAITS}
    return JobStatus(**({"name": name} | figures | more | texts | changes))


def jobs(count) -> list[JobStatus]:
    """Returns jobs with the long names of a sweep, that differ at their ends."""
    return [job(f"sweep-learning-rate-3e-4-rank-16-seed-{i:02d}", step=i) for i in range(count)]


def lines(renderable, width, height=100) -> list[str]:
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, 100, 120, 160])
@pytest.mark.parametrize("count", [1, 4, 32])
def test_name_state_step_and_reward_are_there_at_every_width(width, count):
    shown = lines(status_table.StatusTable(jobs(count)), width)
    assert len(shown) == count + 1 and all(len(line) <= width for line in shown)
    assert shown[0].split()[:4] == ["job", "state", "step", "reward"]
    for i, line in enumerate(shown[1:]):
        name, state, step, reward = line.split()[:4]
        assert name.startswith("sweep-lear") and name.endswith(f"seed-{i:02d}"), line
        assert (state, step, reward) == ("running", f"{i}/40", "0.61"), line


def test_the_most_important_figures_come_first_and_the_rest_waits_for_room():
    heads = {width: lines(status_table.StatusTable([job("lr-1e-4")]), width)[0].split() for width in (60, 80, 100, 120)}
    assert heads[60] == ["job", "state", "step", "reward", "waits", "for"]
    assert heads[80] == ["job", "state", "step", "reward", "first", "tok/s", "waits", "for"]
    figures = ["job", "state", "step", "reward", *(heading for heading, _, _ in status_table.OPTIONAL)]
    for head in heads.values():
        assert head[:-2] == figures[: len(head) - 2]
    assert heads[120] == [*figures, "waits", "for"]
    for width in (80, 100, 120):
        assert lines(status_table.StatusTable([job("lr-1e-4")]), width)[1].rstrip().endswith("training batch 3, 46 s")


@pytest.mark.parametrize("width", [80, 120])
def test_columns_stay_where_they_are(width):
    def places(entry):
        head = lines(status_table.StatusTable([entry]), width)[0]
        return [head.index(word) for word in ("state", "step", "reward", "first", "waits for")]

    early = job("a", state="starting", step=0, steps=1000, reward=None, reward_first=None, tokens_per_s=0.0, episodes={})
    late = dataclasses.replace(early, state="succeeded", step=1000, reward=-12.5, tokens_per_s=12345.6, waits_for="")
    assert places(early) == places(late)


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (WAITS, "training batch 3, 46 s"),
        ("generate: episode a/1/0/2 attempt 0 turn 1, since 2.0 s (limit 600 s); 63 more wait", "sampling, 2 s"),
        ("generate: episode a/1/0/2 attempt 0 turn 1, by the device, since 2.0 s (limit 600 s)", "sampling, 2 s"),
        ("env worker: a ready worker of pool env-x, by the supervisor, since 3.0 s (no limit)", "environment worker, 3 s"),
        (
            "start: its device (3 of 20 programs compiled), by the device, since 9.6 s (limit 3600 s)",
            "start: its device (3 of 20 programs compiled), 10 s",
        ),
        ("something else", "something else"),
    ],
)
def test_what_a_job_waits_for_is_short(text, short):
    assert status_table.waits_for(text) == short


def test_a_low_terminal_shows_the_jobs_at_work():
    over = [job(f"over-{i}", state="succeeded") for i in range(20)]
    shown = lines(status_table.StatusTable([*over, job("late")], num_rows=5), 80)
    assert len(shown) == 6 and "late" in shown[1] and shown[-1].startswith("17 more")


def test_the_live_view_redraws_and_leaves_the_last_table():
    console = Console(width=80, height=24, record=True, file=io.StringIO(), force_terminal=True)
    view = live.LiveView(console)
    view.status(RunStatus(12.0, "running", tuple(jobs(32)), {"learner": 0.6}, {}, (4, 4), 0, {}, {}, 0.0))
    view.event({"kind": "warning", "job": "a", "text": "a disk is slow"})
    view.close()
    text = console.export_text()
    assert text.count("a: a disk is slow") == 1 and "12 s | running | device learner 60%" in text
    assert "11 more" in text or "12 more" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_summary_fits(width):
    figures = {"steps": 40, "steps_asked": 40, "reward_first": 0.2, "reward_last3": 0.9, "eval_before": 0.3, "eval_after": 0.95}
    rest = {"tokens": 123456, "restarts": 0, "incarnations": 1, "episodes": {}, "elapsed_s": 9.0, "adapter": "a"}
    name = "sweep-learning-rate-3e-4-rank-16-seed-07"
    shown = lines(live.summary(RunResult((JobResult(name, "succeeded", "", "", **figures, **rest),), 9.0), width), width)
    assert len(shown) == 2 and len(shown[1]) <= width
    assert shown[1].split()[1:7] == ["succeeded", "40/40", "0.20", "0.90", "+0.70", "0.30"], shown
    assert ("123456" in shown[1]) == (width == 120)


def test_an_interrupted_run_says_how_far_it_came(tmp_path):
    config = JobConfig(name="shorter", env="tiny:upper", steps=4)
    run_dir = tmp_path / "k 2"
    assert live.stopped_sentence(live.stopped(run_dir, [config])) == "stopped before the jobs started"
    folder = run_dir / "jobs" / "shorter"
    folder.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("")
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2)))
    sentence = live.stopped_sentence(live.stopped(run_dir, [config]))
    assert sentence == f"stopped; shorter at step 2 of 4; go on with: marlaas run --dir '{run_dir}' --resume"
