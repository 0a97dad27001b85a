"""Regular expressions that other people wrote, matched under a time limit: some need years for forty letters.

The third-party `regex` looks at the clock while it matches, and other threads run meanwhile; `re` does neither.
"""

import time
from collections.abc import Iterable
from typing import Any

import regex

from marlaas_jax.errors import cut

TIMEOUT_S = 1.0  # of one call; `regex` counts the seconds of the process's cores, which is never longer on a free machine
MAX_CHARACTERS = 10_000  # of a pattern


class PatternFault(ValueError):
    """The pattern cannot be used, or took too long; the text says which, in a few words."""


def check(pattern: str) -> int:
    """Returns the number of the pattern's groups. Raises PatternFault."""
    if len(pattern) > MAX_CHARACTERS:
        raise PatternFault(f"a regular expression has at most {MAX_CHARACTERS} characters")
    try:
        return regex.compile(pattern).groups
    except RecursionError:
        raise PatternFault("not a regular expression (nested too deeply)") from None
    except (regex.error, ValueError, ArithmeticError) as error:
        raise PatternFault(f"not a regular expression ({cut(str(error))})") from None


def search(pattern: str, text: str) -> Any:
    """Returns the first match in `text`, or None. The pattern is one that `check` let through. Raises PatternFault."""
    try:
        return regex.search(pattern, text, timeout=TIMEOUT_S)
    except TimeoutError:
        raise _too_slow() from None


def matching(pattern: str, texts: Iterable[str]) -> set[str]:
    """Returns the texts that the pattern matches in full; all share one time limit. Raises PatternFault."""
    check(pattern)
    end = time.monotonic() + TIMEOUT_S
    try:
        return {text for text in texts if regex.fullmatch(pattern, text, timeout=max(1e-3, end - time.monotonic()))}
    except TimeoutError:
        raise _too_slow() from None


def _too_slow() -> PatternFault:
    return PatternFault(f"matching took over {TIMEOUT_S:g} s; write it without nested repetitions such as (a+)+")
