"""What the caller can mend: one sentence on standard error that names field, value and what is allowed, exit code 2."""

import datetime
import json
import os
import shutil

import pytest
import yaml
from typer.testing import CliRunner

from marlaas_jax.cli.main import app
from marlaas_jax.config import load_run
from marlaas_jax.lora import peft_format
from marlaas_jax.lora.adapter import AdapterSpec, init_weights
from marlaas_jax.model import hf_config, source
from marlaas_jax.model.identity import identity
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
        ({"seed": 10**30}, ["seed=1000", "2**63 - 1"]),
        ({"seed": 2**63 - 1, "lora": {"seed": -1}}, ["lora.seed=-1", "greater than or equal to 0"]),
        ({"steps": 2**40}, ["steps=1099511627776", "less than or equal to 1000000000"]),
        ({"rollout": {"max_attempts": 10**12}}, ["max_attempts=1000000000000", "less than or equal to 1000"]),
        ({"rollout": {"step_timeout_s": 1e300}}, ["step_timeout_s=1e+300", "less than or equal to"]),
        ({"sampling": {"stop_token_ids": [2**31]}}, ["stop_token_ids.0=2147483648", "less than or equal to 2147483647"]),
        ({"sampling": {"top_k": 10**12}}, ["top_k=1000000000000", "less than or equal to 2147483647"]),
        ({"sampling": {"temperature": 1e300}}, ["temperature=1e+300", "less than or equal to 1e+06"]),
        ({"lora": {"alpha": 1e300}}, ["lora.alpha=1e+300", "less than or equal to 1e+06"]),
        ({"optimizer": {"eps": 1e-50}}, ["optimizer.eps=1e-50", "greater than or equal to 1e-30"]),
        ({"optimizer": {"learning_rate": 1e300}}, ["learning_rate=1e+300", "less than or equal to 1000"]),
        ({"optimizer": {"learning_rate": 1e-50}}, ["learning_rate=1e-50", "greater than or equal to 1e-12"]),
        ({"optimizer": {"beta1": 0.99999999999}}, ["beta1=0.99999999999", "less than or equal to 0.999999"]),
        ({"optimizer": {"beta2": 0.99999999999}}, ["beta2=0.99999999999", "less than or equal to 0.999999"]),
        ({"optimizer": {"max_grad_norm": 1e-50}}, ["max_grad_norm=1e-50", "greater than or equal to 1e-12"]),
        ({"algorithm": {"importance_cap": 1e-50}}, ["importance_cap=1e-50", "greater than or equal to 1e-06"]),
        ({"algorithm": {"kl_weight": 1e300}}, ["kl_weight=1e+300", "less than or equal to 1e+06"]),
        ({"weight": 1e-4}, ["weight=0.0001", "greater than or equal to 0.001"]),
        ({"weight": 1001.0}, ["weight=1001.0", "less than or equal to 1000"]),
        ({"env": "tiny:\ud800"}, [r"env='tiny:\ud800'", "UTF-8"]),
        ({"env_args": {"x": ["\ud800"]}}, [r"env_args.x.0='\ud800'", "UTF-8"]),
        ({"env_args": {"x": float("nan")}}, ["env_args.x=nan", "finite"]),
        ({"env_args": {1: 2}}, ["env_args: the key 1", "quotes"]),
        ({"env_args": {"day": datetime.date(2020, 1, 2)}}, ["env_args.day=", "date", "quotes"]),
        ({"env_args": {"x": "y" * 5_000_000}}, ["bytes", "4194304"]),
        ({"env_args": {"path": "p" * 5000}}, ["env_args.path='ppp", "too long", "255"]),
        ({"env": "x\0.py:f"}, [r"env='x\x00.py:f'", "NUL"]),
        ({"data": {"source": "jsonl:" + "p" * 5000}}, ["data.source='jsonl:", "too long"]),
        ({"lora": {"init_from": "p/" * 3000}}, ["lora.init_from=", "too long", "4000"]),
        ({"isolation": "total"}, ["jobs.0.isolation='total'", "'shared' or 'exact'"]),
        ({"isolation": "exact", "rollout": {"max_staleness": 1}}, ["rollout.max_staleness=1", "isolation='exact' allows 0"]),
        ({"isolation": "exact", "rollout": 3}, ["jobs.0.rollout=3"]),
        ({"n" * 5000: 1}, ["jobs.0.nnn", "unknown key"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_job_file_is_refused_before_anything_starts(tmp_path, change, words):
    file = write(tmp_path / "job.yaml", GOOD | change)
    sentence = refuse("run", file, "--dir", tmp_path / "run")
    assert all(word in sentence for word in words), sentence
    assert len(sentence) < 600 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: 2020-13-45", ["line 1", "'2020-13-45' is no date"]),
        ("seed: " + "9" * 5000, ["line 1", "is no whole number"]),
        ("seed: 0x" + "f" * 5000, ["seed=a number of thousands of digits", "2**63 - 1"]),
        ("seed: !!int abc", ["'abc' is no whole number"]),
        ("weight: !!float abc", ["'abc' is no float"]),
        ("name: !!timestamp abc", ["'abc' is no date"]),
        ("seed: !!bool abc", ["'abc' is no bool"]),
        ("env_args: " + "[" * 3000, ["nested too deeply"]),
        ("env_args: {x: " + "[" * 40 + "]" * 40 + "}", ["env_args.x.0.0", "nested too deeply"]),
        ("env_args: &x {y: *x}", ["env_args.y", "alias"]),
        ("env_args: {a: &a [" + "1," * 300 + "], b: &b [" + "*a," * 300 + "], c: [" + "*b," * 300 + "]}", ["200000 values"]),
        ("steps: 3\nname: b\n'steps': 4", ["line 3", "the key 'steps' stands there twice"]),
        ("lora:\n  rank: 3\n  rank: 3", ["line 3", "'rank'"]),
        ("env_args: !!python/name:os.system", ["line 1", "tag"]),
        ("env_args: {b: !!binary aGk=}", ["env_args.b=b'hi'", "bytes"]),
        ("env_args: \0", ["special characters"]),
        ("env_args: {'x\\ud800': 1}", None),  # single quotes: a backslash is a backslash
        ('env_args: {"x\\ud800": 1}', ["UTF-8"]),
        ("env_args: {{a: 1}: 2}", ["line 1", "unhashable"]),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
@pytest.mark.parametrize("command", ["run", "doctor"])
def test_yaml_that_is_no_configuration_is_refused_at_its_line(tmp_path, command, text, words):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    if words is None:
        assert "name: missing" in refuse("run", file)
        return
    sentence = refuse(command, file)
    assert all(word in sentence for word in [str(file), *words]), sentence
    assert len(sentence) < 600


def test_bytes_that_are_not_utf8_and_files_that_are_too_large(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_bytes(b"name: a\xff")
    assert "byte 7 is not UTF-8" in refuse("run", file)
    file.write_bytes(b"#" * (5 << 20))
    assert "at most 4194304" in refuse("run", file)
    file = write(tmp_path / "good.yaml", GOOD | {"sampling": {"max_tokens": 8}})
    assert "--dir=" in (sentence := refuse("run", file, "--dir", "runs/\udcff")) and "UTF-8" in sentence
    assert "too long" in refuse("run", file, "--dir", "d" * 5000)
    assert "too long" in refuse("export", "run/job", "--out", "d" * 300)
    assert "no such job file" in refuse("run", "f" * 5000)


def test_settings_of_jobs_that_share_a_section_are_their_own(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "jobs:\n- &j\n  name: a\n  env: tiny:upper\n  rollout: &r {group_size: 4}\n  env_args: {x: {y: 1}}\n"
        "- <<: *j\n  name: b\n- {name: c, env: tiny:upper, rollout: *r}\n"
    )
    config = load_run([file], ["jobs.a.rollout.group_size=2", "jobs.a.env_args.x.y=5"])
    assert [job.rollout.group_size for job in config.jobs] == [2, 4, 4]
    assert [job.env_args for job in config.jobs] == [{"x": {"y": 5}}, {"x": {"y": 1}}, {}]
    config = load_run([file], ["jobs.*.env_args={x: {y: 2}}", "jobs.c.env_args.x.y=7"])
    assert [job.env_args["x"]["y"] for job in config.jobs] == [2, 2, 7]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["\udcff\udcfe"], [r"prompt='\udcff\udcfe'", "UTF-8"]),
        (["abc", "--stop", "\udcff"], [r"stop.0='\udcff'", "UTF-8"]),
        (["abc", "--stop", ""], ["stop.0=''", "at least 1 character"]),
        (["abc", "--adapter", "\udcff"], ["--adapter=", "UTF-8"]),
        (["abc", "--adapter", "a/" * 5000], ["--adapter=", "too long"]),
        (["abc", "--model", "m" * 5000], ["--model='mmm", "too long"]),
        (["abc", "--model", "~nobody-of-this-name/m"], ["model='~nobody", "no such file"]),
        (["abc", "--max-tokens", str(10**30)], ["max_tokens=1000", "2**63 - 1"]),
        (["abc", "--top-k", str(10**12)], ["top_k=1000000000000", "2147483647"]),
        (["abc", "--temperature", "1e300"], ["temperature=1e+300", "less than or equal to 1e+06"]),
        (["abc", "--top-p", "0"], ["top_p=0.0", "greater than 0"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_cannot_be_sampled_is_refused(arguments, words):
    sentence = refuse("sample", *([] if "--model" in arguments else ["--model", "tiny"]), *arguments)
    assert all(word in sentence for word in words) and len(sentence) < 600, sentence


def damage(folder, config=None, metadata=None, header=None, weights=None):
    """Changes an adapter folder: fields of its configuration, metadata or the whole header of its tensors, or all values."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))
    file = folder / "adapter_model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + length])
    text = (
        header or json.dumps(document | {"__metadata__": document["__metadata__"] if metadata is None else metadata}).encode()
    )
    tensors = data[8 + length :] if weights is None else weights * (len(data[8 + length :]) // len(weights))
    file.write_bytes(len(text).to_bytes(8, "little") + text + tensors)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    config = hf_config.read(source.resolve("tiny"))
    spec = AdapterSpec(2, 4.0, ("q", "v"))
    base = identity(source.resolve("tiny"))
    peft_format.save(folder, config, spec, init_weights(config, spec, 2), base)
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {"r": 10**9}}, ["this model and r=1000000000 need", "[1000000000, "]),
        ({"config": {"r": 10**30}}, ["this model and r=1000000000"]),
        ({"config": {"lora_alpha": 10**400}}, ["lora_alpha=1000", "1e-06 to 1e+06"]),
        ({"config": {"lora_alpha": 1e308}}, ["lora_alpha=1e+308", "1e-06 to 1e+06"]),
        ({"config": {"target_modules": r"(a|aa|.)*[.](q|v)_proj(x|xx|.)*\d$"}}, ["target_modules=", "matches no module"]),
        ({"config": {"target_modules": r"(.|..|...)*[!?]$"}}, ["target_modules='(.|..|...)*[!?]$'", "over 1 s"]),
        ({"config": {"target_modules": "(.*)*(.*)*(.*)*x$"}}, ["target_modules=", "matches no module"]),
        ({"config": {"exclude_modules": r"(.|..|...)*[!?]$"}}, ["exclude_modules='(.|..|...)*[!?]$'", "over 1 s"]),
        ({"config": {"target_modules": "(" * 5000}}, ["target_modules='((((", "nested too deeply"]),
        ({"metadata": {"marlaas": 5}}, ["__metadata__={'marlaas': 5}", "text"]),
        ({"metadata": "x"}, ["__metadata__='x'", "text"]),
        ({"metadata": {"marlaas": '{"base": "foo"}'}}, ["metadata", "object", "$.base"]),
        ({"metadata": {"marlaas": '{"base": {"x": {}}}'}}, ["metadata", "str", "$.base[...]"]),
        ({"metadata": {"marlaas": '{"seed": "abc"}'}}, ["metadata", "int", "$.seed"]),
        ({"metadata": {"marlaas": '{"seed": null}'}}, ["metadata", "int", "$.seed"]),
        ({"metadata": {"marlaas": '{"extra":' * 100_000}}, ["metadata"]),
        ({"metadata": {"marlaas": "[]"}}, ["metadata", "object"]),
        ({"header": b'{"a":' * 100_000}, ["header cannot be read", "RecursionError"]),
        ({"header": b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}'}, ["header cannot be read"]),
        ({"weights": b"\x00\x00\xc0\x7f"}, ["lora_A.weight", "not finite"]),
        ({"weights": b"\x00\x00\x80\xff"}, ["lora_A.weight", "not finite"]),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_a_damaged_adapter_is_refused_in_one_sentence(adapter, tmp_path, change, words):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    damage(folder, **change)
    sentence = refuse("sample", "abc", "--model", "tiny", "--adapter", folder)
    assert all(word in sentence for word in [str(folder), *words]) and len(sentence) < 800, sentence


def test_chat_takes_only_text(tmp_path):
    assert "--system=" in refuse("chat", "--model", "tiny", "--system", "\udcff")
    result = CliRunner().invoke(app, ["chat", "--model", "tiny"], input=b"abc\xff\n")
    assert result.exit_code == 2 and "standard input" in result.stderr and "Traceback" not in result.stderr


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
    assert "no date" in refuse("run", file, "--set", "jobs.upper.steps=2020-13-45")
    assert "twice" in refuse("run", file, "--set", "jobs.upper.lora={rank: 1, rank: 2}")
    assert "name=5" in refuse("run", write(tmp_path / "5.yaml", GOOD | {"name": 5}), "--set", "jobs.5.x=1")
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
