"""The built-in families: items, splits, turns and rewards."""

import asyncio
import json

import pytest

from marlaas_envs import registry
from marlaas_envs.char_tasks import TASKS as CHAR_TASKS
from marlaas_envs.evaluator import MAX_BITS, CalculatorError, calculate
from marlaas_envs.pools import CAPITALS, PAST_TENSE, SENTIMENT, WORDS
from marlaas_envs.protocol import UNLIMITED, Action, Done, EnvLookupError, Observation
from marlaas_envs.tool_text import find_calls
from marlaas_envs.words import TASKS as WORD_TASKS

NAMES = (
    [f"words:{task}" for task in WORD_TASKS] + [f"tiny:{task}" for task in CHAR_TASKS] + ["arithmetic", "calculator", "guess"]
)


def family_of(name):
    return registry.load(name)


def items(name, split, count=200, seed=0, **args):
    source = registry.dataset(family_of(name), name, split, seed, args)
    return [source[i] for i in range(min(count, len(source)))]


def play(name, item, *turns, **args):
    """Returns what the environment says to each turn; a turn is text, or an Action."""

    async def episode():
        env = registry.make(family_of(name), name, args)
        answers = [await env.reset(item, 0)]
        for turn in turns:
            answers.append(await env.step(turn if isinstance(turn, Action) else Action(turn)))
        return answers

    return asyncio.run(episode())


@pytest.mark.parametrize("name", NAMES)
def test_items_are_repeatable_json_and_train_and_eval_share_no_prompt(name):
    train, held_out = items(name, "train"), items(name, "eval")
    assert train == items(name, "train") and held_out == items(name, "eval", seed=7)
    assert json.loads(json.dumps(train)) == train
    if name == "guess":  # one prompt for all; the hidden numbers differ
        assert not {i["answer"] for i in train} & {i["answer"] for i in held_out}
    else:
        assert not {i["prompt"] for i in train} & {i["prompt"] for i in held_out}
    assert len(held_out) >= 20
    if len(registry.dataset(family_of(name), name, "train", 0, {})) == UNLIMITED:
        assert train != items(name, "train", seed=1)  # another job's seed, other items


def turns(name, item):
    """Returns the turns of a perfect episode and of a bad one."""
    answer = item["answer"]
    if name == "words:two_step":
        return [f" {answer}", f" {answer}"], [" nonsense", " nonsense"]
    if name == "tiny:calc":
        return [f"<calc>{item['prompt'][5:-1]}</calc>", answer], ["<calc>1*1</calc>", answer + "0"]
    if name == "calculator":
        return [f" <calc>{item['prompt'].rsplit('Q: ', 1)[1].splitlines()[0]}", f" {answer}"], [f" {answer}1"]
    return [answer if name.startswith("tiny:") else f" {answer}"], ["nonsense"]


@pytest.mark.parametrize("name", NAMES)
def test_right_answers_get_one_and_wrong_ones_nothing(name):
    for item in items(name, "train", 20):
        right, wrong = turns(name, item)
        *_, done = play(name, item, *right)
        assert isinstance(done, Done) and done.reward == 1.0
        *_, done = play(name, item, *wrong)
        assert isinstance(done, Done) and done.reward == 0.0
        *_, done = play(name, item, *right[:-1], Action(right[-1], "length"))
        assert isinstance(done, Done) and done.reward <= 0.5  # cut off


def test_pools_are_wide_and_clean():
    assert len(WORDS) == len(set(WORDS)) >= 300 and all(w.isascii() and w.islower() and len(w) < 9 for w in WORDS)
    assert len(PAST_TENSE) >= 120 and len(CAPITALS) >= 90 and len(SENTIMENT) >= 150
    assert len(set(SENTIMENT)) == len(SENTIMENT) and {label for _, label in SENTIMENT} == {"positive", "negative"}
    assert abs(sum(1 if label == "positive" else -1 for _, label in SENTIMENT)) <= 4
    assert not any(country in capital for country, capital in CAPITALS.items())


def test_words_of_train_and_eval_are_disjoint_too():
    def words(split):
        return {w for i in items("words:repeat", split, 2000) for w in i["answer"].split()}

    assert not words("train") & words("eval")


def test_words_prompt_has_two_shots_and_shots_can_be_chosen():
    (item,) = items("words:capital_city", "train", 1)
    assert item["prompt"].startswith(
        "Q: What is the capital of Italy?\nA: Rome\nQ: What is the capital of Japan?\nA: Tokyo\nQ: What is"
    )
    (item,) = items("words:first_letter", "train", 1, shots=0)
    assert item["prompt"].startswith("Q: first letter of") and item["prompt"].count("Q:") == 1
    with pytest.raises(EnvLookupError, match=r"env_args.shots=9: must be a whole number from 0 to 4"):
        items("words:repeat", "train", 1, shots=9)


def test_two_step_gives_half_for_each_turn_and_goes_on_at_the_newline():
    item = {"prompt": "Q: last word of a b\nA:", "answer": "b"}
    first, second, done = play("words:two_step", item, " a", " b")
    assert first.stop == second.stop == ("\n",) and second.text == "Q: repeat that\nA:"
    assert done.reward == 0.5 and done.metrics == {"first_turn": 0.0, "second_turn": 1.0}
    _, done = play("words:two_step", item, Action(" b and so on", "length"))
    assert done.reward == 0.0


def test_calculator_in_chat_form_with_json_calls():
    item = items("calculator", "train", 1, chat=True)[0]
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2*(3+4)"}}</tool_call>'
    first, second, done = play("calculator", item, call, item["answer"], chat=True)
    assert first.messages[0]["role"] == "user" and first.tools[0]["function"]["name"] == "calculator"
    assert second.messages == ({"role": "tool", "name": "calculator", "content": "14"},)
    assert done.reward == 1.0 and done.metrics == {"calls": 1.0, "call_errors": 0.0}
    bad = [
        "<tool_call>{not json</tool_call>",
        '{"name": "browser", "parameters": {}}',
        '{"name": "calculator", "parameters": {"expression": 5}}',
    ]
    *answers, done = play("calculator", item, *bad, call, chat=True)
    assert [a.messages[0]["content"][:6] for a in answers[1:]] == ["error:"] * 3
    assert done.reward == 0.0 and done.note == "more than 3 calls"


def test_calculator_in_text_form_shows_the_model_its_own_notation():
    item = items("calculator", "train", 1)[0]
    assert "<calc>" in item["prompt"] and "</tool>" in item["prompt"]
    first, second = play("calculator", item, " <calc>12*12")
    assert first.stop == ("</calc>", "\n") and second.text == "<tool>144</tool>"


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2+3*4", "14"), ("(2+3)*4", "20"), ("7/2", "3.5"), ("6/3", "2"), ("-7//2", "-4"), ("7%3", "1"), ("2**10", "1024"),
     ("2^3", "8"), ("1,000+1", "1001"), ("1/3", "0.333333333333"), (" 23*47 ", "1081"), ("--4", "4"), ("2**-1", "0.5")],
)  # fmt: skip
def test_evaluator(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "a+1", "__import__('os')", "'a'*9", "(1).real", "9**9**9", "2**99999", "1/0", "1e999", "[1]", "lambda: 1",
     "1 if 1 else 2",
     "(" * 150 + "1" + ")" * 20, "9" * 250, "(-8)**0.5", "True+1", "1<2", "10**256*10**256*10**256", "1e300*1e300",
     "2.5**1000000"],
)  # fmt: skip
def test_evaluator_refuses_what_is_no_small_arithmetic(expression):
    with pytest.raises(CalculatorError):
        calculate(expression)
    assert MAX_BITS < 10_000


def test_tool_calls_in_their_forms():
    assert find_calls("no call") == [] and find_calls('{"a": 1}') == []
    assert [c.arguments["expression"] for c in find_calls("<calc>1+1</calc> and <calc>2+2")] == ["1+1", "2+2"]
    both = '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call><tool_call>[]</tool_call>'
    a, b = find_calls(both)
    assert (a.name, a.arguments) == ("a", {"x": 1}) and b.error


def test_guess_is_answered_and_ends():
    item = {"prompt": "p\n", "answer": "7", "high": 20}
    answers = play("guess", item, "5", " 9.", "7")
    assert [a.text for a in answers[1:3]] == ["higher\nguess:", "lower\nguess:"] and answers[-1].reward == 1.0
    assert play("guess", item, "seven")[-1].reward == 0.0
    assert play("guess", item, "1", "2", max_guesses=2)[-1].reward == 0.0
    chat = play("guess", item, "5", chat=True)
    assert chat[0].messages and chat[1].messages == ({"role": "user", "content": "higher"},)


def test_gsm8k_reads_a_folder(tmp_path):
    row = {"question": "How many?", "answer": "2 + 2 = <<2+2=4>>4\u2028\n#### 1,004"}
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    (item,) = items("gsm8k", "train", 5, path=str(tmp_path))
    assert item["answer"] == "1,004" and item["prompt"].startswith("How many?\n")
    seen, done = play("gsm8k", item, "so #### 1004")
    assert seen.messages and done.reward == 1.0
    assert play("gsm8k", item, "so 1004", answer="last")[-1].reward == 1.0
    with pytest.raises(EnvLookupError, match=r"env_args.path='/none': must be a folder"):
        items("gsm8k", "train", 1, path="/none")
    (tmp_path / "test.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(EnvLookupError, match="line 1 is not an object with"):
        items("gsm8k", "eval", 1, path=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wrods:repeat", "no such environment; there are words, arithmetic"),
        ("words:repaet", "no such task; there are capital_city, first_letter"),
        ("tiny:x", "no such task; there are upper"),
        ("guess:x", "there are no variants"),
        ("none.py:f", "no such file"),
    ],
)
def test_unknown_names_list_what_exists(name, says):
    with pytest.raises(EnvLookupError, match=says):
        registry.load(name)


def test_unknown_arguments_list_what_is_allowed():
    with pytest.raises(
        EnvLookupError, match=r"env_args.digit=3: calculator does not know it; allowed: chat, digits, max_calls"
    ):
        registry.make(registry.load("calculator"), "calculator", {"digit": 3})


def test_reward_functions_classes_and_families_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        """
ITEMS = ["one", "two", {"prompt": "three", "answer": "3"}]
def reward(prompt, completion, item): return len(completion) / 10
async def later(prompt, completion, item): return 0.5
class Game:
    def __init__(self, size=3): self.size = size
    def reset(self, item, seed): return self.size
    def step(self, action): return None
class Family:
    prompt_once = False
    def dataset(self, split, seed, n=2): return [{"prompt": split}] * n
    def make(self, n=2): return n
"""
    )
    name = f"{path}:reward"
    train = registry.dataset(registry.load(name), name, "train", 0, {})
    assert [i["prompt"] for i in train] == ["one", "two"]
    env = registry.make(registry.load(name), name, {})
    assert env.reset(train[0], 0) == Observation(text="one") and env.step(Action("12345")) == Done(0.5)
    family = registry.load(f"{path}:Game")
    assert registry.make(family, "g", {"size": 9}).reset({}, 0) == 9
    family = registry.load(f"{path}:Family")
    assert not family.prompt_once and registry.make(family, "f", {"n": 4}) == 4
    assert list(registry.dataset(family, "f", "eval", 0, {"n": 1})) == [{"prompt": "eval"}]
    with pytest.raises(EnvLookupError, match="no such function; it has Family, Game, later, reward"):
        registry.load(f"{path}:other")
    env = registry.make(registry.load(f"{path}:later"), "l", {"chat": True})
    assert env.reset({"prompt": "p"}, 0) == Observation(messages=({"role": "user", "content": "p"},))
    assert asyncio.run(env.step(Action("x"))) == Done(0.5)


def test_a_file_may_import_its_neighbours_and_names_tell_their_pool(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / "neighbour_of_mine.py").write_text("def reward(p, c, i): return 3.0")
    (tmp_path / "mine.py").write_text("from neighbour_of_mine import reward")
    assert registry.make(registry.load(f"{tmp_path}/mine.py:reward"), "m", {}) is not None
    assert registry.pool_of("words:repeat") == registry.pool_of("words:last_word") == "words"
    assert registry.pool_of("a/b.py:f") == "a/b.py" and registry.pool_of("guess") == "guess"


def test_families_of_other_packages_are_found(tmp_path, monkeypatch):
    (tmp_path / "other_pkg.py").write_text(
        "def make_family(variant):\n    class F: prompt_once = True; name = variant\n    return F()\n"
    )
    info = tmp_path / "other_pkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-pkg\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[marlaas.envs]\nother = other_pkg:make_family\nbroken = other_pkg:nothing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.load("other:easy").name == "easy" and "other" in registry.names()
    with pytest.raises(EnvLookupError, match=r"env='broken': its package other_pkg:nothing fails"):
        registry.load("broken")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of its dependencies, when they are compiled
def test_reasoning_gym_scores_with_its_own_scorer():
    name = "reasoning_gym:chain_sum"
    train, held_out = items(name, "train", 5), items(name, "eval", 5)
    assert not {i["prompt"] for i in train} & {i["prompt"] for i in held_out}
    for answer in (train[0]["answer"], f"<answer>{train[0]['answer']}</answer>"):
        assert play(name, train[0], answer)[-1].reward == 1.0
    assert play(name, train[0], "no")[-1].reward < 0.5
    with pytest.raises(EnvLookupError, match="no such data set; there are ab, acre"):
        registry.load("reasoning_gym:nope")
    with pytest.raises(EnvLookupError, match="min_wrong"):
        items(name, "train", 1, min_wrong=2)
