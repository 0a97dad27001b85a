"""The checks of a disturbed day can fail: each is shown what it is there to find."""

import json
from collections import Counter

import pytest

from marlaas_jax.config import JobConfig, validate
from tests.chaos import checks
from tests.chaos.disturbances import FROZEN, KILLED, Disturbance, Done, draw
from tests.e2e import history

GROUPS = 2
CONFIG = validate(JobConfig, {"name": "a", "env": "x", "steps": 3, "rollout": {"groups_per_batch": GROUPS, "max_staleness": 1}})


def rows():
    return [
        {"step": step, "version": step, "tickets": [[2 * step - 2, 0], [2 * step - 1, 1]],
         "rollout/num_empty_places": 0.0, "rollout/staleness_max": 1.0}
        for step in (1, 2, 3)
    ]  # fmt: skip


def faults(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return history.faults(folder, CONFIG.model_dump(mode="json"), is_whole=False)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda lines: lines.insert(1, lines[0]), "doubled"),
        (lambda lines: lines.pop(1), "skipped"),
        (lambda lines: lines[2].update(version=4), "optimizer step"),
        (lambda lines: lines[2]["tickets"].__setitem__(0, [0, 1]), "more than once"),
        (lambda lines: lines[2]["tickets"].pop(), "empty places"),
        (lambda lines: lines[1].update({"rollout/staleness_max": 2.0}), "staleness"),
    ],
)
def test_a_history_that_is_not_whole_is_found(tmp_path, change, text):
    assert faults(tmp_path, rows()) == []
    lines = rows()
    change(lines)
    assert any(text in fault for fault in faults(tmp_path, lines))


def test_an_event_that_is_late_missing_or_of_another_is_found():
    done = [Done(Disturbance("kill", "device", 0.0), "device", 100.0, 100.0, 5.0)]
    event = lambda time, worker: {"time": time, "kind": "worker_lost", "worker": worker}
    assert checks.event_faults(done, [event(101.0, "device")]) == []
    assert "11.0 s" in checks.event_faults(done, [event(111.0, "device")])[0]
    assert "never" in checks.event_faults(done, [event(99.0, "device"), event(101.0, "data")])[0]
    assert checks.event_delays(done, [event(101.0, "device")]) == {"kill device": [1.0]}


def test_what_an_idle_service_still_holds_is_found():
    clean = dict.fromkeys(checks.IDLE_GAUGES, 0.0)
    files, idle = Counter({"socket": 10}), Counter({"device": 1, "guardian": 1})
    assert checks.leak_faults(files, files, clean, idle, 0.0) == []
    assert checks.leak_faults(files, Counter({"socket": 15}), clean, idle, 0.0)
    assert checks.leak_faults(files, files, clean | {"engine/pinned_snapshots": 1.0}, idle, 0.0)
    assert checks.leak_faults(files, files, clean, idle | Counter(environment=1), 0.0)
    assert checks.leak_faults(files, files, clean, idle, 1.0)


def test_every_kind_of_process_is_killed_and_frozen():
    drawn = draw(3, 50, 21, 5.0)
    assert drawn == draw(3, 50, 21, 5.0) != draw(4, 50, 21, 5.0)
    counts = Counter((d.action, d.kind) for d in drawn)
    assert all(counts["kill", kind] == 10 for kind in KILLED) and all(counts["freeze", kind] >= 3 for kind in FROZEN)
