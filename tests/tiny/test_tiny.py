"""The shipped small model and its maker."""

import hashlib
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marlaas_envs import char_tasks
from marlaas_jax.model import transformer
from marlaas_jax.model.attention import causal
from marlaas_jax.model.load import load
from marlaas_jax.text.tokenizer import Tokenizer
from marlaas_jax.tiny import folder, train
from marlaas_jax.tiny.__main__ import SHIPPED, differences
from marlaas_jax.tiny.demonstrator import demonstrate, packed_batches


@pytest.fixture(scope="module")
def shipped():
    return load(SHIPPED)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(SHIPPED)


def _record() -> dict:
    return json.loads((SHIPPED / "scores.json").read_text())


def test_the_shipped_file_is_the_recorded_one(shipped):
    weights = (SHIPPED / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == _record()["sha256"]
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 3e6
    assert shipped[0] == folder.CONFIG
    assert 0.7e6 < sum(x.size for x in jax.tree.leaves(shipped[1])) < 1.1e6
    assert _record()["cpu_s"] <= 15 * 60


def test_rl_has_something_to_lift():
    record = _record()
    sampled = record["sampled"]
    assert set(sampled) == set(char_tasks.TASKS) and len(sampled) >= 10
    assert 0.2 <= np.mean(list(sampled.values())) <= 0.45
    assert min(sampled.values()) >= 0.1 and max(sampled.values()) <= 0.6


def test_the_shipped_weights_have_the_recorded_scores(shipped):
    scores = train.score(shipped[1], num_items=64)
    record = _record()
    for task, score in scores.items():
        assert score.sampled == pytest.approx(record["sampled"][task], abs=0.08)
    assert np.mean([s.sampled for s in scores.values()]) == pytest.approx(np.mean(list(record["sampled"].values())), abs=0.02)


@pytest.mark.slow
def test_a_score_is_what_sampling_gives(shipped, tokenizer):
    """The expected reward from one forward pass against rewards of sampled answers, drawn token by token."""
    config, params = shipped
    items = [char_tasks.item("ends", i, "eval") for i in range(256)]
    prompts = [tokenizer.encode_prompt(item.prompt) for item in items]
    tokens = np.zeros((len(items), 24), np.int32)
    length = np.array([len(prompt) for prompt in prompts])
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt

    @jax.jit
    def draw(tokens, length, key):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = transformer.forward(config, params, tokens, positions, causal(length))
        last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
        return jax.random.categorical(key, transformer.unembed(params, last))

    answers = [[] for _ in items]
    for step in range(5):
        drawn = np.asarray(draw(tokens, length, jax.random.key(step)))
        for row, token in enumerate(drawn):
            tokens[row, length[row]] = token
            answers[row].append(int(token))
        length = length + 1
    texts = [answer[: answer.index(folder.EOS)] if folder.EOS in answer else None for answer in answers]
    rewards = [a is not None and char_tasks.reward(i, tokenizer.decode(a)) for a, i in zip(texts, items, strict=True)]
    score = train.score(params)["ends"].sampled
    assert np.mean(rewards) == pytest.approx(score, abs=4 * (score * (1 - score) / len(items)) ** 0.5)


def test_the_tokenizer_is_an_ordinary_one(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.end_ids, tokenizer.pad_id) == (128, 1, (2,), 0)
    assert tokenizer.encode_prompt("upper abc=") == tokenizer.encode_prompt("<bos>upper abc=")
    assert tokenizer.decode(tokenizer.encode_prompt("upper abc=")) == "upper abc="
    call = tokenizer.encode("<calc>23*47</calc>")
    assert len(call) == 7 and tokenizer.decode([*call, folder.EOS]) == "<calc>23*47</calc>"
    assert tokenizer.encode("é") == tokenizer.encode("<unk>", allow_special=True)
    everything = "".join(chr(c) for c in range(32, 127)) + "\n"
    assert tokenizer.decode(tokenizer.encode(everything)) == everything
    for task, index in itertools.product(char_tasks.TASKS, range(20)):
        item = char_tasks.item(task, index)
        assert len(tokenizer.encode(item.answer)) < char_tasks.MAX_ANSWER_TOKENS
        assert tokenizer.special_tokens["unk_token"] not in tokenizer.decode(tokenizer.encode(item.prompt), False)


def test_a_conversation_is_the_text_that_the_model_knows(tokenizer):
    tokenizer.check_followups(("user", "tool"))
    item = char_tasks.item("calc", 0)
    user, reply = {"role": "user", "content": item.prompt}, {"role": "tool", "content": item.answer}
    turn = [*tokenizer.encode(item.call), folder.EOS]
    whole = tokenizer.render([user, {"role": "assistant", "content": item.call}, reply])
    assert tokenizer.render([user]) == tokenizer.encode_prompt(item.prompt)
    assert tokenizer.render([user]) + turn + tokenizer.render_followup([reply]) == whole
    assert tokenizer.render_followup([reply]) == tokenizer.encode(char_tasks.calculate(item.call))


def test_the_demonstrator_is_right_as_often_as_said():
    import random

    rng = random.Random(0)
    for task in ("upper", "min", "rev", "calc"):
        right = 0
        for i in range(2000):
            item = char_tasks.item(task, i % 100)
            spans = demonstrate(item, 0.36, rng)
            right += spans[-1][0] == item.answer + "<eos>" and (item.call is None or spans[1][0] == item.call + "<eos>")
        assert right / 2000 == pytest.approx(0.36, abs=0.04)


def test_packing_keeps_demonstrations_apart():
    """The loss of a packed batch equals that of the same demonstrations each in a row of its own."""
    params = transformer.init_params(folder.CONFIG, 3)
    batch = next(packed_batches(folder.build_tokenizer(), 3, 64, 1, seed=5))
    assert batch.is_imitated_BT.any() and (batch.segment_BT.max(1) >= 1).all()
    alone = [batch.segment_BT[row] == i for row in range(3) for i in range(batch.segment_BT[row].max() + 1)]
    rows = [row for row in range(3) for _ in range(batch.segment_BT[row].max() + 1)]
    tokens, length = np.zeros((len(rows), 64), np.int32), np.array([inside.sum() for inside in alone])
    imitated = np.zeros(tokens.shape, bool)
    for i, (row, inside) in enumerate(zip(rows, alone, strict=True)):
        tokens[i, : length[i]] = batch.tokens_BT[row][inside]
        imitated[i, : length[i]] = batch.is_imitated_BT[row][inside]
        assert tokens[i, 0] == folder.BOS and tokens[i, length[i] - 1] == folder.EOS

    @jax.jit
    def logprobs(tokens, length):
        hidden, _ = transformer.forward(
            folder.CONFIG, params, tokens, jnp.broadcast_to(jnp.arange(64), tokens.shape), causal(length)
        )
        return jax.nn.log_softmax(transformer.unembed(params, hidden))

    picked = np.take_along_axis(np.asarray(logprobs(tokens, length))[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    expected = -picked[imitated[:, 1:]].mean()
    loss = jax.jit(train.imitation_loss)(params, {k: jnp.asarray(v) for k, v in vars(batch).items()})
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_few_steps_learn_and_repeat(tmp_path):
    lines: list[str] = []
    first = train.train(0, lines.append, num_steps=4)
    again = train.train(0, lines.append, num_steps=4)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first, again))
    batch = {k: jnp.asarray(v) for k, v in vars(next(packed_batches(folder.build_tokenizer(), 8, 64, 1, seed=9))).items()}
    loss = jax.jit(train.imitation_loss)
    assert float(loss(first, batch)) < float(loss(transformer.init_params(folder.CONFIG, 0), batch)) - 0.2
    folder.write(tmp_path / "out", first)
    config, loaded = load(tmp_path / "out")
    assert config == folder.CONFIG
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first, loaded))
    assert Tokenizer.load(tmp_path / "out").end_ids == (folder.EOS,)
    assert all("step 4/4" in line for line in lines)


def test_differences_are_found():
    old = {"sampled": {"a": 0.3, "b": 0.4}, "greedy": {"a": 0.5, "b": 0.5}}
    assert differences(old, old) == []
    assert differences({"sampled": {"a": 0.36, "b": 0.36}, "greedy": {"a": 0.9, "b": 0.1}}, old) == [
        "a sampled: 0.36 against 0.3"
    ]
    assert len(differences({"sampled": {"b": 0.4}, "greedy": {"a": 0.7, "b": 0.5}}, old)) == 3


@pytest.mark.slow
def test_transformers_reads_the_folder_and_agrees(shipped, tokenizer):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    reference = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    text = "calc 23*47=<calc>23*47</calc><eos><tool>1081</tool>1081<eos> Aé\n~"
    ids = tokenizer.encode_prompt(text)
    assert reference(text)["input_ids"] == ids
    user = [{"role": "user", "content": "upper abc="}]
    assert reference.apply_chat_template(user, tokenize=False, add_generation_prompt=True) == tokenizer.render_text(user)
    config, params = shipped
    hidden, _ = transformer.forward(
        config, params, jnp.asarray([ids]), jnp.arange(len(ids))[None], causal(jnp.array([len(ids)]))
    )
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits.numpy()
    np.testing.assert_allclose(np.asarray(transformer.unembed(params, hidden)), logits, atol=2e-4)
