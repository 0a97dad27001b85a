"""What `marlaas doctor` says about installations that lack something (H43)."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from marlaas_jax.cli import doctor
from marlaas_jax.config import RunConfig
from marlaas_jax.errors import NotFound


def run_config(**runtime) -> RunConfig:
    return RunConfig.model_validate({"runtime": {"model": "tiny"} | runtime, "jobs": [{"name": "a", "env": "words:repeat"}]})


def by_name(findings) -> dict[str, doctor.Finding]:
    return {f"{finding.section}/{finding.name}": finding for finding in findings}


@pytest.fixture
def versions(monkeypatch):
    """Pretends that packages have other versions, or (None) are absent."""
    pretended: dict[str, str | None] = {}
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in pretended:
            return real(name)
        found = pretended[name]
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    return pretended


def test_a_complete_installation_lacks_nothing(capsys):
    code = doctor.run(json=True)
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["ok"]
    found = {(f["section"], f["name"]): f for f in report["findings"]}
    assert found["devices", "backend"]["text"].startswith("cpu: 1 x cpu")
    assert found["devices", "computing in"]["text"] == "float32"
    assert found["engine", "base"]["text"] == "jetstream.engine.engine_api.Engine"
    assert found["versions", "jax"]["text"] == importlib.metadata.version("jax")


def test_a_missing_dependency_says_how_to_install_it(versions, capsys):
    versions["orbax-checkpoint"] = None
    finding = by_name(doctor.examine())["versions/orbax-checkpoint"]
    assert finding.status == "missing" and finding.text.startswith("pip install 'orbax-checkpoint<")
    assert doctor.run() == 1
    assert "something needed is missing" in capsys.readouterr().out


@pytest.mark.parametrize("version", ["0.4.30", "0.99.0"])
def test_a_jax_out_of_range_is_one_line(versions, version):
    versions["jax"] = version
    finding = by_name(doctor.examine())["versions/jax"]
    assert finding.status == "warning" and finding.text.startswith(f"{version}, tested with ")


def test_a_missing_extra_is_no_fault_and_says_how_to_install_it(versions):
    versions["fastapi"] = None
    finding = by_name(doctor.examine())["extras/service"]
    assert (finding.status, finding.text) == ("warning", "not installed (fastapi): pip install 'marlaas-jax[service]'")


def test_programs_of_each_role_are_listed_within_their_limit():
    found = [f for f in doctor.examine(run_config()) if f.section == "programs"]
    counts = {f.name.split(", ")[0]: int(f.name.split(", ")[1]) for f in found}
    assert set(counts) == {"sampler", "learner"} and all(0 < count <= 24 for count in counts.values())
    assert len(found[0].text.split("; ")) == counts["sampler"]


def test_a_model_that_cannot_be_found_is_missing():
    found = by_name(doctor.examine(run_config(model="./nowhere")))
    assert found["models/./nowhere"].status == "missing" and "there is no such file or folder" in found["models/./nowhere"].text


def test_a_context_beyond_the_model_is_told():
    found = by_name(doctor.examine(run_config(engine={"max_context": 1_000_000})))
    assert found["programs/context"].status == "missing"
    assert found["programs/context"].text.startswith("runtime.engine.max_context=1000000: tiny allows at most ")


def test_a_job_file_that_does_not_exist(tmp_path):
    with pytest.raises(NotFound, match="no such job file"):
        doctor.run(config=tmp_path / "none.yaml")


def test_a_platform_that_jax_does_not_have():
    code = "import sys; from marlaas_jax.cli import doctor; sys.exit(doctor.run(json=True))"
    environment = os.environ | {"JAX_PLATFORMS": "bogus"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    (finding,) = [f for f in json.loads(done.stdout)["findings"] if f["section"] == "devices"]
    assert finding["status"] == "missing" and finding["text"].startswith("JAX_PLATFORMS='bogus' gives no device: ")
