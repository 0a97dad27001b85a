"""Event streams: each event once and in order, whatever happens to the connection."""

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest

from marlaas_jax.errors import NotAllowed, NotFound, Unreachable
from marlaas_jax.service.api import events as event_routes
from tests.service.live import FILES, live, of

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with live(tmp_path_factory.mktemp("streams"), quotas={"max_running_jobs": 0, "max_queued_jobs": None}) as found:
        yield found


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(event_routes, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(event_routes, "LAST_EVENTS_S", 0.2)


def tell(service, job_id, *numbers):
    """Makes something happen to a job."""

    async def add():
        for number in numbers:
            service.service.events.add("step", await service.service.job(ANYBODY, job_id), {"step": number})

    service.run(add())


class ANYBODY:
    is_admin, id = True, ""


class Proxy:
    """Stands between client and service; cuts each connection after so many bytes of the answer."""

    def __init__(self, url, cut_after):
        self._target = (httpx.URL(url).host, httpx.URL(url).port)
        self._cut_after = cut_after
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.num_cut = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            with client, socket.create_connection(self._target) as server:
                server.sendall(client.recv(65536))
                passed = 0
                while block := server.recv(64):
                    client.sendall(block)
                    passed += len(block)
                    if passed > self._cut_after:
                        self.num_cut += 1
                        break

    def close(self):
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(10)


def test_a_stream_cut_again_and_again_has_neither_gap_nor_repeat(service, quick):
    client = service.client("ann")
    job = client.submit(of("cut"), files=FILES)
    tell(service, job.id, *range(20))
    proxy = Proxy(service.url, cut_after=900)
    through = type(client)(proxy.url, service.key("ann"), patience_s=10)
    found = []

    def follow():
        for event in through.events(job.id):
            found.append(event)

    thread = threading.Thread(target=follow)
    thread.start()
    for number in range(20, 40):
        tell(service, job.id, number)
        time.sleep(0.02)
    client.cancel(job.id)
    thread.join(60)
    assert not thread.is_alive() and proxy.num_cut >= 5
    assert [event.data["step"] for event in found if event.kind == "step"] == list(range(40))
    assert [event.seq for event in found] == sorted({event.seq for event in found})
    assert found[0].kind == "job_queued" and found[-1].kind == "job_cancelled"
    through.close()
    proxy.close()


def test_a_stream_goes_on_behind_the_id_it_is_given(service, quick):
    client = service.client("ann")
    job = client.submit(of("resumed"), files=FILES)
    tell(service, job.id, *range(5))
    client.cancel(job.id)
    every = list(client.events(job.id))
    assert [event.kind for event in every] == ["job_queued", *["step"] * 5, "job_cancelled"]
    headers = {"Authorization": f"Bearer {service.key('ann')}"}
    for number, event in enumerate(every):
        assert list(client.events(job.id, after=event.seq)) == every[number + 1 :]
        text = httpx.get(
            f"{service.url}/v1/jobs/{job.id}/events?after=0", headers=headers | {"Last-Event-ID": str(event.seq)}
        ).text
        told = [json.loads(line[6:])["seq"] for line in text.splitlines() if line.startswith('data: {"seq"')]
        assert told == [event.seq for event in every[number + 1 :]]
        assert text.endswith("event: end\ndata: {}\n\n") and "tenant_id" not in text
    assert httpx.get(f"{service.url}/v1/events", headers=headers | {"Last-Event-ID": "x"}).status_code == 400
    assert httpx.get(f"{service.url}/v1/events?after=-1", headers=headers).status_code == 422


def test_a_tenants_stream_has_its_own_events_only_and_lives_between_them(service, quick):
    ann, bob = service.client("ann"), service.client("bob")
    with (
        httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {service.key('bob')}"}, timeout=20) as http,
        http.stream("GET", "/v1/events") as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("id: ") and next(lines) == ": open"
        others = ann.submit(of("others"), files=FILES)
        mine = bob.submit(of("mine"), files=FILES)
        read = []
        while sum(line == ": still here" for line in read) < 2 or not any(mine.id in line for line in read):
            read.append(next(lines))
        assert not any(others.id in line for line in read)
        assert len([line for line in read if line.startswith("data: ")]) == 1
        assert service.run(_streams(service)) == 1
    deadline = time.monotonic() + 10
    while service.run(_streams(service)):
        assert time.monotonic() < deadline, "the stream of a client that went away stays open"
        time.sleep(0.05)


async def _streams(service):
    return service.service.events.num_listeners


def test_a_revoked_key_ends_its_stream(service, quick):
    root = service.client("root", is_admin=True)
    client = service.client("leaver")
    job = client.submit(of("left"), files=FILES)
    key = next(t for t in root.tenants() if t.name == "leaver").keys[0]
    events = client.events(job.id)
    assert next(events).kind == "job_queued"
    root.revoke_key(key.id)
    with pytest.raises(NotAllowed):
        next(events)


def test_a_stream_of_a_job_that_is_deleted_ends(service, quick):
    client = service.client("ann")
    job = client.submit(of("gone"), files=FILES)
    client.cancel(job.id)
    last = list(client.events(job.id))[-1].seq
    assert list(client.events(job.id, after=last)) == []
    client.delete(job.id)
    with pytest.raises(NotFound):
        list(client.events(job.id))


def test_streams_beyond_the_limit_are_refused(service, monkeypatch):
    monkeypatch.setattr(event_routes, "MAX_STREAMS", 0)
    headers = {"Authorization": f"Bearer {service.key('ann')}"}
    answer = httpx.get(f"{service.url}/v1/events", headers=headers)
    assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0


def test_a_service_that_is_gone_is_one_sentence(service):
    with type(service.client("ann"))("http://127.0.0.1:9", "mj-x", patience_s=0.5) as client:
        with pytest.raises(Unreachable, match="marlaas serve"):
            client.job("x")
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9"):
            next(client.events("x"))


def test_many_streams_at_once_all_hear_it(service):
    key = service.key("ann")
    job = service.client("ann").submit(of("heard"), files=FILES)

    async def listen(http, heard):
        async with http.stream("GET", f"/v1/jobs/{job.id}/events") as stream:
            async for line in stream.aiter_lines():
                if line == "event: step":
                    heard.append(1)
                    return

    async def main():
        heard = []
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=service.url, headers={"Authorization": f"Bearer {key}"}, timeout=30, limits=limits
        ) as http:
            tasks = [asyncio.create_task(listen(http, heard)) for _ in range(100)]
            await asyncio.sleep(1)
            await asyncio.to_thread(tell, service, job.id, 1)
            await asyncio.wait_for(asyncio.gather(*tasks), 30)
        return len(heard)

    assert asyncio.run(main()) == 100
