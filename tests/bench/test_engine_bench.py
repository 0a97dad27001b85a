"""The engine benchmark runs and reports; its figures are of no account here."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_quick_run_prints_json():
    """In a process of its own, because it binds itself to one core."""
    code = "from marlaas_jax.bench import engine; engine.run(json=True, quick=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["peaks"]["matmul_flops_per_s"] > 0
    assert [set(line) >= {"name", "ratio", "wanted", "holds"} for line in report["lines"]] == [True] * 3
    assert all(line["ratio"]["wall"] > 0 for line in report["lines"])


def test_a_missing_reference_is_named():
    from marlaas_jax.bench.engine import missing_reference

    assert "no_such_module_anywhere" in missing_reference(sys.executable, "no_such_module_anywhere")
