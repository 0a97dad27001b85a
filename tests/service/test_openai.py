"""Sampling over HTTP with the `openai` client, against a service with a fake device."""

import threading
import time

import httpx
import openai
import pytest

from marlaas_jax.fairness import Owner
from marlaas_jax.text.incremental import IncrementalText
from tests.service.live import FILES, live, of
from tests.workers.fake_sampling import text_of

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with live(tmp_path_factory.mktemp("openai"), runtime={"model": "tiny", "engine": {"max_context": 256}}) as found:
        yield found


@pytest.fixture(scope="module")
def tokenizer(service):
    return service.service.controller.tokenizer


def client_of(service, name, **options):
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key(name), max_retries=0, timeout=30, **options)


@pytest.fixture(scope="module")
def ai(service):
    with client_of(service, "ann") as client:
        yield client


@pytest.fixture(scope="module")
def job(service):
    """An ended job of ann's with the steps 2 and 4."""
    client = service.client("ann")
    return client.wait(client.submit(of("ended"), files=FILES).id)


def said(tokenizer, prompt, seed, weights, max_tokens=200):
    """Returns (text, ids) that the fake model says."""
    ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
    answer = [*tokenizer.encode(text_of(seed, tuple(ids), weights)), tokenizer.end_ids[0]][:max_tokens]
    return tokenizer.decode([token for token in answer if token not in tokenizer.end_ids]), answer


def test_the_base_answers_as_the_model_does(ai, tokenizer):
    text, ids = said(tokenizer, "Say it", 7, ("", -2))
    answer = ai.completions.create(
        model="tiny", prompt="Say it", seed=7, max_tokens=100, logprobs=0, user="x",
        extra_body={"metadata": {"a": "b"}, "return_token_ids": True, "top_k": 5, "store": False, "presence_penalty": 0,
                    "best_of": 1},
    )  # fmt: skip
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.token_ids) == (text, "stop", ids)
    assert choice.prompt_token_ids == tokenizer.encode_prompt("Say it") and answer.model == "tiny" and answer.version is None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(choice.prompt_token_ids), len(ids))
    assert answer.usage.total_tokens == len(choice.prompt_token_ids) + len(ids)
    assert choice.logprobs.token_logprobs == [-(token % 7) / 8 for token in ids]
    assert choice.logprobs.tokens == [tokenizer.decode([token], skip_special=False) for token in ids]
    whole = IncrementalText(tokenizer)
    for token, offset in zip(ids, choice.logprobs.text_offset, strict=True):
        assert offset == len(whole.text)
        whole.push(token)
    again = ai.completions.create(model="tiny", prompt=choice.prompt_token_ids, seed=7, max_tokens=100)
    assert again.choices[0].text == text
    other = ai.completions.create(model="tiny", prompt="Say it", seed=8, max_tokens=100)
    assert other.choices[0].text != text


def test_many_prompts_and_choices_come_in_order(ai, tokenizer):
    prompts = ["one", "two", "three"]
    answer = ai.completions.create(model="tiny", prompt=prompts, n=2, seed=3, max_tokens=100)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [answer.choices[2 * i].text for i in range(3)] == [said(tokenizer, p, 3, ("", -2))[0] for p in prompts]
    assert len({choice.text for choice in answer.choices}) == 6
    alone = ai.completions.create(model="tiny", prompt="two", n=2, seed=3, max_tokens=100)
    assert [choice.text for choice in alone.choices] == [choice.text for choice in answer.choices[2:4]]
    ids = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    same = ai.completions.create(model="tiny", prompt=ids, n=2, seed=3, max_tokens=100)
    assert [choice.text for choice in same.choices] == [choice.text for choice in answer.choices]
    assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_stops_and_limits(ai, tokenizer):
    text, ids = said(tokenizer, "x", 1, ("", -2))
    for stop in ("and", ["nowhere", "on unt"], "e."):
        cut = ai.completions.create(model="tiny", prompt="x", seed=1, max_tokens=100, stop=stop)
        marks = [stop] if isinstance(stop, str) else stop
        assert cut.choices[0].text == text[: min(at for mark in marks if (at := text.find(mark)) >= 0)]
        assert cut.choices[0].finish_reason == "stop"
    short = ai.completions.create(model="tiny", prompt="x", seed=1, max_tokens=5)
    assert (short.choices[0].text, short.choices[0].finish_reason) == (tokenizer.decode(ids[:5]), "length")
    assert short.usage.completion_tokens == 5
    default = ai.completions.create(model="tiny", prompt="x", seed=1)
    assert default.usage.completion_tokens == min(16, len(ids))


def test_streams_hold_what_whole_answers_hold(ai, tokenizer):
    text, ids = said(tokenizer, "stream", 5, ("", -2))
    for stop, expected in ((None, text), ("so on", text[: text.index("so on")])):
        chunks = list(
            ai.completions.create(
                model="tiny", prompt="stream", seed=5, max_tokens=100, stream=True, stop=stop, logprobs=0,
                stream_options={"include_usage": True}, extra_body={"return_token_ids": True},
            )
        )  # fmt: skip
        *parts, last = chunks
        assert len(parts) > 3 and last.choices == [] and all(part.usage is None for part in parts)
        assert "".join(part.choices[0].text for part in parts) == expected
        told = [token for part in parts for token in part.choices[0].token_ids]
        assert told == ids[: len(told)] and last.usage.completion_tokens == len(told)
        assert [x for part in parts for x in part.choices[0].logprobs.token_logprobs] == [-(t % 7) / 8 for t in told]
        assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]


def test_chat_goes_through_the_template(ai, tokenizer):
    turns = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}], "name": "ann"}]
    plain = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.render(plain)
    text, ids = said(tokenizer, prompt, 2, ("", -2))
    ask = {"model": "tiny", "messages": turns, "seed": 2, "max_completion_tokens": 100}
    answer = ai.chat.completions.create(**ask, logprobs=True, tools=[], extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", text, "stop")
    assert answer.prompt_token_ids == prompt and choice.token_ids == ids
    assert [entry.logprob for entry in choice.logprobs.content] == [-(token % 7) / 8 for token in ids]
    whole = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content if entry.bytes is not None)
    assert whole.startswith(text.encode())
    chunks = list(ai.chat.completions.create(**ask, n=2, stream=True, stream_options={"include_usage": True}))
    first = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].index == 0]
    assert first[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in first) == text
    assert chunks[-1].usage.prompt_tokens == len(prompt) and chunks[-1].choices == []
    back = ai.chat.completions.create(
        model="tiny", messages=[*plain, choice.message.model_dump(), {"role": "user", "content": "More"}], max_tokens=3
    )
    assert back.usage.completion_tokens == 3


def test_jobs_are_models_of_their_tenant(service, ai, job, tokenizer):
    listed = {model.id: model for model in ai.models.list()}
    assert set(listed) == {"tiny", job.id} and listed[job.id].steps == [2, 4] and listed[job.id].parent == "tiny"
    assert ai.models.retrieve("tiny").id == "tiny" and ai.models.retrieve(f"{job.id}@2").id == f"{job.id}@2"
    for step, name in ((4, job.id), (4, f"{job.id}@4"), (2, f"{job.id}@2")):
        answer = ai.completions.create(model=name, prompt="x", seed=1, max_tokens=100)
        assert answer.choices[0].text == said(tokenizer, "x", 1, (job.id, step))[0]
        assert answer.version == step and answer.system_fingerprint and answer.model == name
    with client_of(service, "bob") as stranger:
        assert [model.id for model in stranger.models.list()] == ["tiny"]
        for name in (job.id, f"{job.id}@4", "job_" + "0" * 22, "gpt-4o", "../x", f"{job.id}@", "@1"):
            for call in (
                lambda name=name: stranger.completions.create(model=name, prompt="x"),
                lambda name=name: stranger.chat.completions.create(model=name, messages=[{"role": "user", "content": "x"}]),
            ):
                with pytest.raises(openai.NotFoundError) as error:
                    call()
                assert error.value.code == "model_not_found" and error.value.type == "invalid_request_error"
            with pytest.raises(openai.NotFoundError):
                stranger.models.retrieve(name)
    with pytest.raises(openai.NotFoundError, match="committed and kept: 2, 4"):
        ai.completions.create(model=f"{job.id}@3", prompt="x")
    with client_of(service, "ann") as wrong, pytest.raises(openai.AuthenticationError) as refused:
        wrong.api_key = "mj-wrong"
        wrong.models.list()
    assert refused.value.code == "invalid_api_key"


def test_a_job_that_waits_has_no_model_and_a_running_one_its_newest(service, tokenizer):
    client = service.client("runner")
    with client_of(service, "runner") as ai:
        running = client.submit(of("long", steps=100_000), files=FILES)
        until(lambda: service.service.sampling.is_published(running))
        answer = ai.completions.create(model=running.id, prompt="x", seed=1, max_tokens=100)
        assert answer.choices[0].text == said(tokenizer, "x", 1, (running.id, answer.version))[0]
        until(lambda: client.checkpoints(running.id))
        client.cancel(running.id)
        last = client.checkpoints(running.id)[-1]["step"]
        after = ai.completions.create(model=running.id, prompt="x", seed=1, max_tokens=100)
        assert after.version == last and after.choices[0].text == said(tokenizer, "x", 1, (running.id, last))[0]
        never = client.submit(of("never"), files=FILES)
        client.cancel(never.id)
        if not client.checkpoints(never.id):
            with pytest.raises(openai.NotFoundError, match="committed and kept: none"):
                ai.completions.create(model=never.id, prompt="x")
            with pytest.raises(openai.NotFoundError):
                ai.models.retrieve(never.id)


def until(condition, timeout_s=30):
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({"prompt": []}, "prompt=[]: must be a text, a list of texts", "prompt"),
        ({"prompt": [[]]}, "none empty", "prompt"),
        ({"prompt": [1, "x"]}, "must be a text", "prompt"),
        ({"prompt": [True]}, "must be a text", "prompt"),
        ({"prompt": [10**40]}, "prompt: token id 10000000000000000000 is none of the model's", "prompt"),
        ({"prompt": [-1]}, "token id -1 is none", "prompt"),
        ({"prompt": [5] * 200, "max_tokens": 57}, "200 tokens and max_tokens=57 are too many for the context of 256", "prompt"),
        ({"prompt": [5] * 256}, "256 tokens are too many for the context of 256", "prompt"),
        ({"max_tokens": 0}, "max_tokens=0", "max_tokens"),
        ({"temperature": -1}, "temperature=-1", "temperature"),
        ({"top_p": 0}, "top_p=0", "top_p"),
        ({"n": 0}, "n=0", "n"),
        ({"n": 129}, "n=129", "n"),
        ({"n": 65, "prompt": ["x", "y"]}, "n=65: of 2 prompts", "n"),
        ({"stop": ["a"] * 5}, "must be a text or up to 4", "stop"),
        ({"stop": ""}, "1 to 256 characters", "stop"),
        ({"stop": "x" * 257}, "1 to 256 characters", "stop"),
        ({"seed": 2**63}, "seed=9223372036854775808", "seed"),
        ({"logprobs": 1}, "logprobs=1: input should be less than or equal to 0", "logprobs"),
        ({"echo": True}, "echo=True: is not supported; leave it out or give False", "echo"),
        ({"best_of": 3}, "best_of=3: is not supported; leave it out", "best_of"),
        ({"suffix": "x"}, "suffix='x': is not supported", "suffix"),
        ({"logit_bias": {"5": 1}}, "logit_bias={'5': 1}: is not supported", "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5: is not supported", "presence_penalty"),
        ({"tools": [{}]}, "tools=[{}]: is not supported", "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format={'type': 'json_object'}: is not", "response_format"),
        ({"store": True}, "store=True: is not supported", "store"),
        ({"decoding": "x"}, "decoding: unknown key; allowed here: logprobs", "decoding"),
        ({"stream_options": {"x": 1}}, "stream_options.x: unknown key; allowed here: include", "stream_options.x"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_before_any_work(service, ai, body, words, param):
    sent = {"model": "tiny", "prompt": "x"} | body
    answer = ai._client.post(f"{service.url}/v1/completions", json=sent, headers={"Authorization": f"Bearer {ai.api_key}"})
    assert answer.status_code == 400, answer.text
    told = answer.json()["error"]
    assert words in told["message"] and told["param"] == param and told["type"] == "invalid_request_error"
    assert len(told["message"]) < 500 and "\n" not in told["message"]
    assert service.service.controller.requests.num_open == service.service.sampling.num_open == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages=[]"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "tiny knows the roles user, assistant and tool, not system"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role='robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "tool_calls=[{}]: is not supported"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs=3"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens=3 says otherwise"),
        ({"reasoning_effort": "high"}, "reasoning_effort='high': is not supported; leave it out"),
        ({"messages": [{"role": "user", "content": "word " * 500}]}, "are too many for the context of 256 tokens"),
    ],
)
def test_refusals_of_chats(service, ai, body, words):
    sent = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]} | body
    answer = ai._client.post(f"{service.url}/v1/chat/completions", json=sent, headers={"Authorization": f"Bearer {ai.api_key}"})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_usage_is_told_once_per_request_and_counts_for_the_day(service, monkeypatch):
    told = []
    monkeypatch.setattr(service.service.metering, "record_request", lambda tenant_id, **used: told.append((tenant_id, used)))
    with client_of(service, "counted") as ai:
        answer = ai.completions.create(model="tiny", prompt=["a", "bc"], n=2, max_tokens=4)
    tenant = service.run(owner(service, "counted"))
    until(lambda: len(told) == 2)
    assert {(who, used["job_id"]) for who, used in told} == {(tenant.id, "")}
    assert sum(used["prompt_tokens"] for _, used in told) == answer.usage.prompt_tokens
    assert sum(used["sampled_tokens"] for _, used in told) == answer.usage.completion_tokens == 16
    with client_of(service, "counted") as ai:
        monkeypatch.undo()
        answer = ai.completions.create(model="tiny", prompt="a", max_tokens=4)
    until(lambda: service.service.metering.tokens_today(tenant.id) == answer.usage.total_tokens)


async def owner(service, name):
    from marlaas_jax.store import tenants

    return await service.service.store.aread(tenants.get_tenant, name)


def test_quotas_say_when_to_come_back(service):
    root = service.client("root", is_admin=True)
    with client_of(service, "small") as ai:
        tenant = next(t for t in root.tenants() if t.name == "small")
        root.change_tenant(tenant.id, quotas={"max_queued_tokens": 20})
        with pytest.raises(openai.RateLimitError, match="max_queued_tokens=20: this tenant has 0 waiting, 1") as error:
            ai.completions.create(model="tiny", prompt="x", max_tokens=100)
        assert error.value.response.headers["Retry-After"] == "2" and error.value.code == "rate_limit_exceeded"
        ai.completions.create(model="tiny", prompt="x", max_tokens=5)
        root.change_tenant(tenant.id, quotas={"tokens_per_day": 3})
        with pytest.raises(openai.RateLimitError, match="tokens_per_day=3") as error:
            ai.completions.create(model="tiny", prompt="x", max_tokens=5)
        assert 1 <= int(error.value.response.headers["Retry-After"]) <= 86400
    assert service.service.sampling.num_open == 0


def test_a_repeat_with_a_key_is_answered_as_before_and_a_stream_is_not_kept(service):
    headers = {"Authorization": f"Bearer {service.key('once')}", "Idempotency-Key": "s1"}
    body = {"model": "tiny", "prompt": "x", "max_tokens": 100}
    first, again = (httpx.post(f"{service.url}/v1/completions", json=body, headers=headers) for _ in range(2))
    assert first.json() == again.json() and again.headers["Idempotency-Replayed"] == "true"
    streams = [httpx.post(f"{service.url}/v1/completions", json=body | {"stream": True}, headers=headers) for _ in range(2)]
    assert all(stream.status_code == 200 and stream.text.endswith("data: [DONE]\n\n") for stream in streams)


def test_an_adapter_that_cannot_be_read_is_a_fault_told_without_paths(service, ai, job, monkeypatch):
    from marlaas_jax.messages import Generated

    def broken(message, answers, on_end):
        answers.put_nowait(
            Generated("api/x", 0, "", 0, (), b"", b"", "error", 0, 0, "", error="CorruptFile: /secret/path cannot be read")
        )
        return type("Ticket", (), {"request_id": "api/x", "cancel": lambda self: None})()

    monkeypatch.setattr(service.service.controller.requests, "start", broken)
    with pytest.raises(openai.InternalServerError, match="the service's log says why") as error:
        ai.completions.create(model=job.id, prompt="x")
    assert "secret" not in str(error.value) and "Retry-After" not in error.value.response.headers


def test_the_engine_s_share_is_the_tenants(service, monkeypatch):
    sent = []
    start = service.service.controller.requests.start
    monkeypatch.setattr(
        service.service.controller.requests, "start", lambda message, *rest: (sent.append(message), start(message, *rest))[1]
    )
    root = service.client("root", is_admin=True)
    with client_of(service, "heavy") as ai:
        tenant = next(t for t in root.tenants() if t.name == "heavy")
        root.change_tenant(tenant.id, weight=3.0)
        threads = [
            threading.Thread(target=ai.completions.create, kwargs={"model": "tiny", "prompt": "x", "max_tokens": 2})
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {(message.share, message.owner) for message in sent} == {(f"interactive/{tenant.id}", Owner(tenant.id, 3.0))}
