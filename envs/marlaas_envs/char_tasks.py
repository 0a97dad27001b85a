"""Character tasks of the `tiny` model: what an item is, where one easily slips, and how answers are graded.

Every task is an unlimited generator read by index: `item(task, index, split)` is the same item in every process and Python
version. A prompt belongs to one split for good, by its hash, so nothing held out is ever trained on.

`calc` takes two turns: the policy calls the calculator with `<calc>23*47</calc>`, the environment answers
`<tool>1081</tool>`, and the policy's second turn is graded.
"""

import dataclasses
import hashlib
import random
import re
import string
from collections.abc import Callable

SPLITS = ("train", "eval")
MAX_ANSWER_TOKENS = 12  # of any right turn, the end token included

_CALL = re.compile(r"<calc>(\d{1,6})([*+-])(\d{1,6})</calc>")


@dataclasses.dataclass(frozen=True)
class Item:
    """One prompt, its right answer, and a plausible wrong one of the same length.

    Where slip and answer differ, a careless demonstrator may write the slip's character instead of the answer's. For `calc`
    the answer is the final number, `call` is the right first turn and `slip` a wrong one.
    """

    task: str
    prompt: str
    answer: str
    slip: str
    call: str | None = None


def _word(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(low, high)))


def _words(rng: random.Random) -> list[str]:
    return [_word(rng, 2, 3) for _ in range(3)]


def _digits(rng: random.Random, count: int) -> list[str]:
    return rng.sample(string.digits, count)


def _mixed_case(rng: random.Random) -> str:
    word = _word(rng, 3, 4)
    upper = rng.sample(range(len(word)), rng.randint(1, len(word) - 1))
    return "".join(c.upper() if i in upper else c for i, c in enumerate(word))


def _moved(word: str, by: int) -> str:
    letters = string.ascii_lowercase
    return "".join(letters[(letters.index(c) + by) % 26] for c in word)


def _over(word: str, answer: str) -> str:
    """Returns `answer` with its beginning overwritten by `word`."""
    return word[: len(answer)] + answer[len(word) :]


# Each task draws (what follows the task's name, right answer, slip).
Drawn = tuple[str, str, str]


def _upper(rng: random.Random) -> Drawn:
    word = _word(rng, 3, 4)
    return word, word.upper(), word


def _lower(rng: random.Random) -> Drawn:
    word = _word(rng, 3, 4).upper()
    return word, word.lower(), word


def _swap(rng: random.Random) -> Drawn:
    word = _mixed_case(rng)
    return word, word.swapcase(), word


def _double(rng: random.Random) -> Drawn:
    word = _word(rng, 2, 4)
    return word, word + word, word + word[::-1]


def _triple(rng: random.Random) -> Drawn:
    word = _word(rng, 2, 3)
    return word, word * 3, word + word[::-1] + word


def _rev(rng: random.Random) -> Drawn:
    word = _word(rng, 3, 4)
    return word, word[::-1], word


def _sort(rng: random.Random) -> Drawn:
    digits = "".join(_digits(rng, rng.randint(3, 4)))
    return digits, "".join(sorted(digits)), digits


def _first(rng: random.Random) -> Drawn:
    words = _words(rng)
    return " ".join(words), words[0], _over(words[2], words[0])


def _second(rng: random.Random) -> Drawn:
    words = _words(rng)
    return " ".join(words), words[1], _over(words[0], words[1])


def _last(rng: random.Random) -> Drawn:
    words = _words(rng)
    return " ".join(words), words[2], _over(words[0], words[2])


def _ends(rng: random.Random) -> Drawn:
    word = _word(rng, 3, 5)
    return word, word[0] + word[-1], word[1] + word[-2]


def _join(rng: random.Random) -> Drawn:
    left, right = _word(rng, 2, 3), _word(rng, 2, 3)
    return f"{left} {right}", left + right, right + left


def _next(rng: random.Random) -> Drawn:
    word = _word(rng, 2, 3)
    return word, _moved(word, 1), word


def _min(rng: random.Random) -> Drawn:
    digits = _digits(rng, 3)
    return " ".join(digits), min(digits), max(digits)


def _max(rng: random.Random) -> Drawn:
    digits = _digits(rng, 3)
    return " ".join(digits), max(digits), min(digits)


def _calc(rng: random.Random) -> Drawn:
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    return f"{a}*{b}", str(a * b), f"<calc>{a}+{b}</calc>"


TASKS: dict[str, Callable[[random.Random], Drawn]] = {
    "upper": _upper,
    "lower": _lower,
    "swap": _swap,
    "double": _double,
    "triple": _triple,
    "rev": _rev,
    "sort": _sort,
    "first": _first,
    "second": _second,
    "last": _last,
    "ends": _ends,
    "join": _join,
    "next": _next,
    "min": _min,
    "max": _max,
    "calc": _calc,
}


def split_of(prompt: str) -> str:
    """Returns the split that a prompt belongs to: one prompt in eight, by its hash, is held out."""
    return "eval" if hashlib.sha256(prompt.encode()).digest()[0] % 8 == 0 else "train"


def item(task: str, index: int, split: str = "train") -> Item:
    """Returns item `index` (any integer >= 0) of a task's split."""
    if task not in TASKS:
        raise ValueError(f"task={task!r}: not a character task; allowed: {', '.join(TASKS)}")
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: allowed: {', '.join(SPLITS)}")
    if index < 0:
        raise ValueError(f"index={index}: must be 0 or more")
    rng = random.Random(f"{task}/{split}/{index}")
    while True:
        rest, answer, slip = TASKS[task](rng)
        prompt = f"{task} {rest}="
        if split_of(prompt) == split and slip != answer:
            return Item(task, prompt, answer, slip, f"<calc>{rest}</calc>" if task == "calc" else None)


def calculate(completion: str) -> str | None:
    """Returns what the environment appends after a turn that calls the calculator, or None for any other turn."""
    match = _CALL.fullmatch(completion)
    if match is None:
        return None
    a, operator, b = int(match[1]), match[2], int(match[3])
    result = {"*": a * b, "+": a + b, "-": a - b}[operator]
    return f"<tool>{result}</tool>"


def reward(item: Item, completion: str) -> float:
    """Returns 1.0 when the final turn, without its end token, is exactly the answer, else 0.0."""
    return float(completion == item.answer)
