"""Verifiers against the table in docs/environments.md (H29)."""

from fractions import Fraction

import pytest

from marlaas_envs.verify import exact_line, last_number, number, number_after_hashes, parse_number

# completion -> rewards of exact_line, number, number_after_hashes, last_number for the answer 42
TABLE = {
    "42": (1, 1, 0, 1),
    " 42\n": (1, 1, 0, 1),
    "42.": (0, 1, 0, 1),
    "42.0": (0, 1, 0, 1),
    "42 apples": (0, 0, 0, 1),
    "41 42": (0, 0, 0, 1),
    "42 41": (0, 0, 0, 0),
    "<answer>42</answer>": (0, 1, 0, 1),
    "<answer>42": (0, 0, 0, 1),
    "<answer>41</answer><answer>42</answer>": (0, 1, 0, 1),
    "<answer>42</answer><answer>41</answer>": (0, 0, 0, 0),
    "6*7 = 42 #### 42": (0, 0, 1, 1),
    "#### $42": (0, 0, 1, 1),
    "#### 42 apples": (0, 0, 0, 1),
    "#### 41 #### 42": (0, 0, 1, 1),
    "": (0, 0, 0, 0),
    "Q: 40+2": (0, 0, 0, 0),
    " " * 10_000 + "42": (0, 0, 0, 1),
}


@pytest.mark.parametrize("completion", TABLE, ids=lambda c: repr(c)[:24])
def test_table_of_the_docs(completion):
    got = (
        exact_line(completion, "42", True).reward,
        number(completion, "42").reward,
        number_after_hashes(completion, "42").reward,
        last_number(completion, "42").reward,
    )
    assert got == TABLE[completion]


def test_docs_hold_the_same_table(pytestconfig):
    rows = {}
    for line in (pytestconfig.rootpath / "docs/environments.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and set("".join(cells[1:])) <= {"0", "1"}:
            rows[cells[0]] = tuple(int(c) for c in cells[1:])
    in_words = {"": "empty, or none", "Q: 40+2": "the prompt `Q: 40+2` again", " " * 10_000 + "42": "10,000 blanks, then `42`"}
    assert rows == {in_words.get(text, f"`{text}`".replace("\n", "\\n")): rewards for text, rewards in TABLE.items()}


@pytest.mark.parametrize("verifier", [number, number_after_hashes, last_number])
def test_nothing_counts_as_wrong(verifier):
    assert verifier(None, "42").reward == 0.0
    assert exact_line(None, "42", True).reward == 0.0


def test_a_turn_that_was_cut_off_does_not_count_and_the_note_says_what_was_seen():
    verdict = exact_line(" Paris", "Paris", stopped=False)
    assert verdict.reward == 0.0 and verdict.seen == "Paris"
    assert exact_line(" paris", "Paris", True).reward == 0.0
    assert exact_line(" Paris\nmore", "Paris", True).reward == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,000", 1000), ("1,000.50", Fraction(2001, 2)), ("-3", -3), ("$5", 5), ("-$5", -5), (".5", Fraction(1, 2)),
        ("50%", 50),
        ("1,00", None), ("", None), (".", None), ("-", None), ("1e5", None), ("0x10", None), ("4 2", None), ("9" * 200, None),
    ],
)  # fmt: skip
def test_parse_number(text, value):
    assert parse_number(text) == value
