"""Items by ticket from files and generators: order, splits, mapping, and one sentence for each thing that can be wrong."""

import itertools
import json
import subprocess
import sys
import threading
import time

import pytest

from marlaas_envs import registry
from marlaas_jax.config import DataConfig
from marlaas_jax.data import dataset, mapping
from marlaas_jax.data.sources import open_source
from marlaas_jax.errors import CorruptFile, InvalidConfig, InvalidRequest, NotFound, UserError


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "items.jsonl"
    rows = [{"prompt": f"p{i}", "answer": f"so #### {i}", "n": i} for i in range(50)]
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def opened(config, seed=0):
    return dataset.from_config(config, seed)


def test_each_epoch_is_a_permutation_and_any_ticket_can_be_asked_for_first(lines):
    config = DataConfig(source=f"jsonl:{lines}")
    data = opened(config, seed=3)
    assert (data.num_train, data.num_eval) == (45, 5)
    tickets = [data.item("train", t)["n"] for t in range(90)]
    assert sorted(tickets[:45]) == sorted(tickets[45:]) == list(range(45))
    assert tickets[:45] != tickets[45:] and tickets[:45] != list(range(45))
    again = opened(config, seed=3)
    assert [again.item("train", t)["n"] for t in (89, 7, 44)] == [tickets[t] for t in (89, 7, 44)]
    assert [opened(config, seed=4).item("train", t)["n"] for t in range(45)] != tickets[:45]
    assert data.item("train", 10**6)["n"] in range(45)


def test_held_out_items_are_the_last_tenth_in_one_order_for_all_seeds(lines):
    one, two = (opened(DataConfig(source=f"jsonl:{lines}"), seed) for seed in (1, 2))
    held_out = [one.item("eval", i)["n"] for i in range(5)]
    assert sorted(held_out) == [45, 46, 47, 48, 49] and held_out == [two.item("eval", i)["n"] for i in range(5)]
    with pytest.raises(InvalidRequest, match="index=5: there are 5 held-out items"):
        one.item("eval", 5)
    with pytest.raises(InvalidRequest, match="split='test'"):
        one.item("test", 0)


def test_eval_source_is_used_whole(lines, tmp_path):
    other = tmp_path / "eval.json"
    other.write_text(json.dumps([{"prompt": "e", "answer": 1}]))
    data = opened(DataConfig(source=f"jsonl:{lines}", eval_source=f"json:{other}"))
    assert (data.num_train, data.num_eval) == (50, 1) and data.item("eval", 0) == {"prompt": "e", "answer": 1}


def test_mapping_of_prompt_and_answer(lines):
    config = DataConfig(
        source=f"jsonl:{lines}", answer_regex=r"#### (.*)", prompt_field="prompt", prompt_template="Q: {prompt} [{n}]\nA:"
    )
    item = opened(config).item("train", 0)
    assert item["answer"] == str(item["n"]) and item["prompt"] == f"Q: p{item['n']} [{item['n']}]\nA:"
    assert mapping.to_item({"q": "x"}, DataConfig(source="json:x", prompt_field="q", answer_field=None)) == {
        "q": "x",
        "prompt": "x",
    }
    chat = [{"role": "user", "content": "hi"}]
    assert mapping.to_item({"prompt": chat, "answer": 3}, DataConfig(source="json:x")) == {"prompt": chat, "answer": 3}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_field": "question"}, r"data.prompt_field='question': the item has no such field; it has prompt, answer, n"),
        ({"answer_field": "solution"}, r"data.answer_field='solution': the item has no such field"),
        ({"prompt_field": "n"}, r"must be a string or a list of messages, got int"),
        ({"answer_regex": "==(.*)"}, r"nothing in 'so #### 0' matches"),
        ({"answer_regex": "#### .*"}, r"needs a group"),
        ({"answer_regex": "(("}, r"not a regular expression"),
        ({"prompt_template": "{prompt} {other}"}, r"the item has no field 'other'"),
        ({"prompt_template": "{prompt"}, r"not a template"),
        ({"prompt_template": "{prompt:>999999999}"}, r"not a template.*not 'prompt'"),
        ({"prompt_template": "{prompt.x}"}, r"not a template.*not 'prompt.x'"),
        ({"prompt_template": "{answer[x]}"}, r"not a template"),
        ({"answer_regex": "(" * 5000}, r"answer_regex='\(+\.\.\.\(+': not a regular expression \(nested too deeply"),
        ({"answer_regex": "(a{99999999999999999999})"}, r"not a regular expression"),
        ({"source": "jsonl:" + "p/" * 1900 + "x"}, r"data.source='jsonl:p.*\.\.\..*x': no such file"),
        ({"source": "csv:x"}, r"must read jsonl:PATH, json:PATH, parquet:PATH"),
        ({"source": "jsonl:/none/x"}, r"data.source='jsonl:/none/x': no such file"),
    ],
)
def test_wrong_settings_are_one_sentence(lines, changes, says):
    with pytest.raises(UserError, match=says) as caught:
        opened(DataConfig(**{"source": f"jsonl:{lines}", **changes}), seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("jsonl", "", "it holds no items"),
        ("jsonl", "\n\n", "it holds no items"),
        ("json", "[]", "it holds no items"),
        ("json", "{}", "must hold a list of objects, got dict"),
        ("json", "[", "not readable as JSON"),
        ("jsonl", '{"prompt": "a", "answer": 1}', "it has 1 item; at least 2 are needed"),
        ("jsonl", "3\n4\n", "line 1 must be an object, got int"),
        ("json", "[1, 2]", "item 0 must be an object, got int"),
        ("jsonl", "{oops\n" * 2, "line 1 is not JSON"),
        ("jsonl", "[" * 100_000 + "\n" + "1", "line 1 is not JSON"),
        ("json", "[" * 100_000, "not readable as JSON"),
    ],
)
def test_broken_files_are_one_sentence(tmp_path, kind, text, says):
    path = tmp_path / "f"
    path.write_text(text)
    with pytest.raises(CorruptFile, match=says):
        opened(DataConfig(source=f"{kind}:{path}"))


def test_a_bad_line_is_named_when_it_is_reached(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n' * 30 + "\n{oops\n" + '{"prompt": "a", "answer": 1}\n' * 9)
    data = opened(DataConfig(source=f"jsonl:{path}"))
    with pytest.raises(CorruptFile, match="line 32 is not JSON"):
        for ticket in range(data.num_train):
            data.item("train", ticket)


def test_a_regular_expression_that_never_ends_costs_its_own_items_and_nobody_else_any_time(tmp_path):
    path = tmp_path / "f.jsonl"
    answers = ["aab"] * 8 + ["a" * 60 + "d", "aab"]
    path.write_text("".join(json.dumps({"prompt": "p", "answer": answer}) + "\n" for answer in answers))
    data = opened(DataConfig(source=f"jsonl:{path}", answer_regex="^((?:a|aa|aaa)*)[bc]$"))
    ticks: list[float] = []
    done = threading.Event()

    def tick():
        while not done.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    found = []
    for ticket in range(data.num_train):
        try:
            found.append(data.item("train", ticket)["answer"])
        except CorruptFile as error:
            found.append(str(error))
    done.set()
    thread.join()
    slow = [text for text in found if text != "aa"]
    assert len(slow) == 1 and "data.answer_regex='^((?:a|aa|aaa)*)[bc]$': matching took over 1 s" in slow[0]
    assert max(b - a for a, b in itertools.pairwise(ticks)) < 0.5


def test_a_file_that_changes_under_a_job_is_told(lines):
    data = opened(DataConfig(source=f"jsonl:{lines}"))
    lines.write_text(lines.read_text() + '{"prompt": "new", "answer": "#### 1"}')
    with pytest.raises(CorruptFile, match="it was changed while a job reads it"):
        data.item("train", 0)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "f.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InvalidConfig, match="pip install pyarrow"):
        open_source(f"parquet:{path}")


def test_parquet_where_pyarrow_is_there(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "f.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"], "answer": [1, 2, 3]}), path)
    data = opened(DataConfig(source=f"parquet:{path}"))
    assert {data.item("train", t)["prompt"] for t in range(2)} == {"a", "b"}
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(CorruptFile, match="not readable as parquet"):
        opened(DataConfig(source=f"parquet:{path}"))


def test_byte_offsets_read_unicode_and_long_lines(tmp_path):
    path = tmp_path / "f.jsonl"
    rows = [{"prompt": "\u00e9\u4e16" * (1 + 5000 * (i % 2)), "answer": str(i)} for i in range(6)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    source = open_source(f"jsonl:{path}")
    assert [source[i] for i in (5, 0, 3)] == [rows[i] for i in (5, 0, 3)]


@pytest.mark.parametrize(("name", "finite"), [("words:capital_city", True), ("words:last_word", False), ("tiny:rev", False)])
def test_environment_items_by_ticket(name, finite):
    family = registry.load(name)
    train, held_out = (registry.dataset(family, name, split, 5, {}) for split in ("train", "eval"))
    data = dataset.from_sources(train, held_out, seed=5)
    assert (data.num_train > 0) == finite == (data.num_eval > 0)
    prompts = [data.item("train", t)["prompt"] for t in range(60)]
    assert prompts == [data.item("train", t)["prompt"] for t in range(60)] and len(set(prompts)) >= 55
    assert not set(prompts) & {data.item("eval", i)["prompt"] for i in range(20)}
    if finite:
        assert len({data.item("train", t)["prompt"] for t in range(data.num_train)}) == data.num_train


def test_missing_file_of_eval_source(lines):
    with pytest.raises(NotFound, match="no such file"):
        opened(DataConfig(source=f"jsonl:{lines}", eval_source="jsonl:/none"))


def test_without_jax_the_order_is_the_same_and_a_users_file_may_still_import_it():
    """The data worker imports grain without JAX; here it was imported with it."""
    import jax  # noqa: F401

    code = """
import json, sys
from marlaas_jax.data import dataset
assert "jax" not in sys.modules
print(json.dumps([dataset.MapDataset.range(50).shuffle(seed=7)[i] for i in range(100)]))
import jax.numpy
assert jax.numpy.ones(2).sum() == 2
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and not done.stderr, done.stderr
    import grain

    assert json.loads(done.stdout) == [grain.MapDataset.range(50).shuffle(seed=7)[i] for i in range(100)]
