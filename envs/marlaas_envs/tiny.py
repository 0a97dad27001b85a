"""tiny:<task>: the character tasks that the `tiny` model was made on (char_tasks.py). `calc` is graded on its second turn."""

from typing import Any

from marlaas_envs import char_tasks
from marlaas_envs.protocol import UNLIMITED, Action, Done, Env, EnvFamily, EnvLookupError, Item, Observation, Source
from marlaas_envs.sources import check_split

_STRIDE = 10_000_000  # between the items of two seeds


class Tiny:
    """One task."""

    prompt_once = True

    def __init__(self, task: str):
        self._task = task

    def dataset(self, split: str, seed: int) -> Source:
        """Returns the task's items."""
        check_split(split)
        return CharItems(self._task, split, seed if split == "train" else 0)

    def make(self) -> Env:
        """Returns the environment."""
        return TinyEnv()


class CharItems:
    """Items without end."""

    def __init__(self, task: str, split: str, seed: int):
        self._task = task
        self._split = split
        self._first = seed * _STRIDE

    def __len__(self) -> int:
        return UNLIMITED

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = char_tasks.item(self._task, self._first + index, self._split)
        return {"prompt": item.prompt, "answer": item.answer, "task": item.task}


class TinyEnv:
    """Exact match of the last turn, which must end by itself."""

    def __init__(self):
        self._item: Item = {}
        self._may_call = False

    async def reset(self, item: Item, seed: int) -> Observation:
        """Returns the prompt."""
        self._item = item
        self._may_call = item["task"] == "calc"
        return Observation(text=item["prompt"])

    async def step(self, action: Action) -> Observation | Done:
        """Returns the calculator's result after a call, else the reward. Without the call, `calc` gives nothing."""
        if self._may_call:
            self._may_call = False
            result = char_tasks.calculate(action.text) if action.stopped else None
            return Observation(text=result) if result is not None else Done(0.0, {"called": 0.0}, action.text[:200])
        right = action.stopped and action.text == self._item["answer"]
        metrics = {"called": 1.0} if self._item["task"] == "calc" else {}
        return Done(float(right), metrics, action.text[:200])


def family(variant: str) -> EnvFamily:
    """Returns the family of one task."""
    if variant not in char_tasks.TASKS:
        raise EnvLookupError(f"env='tiny:{variant}': no such task; there are {', '.join(char_tasks.TASKS)}")
    return Tiny(variant)
