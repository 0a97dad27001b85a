"""Verifiers: what a completion must be to count, and what was compared. docs/environments.md holds the table of rules.

Blanks around an answer are free up to a limit, so that neither a trailing newline costs the reward nor padding comes for free.
"""

import dataclasses
import re
from fractions import Fraction

MAX_BLANKS = 16  # before and after an answer together
_NUMBER = re.compile(r"[-+]?\$?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A reward in [0, 1] and what the verifier saw."""

    reward: float
    seen: str


def trimmed(text: str) -> str | None:
    """Returns `text` without the blanks around it, or None where they are more than allowed."""
    short = text.strip()
    return short if len(text) - len(short) <= MAX_BLANKS else None


def exact_line(text: str | None, answer: str, stopped: bool) -> Verdict:
    """The first line must be the answer, letter by letter, and the policy must have ended its turn."""
    short = trimmed((text or "").split("\n")[0])
    return _verdict(stopped and short == answer, short)


def number(text: str | None, answer: str | int | float) -> Verdict:
    """The whole text, or the last <answer>...</answer> of a text with such tags, must be the number."""
    whole = text or ""
    if "<answer>" in whole or "</answer>" in whole:
        pairs = _ANSWER.findall(whole)
        complete = whole.count("<answer>") == whole.count("</answer>") == len(pairs)
        whole = pairs[-1] if complete else ""
    return _same_number(trimmed(whole), answer)


def number_after_hashes(text: str | None, answer: str | int | float) -> Verdict:
    """What follows the last `####` to the end of its line must be the number (GSM8K's own form)."""
    _, mark, rest = (text or "").rpartition("####")
    return _same_number(trimmed(rest.lstrip(" ").split("\n")[0]) if mark else None, answer)


def last_number(text: str | None, answer: str | int | float) -> Verdict:
    """The last number anywhere in the text must be the answer: lenient, for models that follow no format."""
    found = re.findall(r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", text or "")
    return _same_number(found[-1] if found else None, answer)


def parse_number(text: str) -> Fraction | None:
    """Returns the number that `text` is, or None. Allowed: sign, dollar, thousands commas, decimals, one full stop, percent."""
    text = text.removesuffix(".").removesuffix("%")
    match = _NUMBER.fullmatch(text)
    if match is None or (match[1] is None and match[3] is None) or len(text) > 100:
        return None
    return Fraction(text.replace(",", "").replace("$", ""))


def _same_number(short: str | None, answer: str | int | float) -> Verdict:
    wanted = parse_number(str(answer).strip())
    got = parse_number(short) if short else None
    return _verdict(wanted is not None and got == wanted, short)


def _verdict(right: bool, seen: str | None) -> Verdict:
    return Verdict(1.0 if right else 0.0, (seen or "")[:200])
