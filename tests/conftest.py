"""What holds for every test. The environment is set before anything imports JAX."""

import os
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs compiled by one run of the tests serve the next. One folder per user: compiled code of others is not trusted.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"marlaas-test-programs-{os.getuid()}"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
# Nothing here may reach for a model hub; without a network it would wait instead of failing.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

# The fast tests compile a few thousand programs and run each for milliseconds; compiled this way they take half the time. The
# slow and long tests run what users run.
QUICK_COMPILE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" in config.option.markexpr:
        for name, value in QUICK_COMPILE.items():
            os.environ.setdefault(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    platforms = os.environ["JAX_PLATFORMS"]
    for marker, names in {"tpu": ("tpu",), "gpu": ("gpu", "cuda", "rocm")}.items():
        if not any(name in platforms for name in names):
            skip = pytest.mark.skip(reason=f"needs a {marker.upper()}: set JAX_PLATFORMS={names[-1]}")
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the seconds that each folder of tests took."""
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                parts = report.nodeid.split("::")[0].split("/")
                block = parts[1] if len(parts) > 2 else parts[-1]
                seconds[block] += report.duration
                counts[block] += report.when == "call"
    if seconds:
        terminalreporter.section("seconds per block")
        for block in sorted(seconds, key=lambda b: -seconds[b]):
            terminalreporter.line(f"{seconds[block]:8.1f} s  {counts[block]:4d} tests  {block}")
        terminalreporter.line(f"{sum(seconds.values()):8.1f} s  {sum(counts.values()):4d} tests  in all")
