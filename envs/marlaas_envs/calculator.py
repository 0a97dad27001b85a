"""calculator: questions that need a tool, over several turns. The policy calls the calculator, then answers with the number.

Text form (default): `<calc>23*47</calc>` is answered by `<tool>1081</tool>`. Chat form (`chat: true`): the tool is declared by
its JSON schema, calls are JSON, results are messages of the role `tool`. Arguments: digits, operations, chat, max_calls, shots.
"""

import random
from typing import Any

from marlaas_envs.evaluator import CalculatorError, calculate
from marlaas_envs.protocol import Action, Done, Env, EnvFamily, EnvLookupError, Item, Observation, Source
from marlaas_envs.sources import Generated
from marlaas_envs.tool_text import Call, find_calls
from marlaas_envs.verify import number

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Calculates an expression of numbers with + - * / // % ** and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "for example 23*47+5"}},
                "required": ["expression"],
            },
        },
    },
)
TEXT_STOP = ("</calc>", "\n")
_SHOT_SEED = 99
_INSTRUCTION = "Use the calculator, then answer with the number only."


class CalculatorFamily:
    """Products and sums too large to do in one's head."""

    prompt_once = True

    def dataset(
        self, split: str, seed: int, digits: int = 2, operations: int = 1, chat: bool = False, shots: int = 2
    ) -> Source:
        """Returns expressions of `operations` + 1 numbers of up to `digits` digits."""
        for name, value, most in (("digits", digits, 6), ("operations", operations, 5), ("shots", shots, 8)):
            if not isinstance(value, int) or not (name == "shots" or value >= 1) or not 0 <= value <= most:
                raise EnvLookupError(f"env_args.{name}={value!r}: must be a whole number, at most {most}")

        def question(rng: random.Random) -> tuple[str, str]:
            text = str(rng.randint(11, 10**digits + 1))
            for _ in range(operations):
                text += f"{rng.choice('*+-')}{rng.randint(11, 10**digits + 1)}"
            return text, calculate(text)

        rng = random.Random(_SHOT_SEED)
        solved = (question(rng) for _ in range(shots))
        head = "".join(f"Q: {text}\nA: <calc>{text}</calc><tool>{answer}</tool>{answer}\n" for text, answer in solved)

        def make(rng: random.Random) -> dict[str, Any]:
            text, answer = question(rng)
            return {"prompt": f"What is {text}? {_INSTRUCTION}" if chat else f"{head}Q: {text}\nA:", "answer": answer}

        return Generated(f"calculator/{digits}/{operations}", split, seed, make, by_hash=True)

    def make(self, chat: bool = False, max_calls: int = 3) -> Env:
        """Returns an environment that answers at most `max_calls` calls."""
        return CalculatorEnv(chat, max_calls)


class CalculatorEnv:
    """Reward 1 for the right number in the last turn, however many calls it took; 0 once the calls are used up."""

    def __init__(self, chat: bool, max_calls: int):
        self.reply_roles = ("tool",) if chat else ()
        self._chat = chat
        self._max_calls = max_calls
        self._item: Item = {}
        self._calls = 0
        self._errors = 0

    async def reset(self, item: Item, seed: int) -> Observation:
        """Returns the question."""
        self._item = item
        if self._chat:
            return Observation(messages=({"role": "user", "content": item["prompt"]},), tools=TOOLS)
        return Observation(text=item["prompt"], stop=TEXT_STOP)

    async def step(self, action: Action) -> Observation | Done:
        """Returns the results of the turn's calls, or the reward of its answer."""
        calls = find_calls(action.text) if action.stopped else []
        if not calls:
            verdict = number(action.text, self._item["answer"])
            return self._done(verdict.reward if action.stopped else 0.0, verdict.seen)
        self._calls += len(calls)
        if self._calls > self._max_calls:
            return self._done(0.0, f"more than {self._max_calls} calls")
        results = [self._result(call) for call in calls]
        if self._chat:
            messages = tuple({"role": "tool", "name": "calculator", "content": result} for result in results)
            return Observation(messages=messages, tools=TOOLS)
        return Observation(text="".join(f"<tool>{result}</tool>" for result in results), stop=TEXT_STOP)

    def _result(self, call: Call) -> str:
        try:
            if call.error:
                raise CalculatorError(call.error)
            if call.name != "calculator":
                raise CalculatorError(f"there is no tool {call.name[:40]!r}, only calculator")
            expression = call.arguments.get("expression")
            if not isinstance(expression, str):
                raise CalculatorError("`expression` must be a string")
            return calculate(expression)
        except CalculatorError as error:
            self._errors += 1
            return f"error: {error}"

    def _done(self, reward: float, note: str) -> Done:
        return Done(reward, {"calls": float(self._calls), "call_errors": float(self._errors)}, note)


def family(variant: str) -> EnvFamily:
    """Returns the family; there are no variants."""
    if variant:
        raise EnvLookupError(
            f"env='calculator:{variant}': there are no variants; use env_args digits, operations, chat, max_calls"
        )
    return CalculatorFamily()
