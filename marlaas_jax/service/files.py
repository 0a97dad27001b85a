"""What a tenant uploads with a job, and where a job's paths may point: into its own upload, and nowhere else."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from marlaas_jax.config import JobConfig
from marlaas_jax.errors import InvalidRequest, StorageError

MAX_FILES = 200
MAX_BYTES = 64 << 20  # of one upload


def check_upload(files: Mapping[str, bytes]) -> None:
    """Raises InvalidRequest unless all names are plain relative paths and the upload is within its limits."""
    if len(files) > MAX_FILES:
        raise InvalidRequest(f"files: {len(files)} are too many; at most {MAX_FILES} are allowed")
    total = sum(map(len, files.values()))
    if total > MAX_BYTES:
        raise InvalidRequest(f"files: {total} bytes are too many; at most {MAX_BYTES} are allowed")
    for name in files:
        parts = PurePosixPath(name).parts
        is_plain = parts and name.isprintable() and "\\" not in name and len(name.encode()) <= 255
        if not is_plain or PurePosixPath(name).is_absolute() or ".." in parts:
            raise InvalidRequest(f"files: name={name[:80]!r} must be a relative path without '..'")
    places = {PurePosixPath(name) for name in files}
    if len(places) < len(files):
        raise InvalidRequest("files: two names mean the same path")
    for place in places:
        if not places.isdisjoint(place.parents):
            raise InvalidRequest(f"files: name={str(place)[:80]!r} lies below another file")


def write_upload(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files into a new folder."""
    try:
        folder.mkdir(parents=True)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror or error})") from None


def move_upload(folder: Path, job_folder: Path) -> None:
    """Makes what was uploaded a job's own."""
    try:
        job_folder.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(job_folder)
    except OSError as error:
        raise StorageError(f"{job_folder}: cannot be written ({error.strerror or error})") from None


def read_upload(folder: Path) -> dict[str, bytes]:
    """Returns the files of an upload by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def localized(config: JobConfig, names: Mapping[str, object], folder: Path) -> JobConfig:
    """Returns the job with its paths leading into `folder`. Raises InvalidRequest for one that names no uploaded file."""

    def place(field: str, path: str) -> str:
        name = PurePosixPath(path)
        is_known = str(name) in names or any(other.startswith(f"{name}/") for other in names)
        if name.is_absolute() or ".." in name.parts or not is_known:
            raise InvalidRequest(f"{field}={path!r}: must be among the files sent with the job ({', '.join(names) or 'none'})")
        return str(folder / name)

    changes: dict[str, object] = {}
    if match := re.fullmatch(r"(.+\.py):(\w+)", config.env):
        changes["env"] = f"{place('env', match[1])}:{match[2]}"
    paths = {key: value for key, value in config.env_args.items() if key == "path" or key.endswith("_path")}
    changes["env_args"] = config.env_args | {key: place(f"env_args.{key}", str(value)) for key, value in paths.items()}
    if config.data is not None:
        found = {}
        for key in ("source", "eval_source"):
            if (source := getattr(config.data, key)) is not None:
                kind, _, path = source.partition(":")
                found[key] = f"{kind}:{place(f'data.{key}', path)}"
        changes["data"] = config.data.model_copy(update=found)
    return config.model_copy(update=changes)
