"""Training and held-out items of a job's files, before they are shuffled; imports neither grain nor JAX."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from marlaas_jax.config import DataConfig
from marlaas_jax.data import mapping
from marlaas_jax.data.sources import Source, open_source
from marlaas_jax.errors import CorruptFile


@dataclasses.dataclass(frozen=True)
class Splits:
    """Rows of both splits, and what makes an item of a row."""

    train: Source
    held_out: Source
    to_item: Callable[[Mapping[str, Any]], Mapping[str, Any]]


def open_splits(config: DataConfig) -> Splits:
    """Opens the files and tries the first row of each split. Raises one sentence for what cannot be used.

    Without `eval_source` the last tenth of `source`, at least one item, is held out.
    """
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
    return Splits(train, held_out, to_item)


class _Part:
    """Items start..end of a source."""

    def __init__(self, source: Source, start: int, end: int):
        self._source, self._start, self._num = source, start, end - start

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._source[self._start + index]
