"""Chat templates against transformers' renderer (frozen), and what follows a sampled turn."""

import json

import pytest

from marlaas_jax.errors import InvalidRequest
from marlaas_jax.text.chat import ChatTemplate
from marlaas_jax.text.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "Question one"}]
MORE = [{"role": "user", "content": "And then?"}]


def test_renderings_equal_transformers(frozen):
    templates = {name: ChatTemplate(source, SPECIAL, ()) for name, source in frozen["templates"].items()}
    refused = 0
    for case in frozen["renderings"]:
        arguments = (
            frozen["conversations"][case["conversation"]],
            frozen["tools"] if case["tools"] else (),
            case["generation"],
        )
        template = templates[case["template"]]
        if case["text"] is None:
            refused += 1
            with pytest.raises(InvalidRequest):
                template.render(*arguments)
        else:
            assert template.render(*arguments) == case["text"], case
    assert 0 < refused < len(frozen["renderings"]) / 2


def test_smollm2_conversations_equal_transformers(frozen, smollm2):
    expected = frozen["smollm2"]
    for conversation, text, ids in zip(expected["conversations"], expected["texts"], expected["chat_ids"], strict=True):
        assert smollm2.render_text(conversation) == text
        assert smollm2.render(conversation) == ids


def test_h20_prompt_sampled_and_followup_are_the_templates_ids(smollm2, small, frozen):
    """H20: token in, token out over three turns; the whole equals what the template gives."""
    chatml = _with_template(small["llama-bpe"], frozen["templates"]["chatml"])
    for tokenizer in (smollm2, chatml):
        tokenizer.check_followups(("user", "tool"))
        conversation, ids = list(USER), tokenizer.render(USER)
        for answer, reply in (("Certainly, 12  spaces", "tool"), ("So\n\nbe it", "user"), ("fine", "user")):
            sampled = [*tokenizer.encode(answer), *tokenizer.encode("<|im_end|>", allow_special=True)]
            message = {"role": reply, "content": "  42 é\n"}
            conversation += [{"role": "assistant", "content": answer}, message]
            ids += sampled + tokenizer.render_followup([message], last_id=sampled[-1])
            assert ids == tokenizer.render(conversation)


def test_an_unfinished_turn_is_closed_by_the_followup(smollm2):
    end = smollm2.end_ids[0]
    finished = smollm2.render_followup(MORE)
    assert smollm2.render_followup(MORE, last_id=end) == finished
    assert smollm2.render_followup(MORE, last_id=smollm2.encode("x")[0]) == [end, *finished]


def test_several_messages_may_follow(smollm2):
    replies = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, {"role": "user", "content": "go on"}]
    whole = smollm2.render([*USER, {"role": "assistant", "content": "A"}, *replies])
    sampled = [*smollm2.encode("A"), smollm2.end_ids[0]]
    assert smollm2.render(USER) + sampled + smollm2.render_followup(replies) == whole


@pytest.mark.parametrize(
    ("source", "role", "reason"),
    [
        ("{{ messages[-1].content }}</s>", "user", "changes what came before"),
        ("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
         "user", "starts with none of the model's end tokens"),
        ("{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{{ m.content }}</s>"
         "{% endfor %}", "tool", "no tools here"),
        # Shows only the last two turns whole.
        ("{% for m in messages %}{{ m.content if loop.revindex < 5 else '...' }}</s>{% endfor %}", "user",
         "changes an earlier turn"),
    ],
)  # fmt: skip
def test_h21_a_template_that_rewrites_history_is_refused_before_a_job_starts(source, role, reason):
    """H21: the mismatch is an error at the start, not a quiet drop."""
    template = ChatTemplate(source, SPECIAL, ("</s>",))
    with pytest.raises(InvalidRequest, match=reason):
        template.check_followups((role,))


def test_h21_thinking_taken_out_of_earlier_turns_is_refused(frozen):
    """H21: a template that keeps thinking only until the next question takes tool results but no further questions."""
    template = ChatTemplate(frozen["templates"]["thinking"], SPECIAL, ("<|im_end|>",))
    template.check_followups(("tool",))
    with pytest.raises(InvalidRequest, match="changes the thinking when a message with role 'user' follows"):
        template.check_followups(("user",))


def test_tools_shown_beside_the_last_question_only_are_refused(frozen):
    template = ChatTemplate(frozen["templates"]["inst"], SPECIAL, ("</s>",))
    template.check_followups(("user",))
    with pytest.raises(InvalidRequest, match="changes what came before"):
        template.check_followups(("user",), frozen["tools"])


def test_a_file_replaces_the_models_template(smollm2, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    folder = tmp_path / "model"
    folder.mkdir()
    smollm2.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(smollm2.special_tokens | {"chat_template": "other"}))
    assert Tokenizer.load(folder).chat_template == "other"
    tokenizer = Tokenizer.load(folder, chat_template=path)
    assert tokenizer.render_text(USER) == "Question one<|im_end|>"
    (folder / "chat_template.jinja").write_text("newer place")
    assert Tokenizer.load(folder).chat_template == "newer place"
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.load(folder).chat_template == "d"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for m in messages %}{% set _ = messages.append(m) %}{% endfor %}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_templates_stay_in_the_sandbox(source):
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, SPECIAL, ()).render(USER)


def test_a_template_that_does_not_parse_is_refused():
    with pytest.raises(InvalidRequest, match="chat template, line 2"):
        ChatTemplate("\n{% for %}", SPECIAL, ())


def test_messages_must_be_plain_data():
    template = ChatTemplate("{{ messages[0].content }}", SPECIAL, ())
    with pytest.raises(InvalidRequest, match="hold a bytes"):
        template.render([{"role": "user", "content": b"x"}])
    with pytest.raises(InvalidRequest, match="fails on the messages"):
        ChatTemplate("{{ messages[0]['content'] + 'x' }}", SPECIAL, ()).render([{"role": "user", "content": 3}])


def test_dates_come_from_strftime_now():
    assert ChatTemplate("{{ strftime_now('%Y') }}", SPECIAL, ()).render(USER).isdigit()


def _with_template(tokenizer: Tokenizer, source: str) -> Tokenizer:
    return Tokenizer(tokenizer.backend, tokenizer.special_tokens, tokenizer.end_ids, tokenizer.adds_bos, source)
