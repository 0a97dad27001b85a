"""The character tasks: deterministic items, a split that holds, answers checked by a second definition of each task."""

import itertools

import pytest

from marlaas_envs import char_tasks

NUM = 200


def _count_up(text: str) -> str:
    return "".join("abcdefghijklmnopqrstuvwxyza"["abcdefghijklmnopqrstuvwxyz".find(c) + 1] for c in text)


# A second way to each answer, from the prompt's text alone.
BY_HAND = {
    "upper": lambda x: "".join(chr(ord(c) - 32) for c in x),
    "lower": lambda x: "".join(chr(ord(c) + 32) for c in x),
    "swap": lambda x: "".join(chr(ord(c) ^ 32) for c in x),
    "double": lambda x: "".join(itertools.chain(x, x)),
    "triple": lambda x: "".join(itertools.chain(x, x, x)),
    "rev": lambda x: "".join(x[-1 - i] for i in range(len(x))),
    "sort": lambda x: "".join(d for d in "0123456789" if d in x),
    "first": lambda x: x.split()[0],
    "second": lambda x: x.split()[1],
    "last": lambda x: x.split()[2],
    "ends": lambda x: x[:1] + x[-1:],
    "join": lambda x: x.replace(" ", ""),
    "next": _count_up,
    "min": lambda x: next(d for d in "0123456789" if d in x),
    "max": lambda x: next(d for d in "9876543210" if d in x),
    "calc": lambda x: str(sum(int(x.split("*")[0]) for _ in range(int(x.split("*")[1])))),
}


@pytest.mark.parametrize("task", char_tasks.TASKS)
def test_items_are_right_and_slips_are_wrong(task):
    for index in range(NUM):
        item = char_tasks.item(task, index)
        assert item.prompt.startswith(f"{task} ") and item.prompt.endswith("=")
        assert item.answer == BY_HAND[task](item.prompt[len(task) + 1 : -1])
        assert item.slip != item.answer and len(item.slip) == len(item.call or item.answer)
        assert char_tasks.reward(item, item.answer) == 1.0
        assert char_tasks.reward(item, item.slip) == 0.0
        assert len(item.answer) < char_tasks.MAX_ANSWER_TOKENS


@pytest.mark.parametrize("task", char_tasks.TASKS)
def test_items_repeat_and_splits_do_not_meet(task):
    train = [char_tasks.item(task, i) for i in range(NUM)]
    held_out = {char_tasks.item(task, i, "eval").prompt for i in range(NUM)}
    assert train == [char_tasks.item(task, i) for i in range(NUM)]
    assert not held_out & {item.prompt for item in train}
    assert len({item.prompt for item in train}) > NUM / 2
    assert char_tasks.item(task, 10**12).task == task


def test_an_item_is_what_it_was():
    """Items do not depend on the machine or the Python version: shipped scores and old runs name these."""
    assert char_tasks.item("upper", 0).prompt == "upper qfw="
    assert char_tasks.item("calc", 1, "eval").prompt == "calc 23*90="


def test_the_calculator_answers_calls_and_nothing_else():
    item = char_tasks.item("calc", 3)
    assert char_tasks.calculate(item.call) == f"<tool>{item.answer}</tool>"
    assert char_tasks.calculate("<calc>7-12</calc>") == "<tool>-5</tool>"
    for text in ("1081", "<calc>1*</calc>", "<calc>1*2*3</calc>", "x<calc>1*2</calc>", "<calc>9999999*1</calc>", ""):
        assert char_tasks.calculate(text) is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("nothing", 0), "task='nothing': not a character task; allowed: upper"),
        (("upper", -1), "index=-1: must be 0 or more"),
        (("upper", 0, "test"), "split='test': allowed: train, eval"),
    ],
)
def test_wrong_arguments_are_named(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        char_tasks.item(*arguments)
