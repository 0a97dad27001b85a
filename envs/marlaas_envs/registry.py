"""Finds an environment family by name: `family`, `family:variant`, or `path/to/file.py:object`.

Built-in families are listed here; other packages add theirs through the entry-point group `marlaas.envs`, each entry being a
callable `(variant: str) -> EnvFamily`. In a file, the object may be a reward function `(prompt, completion, item) -> float`
(plain or async), an environment class with `reset` and `step`, or a family with `dataset` and `make`.
"""

import importlib
import importlib.util
import inspect
import itertools
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from marlaas_envs.protocol import Env, EnvFamily, EnvLookupError, Source
from marlaas_envs.single_turn import RewardFunction
from marlaas_envs.sources import Listed, check_split

ENTRY_POINT_GROUP = "marlaas.envs"
BUILT_IN = ("words", "arithmetic", "calculator", "guess", "gsm8k", "reasoning_gym", "tiny")

_numbers = itertools.count()


def load(name: str) -> EnvFamily:
    """Returns the family that `name` stands for. Raises EnvLookupError, one sentence, where there is none."""
    path, _, attribute = name.rpartition(":")
    if path.endswith(".py"):
        return _from_file(Path(path), attribute)
    family, _, variant = name.partition(":")
    if family in BUILT_IN:
        return importlib.import_module(f"marlaas_envs.{family}").family(variant)
    others = _entry_points()
    if family in others:
        try:
            return others[family].load()(variant)
        except EnvLookupError:
            raise
        except Exception as error:
            raise EnvLookupError(f"env={name!r}: its package {others[family].value} fails: {error!r}") from error
    raise EnvLookupError(f"env={name!r}: no such environment; there are {', '.join(names())}, and path/to/file.py:function")


def pool_of(name: str) -> str:
    """Returns what environments must share to share processes: the family, or the file that a name points to."""
    path, _, _ = name.rpartition(":")
    return path if path.endswith(".py") else name.partition(":")[0]


def names() -> list[str]:
    """Returns the families that exist here, variants not listed."""
    return [*BUILT_IN, *sorted(name for name in _entry_points() if name not in BUILT_IN)]


def dataset(family: EnvFamily, name: str, split: str, seed: int, args: dict[str, Any]) -> Source:
    """Returns the family's items for a job's `env_args`."""
    return family.dataset(split, seed, **_accepted(family, name, args)[0])


def make(family: EnvFamily, name: str, args: dict[str, Any]) -> Env:
    """Returns a new environment for a job's `env_args`."""
    return family.make(**_accepted(family, name, args)[1])


def _accepted(family: EnvFamily, name: str, args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments that `dataset` and `make` take. Raises for one that neither takes."""
    taken = [_parameters(family.dataset) - {"split", "seed"}, _parameters(family.make)]
    for key in args:
        if not any(key in names or "**" in names for names in taken):
            allowed = ", ".join(sorted(taken[0] | taken[1])) or "none"
            raise EnvLookupError(f"env_args.{key}={args[key]!r}: {name} does not know it; allowed: {allowed}")
    dataset_args, make_args = ({k: v for k, v in args.items() if k in names or "**" in names} for names in taken)
    return dataset_args, make_args


def _parameters(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {"**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}


def _entry_points() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def _from_file(path: Path, attribute: str) -> EnvFamily:
    if not path.is_file():
        raise EnvLookupError(f"env='{path}:{attribute}': no such file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # the file may import its neighbours
    module_name = f"marlaas_user_{path.stem}_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up
    spec.loader.exec_module(module)
    found: Any = getattr(module, attribute, None)
    if not callable(found) and not hasattr(found, "make"):
        public = sorted(k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name)
        raise EnvLookupError(f"env='{path}:{attribute}': the file has no such function; it has {', '.join(public) or 'none'}")
    if hasattr(found, "make") and hasattr(found, "dataset"):
        family: Any = found() if inspect.isclass(found) else found
        return family
    return FileFamily(found, f"{path}:{attribute}", getattr(module, "ITEMS", None))


class FileFamily:
    """A reward function or an environment class from a user's file. Items: the job's `data`, or the file's own ITEMS.

    ITEMS is a list of dicts, or of strings that are prompts; its last tenth (at least one item) is held out.
    """

    prompt_once = True

    def __init__(self, found: Any, name: str, items: Any):
        self._found = found
        self._name = name
        self._items = items
        self.retry = getattr(found, "retry", "")
        self._is_env = hasattr(found, "reset") and hasattr(found, "step")
        if self._is_env:
            self.make = found  # its own arguments are the allowed ones

    def dataset(self, split: str, seed: int) -> Source:
        """Returns the file's ITEMS."""
        check_split(split)
        if self._items is None:
            raise EnvLookupError(f"env={self._name!r}: it has no items; give `data.source`, or a list ITEMS in the file")
        items = [{"prompt": item} if isinstance(item, str) else dict(item) for item in self._items]
        if len(items) < 2:
            raise EnvLookupError(f"env={self._name!r}: ITEMS has {len(items)} items; at least 2 are needed, as one is held out")
        num_train = len(items) - max(1, len(items) // 10)
        return Listed(items[:num_train] if split == "train" else items[num_train:])

    def make(self, chat: bool = False, stop: list[str] | tuple[str, ...] = ()) -> Env:  # type: ignore[no-redef]
        """Returns the function as an environment; `chat` sends the prompt as a user message."""
        return RewardFunction(self._found, chat, stop)
