"""Items by ticket: `train(ticket)` is the same item whenever it is asked for, so a resumed run reads on where it stopped.

Training items are shuffled by the job's seed, anew in each epoch (grain's MapDataset); held-out items keep one order for all
seeds. Imports grain: only the data worker's process loads this.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from marlaas_jax.config import DataConfig
from marlaas_jax.data.light_grain import MapDataset
from marlaas_jax.data.sources import Source
from marlaas_jax.data.splits import open_splits
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
    splits = open_splits(config)
    return JobDataset(
        len(splits.train),
        len(splits.held_out),
        _shuffled(splits.train, seed, repeat=True).map(splits.to_item),
        _shuffled(splits.held_out, _EVAL_SEED, repeat=False).map(splits.to_item),
    )


def _shuffled(source: Source, seed: int, repeat: bool) -> Any:
    if len(source) >= UNLIMITED:
        return source
    dataset = MapDataset.source(source).shuffle(seed=seed % 2**32)
    return dataset.repeat() if repeat else dataset


def _length(source: Source) -> int:
    return 0 if len(source) >= UNLIMITED else len(source)
