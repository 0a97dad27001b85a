"""guess: find a hidden number by asking; each turn is one guess, answered by `higher` or `lower`.

Arguments: high (the number lies in 1..high), max_guesses, chat. Reward: 1 for finding it; metric `guesses`. The seed draws
nothing here: the hidden number is the item's, so that a group of episodes plays the same game.
"""

import random
from typing import Any

from marlaas_envs.protocol import Action, Done, Env, EnvFamily, EnvLookupError, Item, Observation, Source
from marlaas_envs.sources import Generated, split_pool
from marlaas_envs.verify import parse_number, trimmed


class Guess:
    """Hidden numbers of train and eval are disjoint; the prompt is the same for all."""

    prompt_once = True

    def dataset(self, split: str, seed: int, high: int = 20) -> Source:
        """Returns games."""
        if not isinstance(high, int) or not 4 <= high <= 1_000_000:
            raise EnvLookupError(f"env_args.high={high!r}: must be a whole number from 4 to 1000000")
        secrets = split_pool(range(1, high + 1), split)

        def make(rng: random.Random) -> dict[str, Any]:
            prompt = f"Find the hidden number from 1 to {high}. I say higher or lower.\n"
            return {"prompt": prompt, "answer": str(rng.choice(secrets)), "high": high}

        return Generated(f"guess/{high}", split, seed, make)

    def make(self, chat: bool = False, max_guesses: int = 6) -> Env:
        """Returns a game of at most `max_guesses` guesses."""
        return GuessEnv(chat, max_guesses)


class GuessEnv:
    """One game. A turn that is no number ends it."""

    def __init__(self, chat: bool, max_guesses: int):
        self.reply_roles = ("user",) if chat else ()
        self._chat = chat
        self._max_guesses = max_guesses
        self._secret = 0
        self._guesses = 0

    async def reset(self, item: Item, seed: int) -> Observation:
        """Returns the rules."""
        self._secret = int(item["answer"])
        if self._chat:
            return Observation(messages=({"role": "user", "content": item["prompt"] + "Reply with one number per turn."},))
        return Observation(text=item["prompt"] + "guess:", stop=("\n",))

    async def step(self, action: Action) -> Observation | Done:
        """Returns the hint, or the reward."""
        self._guesses += 1
        value = parse_number(trimmed(action.text) or "") if action.stopped else None
        if value is None or value == self._secret or self._guesses >= self._max_guesses:
            return Done(float(value == self._secret), {"guesses": float(self._guesses)}, action.text[:200])
        hint = "higher" if value < self._secret else "lower"
        if self._chat:
            return Observation(messages=({"role": "user", "content": hint},))
        return Observation(text=f"{hint}\nguess:", stop=("\n",))


def family(variant: str) -> EnvFamily:
    """Returns the family; there are no variants."""
    if variant:
        raise EnvLookupError(f"env='guess:{variant}': there are no variants; use env_args high, max_guesses, chat")
    return Guess()
