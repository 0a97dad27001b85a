"""What `marlaas run` says at its start, while jobs fail, at its end and when it is interrupted; the run itself is a fake."""

import json
import logging

import pytest
import yaml
from typer.testing import CliRunner

import marlaas_jax
from marlaas_jax.cli import main
from marlaas_jax.cli.main import app
from marlaas_jax.workers import run as workers
from marlaas_jax.workers.controller_status import JobResult, RunResult

FIGURES = {"reward_first": None, "reward_last3": None, "eval_before": None, "eval_after": None, "tokens": 0, "restarts": 0}
REASON = "no reward today"


@pytest.fixture
def arguments(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({"runtime": {"model": "tiny"}, "jobs": [{"name": "a", "env": "tiny:upper", "steps": 4}]}))
    return ["run", str(file), "--dir", str(tmp_path / "run")]


async def fails(config, run_dir, resume, on_status, on_event):
    """A run whose only job fails before its first step."""
    run_dir.mkdir()
    logging.getLogger("marlaas_jax.workers").warning("job failed job=a reason=%s", REASON)
    on_event({"kind": "job_failed", "job": "a", "failure": "EnvironmentFailed", "reason": REASON})
    rest = {"steps": 0, "steps_asked": 4, "incarnations": 1, "episodes": {}, "elapsed_s": 3.0, "adapter": None}
    return RunResult((JobResult("a", "failed", "EnvironmentFailed", REASON, **FIGURES, **rest),), 3.0)


async def is_interrupted(config, run_dir, resume, on_status, on_event):
    """A run that is interrupted after two steps."""
    folder = run_dir / "jobs" / "a"
    folder.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("")
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2)))
    raise KeyboardInterrupt


def test_a_failure_is_told_once_and_warnings_go_to_the_log(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "run", fails)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"run folder {tmp_path / 'run'}; loading tiny"
    assert result.output.count(REASON) == 1 and f"a: failed: EnvironmentFailed: {REASON}" in lines
    assert lines[-1] == "3 s in all; nothing was trained"
    log = (tmp_path / "run" / "logs" / "controller.log").read_text()
    assert f"WARNING marlaas_jax.workers job failed job=a reason={REASON}" in log


def test_the_log_of_warnings_is_bounded(arguments, tmp_path, monkeypatch):
    async def chatters(config, run_dir, resume, on_status, on_event):
        for _ in range(3000):
            logging.getLogger("marlaas_jax").warning("x" * 1000)
        return await fails(config, run_dir / "inner", resume, on_status, on_event)

    monkeypatch.setattr(workers, "run", chatters)
    assert CliRunner().invoke(app, arguments).exit_code == 1
    files = list((tmp_path / "run" / "logs").iterdir())
    assert {file.name for file in files} == {"controller.log", "controller.log.1"}
    assert all(file.stat().st_size <= 1 << 20 for file in files)


def test_an_interrupted_run_says_where_it_stopped_and_how_to_go_on(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "run", is_interrupted)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130
    go_on = f"marlaas run --dir {tmp_path / 'run'} --resume"
    assert f"stopped; a at step 2 of 4; go on with: {go_on}" in result.stderr.splitlines()


def test_an_interrupted_run_in_json(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "run", is_interrupted)
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 130
    (record,) = map(json.loads, result.stdout.splitlines())
    assert record["type"] == "stopped" and record["jobs"] == [{"name": "a", "step": 2, "steps": 4}]
    assert record["resume"] == f"marlaas run --dir {tmp_path / 'run'} --resume"


def test_version_and_help():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"marlaas {marlaas_jax.__version__}\n"
    for command in ("sample", "chat"):
        text = " ".join(CliRunner().invoke(app, [command, "--help"]).stdout.replace("│", " ").split())
        assert "tiny" in text and "RUN_DIR/JOB@STEP" in text, text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_sample_says_that_it_loads_and_that_an_answer_is_empty_on_a_terminal_only(monkeypatch, is_terminal):
    monkeypatch.setattr("marlaas_jax.cli.sample.sample", lambda *_: [{"text": "", "finish_reason": "stop"}])
    monkeypatch.setattr(main, "is_terminal", lambda: is_terminal)
    result = CliRunner().invoke(app, ["sample", "upper abc=", "--model", "tiny"])
    said = ["loading tiny", "(empty answer: finish reason stop)"] if is_terminal else []
    assert result.stdout == "\n" and result.stderr.splitlines() == said
