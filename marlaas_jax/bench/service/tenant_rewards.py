"""The file that tenants of the scripted day upload as their own reward functions. It imports nothing of this project.

`raises` and `hangs` work at first: a check of the environment before the job starts sees nothing wrong with them.
"""

import asyncio
import itertools
import random
import string
import threading
from collections.abc import Mapping
from typing import Any

SLOW_S = 0.15  # one answer of the slow reward
HEALTHY_CALLS = 24  # of the broken ones, before they break

_rng = random.Random(1)
_words = sorted({"".join(_rng.choices(string.ascii_lowercase, k=_rng.randint(3, 4))) for _ in range(800)})
_rng.shuffle(_words)
ITEMS = [{"prompt": f"upper {word}=", "answer": word.upper()} for word in _words]
_calls = itertools.count(1)


def fast(prompt: str, completion: str, item: Mapping[str, Any]) -> float:
    """Returns 1 for the right answer."""
    return float(completion == item["answer"])


async def slow(prompt: str, completion: str, item: Mapping[str, Any]) -> float:
    """Returns the same, later."""
    await asyncio.sleep(SLOW_S)
    return fast(prompt, completion, item)


def raises(prompt: str, completion: str, item: Mapping[str, Any]) -> float:
    """Returns the same a few times, then fails for good."""
    if next(_calls) > HEALTHY_CALLS:
        raise ValueError("the answers' database is gone")
    return fast(prompt, completion, item)


def hangs(prompt: str, completion: str, item: Mapping[str, Any]) -> float:
    """Returns the same a few times, then never again."""
    if next(_calls) > HEALTHY_CALLS:
        threading.Event().wait()
    return fast(prompt, completion, item)
