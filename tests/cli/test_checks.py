"""`marlaas run --check`: what a run would refuse is refused, and what a user wrote is not run."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from marlaas_jax.cli.main import app

REWARD = """
ITEMS = ["a", "b", "c"]

def reward(prompt, completion, item):
    return 1.0

raise SystemExit("it was run")
"""
GOOD = {"name": "a", "env": "tiny:upper", "steps": 1, "sampling": {"max_tokens": 8}}


def check(tmp_path, job=None, *more, **runtime):
    """Returns the result of `marlaas run --check` of one job on `tiny`."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({"runtime": {"model": "tiny"} | runtime, "jobs": [GOOD | (job or {})]}))
    return CliRunner().invoke(app, ["run", str(file), "--check", *more])


@pytest.mark.parametrize(
    ("job", "runtime", "words"),
    [
        ({}, {"model": "nowhere/"}, ["nowhere"]),
        ({}, {"engine": {"max_context": 100_000}}, ["max_context=100000"]),
        ({}, {"engine": {"prefill_buckets": list(range(16, 160, 8))}}, ["prefill_buckets"]),
        ({}, {"learner": {"prompt_buckets": [8, 16, 24, 32], "suffix_buckets": [8, 16, 24]}}, ["prompt_buckets"]),
        ({"env": "nothing"}, {}, ["job 'a'", "env='nothing'", "words"]),
        ({"env": "tiny:nothing"}, {}, ["env='tiny:nothing'", "upper"]),
        ({"env": "tiny:upper", "env_args": {"digitz": 2}}, {}, ["env_args.digitz=2", "allowed: none"]),
        ({"env": "words:repeat", "env_args": {"shots": 9}}, {}, ["env_args.shots=9"]),
        ({"env": "gsm8k", "env_args": {"answer": "first"}}, {}, ["env_args.answer='first'"]),
        ({"env": "gsm8k", "env_args": {"path": "nowhere"}}, {}, ["env_args.path='nowhere'"]),
        ({"env": "guess", "env_args": {"chat": True}}, {"chat_template": "last.jinja"}, ["env='guess'", "the role user"]),
        ({"data": {"source": "jsonl:nowhere.jsonl"}}, {}, ["nowhere.jsonl", "no such file"]),
        ({"data": {"source": "jsonl:rows.jsonl", "prompt_field": "text"}}, {}, ["data.prompt_field='text'", "question"]),
        ({"env": "nowhere.py:reward"}, {}, ["nowhere.py", "no such file"]),
        ({"env": "reward.py:rewrad"}, {}, ["defines no 'rewrad'", "ITEMS, reward"]),
        ({"env": "broken.py:reward"}, {}, ["not Python", "line 1"]),
        ({"env": "bare.py:reward"}, {}, ["it has no items"]),
        ({"lora": {"init_from": "nowhere/job"}}, {}, ["nowhere/job", "no run is there"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_what_a_run_would_refuse_is_refused(tmp_path, job, runtime, words):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 3)
    (tmp_path / "last.jinja").write_text("{{ messages[-1].content }}{{ eos_token }}")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "broken.py").write_text("def reward(:\n")
    (tmp_path / "bare.py").write_text("def reward(prompt, completion, item):\n    return 1.0\n")
    result = check(tmp_path, job, **runtime)
    assert result.exit_code == 2, result.output
    (sentence,) = result.stderr.strip().splitlines()
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    "file",
    [
        REWARD,
        "from elsewhere import *\n",
        "from elsewhere import reward\n",
        "try:\n    import fast as reward\nexcept ImportError:\n    reward, ITEMS = None, []\n",
        "class reward:\n    pass\n",
    ],
)
def test_a_users_file_is_read_and_not_run(tmp_path, file):
    (tmp_path / "reward.py").write_text(file)
    result = check(tmp_path, {"env": "reward.py:reward"})
    assert result.exit_code == 0, result.output
    assert "it was run" not in result.output


def test_defaults_are_filled_in_where_they_are_known(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    result = check(tmp_path, {"seed": 7}, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    runtime, (job,) = document["runtime"], document["jobs"]
    assert (runtime["dtype"], runtime["layers"]) == ("float32", "unrolled")
    assert runtime["bank"]["num_sampler_slots"] == 3 and runtime["bank"]["num_learner_slots"] == 2
    assert runtime["engine"]["context_buckets"][-1] == runtime["engine"]["prefill_buckets"][-1] == 256
    assert (runtime["learner"]["micro_batch_tokens"], runtime["learner"]["logits_chunk"]) == (256, 64)
    assert job["lora"]["seed"] == 7
    assert (job["algorithm"]["aggregation"], job["algorithm"]["clip_high"]) == ("sequence", 0.2)
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(document))
    assert json.loads(CliRunner().invoke(app, ["run", str(again), "--check", "--json"]).stdout) == document


def test_what_the_device_decides_stays_open_where_it_is_not_known(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    result = check(tmp_path)
    assert result.exit_code == 0, result.output
    runtime = yaml.safe_load(result.stdout)["runtime"]
    assert (runtime["dtype"], runtime["layers"]) == ("auto", "auto") and runtime["engine"]["context_buckets"] == []


def test_an_exact_job_is_told_its_price_and_gets_what_it_needs(tmp_path):
    result = check(tmp_path, {"isolation": "exact", "rollout": {"group_size": 2}}, "--json")
    assert result.exit_code == 0, result.output
    assert "bench exact" in result.stderr and len(result.stderr.strip().splitlines()) == 1
    document = json.loads(result.stdout)
    assert document["jobs"][0]["rollout"]["max_staleness"] == 0
    # Its blocks are not as wide as the largest group of whoever else is there.
    assert document["runtime"]["learner"]["block_rows"] == 8
    shared = check(tmp_path, {"rollout": {"group_size": 2}}, "--json")
    assert json.loads(shared.stdout)["runtime"]["learner"]["block_rows"] == 2 and not shared.stderr.strip()
