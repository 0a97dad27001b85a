"""The environment of one question and one answer, which most families use."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from marlaas_envs.protocol import Action, Done, Item, Observation
from marlaas_envs.verify import Verdict

Scorer = Callable[[Action, Item], Verdict]
PlainReward = Callable[[Any, str, Item], Any]  # (prompt, completion, item) -> float, plain or async


def opening(item: Item, chat: bool, stop: Sequence[str] = ()) -> Observation:
    """Returns the first observation of an item: its `prompt` as text, as one user message, or as the messages that it is."""
    prompt = item["prompt"]
    if not isinstance(prompt, str):
        return Observation(messages=tuple(prompt), stop=stop)
    if chat:
        return Observation(messages=({"role": "user", "content": prompt},), stop=stop)
    return Observation(text=prompt, stop=stop)


class SingleTurn:
    """Shows the item's prompt and scores the one turn that follows."""

    def __init__(self, score: Scorer, chat: bool = False, stop: Sequence[str] = ()):
        self._score = score
        self._chat = chat
        self._stop = tuple(stop)
        self._item: Item = {}

    async def reset(self, item: Item, seed: int) -> Observation:
        """Returns the prompt."""
        self._item = item
        return opening(item, self._chat, self._stop)

    async def step(self, action: Action) -> Done:
        """Returns the score, with what was compared as the note."""
        verdict = self._score(action, self._item)
        return Done(verdict.reward, {"stopped": float(action.stopped)}, verdict.seen)


class RewardFunction:
    """A plain function as an environment. The function may be slow or blocking: `step` is plain, so it runs in a thread."""

    def __init__(self, function: PlainReward, chat: bool = False, stop: Sequence[str] = ()):
        self._function = function
        self._chat = chat
        self._stop = tuple(stop)
        self._item: Item = {}
        if inspect.iscoroutinefunction(function):
            self.step = self._step_async
        else:
            self.step = self._step_plain

    def reset(self, item: Item, seed: int) -> Observation:
        """Returns the item's prompt."""
        self._item = item
        return opening(item, self._chat, self._stop)

    def _step_plain(self, action: Action) -> Done:
        return Done(self._function(self._item["prompt"], action.text, self._item))

    async def _step_async(self, action: Action) -> Done:
        return Done(await self._function(self._item["prompt"], action.text, self._item))
