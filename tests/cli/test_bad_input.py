"""What the caller can mend: one sentence on standard error that names field, value and what is allowed, exit code 2."""

import json
import os
import shutil

import pytest
import yaml
from typer.testing import CliRunner

from marlaas_jax.cli.main import app
from marlaas_jax.config import load_run
from marlaas_jax.model import source
from marlaas_jax.workers import folder_lock

GOOD = {"name": "upper", "env": "tiny:upper", "steps": 1}


def write(path, document):
    path.write_text(yaml.safe_dump(document))
    return path


def refuse(*arguments):
    """Returns the sentence with which a command was refused."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stepps": 3}, ["jobs.0.stepps", "unknown key", "steps"]),
        ({"lora": {"rnk": 3}}, ["jobs.0.lora.rnk", "rank"]),
        ({"lora": {"rank": 9}}, ["jobs.0.lora.rank=9", "runtime.bank.max_rank=8"]),
        ({"lora": {"targets": ["q", "z"]}}, ["jobs.0.lora.targets.1='z'", "'gate'"]),
        ({"lora": {"targets": []}}, ["targets=[]", "at least one"]),
        ({"steps": 0}, ["jobs.0.steps=0", "greater than or equal to 1"]),
        ({"steps": "many"}, ["jobs.0.steps='many'", "integer"]),
        ({"sampling": {"max_tokens": 256}}, ["max_tokens=256", "runtime.engine.max_context=256"]),
        ({"sampling": {"temperature": -1}}, ["temperature=-1", "greater than or equal to 0"]),
        ({"name": "../up"}, ["jobs.0.name='../up': use 1 to 64 letters, digits"]),
        ({"env": None}, ["jobs.0.env=None", "string"]),
        ({"checkpoint": {"every_s": float("inf")}}, ["checkpoint.every_s=inf", "finite"]),
        ({"seed": -1}, ["jobs.0.seed=-1", "greater than or equal to 0"]),
        ({"sampling": {"stop": [""]}}, ["sampling.stop.0=''", "at least 1 character"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_wrong_job_file_is_refused_before_anything_starts(tmp_path, change, words):
    file = write(tmp_path / "job.yaml", GOOD | change)
    sentence = refuse("run", file, "--dir", tmp_path / "run")
    assert all(word in sentence for word in words), sentence
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_another_process_writes_is_refused(tmp_path):
    write(tmp_path / "config.yaml", {"runtime": {"model": "tiny"}, "jobs": [GOOD]})
    with folder_lock.hold(tmp_path):
        sentence = refuse("run", "--dir", tmp_path, "--resume")
    assert f"{tmp_path}: is being written by another run (pid {os.getpid()})" in sentence


def test_files_that_are_missing_or_no_yaml(tmp_path):
    assert "nowhere.yaml" in refuse("run", tmp_path / "nowhere.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    assert "bad.yaml" in refuse("run", tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "mapping" in refuse("run", tmp_path / "list.yaml")
    assert "at least one job file" in refuse("run")


def test_two_jobs_of_one_name_and_runtimes_that_differ(tmp_path):
    file = write(tmp_path / "job.yaml", GOOD)
    sentence = refuse("run", file, file)
    assert sentence == "error: jobs: name='upper' is used by 2 jobs; names must differ"
    a = write(tmp_path / "a.yaml", {"runtime": {"model": "tiny"}, "jobs": [GOOD]})
    b = write(tmp_path / "b.yaml", {"runtime": {"model": "smollm2-135m"}, "jobs": [GOOD | {"name": "b"}]})
    assert "b.yaml" in refuse("run", a, b)


def test_overrides_and_resume_that_name_nothing(tmp_path):
    file = write(tmp_path / "job.yaml", GOOD)
    assert "KEY=VALUE" in refuse("run", file, "--set", "steps")
    assert "'lower'" in refuse("run", file, "--set", "jobs.lower.steps=3")
    assert "YAML" in refuse("run", file, "--set", "jobs.*.steps=[5")
    assert "no keys" in refuse("run", file, "--set", "jobs.*.env.x=5")
    assert "jobs.NAME." in refuse("run", file, "--set", "jobs=5")
    assert "--dir" in refuse("run", "--resume")
    assert "config.yaml" in refuse("run", "--resume", "--dir", tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    assert "--resume" in refuse("run", file, "--dir", tmp_path / "full")


def model_folder(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(source.resolve("tiny"), folder)
    return folder


def run_with_model(tmp_path, folder, **runtime):
    document = {"runtime": {"model": str(folder)} | runtime, "jobs": [GOOD]}
    return refuse("run", write(tmp_path / "job.yaml", document), "--dir", tmp_path / "run")


def test_a_model_of_an_unsupported_architecture(tmp_path):
    folder = model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    sentence = run_with_model(tmp_path, folder)
    assert "mamba" in sentence.lower() and "llama" in sentence.lower()


def test_a_truncated_safetensors_file(tmp_path):
    folder = model_folder(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert str(path) in run_with_model(tmp_path, folder)


def test_a_model_that_is_not_there_and_a_context_beyond_it(tmp_path):
    assert "nowhere" in run_with_model(tmp_path, tmp_path / "nowhere")
    sentence = run_with_model(tmp_path, "tiny", engine={"max_context": 100_000})
    assert "max_context=100000" in sentence


def test_a_run_folder_that_cannot_be_written(tmp_path):
    file = write(tmp_path / "job.yaml", GOOD | {"sampling": {"max_tokens": 8}})
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refuse("run", file, "--dir", tmp_path / "file" / "run")


def test_exports_and_adapters_that_are_not_there(tmp_path):
    assert "not a run folder" in refuse("export", tmp_path / "run" / "job", "--out", tmp_path / "out")
    assert "exists already" in refuse("export", tmp_path / "run" / "job", "--out", tmp_path)
    assert "nowhere" in refuse("sample", "abc", "--model", "tiny", "--adapter", "nowhere/job")


@pytest.mark.parametrize("source", ["shorter", "runs/x/shorter/", "lr@1e-4/job"])
def test_names_of_a_runs_job_are_read_as_they_are(source):
    sentence = refuse("sample", "abc", "--model", "tiny", "--adapter", source)
    assert "'horter'" not in sentence and repr(source) in sentence


def test_overrides_reach_names_with_dots_and_sections_that_are_empty(tmp_path):
    file = write(tmp_path / "job.yaml", GOOD | {"name": "a.b", "lora": None})
    arguments = ["run", str(file), "--check", "--set", "jobs.a.b.lora.rank=3", "--set", "runtime.engine.num_decode_slots=4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = yaml.safe_load(result.stdout)
    assert document["jobs"][0]["lora"]["rank"] == 3 and document["runtime"]["engine"]["num_decode_slots"] == 4


def test_a_prompt_longer_than_the_model_allows():
    sentence = refuse("sample", "upper " + "a" * 2000, "--model", "tiny", "--max-tokens", "8")
    assert "2007 tokens" in sentence, sentence


def test_h21_a_template_that_cannot_take_an_environments_answers_is_refused_before_the_job_starts(tmp_path):
    (tmp_path / "last_only.jinja").write_text("{{ messages[-1].content }}{{ eos_token }}")
    document = {
        "runtime": {"model": "tiny", "chat_template": "last_only.jinja"},
        "jobs": [GOOD | {"env": "guess", "env_args": {"chat": True}}],
    }
    sentence = refuse("run", write(tmp_path / "job.yaml", document), "--dir", tmp_path / "run")
    assert "env='guess'" in sentence and "role user" in sentence and "the chat template" in sentence, sentence


def test_paths_are_relative_to_the_job_file_and_in_overrides_to_the_working_directory(tmp_path, monkeypatch):
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for folder in (inner, outer):
        (folder / "data").mkdir(parents=True)
    job = GOOD | {"env_args": {"path": "data", "other": "data"}, "data": {"source": "jsonl:items.jsonl"}}
    file = write(inner / "job.yaml", {"runtime": {"chat_template": "a.jinja"}, "jobs": [job]})
    monkeypatch.chdir(outer)
    config = load_run([file])
    assert config.jobs[0].env_args == {"path": str(inner / "data"), "other": "data"}
    assert config.jobs[0].data.source == f"jsonl:{inner}/items.jsonl"
    assert config.runtime.chat_template == str(inner / "a.jinja")
    changes = ["jobs.*.data.source=parquet:b.parquet", "runtime.chat_template=b.jinja", "jobs.*.lora.init_from=run/job"]
    config = load_run([file], [*changes, "jobs.*.env=mine.py:reward"])
    assert config.jobs[0].data.source == f"parquet:{outer}/b.parquet"
    assert config.runtime.chat_template == str(outer / "b.jinja")
    assert config.jobs[0].lora.init_from == str(outer / "run/job") and config.jobs[0].env == f"{outer}/mine.py:reward"
    assert config.jobs[0].env_args["path"] == str(inner / "data")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("seed=5", ["jobs.upper.seed=5", "begun with 0"]),
        ("env=tiny:lower", ["jobs.upper.env='tiny:lower'", "'tiny:upper'"]),
        ("rollout.groups_per_batch=2", ["groups_per_batch=2", "begun with 8"]),
        ("lora.rank=2", ["jobs.upper.lora"]),
    ],
)
def test_a_resumed_job_keeps_what_its_tickets_mean(tmp_path, change, words):
    """A refusal leaves the run's configuration as it was, so the next plain --resume goes on."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    stored = load_run([write(tmp_path / "job.yaml", GOOD)])
    document = yaml.safe_dump(stored.model_dump(mode="json"))
    (run_dir / "config.yaml").write_text(document)
    sentence = refuse("run", "--resume", "--dir", run_dir, "--set", f"jobs.upper.{change}")
    assert all(word in sentence for word in words), sentence
    assert (run_dir / "config.yaml").read_text() == document
    more = ["run", "--resume", "--dir", str(run_dir), "--check", "--set", "jobs.upper.steps=9"]
    result = CliRunner().invoke(app, more)
    assert result.exit_code == 0 and yaml.safe_load(result.stdout)["jobs"][0]["steps"] == 9


def test_an_adapter_to_start_from_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    file = write(tmp_path / "job.yaml", GOOD | {"lora": {"init_from": "runs/of/nobody@3"}})
    sentence = refuse("run", file, "--dir", tmp_path / "run")
    assert "job 'upper': lora.init_from=" in sentence and "runs/of/nobody@3" in sentence
    assert not (tmp_path / "run").exists()
