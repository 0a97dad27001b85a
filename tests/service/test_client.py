"""The client end to end: against a service with real workers and a fake device."""

import asyncio
import json
import zipfile

import httpx
import pytest
import yaml
from typer.testing import CliRunner

import marlaas_jax
from marlaas_jax.cli.main import app
from marlaas_jax.client import job_files
from marlaas_jax.errors import InvalidConfig, InvalidRequest, NotAllowed, NotFound, QuotaExceeded, StorageError
from tests.service.live import FILES, live, of
from tests.workers.faked import REWARDS

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with live(tmp_path_factory.mktemp("client")) as found:
        yield found


@pytest.fixture
def job_file(tmp_path):
    """A job that needs a reward function and a file of items, in folders beside it."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text(REWARDS)
    items = "".join(json.dumps({"prompt": f"Say yes to {i}."}) + "\n" for i in range(40))
    (tmp_path / "items.jsonl").write_text(items)
    path = tmp_path / "job.yaml"
    path.write_text(
        yaml.safe_dump(
            {**of("filed"), "env": "code/mine.py:good", "data": {"source": "jsonl:items.jsonl", "answer_field": None}}
        )
    )
    return path


def test_models_answer(service):
    client = service.client("asker")
    assert client.models() == ["tiny"]
    whole = client.complete("tiny", "x", seed=1, max_tokens=100, n=2)
    assert whole.version is None and whole.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)
    assert all(len(choice.logprobs) == len(choice.token_ids) for choice in whole.choices)
    parts = list(client.stream_complete("tiny", "x", seed=1, max_tokens=100, n=2))
    turns = [{"role": "user", "content": "x"}]
    chat, chat_parts = client.chat("tiny", turns, seed=1, max_tokens=100), list(client.stream_chat("tiny", turns, seed=1))
    for choices, pieces in ((whole.choices, parts), (chat.choices, chat_parts)):
        for choice in choices:
            mine = [piece for piece in pieces if piece.index == choice.index]
            assert "".join(piece.text for piece in mine) == choice.text and mine[-1].finish_reason == "stop"
            assert [token for piece in mine for token in piece.token_ids] == choice.token_ids
            assert [logprob for piece in mine for logprob in piece.logprobs] == choice.logprobs
    with pytest.raises(NotFound, match="model='job_x': no such model"):
        client.complete("job_x", "x")
    with pytest.raises(InvalidConfig, match="top_k=-1"):
        list(client.stream_complete("tiny", "x", top_k=-1))
    target = ["--url", service.url, "--api-key", service.key("asker")]
    result = CliRunner().invoke(
        app, ["sample", "x", "--model", "tiny", "--seed", "1", "--max-tokens", "100", "--json", *target]
    )
    assert result.exit_code == 0 and json.loads(result.stdout)["text"] == whole.text

    async def story():
        async with marlaas_jax.AsyncClient(service.url, service.key("asker")) as client:
            pieces = [piece.text async for piece in client.stream_complete("tiny", "x", seed=1, max_tokens=100)]
            assert "".join(pieces) == (await client.complete("tiny", "x", seed=1, max_tokens=100)).text == whole.text

    asyncio.run(story())


def test_a_job_from_its_file_to_its_adapter(service, job_file, tmp_path):
    client = service.client("ann")
    job = client.submit(job_file, priority=2, labels={"team": "a"})
    assert (job.name, job.state, job.priority, job.labels) == ("filed", "queued", 2, {"team": "a"})
    events = []
    done = client.wait(job.id, events.append)
    assert (done.state, done.step, done.reason) == ("succeeded", 4, "") and done.is_over
    assert [event.data["step"] for event in events if event.kind == "step"] == [1, 2, 3, 4]
    assert [row["step"] for row in client.metrics(job.id)] == [1, 2, 3, 4]
    assert [row["step"] for row in client.metrics(job.id, 2, 3)] == [2, 3]
    every = list(client.episodes(job.id))
    assert {episode["split"] for episode in every} == {"train", "eval"}
    second = list(client.episodes(job.id, step=2))
    assert {episode["ticket"] for episode in second} == {2, 3} and len(second) == 8
    won = list(client.episodes(job.id, min_reward=1.0, split="train", outcome="finished"))
    lost = list(client.episodes(job.id, max_reward=0.5, split="train"))
    assert won and all(episode["reward"] == 1.0 for episode in won)
    assert len(won) + len(lost) == sum(episode["split"] == "train" for episode in every)
    assert [entry["step"] for entry in client.checkpoints(job.id)] == [2, 4]
    folder = client.download_adapter(job.id, tmp_path / "adapter")
    assert (folder / "adapter_config.json").read_text() == "{}"
    with pytest.raises(StorageError, match="exists already"):
        client.download_adapter(job.id, folder)
    client.delete(job.id)
    with pytest.raises(NotFound, match=job.id):
        client.job(job.id)


def test_episodes_page_by_page_are_all_of_them(service):
    client = service.client("pager")
    job = client.submit(of("paged"), files=FILES)
    assert client.wait(job.id).state == "succeeded"
    every = list(client.episodes(job.id))
    with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {service.key('pager')}"}) as http:
        seen, cursor = [], None
        while True:
            query = {"limit": 7, **({"cursor": cursor} if cursor else {})}
            page = http.get(f"/v1/jobs/{job.id}/episodes", params=query).json()
            seen += page["episodes"]
            if (cursor := page["next_cursor"]) is None:
                break
        assert seen == every and len(every) > 30
        for cursor in ("x", "0", "0.x", "-1.0", "1.2.3", "9" * 40 + ".0"):
            assert http.get(f"/v1/jobs/{job.id}/episodes", params={"cursor": cursor}).status_code == 400
        inside = http.get(f"/v1/jobs/{job.id}/episodes", params={"cursor": "0.10", "limit": 1}).json()["episodes"]
        assert inside == every[1:2]


def test_pause_resume_and_cancel(service):
    client = service.client("ann")
    job = client.submit(of("long", steps=400), files=FILES)
    events = client.events(job.id)
    assert any(event.kind == "step" for event in events)
    assert client.pause(job.id).state in ("running", "paused")
    assert any(event.kind == "job_paused" for event in events)
    assert client.why(job.id)
    with pytest.raises(InvalidRequest, match="paused"):
        client.delete(job.id)
    assert client.resume(job.id).state == "queued"
    assert any(event.kind == "job_running" for event in events)
    assert client.cancel(job.id).state == "cancelled"
    assert client.wait(job.id).state == "cancelled"
    with pytest.raises(NotFound, match="no adapter"):
        client.download_adapter(job.id, "nowhere")
    events.close()


def test_what_the_service_refuses_is_the_same_exception_here(service, tmp_path, monkeypatch):
    client = service.client("ann")
    with pytest.raises(InvalidConfig, match=r"lora\.rank=64"):
        client.submit({**of("a"), "lora": {"rank": 64}}, files=FILES)
    with pytest.raises(NotAllowed, match="admin"):
        client.tenants()
    with pytest.raises(NotFound):
        client.job("../../tenants")
    root = service.client("root", is_admin=True)
    root.change_tenant(next(t for t in root.tenants() if t.name == "ann").id, quotas={"max_queued_jobs": 0})
    with pytest.raises(QuotaExceeded, match="max_queued_jobs=0") as raised:
        client.submit(of("a"), files=FILES)
    assert raised.value.retry_after_s == 60
    root.change_tenant(next(t for t in root.tenants() if t.name == "ann").id, quotas={})
    monkeypatch.delenv("MARLAAS_API_KEY", raising=False)
    with pytest.raises(NotAllowed, match="MARLAAS_API_KEY"):
        marlaas_jax.Client(service.url)
    monkeypatch.setenv("MARLAAS_URL", service.url)
    monkeypatch.setenv("MARLAAS_API_KEY", service.key("ann"))
    with marlaas_jax.Client() as other:
        assert other.url == service.url and list(other.jobs(state=["paused"])) == []


def test_both_clients_work_inside_a_running_loop(service):
    """H45: as in a notebook's cell."""
    key = service.key("cell")

    async def cell():
        with marlaas_jax.Client(service.url, key) as client:
            job = client.submit(of("blocking"), files=FILES)
            first = next(client.events(job.id))
            assert first.kind == "job_queued"
        async with marlaas_jax.AsyncClient(service.url, key) as client:
            jobs = await asyncio.gather(*(client.job(job.id) for _ in range(100)))
            assert {found.id for found in jobs} == {job.id}
            waiting = asyncio.create_task(client.wait(job.id))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            return await client.wait(job.id)

    assert asyncio.run(cell()).state == "succeeded"


def test_a_lost_reply_does_not_do_it_twice(service):
    """H07: the first reply to each call is swallowed."""
    key = service.key("unlucky")
    lost = []

    class Swallow(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request):
            response = await super().handle_async_request(request)
            sent = (request.method, request.url.path, request.headers.get("idempotency-key"))
            if sent not in lost:
                lost.append(sent)
                await response.aclose()
                raise httpx.ReadError("swallowed")
            return response

    async def story():
        async with marlaas_jax.AsyncClient(service.url, key, patience_s=10) as client:
            headers = client._wire._http.headers
            await client._wire._http.aclose()
            client._wire._http = httpx.AsyncClient(base_url=service.url, transport=Swallow(), headers=headers)
            job = await client.submit(of("single"), files=FILES)
            await client.cancel(job.id)
            jobs = [found async for found in client.jobs()]
            await client.delete(job.id)
            return job, jobs

    job, jobs = asyncio.run(story())
    assert [found.id for found in jobs] == [job.id] and jobs[0].state == "cancelled" and len(lost) == 4


def test_a_job_file_is_packed_with_what_it_names(job_file, tmp_path):
    (packed,) = job_files.read(job_file, ["jobs.filed.steps=7"])
    assert packed.job["env"] == "code/mine.py:good" and packed.job["data"]["source"] == "jsonl:items.jsonl"
    assert set(packed.files) == {"code/mine.py", "items.jsonl"} and packed.job["steps"] == 7
    outside = tmp_path / "other" / "job.yaml"
    outside.parent.mkdir()
    outside.write_text(job_file.read_text().replace("code/mine.py", "../code/mine.py").replace("jsonl:items", "jsonl:../items"))
    (packed,) = job_files.read(outside)
    assert packed.job["env"] == "mine.py:good" and set(packed.files) == {"mine.py", "items.jsonl"}
    job_file.write_text(yaml.safe_dump({**of("b"), "lora": {"init_from": "job_" + "a" * 22}, "env": "words:last_word"}))
    (packed,) = job_files.read(job_file)
    assert packed.job["lora"]["init_from"] == "job_" + "a" * 22 and packed.files == {}
    job_file.write_text(yaml.safe_dump(of("b") | {"env": "missing.py:good"}))
    with pytest.raises(NotFound, match=r"missing\.py"):
        job_files.read(job_file)


def test_a_large_adapter_comes_in_pieces(tmp_path):
    from marlaas_jax.service import job_folder

    folder = tmp_path / "adapter"
    folder.mkdir()
    content = bytes(range(256)) * 8192
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_text("{}")
    pieces = list(job_folder.zipped(job_folder.adapter_files(tmp_path), folder))
    assert len(pieces) > 5
    archive = tmp_path / "a.zip"
    archive.write_bytes(b"".join(pieces))
    with zipfile.ZipFile(archive) as found:
        assert found.testzip() is None and found.read("adapter_model.safetensors") == content
