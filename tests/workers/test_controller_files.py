"""The run folder's files: what is written is read back, whatever it holds."""

import json

import pytest

from marlaas_jax import plots
from marlaas_jax.errors import CorruptFile
from marlaas_jax.workers.controller_files import EpisodeLog, JobFiles, read_lines

LINE_ENDS = "a\u2028b\u2029c\x85d\x0be\x1cf\rg\nh"  # to str.splitlines, all of them


def test_names_that_hold_line_ends_of_other_standards_come_back(tmp_path):
    folder = tmp_path / "jobs" / "a"
    files = JobFiles(folder, clock=lambda: 1.0)
    files.open(resume=False)
    for step in (1, 2):
        figures = {f"env/{LINE_ENDS}": 0.5, "rollout/reward_mean": 1.0}
        files.batch_sent(step, 1, figures, ((0, 0),))
        files.batch_trained(step, step, {})
    files.episode({"note": LINE_ENDS})
    files.cut_back(2)
    files.close()
    assert [row[f"env/{LINE_ENDS}"] for row in files.metrics] == [0.5, 0.5]
    assert plots.read_metrics(tmp_path)["a"] == files.metrics == read_lines(folder / "metrics.jsonl")
    assert [record["note"] for record in read_lines(folder / "episodes-00000.jsonl")] == [LINE_ENDS]


def test_a_line_cut_short_is_left_out_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": "\xe2\x80')
    assert read_lines(path) == [{"a": 1}]
    for damaged in ("5", "", "[]", "{", "[" * 100_000, "1" * 5000):
        path.write_text('{"a": 1}\n' + damaged + "\n")
        with pytest.raises(CorruptFile, match=r"log.jsonl: line 2 is not a JSON object"):
            read_lines(path)


def test_a_picture_shows_what_can_be_read_of_damaged_metrics(tmp_path):
    path = tmp_path / "jobs" / "a" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    rows = [{"step": 1, "rollout/reward_mean": 0.5}, 5, {}, {"step": "x"}, {"step": 2, "rollout/reward_mean": "x"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plots.write_reward_plot(tmp_path).stat().st_size > 1000
    assert [row["step"] for row in plots.read_metrics(tmp_path)["a"]] == [1, 2]


def test_files_of_others_beside_the_episodes_are_passed_over(tmp_path):
    (tmp_path / "episodes-old.jsonl").write_text("")
    (tmp_path / "episodes-00003.jsonl").write_text("")
    log = EpisodeLog(tmp_path)
    log.write({"reward": 1.0})
    log.close()
    assert read_lines(tmp_path / "episodes-00003.jsonl") == [{"reward": 1.0}]
