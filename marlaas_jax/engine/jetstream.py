"""JetStream's Engine interface: the one place that imports it, and a stand-in with the same methods where it is absent.

JetStream (google-jetstream 0.2.2) describes a generation engine by an abstract class: prefill, insert, generate. Its package
imports seqio, and with it TensorFlow, for tokenizers that nothing here uses; where seqio is absent two empty classes take its
place during the import. Importing it also changes the root logger, which is put back.
"""

import abc
import dataclasses
import importlib
import importlib.util
import logging
import sys
import types
import warnings
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class SlotData:
    """What one slot produced."""

    tokens: Any  # [samples, steps]
    valid: Any  # [samples, steps]
    lengths: Any  # [samples]


@dataclasses.dataclass(frozen=True)
class PlainResultTokens:
    """What a dispatch produced, in one array [slots, columns] so that it reaches the host in one copy."""

    data: Any
    tokens_idx: tuple[int, int]  # columns of the tokens
    valid_idx: tuple[int, int]  # columns that say which tokens count
    length_idx: tuple[int, int]  # column of the number of tokens so far
    samples_per_slot: int

    def copy_to_host_async(self) -> None:
        """Starts the copy to the host."""
        if not isinstance(self.data, np.ndarray):
            self.data.copy_to_host_async()

    def convert_to_numpy(self) -> "PlainResultTokens":
        """Returns the same on the host."""
        return dataclasses.replace(self, data=np.asarray(self.data))

    def get_result_at_slot(self, slot: int) -> SlotData:
        """Returns one slot's part."""
        rows = self.data[slot * self.samples_per_slot : (slot + 1) * self.samples_per_slot]
        column = lambda span: rows[:, span[0] : span[1]]
        return SlotData(column(self.tokens_idx), column(self.valid_idx), column(self.length_idx)[:, 0])


class PlainEngine(abc.ABC):
    """The interface in our own words: what an outer loop may ask of a model that generates for many requests at once."""

    @abc.abstractmethod
    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the other methods take as `params`."""

    @abc.abstractmethod
    def init_decode_state(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a state in which no slot is used."""

    @abc.abstractmethod
    def prefill(self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int) -> Any:
        """Returns the prefix of one prompt."""

    @abc.abstractmethod
    def insert(self, prefix: Any, decode_state: Any, slot: int) -> Any:
        """Returns the state with a prefix started in a slot."""

    @abc.abstractmethod
    def generate(self, params: Any, decode_state: Any) -> tuple[Any, Any]:
        """Returns (state, result) after the next tokens of all slots."""

    @abc.abstractmethod
    def get_prefix_destination_sharding(self) -> Any:
        """Returns where a prefix must lie to be inserted."""

    @abc.abstractmethod
    def get_tokenizer(self) -> Any:
        """Returns what `build_tokenizer` takes."""

    @property
    @abc.abstractmethod
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""

    @property
    @abc.abstractmethod
    def samples_per_slot(self) -> int:
        """Number of completions per slot."""

    @property
    @abc.abstractmethod
    def max_prefill_length(self) -> int:
        """Most tokens of one prompt."""

    @property
    @abc.abstractmethod
    def mesh(self) -> Any:
        """The devices."""

    @property
    @abc.abstractmethod
    def colocated_cpus(self) -> Any:
        """CPUs beside the devices, or None."""


def _seqio_stand_in() -> dict[str, types.ModuleType]:
    """Returns modules to put into sys.modules while JetStream is imported; none where seqio is installed."""
    if importlib.util.find_spec("seqio") is not None:
        return {}
    package, vocabularies = types.ModuleType("seqio"), types.ModuleType("seqio.vocabularies")
    for name in ("Vocabulary", "SentencePieceVocabulary"):
        setattr(vocabularies, name, type(name, (), {}))
    vars(package)["vocabularies"] = vocabularies
    return {"seqio": package, "seqio.vocabularies": vocabularies}


def import_quietly(module: str) -> types.ModuleType:
    """Returns a module of JetStream, imported without seqio and without its changes to the root logger."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    stand_in = _seqio_stand_in()
    sys.modules.update(stand_in)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    finally:
        for name in stand_in:
            del sys.modules[name]
        root.setLevel(level)
        root.handlers[:] = handlers


def _base() -> tuple[type, type, str]:
    if importlib.util.find_spec("jetstream") is None:
        return PlainEngine, PlainResultTokens, "our own base class (google-jetstream is not installed)"
    try:
        api = import_quietly("jetstream.engine.engine_api")
        return api.Engine, api.ResultTokens, "jetstream.engine.engine_api.Engine"
    except Exception as error:  # whatever keeps an optional package from importing must not keep ours
        return PlainEngine, PlainResultTokens, f"our own base class (google-jetstream does not import: {error})"


EngineBase, ResultTokens, BASE = _base()  # BASE says in words which one is in use
