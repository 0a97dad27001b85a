"""Item sources that families share: a pool cut into train and eval, and a generator that sorts prompts by their hash."""

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from marlaas_envs.protocol import UNLIMITED, EnvLookupError

SPLITS = ("train", "eval")
_MAX_DRAWS = 2000


def check_split(split: str) -> None:
    """Raises for a split that is neither train nor eval."""
    if split not in SPLITS:
        raise EnvLookupError(f"split={split!r}: allowed: {', '.join(SPLITS)}")


def split_pool(pool: Sequence[Any], split: str) -> list[Any]:
    """Returns three quarters of `pool` for train or the rest for eval, always the same ones, in mixed order."""
    check_split(split)
    mixed = sorted(pool, key=lambda entry: hashlib.sha256(repr(entry).encode()).digest())
    num_eval = max(1, len(mixed) // 4)
    return mixed[:num_eval] if split == "eval" else mixed[num_eval:]


def split_of(prompt: str) -> str:
    """Returns the split that a prompt belongs to for good: one in eight, by its hash, is held out."""
    return "eval" if hashlib.sha256(prompt.encode()).digest()[0] % 8 == 0 else "train"


class Generated:
    """Items without end: `make(rng)` of a random state that depends on name, split, seed and index only."""

    def __init__(
        self, name: str, split: str, seed: int, make: Callable[[random.Random], dict[str, Any]], by_hash: bool = False
    ):
        check_split(split)
        self._key = f"{name}/{split}/{seed if split == 'train' else 'eval'}"
        self._make = make
        self._split = split
        self._by_hash = by_hash  # keep only items whose prompt belongs to the split

    def __len__(self) -> int:
        return UNLIMITED

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self._key}/{index}")
        for _ in range(_MAX_DRAWS):
            item = self._make(rng)
            if not self._by_hash or split_of(item["prompt"]) == self._split:
                return item
        raise EnvLookupError(f"{self._key}: these arguments allow so few prompts that none is left for this split; widen them")


class Listed:
    """A fixed list of items."""

    def __init__(self, items: Sequence[dict[str, Any]]):
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._items[index]
