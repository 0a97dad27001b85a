"""A job file as a service takes it: its fields, and the contents of the files that they name."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlaas_jax.config import JobConfig, load_jobs, resolve_paths, validate
from marlaas_jax.documents import read_yaml
from marlaas_jax.errors import InvalidConfig, NotFound, short

MAX_BYTES = 64 << 20  # as the service has it


@dataclass(frozen=True)
class Packed:
    """A job ready to be sent."""

    job: dict[str, Any]
    files: dict[str, bytes]


def read(path: Path, overrides: Sequence[str] = ()) -> list[Packed]:
    """Returns the jobs of a file; what they name lies beside it. Raises InvalidConfig or NotFound."""
    base = path.resolve().parent
    return [_Packing(base).pack(config) for config in load_jobs(path, overrides)]


def read_sweep(path: Path) -> Packed:
    """Returns a sweep file's fields and what its job names; `job` may be the path of a file that holds one job."""
    document = read_yaml(path)
    job = document.get("job")
    if isinstance(job, str):
        base = path.resolve().parent / job
        found = read(base)
        if len(found) != 1:
            raise InvalidConfig(f"job={job!r}: holds {len(found)} jobs; a sweep takes one")
        packed = found[0]
    elif isinstance(job, dict):
        resolve_paths([job], None, path.resolve().parent)
        named = {**job, "name": document.get("name", "sweep")}
        packed = _Packing(path.resolve().parent).pack(validate(JobConfig, named))
    else:
        raise InvalidConfig(f"job={short(job)}: must be a job's fields, or the path of a job file")
    return Packed({**document, "job": packed.job}, packed.files)


class _Packing:
    """Collects the files of one job."""

    def __init__(self, base: Path):
        self._base = base
        self._paths: dict[str, Path] = {}

    def pack(self, config: JobConfig) -> Packed:
        """Returns the job with its paths relative, and the files."""
        job = config.model_dump(mode="json", exclude_unset=True)
        if match := re.fullmatch(r"(.+\.py):(\w+)", config.env):
            job["env"] = f"{self._take('env', match[1])}:{match[2]}"
        for key, value in config.env_args.items():
            if (key == "path" or key.endswith("_path")) and isinstance(value, str):
                job["env_args"][key] = self._take(f"env_args.{key}", value)
        for key in ("source", "eval_source"):
            if (source := getattr(config.data, key, None)) is not None:
                kind, _, path = source.partition(":")
                job["data"][key] = f"{kind}:{self._take(f'data.{key}', path)}"
        size = sum(path.stat().st_size for path in self._paths.values())
        if size > MAX_BYTES:
            raise InvalidConfig(f"{config.name}: its files have {size} bytes; at most {MAX_BYTES} are allowed")
        return Packed(job, {name: path.read_bytes() for name, path in self._paths.items()})

    def _take(self, field: str, text: str) -> str:
        """Notes a file, or all those of a folder; returns the name under which it is sent."""
        path = Path(text)
        if not path.exists():
            raise NotFound(f"{field}={text!r}: no such file")
        name = path.relative_to(self._base).as_posix() if path.is_relative_to(self._base) else path.name
        for part in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if part.is_file():
                inner = name if part == path else f"{name}/{part.relative_to(path).as_posix()}"
                if self._paths.setdefault(inner, part) != part:
                    raise InvalidConfig(f"{field}={text!r}: another file is sent as {inner!r} too; rename one")
        return name
