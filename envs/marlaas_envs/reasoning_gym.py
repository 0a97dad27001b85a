"""reasoning_gym:<dataset>: the procedural data sets of reasoning-gym (extra `envs`), scored by their own scorers.

The library is imported on first use, inside the worker: that takes up to half a minute. `env_args` beside `chat` are those of
the data set. Training items have generator seeds from the job's seed upwards, held-out ones seeds that no such item reaches.
"""

import importlib
import importlib.util
import sys
import types
import warnings
from typing import Any

from marlaas_envs.protocol import UNLIMITED, Action, Env, EnvFamily, EnvLookupError, Item
from marlaas_envs.single_turn import SingleTurn
from marlaas_envs.sources import check_split
from marlaas_envs.verify import Verdict, trimmed

_SIZE = 1_000_000  # items of one generator
_EVAL_SEED = 2_000_000_000


class ReasoningGym:
    """One data set of the library."""

    prompt_once = True

    def __init__(self, name: str):
        self._name = name
        self._made: dict[tuple, Any] = {}

    def dataset(self, split: str, seed: int, **args: Any) -> "Procedural":
        """Returns the items of a split."""
        check_split(split)
        args.pop("chat", None)
        return Procedural(self, seed % (_EVAL_SEED - _SIZE) if split == "train" else _EVAL_SEED, args)

    def make(self, chat: bool = True, **args: Any) -> Env:
        """Returns the environment; the scorer is the data set's own."""

        def score(action: Action, item: Item) -> Verdict:
            procedural = self.procedural(item["seed"], args)
            answer = _answer(action.text)
            if answer is None:
                return Verdict(0.0, "")
            return Verdict(float(procedural.score_answer(answer, procedural[item["index"]])), answer[:200])

        return SingleTurn(score, chat)

    def procedural(self, seed: int, args: dict[str, Any]) -> Any:
        """Returns the library's generator, made once per seed and arguments."""
        key = (seed, repr(sorted(args.items())))
        if key not in self._made:
            library = _library()
            try:
                self._made[key] = library.create_dataset(self._name, seed=seed, size=_SIZE, **args)
            except (TypeError, ValueError, AssertionError) as error:
                raise EnvLookupError(f"env='reasoning_gym:{self._name}' with env_args={args}: {error}") from None
        return self._made[key]


class Procedural:
    """Items of one generator: the library's question and answer, and where the scorer finds the whole entry again."""

    def __init__(self, owner: ReasoningGym, seed: int, args: dict[str, Any]):
        self._seed = seed
        self._entries = owner.procedural(seed, args)

    def __len__(self) -> int:
        return UNLIMITED

    def __getitem__(self, index: int) -> dict[str, Any]:
        index %= _SIZE
        entry = self._entries[index]
        return {"prompt": entry["question"], "answer": str(entry["answer"]), "seed": self._seed, "index": index}


def family(variant: str) -> EnvFamily:
    """Returns the family of one data set."""
    factory = _library().factory
    if variant not in factory.DATASETS:
        raise EnvLookupError(
            f"env='reasoning_gym:{variant}': no such data set; there are {', '.join(sorted(factory.DATASETS))}"
        )
    return ReasoningGym(variant)


def _answer(text: str) -> str | None:
    """Returns the last tagged answer of a text that has tags, else the whole text, within the limits of blanks."""
    if "<answer>" in text:
        text = text.rpartition("<answer>")[2]
        if "</answer>" not in text:
            return None
        text = text.partition("</answer>")[0]
    return trimmed(text)


def _library() -> Any:
    """Returns the library, imported without the warnings of its dependencies, and without pycosat where that is absent."""
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = _solver_stand_in()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise EnvLookupError(
            f"env='reasoning_gym': cannot be imported ({error}); install it: pip install reasoning-gym"
        ) from None


def _solver_stand_in() -> types.ModuleType:
    """Returns a module in place of pycosat, which has no wheel, needs a C compiler and serves one data set of a hundred."""

    def itersolve(*_: Any) -> Any:
        raise EnvLookupError(
            "env='reasoning_gym:zebra_puzzles': it needs pycosat and a C compiler; install it: pip install pycosat"
        )

    module = types.ModuleType("pycosat")
    vars(module)["itersolve"] = itersolve
    return module
