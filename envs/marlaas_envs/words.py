"""words:<task>: few-shot tasks in raw text that a 135M model can do greedily but not yet by sampling, so that RL lifts it.

    Q: last word of red cup tree
    A: tree
    Q: last word of gold moon fish
    A:

Turns end at a newline. The pools behind train and eval are disjoint: not a word, verb, country or sentence is in both.
`two_step` asks a second question about the first answer and rewards each with one half.
"""

import random
from collections.abc import Callable
from typing import Any

from marlaas_envs.pools import CAPITALS, PAST_TENSE, SENTIMENT, WORDS
from marlaas_envs.protocol import Action, Done, Env, EnvFamily, EnvLookupError, Item, Observation, Source
from marlaas_envs.single_turn import SingleTurn
from marlaas_envs.sources import Generated, Listed, split_pool
from marlaas_envs.verify import Verdict, exact_line

Pair = tuple[str, str]  # question, answer

STOP = ("\n",)
FOLLOW_UP = "repeat that"
MAX_SHOTS = 4

_SHOT_WORDS = (("red", "cup", "tree"), ("dog", "lamp", "rain"), ("book", "star", "hat"), ("milk", "road", "king"))


def _last_word(words: list[str]) -> Pair:
    return f"last word of {' '.join(words)}", words[-1]


def _repeat(words: list[str]) -> Pair:
    text = " ".join(words[:2])
    return f"repeat {text}", text


def _first_letter(word: str) -> Pair:
    return f"first letter of {word}", word[0]


def _upper_case(word: str) -> Pair:
    return f"capital letters: {word}", word.upper()


def _past_tense(entry: Pair) -> Pair:
    return f"past tense of {entry[0]}", entry[1]


def _capital_city(entry: Pair) -> Pair:
    return f"What is the capital of {entry[0]}?", entry[1]  # "capital of X" is copied, not answered, by small models


def _sentiment(entry: Pair) -> Pair:
    return entry


# Tasks that draw several words, and tasks with one entry of a pool; both with what the shots are made of.
_DRAWN: dict[str, Callable[[list[str]], Pair]] = {"last_word": _last_word, "repeat": _repeat, "two_step": _last_word}
_POOLED: dict[str, tuple[Callable[[Any], Pair], tuple, tuple]] = {
    "first_letter": (_first_letter, WORDS, ("tree", "lamp", "dog", "book")),
    "upper_case": (_upper_case, WORDS, ("tree", "lamp", "dog", "book")),
    "past_tense": (
        _past_tense,
        tuple(PAST_TENSE.items()),
        (("walk", "walked"), ("eat", "ate"), ("see", "saw"), ("play", "played")),
    ),
    "capital_city": (
        _capital_city,
        tuple(CAPITALS.items()),
        (("Italy", "Rome"), ("Japan", "Tokyo"), ("Egypt", "Cairo"), ("Poland", "Warsaw")),
    ),
    "sentiment": (
        _sentiment,
        SENTIMENT,
        (
            ("Best meal in years", "positive"),
            ("It broke after two days", "negative"),
            ("A wonderful film", "positive"),
            ("Terrible acting", "negative"),
        ),
    ),
}
TASKS = (*_DRAWN, *_POOLED)


class Words:
    """One task."""

    prompt_once = True

    def __init__(self, task: str):
        self.task = task

    def dataset(self, split: str, seed: int, shots: int = 2) -> Source:
        """Returns prompts with `shots` solved examples before the question."""
        head = _head(self.task, shots)
        if self.task in _POOLED:
            ask, pool, used = _POOLED[self.task]
            entries = split_pool([entry for entry in pool if entry not in used], split)
            return Listed([_item(head, *ask(entry)) for entry in entries])
        used_words = {word for words in _SHOT_WORDS for word in words}
        words = split_pool([word for word in WORDS if word not in used_words], split)
        ask = _DRAWN[self.task]

        def make(rng: random.Random) -> dict[str, Any]:
            return _item(head, *ask(rng.sample(words, 3)))

        return Generated(f"words/{self.task}", split, seed, make)

    def make(self) -> Env:
        """Returns an environment of one turn, or of two for `two_step`."""
        if self.task == "two_step":
            return TwoStep()
        return SingleTurn(_score, stop=STOP)


class TwoStep:
    """Asks for the last word, then for the same again. A turn that does not end at the newline ends the episode."""

    def __init__(self):
        self._item: Item = {}
        self._rewards: list[float] = []

    async def reset(self, item: Item, seed: int) -> Observation:
        """Returns the first question."""
        self._item = item
        return Observation(text=item["prompt"], stop=STOP)

    async def step(self, action: Action) -> Observation | Done:
        """Returns the second question, then the mean of both turns' rewards."""
        verdict = _score(action, self._item)
        self._rewards.append(verdict.reward)
        if len(self._rewards) == 1 and action.stopped:
            return Observation(text=f"Q: {FOLLOW_UP}\nA:", stop=STOP)  # the turn's own newline comes before it
        self._rewards += [0.0] * (2 - len(self._rewards))
        metrics = {"first_turn": self._rewards[0], "second_turn": self._rewards[1]}
        return Done(sum(self._rewards) / 2, metrics, verdict.seen)


def family(variant: str) -> EnvFamily:
    """Returns the family of one task."""
    if variant not in TASKS:
        raise EnvLookupError(f"env='words:{variant}': no such task; there are {', '.join(sorted(TASKS))}")
    return Words(variant)


def _head(task: str, shots: int) -> str:
    if not isinstance(shots, int) or not 0 <= shots <= MAX_SHOTS:
        raise EnvLookupError(f"env_args.shots={shots!r}: must be a whole number from 0 to {MAX_SHOTS}")
    if task in _POOLED:
        ask, _, used = _POOLED[task]
        return "".join(_solved(*ask(entry)) for entry in used[:shots])
    ask = _DRAWN[task]
    head = ""
    for words in _SHOT_WORDS[:shots]:
        question, answer = ask(list(words))
        head += _solved(question, answer)
        if task == "two_step":
            head += _solved(FOLLOW_UP, answer)
    return head


def _solved(question: str, answer: str) -> str:
    return f"Q: {question}\nA: {answer}\n"


def _item(head: str, question: str, answer: str) -> dict[str, Any]:
    return {"prompt": f"{head}Q: {question}\nA:", "answer": answer}


def _score(action: Action, item: Item) -> Verdict:
    return exact_line(action.text, item["answer"], action.stopped)
