"""Clients that go away, devices that die, answers that take too long: sampling over HTTP with a slow fake device."""

import contextlib
import json
import socket
import threading
import time

import httpx
import openai
import pytest

from tests.service.live import live
from tests.service.test_openai import client_of, said, until

pytestmark = pytest.mark.multiprocess


@contextlib.contextmanager
def serving(tmp_path, monkeypatch, options, **changes):
    monkeypatch.setenv("FAKE_DEVICE", json.dumps({"marker": str(tmp_path / "died"), **options}))
    with live(tmp_path, **changes) as found:
        yield found


def is_idle(service):
    """Whether nobody's request is anywhere, the device included."""
    status = service.service.controller.status()
    is_free = status.device_counters.get("engine/running_rows") == 0
    return is_free and service.service.controller.requests.num_open == service.service.sampling.num_open == 0


def running(service):
    return service.service.controller.status().device_counters.get("engine/running_rows", 0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(tmp_path, monkeypatch, is_stream):
    """The request is cancelled on the device; what was computed until then is metered."""
    with serving(tmp_path, monkeypatch, {"turn_s": 0.3}) as service:
        told = []
        monkeypatch.setattr(service.service.metering, "record_request", lambda tenant_id, **used: told.append(used))
        key = service.key("ann")
        body = json.dumps({"model": "tiny", "prompt": "x", "n": 3, "max_tokens": 100, "stream": is_stream}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        url = httpx.URL(service.url)
        with socket.create_connection((url.host, url.port), timeout=30) as raw:
            raw.sendall(head.encode() + body)
            if is_stream:
                received = b""
                while b"data: {" not in received:
                    received += (block := raw.recv(65536))
                    assert block and b" 400 " not in received, received
            until(lambda: running(service) == 1)
            assert service.service.sampling.num_open == 1
        until(lambda: is_idle(service))
        until(lambda: told)
        assert told[0]["prompt_tokens"] > 0 and 0 < told[0]["sampled_tokens"] < 3 * 28  # cut short


def test_a_lost_device_costs_a_whole_answer_nothing_and_ends_a_stream_with_an_error(tmp_path, monkeypatch):
    """H35: kill -9 of the device amid requests."""
    options = {"turn_s": 0.2, "die_in_turn": 3}
    with serving(tmp_path, monkeypatch, options) as service, client_of(service, "ann") as ai:
        tokenizer = service.service.controller.tokenizer
        answers, failures = {}, []

        def whole(seed):
            answers[seed] = ai.completions.create(model="tiny", prompt="x", seed=seed, n=2, max_tokens=100).choices[0].text

        def streamed():
            try:
                for _ in ai.completions.create(model="tiny", prompt="x", max_tokens=100, stream=True):
                    pass
            except openai.APIError as error:
                failures.append(error)

        threads = [threading.Thread(target=whole, args=(seed,)) for seed in (1, 2)] + [threading.Thread(target=streamed)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert (tmp_path / "died").exists()
        assert answers == {seed: said(tokenizer, "x", seed, ("", -2))[0] for seed in (1, 2)}
        assert len(failures) == 1 and "the stream cannot go on: the device was lost" in str(failures[0])
        until(lambda: is_idle(service))


@pytest.mark.slow
def test_every_wait_has_a_deadline(tmp_path, monkeypatch):
    options = {"turn_s": 0.6}
    with serving(tmp_path, monkeypatch, options, request_timeout_s=1.5) as service, client_of(service, "ann") as ai:
        until(lambda: is_idle(service))
        with pytest.raises(openai.InternalServerError, match=r"request_timeout_s=1\.5") as error:
            ai.completions.create(model="tiny", prompt="x", max_tokens=100)
        assert error.value.status_code == 504 and error.value.response.headers["Retry-After"] == "2"
        until(lambda: is_idle(service))
        with pytest.raises(openai.APIError, match=r"request_timeout_s=1\.5"):
            for _ in ai.completions.create(model="tiny", prompt="x", max_tokens=100, stream=True):
                pass
        until(lambda: is_idle(service))
        service.loop.call_soon_threadsafe(service.service.controller.requests.device_gone)
        time.sleep(0.1)
        with pytest.raises(openai.InternalServerError, match="the device is starting") as error:
            ai.completions.create(model="tiny", prompt="x", max_tokens=2)
        assert error.value.status_code == 503 and error.value.response.headers["Retry-After"] == "10"
        service.loop.call_soon_threadsafe(service.service.controller.requests.close, "it died five times")
        time.sleep(0.1)
        with pytest.raises(openai.InternalServerError, match="there is no device: it died five times") as error:
            ai.completions.create(model="tiny", prompt="x", max_tokens=2)
        assert error.value.status_code == 503
        assert service.service.sampling.num_open == 0


@pytest.mark.slow
def test_a_drain_answers_what_is_open(tmp_path, monkeypatch):
    texts = []
    with contextlib.ExitStack() as closed_last, serving(tmp_path, monkeypatch, {"turn_s": 0.2}) as service:
        ai = closed_last.enter_context(client_of(service, "ann"))
        thread = threading.Thread(
            target=lambda: texts.append(ai.completions.create(model="tiny", prompt="x", max_tokens=100, seed=1).choices[0].text)
        )
        thread.start()
        until(lambda: service.service.sampling.num_open == 1)
        expected = said(service.service.controller.tokenizer, "x", 1, ("", -2))[0]
        closed_last.callback(thread.join, 30)
    assert texts == [expected]
