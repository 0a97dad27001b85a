"""Items by ticket: `train(ticket)` is the same item whenever it is asked for, so a resumed run reads on where it stopped.

Training items are shuffled by the job's seed, anew in each epoch (grain's MapDataset); held-out items keep one order for all
seeds. Imports grain, which imports JAX: only the data worker's process loads this.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import grain

from marlaas_jax.config import DataConfig
from marlaas_jax.data import mapping
from marlaas_jax.data.sources import Source, open_source
from marlaas_jax.errors import CorruptFile, InvalidRequest

UNLIMITED = 1 << 31  # a source of this length or more generates items without end, already in random order
_EVAL_SEED = 0


@dataclasses.dataclass(frozen=True)
class JobDataset:
    """Both splits of one job. A length of 0 means without end."""

    num_train: int
    num_eval: int
    _train: Any
    _eval: Any

    def item(self, split: str, index: int) -> Mapping[str, Any]:
        """Returns the item of a ticket ("train"), or held-out item `index` ("eval")."""
        if split not in ("train", "eval"):
            raise InvalidRequest(f"split={split!r}: must be train or eval")
        if index < 0:
            raise InvalidRequest(f"index={index}: must be 0 or more")
        if split == "eval" and self.num_eval and index >= self.num_eval:
            raise InvalidRequest(f"index={index}: there are {self.num_eval} held-out items")
        return (self._train if split == "train" else self._eval)[index]


def from_sources(train: Source, held_out: Source, seed: int) -> JobDataset:
    """Returns the data set of two sources that are already disjoint, as an environment's own are."""
    for name, source in (("training", train), ("held-out", held_out)):
        if not len(source):
            raise CorruptFile(f"data: there is no {name} item")
    return JobDataset(_length(train), _length(held_out), _shuffled(train, seed, repeat=True), held_out)


def from_config(config: DataConfig, seed: int) -> JobDataset:
    """Returns the data set of files. Without `eval_source` the last tenth of `source`, at least one item, is held out."""
    mapping.check(config)
    source = open_source(config.source)
    if config.eval_source is not None:
        train, held_out = source, open_source(config.eval_source)
    else:
        if len(source) < 2:
            raise CorruptFile(f"data.source={config.source!r}: it has 1 item; at least 2 are needed, as one is held out")
        num_train = len(source) - max(1, len(source) // 10)
        train, held_out = _Part(source, 0, num_train), _Part(source, num_train, len(source))
    to_item = functools.partial(mapping.to_item, config=config)
    to_item(train[0])  # a wrong field is told before the job starts
    to_item(held_out[0])
    return JobDataset(
        len(train),
        len(held_out),
        _shuffled(train, seed, repeat=True).map(to_item),
        _shuffled(held_out, _EVAL_SEED, repeat=False).map(to_item),
    )


def _shuffled(source: Source, seed: int, repeat: bool) -> Any:
    if len(source) >= UNLIMITED:
        return source
    dataset = grain.MapDataset.source(source).shuffle(seed=seed % 2**32)
    return dataset.repeat() if repeat else dataset


def _length(source: Source) -> int:
    return 0 if len(source) >= UNLIMITED else len(source)


class _Part:
    """Items start..end of a source."""

    def __init__(self, source: Source, start: int, end: int):
        self._source, self._start, self._num = source, start, end - start

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._source[self._start + index]
