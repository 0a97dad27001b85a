"""arithmetic: sums of two numbers, one turn, the answer as a number (verify.number).

Arguments: operators ("+-*"), max_value, chat (a user message instead of few-shot text), shots (of the few-shot text).
"""

import random
from typing import Any

from marlaas_envs.protocol import Action, Env, EnvFamily, EnvLookupError, Item, Source
from marlaas_envs.single_turn import SingleTurn
from marlaas_envs.sources import Generated
from marlaas_envs.verify import Verdict, number

_OPERATORS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
_SHOT_SEED = 99
INSTRUCTION = "Answer with the number only."


class Arithmetic:
    """Prompts never shared between train and eval."""

    prompt_once = True

    def dataset(
        self, split: str, seed: int, operators: str = "+", max_value: int = 20, chat: bool = False, shots: int = 2
    ) -> Source:
        """Returns questions with both numbers from 0 to `max_value`."""
        if not operators or set(operators) - set(_OPERATORS):
            raise EnvLookupError(f"env_args.operators={operators!r}: use one or more of {''.join(_OPERATORS)}")
        if not isinstance(max_value, int) or max_value < 1:
            raise EnvLookupError(f"env_args.max_value={max_value!r}: must be a whole number of 1 or more")

        def question(rng: random.Random) -> tuple[str, int]:
            a, b, operator = rng.randint(0, max_value), rng.randint(0, max_value), rng.choice(operators)
            return f"{a}{operator}{b}", _OPERATORS[operator](a, b)

        rng = random.Random(_SHOT_SEED)
        head = "".join(f"Q: {q}\nA: {answer}\n" for q, answer in (question(rng) for _ in range(shots)))

        def make(rng: random.Random) -> dict[str, Any]:
            text, answer = question(rng)
            prompt = f"What is {text}? {INSTRUCTION}" if chat else f"{head}Q: {text}\nA:"
            return {"prompt": prompt, "answer": str(answer)}

        return Generated(f"arithmetic/{operators}/{max_value}", split, seed, make, by_hash=True)

    def make(self, chat: bool = False) -> Env:
        """Returns the environment; in few-shot text a turn ends at the newline."""
        return SingleTurn(score, chat, () if chat else ("\n",))


def score(action: Action, item: Item) -> Verdict:
    """The number, from a turn that ended by itself."""
    verdict = number(action.text, item["answer"])
    return verdict if action.stopped else Verdict(0.0, verdict.seen)


def family(variant: str) -> EnvFamily:
    """Returns the family; there are no variants."""
    if variant:
        raise EnvLookupError(
            f"env='arithmetic:{variant}': there are no variants; use env_args operators, max_value, chat, shots"
        )
    return Arithmetic()
