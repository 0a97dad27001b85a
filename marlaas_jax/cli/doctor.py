"""`marlaas doctor`: what this installation and this machine can do, what is missing, and how to mend it.

Owns no facts itself: each line asks the package, the model source, the engine or JAX. Importing this module loads no JAX;
running it does, since only JAX knows which device it got.
"""

import importlib.metadata
import importlib.util
import json as jsonlib
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil
import rich.console
import rich.markup
import rich.table
from packaging.requirements import Requirement

import marlaas_jax
from marlaas_jax.config import RunConfig, load_run
from marlaas_jax.errors import MarlaasError
from marlaas_jax.model import source

DISTRIBUTION = "marlaas-jax"
MIN_FREE_DISK_GB = 2.0  # a converted SmolLM2, a few checkpoints, compiled programs
MIN_FREE_MEMORY_GB = 4.0  # what the quick start peaks at
# device node -> (platforms of JAX that would use it, extra to install)
ACCELERATOR_NODES = {
    "/dev/nvidia0": (("gpu", "cuda"), "cuda"),
    "/dev/accel0": (("tpu",), "tpu"),
    "/dev/vfio/0": (("tpu",), "tpu"),
}

Status = Literal["ok", "warning", "missing"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `missing` makes the exit code 1."""

    section: str
    name: str
    status: Status
    text: str


def run(json: bool = False, config: Path | None = None) -> int:
    """Prints the report; returns 1 if something needed is missing. A wrong job file raises InvalidConfig or NotFound."""
    run_config = load_run([config]) if config is not None else None
    findings = list(examine(run_config))
    ok = all(finding.status != "missing" for finding in findings)
    if json:
        print(jsonlib.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}))
    else:
        _print(findings, ok)
    return 0 if ok else 1


def examine(config: RunConfig | None = None) -> Iterator[Finding]:
    """Yields the findings in the order of the report; with a run's configuration also its model and programs."""
    yield from _packages()
    devices = list(_devices(config))
    yield from devices
    yield from _jetstream()
    yield from _models(config)
    yield from _machine()
    if config is not None and all(finding.status != "missing" for finding in devices):
        yield from _programs(config)


def _packages() -> Iterator[Finding]:
    """The interpreter, the dependencies against their supported ranges, the extras."""
    yield Finding("versions", "marlaas_jax", "ok", marlaas_jax.__version__)
    yield Finding("versions", "python", "ok", f"{platform.python_version()} on {platform.platform()}")
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "versions", DISTRIBUTION, "warning", "not installed as a package, so ranges are unknown: pip install -e ."
        )
        return
    extras: dict[str, list[Requirement]] = {}
    for requirement in [*requirements, Requirement("jaxlib")]:
        extra = _extra_of(requirement)
        if extra is not None:
            extras.setdefault(extra, []).append(requirement)
            continue
        version = _installed(requirement.name)
        if version is None:
            yield Finding("versions", requirement.name, "missing", f"pip install '{requirement.name}{requirement.specifier}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            yield Finding("versions", requirement.name, "warning", f"{version}, tested with {requirement.specifier}")
        else:
            yield Finding("versions", requirement.name, "ok", version)
    for extra, needed in sorted(extras.items()):
        absent = [r.name for r in needed if _installed(r.name) is None]
        if extra in ("tpu", "cuda", "test", "dev"):
            continue  # of the first two the devices below tell the truth; the others are not for users
        text = f"not installed ({', '.join(absent)}): pip install '{DISTRIBUTION}[{extra}]'" if absent else "installed"
        yield Finding("extras", extra, "warning" if absent else "ok", text)


def _extra_of(requirement: Requirement) -> str | None:
    """Returns the extra that brings this requirement, None for a core dependency."""
    text = str(requirement.marker or "")
    return text.split("extra ==")[1].strip(" )'\"") if "extra ==" in text else None


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(config: RunConfig | None) -> Iterator[Finding]:
    """The devices that JAX got, against those asked for and those that the machine has."""
    wanted = os.environ.get("JAX_PLATFORMS", "")
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        text = str(error).strip().splitlines()[0]
        yield Finding("devices", "backend", "missing", f"JAX_PLATFORMS={wanted!r} gives no device: {text}")
        return
    found = devices[0].platform
    kinds = ", ".join(
        f"{len([d for d in devices if d.device_kind == k])} x {k}" for k in sorted({d.device_kind for d in devices})
    )
    yield Finding("devices", "backend", "ok", f"{found}: {kinds}" + (f" (JAX_PLATFORMS={wanted})" if wanted else ""))
    for node, (platforms, extra) in ACCELERATOR_NODES.items():
        if Path(node).exists() and found not in platforms and not (wanted and "cpu" in wanted.split(",")):
            text = f"{node} is here but JAX runs on {found}: pip install '{DISTRIBUTION}[{extra}]'"
            yield Finding("devices", extra, "warning", text)
    from marlaas_jax.device.build import resolve_dtype

    dtype = resolve_dtype(config.runtime.dtype if config is not None else "auto")
    yield Finding("devices", "computing in", "ok", dtype)


def _jetstream() -> Iterator[Finding]:
    """The class under the engine."""
    from marlaas_jax.engine import jetstream

    yield Finding("engine", "base", "ok", jetstream.BASE)


def _models(config: RunConfig | None) -> Iterator[Finding]:
    """The short names, and the model of the job file. Converts nothing that is not asked for."""
    names = [config.runtime.model] if config is not None else list(source.SHORT_NAMES)
    for name in names:
        try:
            folder = source.resolve(name)
        except MarlaasError as error:
            yield Finding("models", name, "missing" if config is not None else "warning", str(error))
        else:
            yield Finding("models", name, "ok", str(folder))


def _machine() -> Iterator[Finding]:
    """Memory, cores, disk, caches."""
    memory = psutil.virtual_memory()
    free_gb = memory.available / 2**30
    text = f"{free_gb:.1f} of {memory.total / 2**30:.1f} GB available"
    enough = free_gb >= MIN_FREE_MEMORY_GB
    yield Finding(
        "machine", "memory", "ok" if enough else "warning", text + ("" if enough else f"; below {MIN_FREE_MEMORY_GB:g} GB")
    )
    yield Finding("machine", "cores", "ok", f"{len(os.sched_getaffinity(0)) if sys.platform == 'linux' else os.cpu_count()}")
    yield _folder("model cache", source.cache_folder())
    # where device/build.py keeps compiled programs
    yield _folder("compiled programs", Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or source.cache_folder() / "xla"))
    free_gb = shutil.disk_usage(Path.cwd()).free / 2**30
    text = f"{free_gb:.1f} GB free under {Path.cwd()}"
    yield Finding("machine", "disk", "ok" if free_gb >= MIN_FREE_DISK_GB else "warning", text)


def _folder(name: str, folder: Path) -> Finding:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Finding("machine", name, "warning", f"{folder}: not writable")
    size_mb = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    return Finding("machine", name, "ok", f"{folder} ({size_mb:.0f} MB)")


def _programs(config: RunConfig) -> Iterator[Finding]:
    """The programs that each role compiles before its first work; nothing is compiled here."""
    import jax

    from marlaas_jax.device import build
    from marlaas_jax.learner import buckets
    from marlaas_jax.model import hf_config

    runtime = config.runtime.sized_for(config.jobs)
    try:
        model = hf_config.read(source.resolve(runtime.model))
        sampler = build.engine_settings(runtime, build.resolve_dtype(runtime.dtype)).buckets().programs()
        learner = buckets.plan(
            runtime.learner,
            model,
            max_context=runtime.engine.max_context,
            max_rank=runtime.bank.max_rank,
            on_cpu=jax.default_backend() == "cpu",
        )
    except MarlaasError as error:
        yield Finding("programs", "buckets", "missing", str(error))
        return
    if runtime.engine.max_context > model.max_position:
        text = f"runtime.engine.max_context={runtime.engine.max_context}: {runtime.model} allows at most {model.max_position}"
        yield Finding("programs", "context", "missing", text)
    yield Finding("programs", f"sampler, {len(sampler)}", "ok", "; ".join(sampler))
    shapes = "; ".join(
        f"forward and backward of {shape.blocks} x (prompt {shape.prompt} + {shape.rows} x {shape.suffix})"
        for shape in learner.shapes
    )
    updates = "; ".join(f"update of {count} adapters" for count in learner.update_buckets)
    text = f"{shapes}; {updates}; {buckets.FIXED_PROGRAMS} of one shape"
    yield Finding("programs", f"learner, {learner.num_programs}", "ok", text)


def _print(findings: list[Finding], ok: bool) -> None:
    console = rich.console.Console()
    colors = {"ok": "green", "warning": "yellow", "missing": "red"}
    table = rich.table.Table(box=None, show_header=False, pad_edge=False)
    for overflow in ("ignore", "ignore", "ignore", "fold"):
        table.add_column(overflow=overflow)
    section = ""
    for finding in findings:
        title = finding.section if finding.section != section else ""
        section = finding.section
        mark = f"[{colors[finding.status]}]{finding.status}[/]"
        table.add_row(f"[bold]{title}[/]", mark, finding.name, rich.markup.escape(finding.text))
    console.print(table)
    console.print("[green]all that is needed is here[/]" if ok else "[red]something needed is missing: see above[/]")
