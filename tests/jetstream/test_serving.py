"""JetStream's Driver and gRPC server in this process, with a fake engine: what clients get, and how it ends."""

import contextlib
import importlib.util
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from marlaas_jax.engine.state import LENGTH, STOP
from marlaas_jax.errors import InvalidConfig
from marlaas_jax.model import source
from marlaas_jax.text.tokenizer import Tokenizer

if importlib.util.find_spec("jetstream") is None:
    pytest.skip("google-jetstream is not installed", allow_module_level=True)

import grpc

from marlaas_jax.engine.jetstream import import_quietly
from marlaas_jax.jetstream import driver, server
from marlaas_jax.jetstream.engine import RowResult
from marlaas_jax.jetstream.prompts import Reader
from tests.jetstream.fake_engine import OVERFLOWS, RAISES, FakeEngine

pb2 = import_quietly("jetstream.core.proto.jetstream_pb2")
pb2_grpc = import_quietly("jetstream.core.proto.jetstream_pb2_grpc")
ADAPTERS = {"one": 1, "two": 2}
MAX_CONTEXT = 16


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(source.resolve("tiny"))


class Served:
    """A running server and a client."""

    def __init__(self, engine, tokenizer):
        self.engine = engine
        self.deaths: queue.Queue[str] = queue.Queue()
        self.reserved = server.reserve("127.0.0.1", 0)
        self.address = server.address_of(self.reserved)
        reader = Reader(tokenizer, 128, MAX_CONTEXT, ADAPTERS)
        self.running = server.start(engine, reader, self.address, self.deaths.put)
        self.channel = grpc.insecure_channel(self.address)
        self.stub = pb2_grpc.OrchestratorStub(self.channel)

    def stream(self, ids, max_tokens=4, adapter="", **fields):
        content = pb2.DecodeRequest.TokenContent(token_ids=ids)
        request = pb2.DecodeRequest(token_content=content, max_tokens=max_tokens, **fields)
        return self.stub.Decode(request, metadata=(("lora-adapter-id", adapter),) if adapter else None, timeout=30)

    def ids(self, *args, **kwargs):
        return [token for part in self.stream(*args, **kwargs) for token in part.stream_content.samples[0].token_ids]

    def refusal(self, *args, **kwargs):
        """Returns (status name, details) of a request that fails."""
        with pytest.raises(grpc.RpcError) as caught:
            self.ids(*args, **kwargs)
        return caught.value.code().name, caught.value.details()

    def is_live(self):
        return self.stub.HealthCheck(pb2.HealthCheckRequest(), timeout=30).is_live

    def await_placed(self, count):
        """Waits until the Driver has so many requests under way."""
        deadline = time.monotonic() + 30
        while len(self.running._driver._placed) != count:
            assert time.monotonic() < deadline, self.running._driver._placed
            time.sleep(0.005)

    def close(self):
        self.channel.close()
        self.running.stop()
        self.reserved.close()


@contextlib.contextmanager
def served(tokenizer, **changes):
    running = Served(FakeEngine(**changes), tokenizer)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def shared(tokenizer):
    with served(tokenizer) as running:
        yield running


def expected(slot, count):
    return [100 * slot + 10 + i for i in range(count)]


def later_schema(request, name, number=9):
    """Returns the request as a client of a later schema sends it, with `lora_adapter_id` in a field of that number."""
    field = bytes([number << 3 | 2, len(name)]) + name.encode()
    return pb2.DecodeRequest.FromString(request.SerializeToString() + field)


def test_each_request_has_its_own_adapter(shared):
    assert shared.is_live()
    for adapter, slot in {"": 0, "base": 0, **ADAPTERS}.items():
        assert shared.ids([3, 4], adapter=adapter) == expected(slot, 4)
    assert shared.ids([3], session_cache="adapter:two") == expected(2, 4)
    plain = pb2.DecodeRequest(token_content=pb2.DecodeRequest.TokenContent(token_ids=[3]), max_tokens=2)
    answers = shared.stub.Decode(later_schema(plain, "one"), timeout=30)
    assert [a.stream_content.samples[0].token_ids[0] for a in answers] == expected(1, 2)


def test_many_at_once_lose_nothing(shared):
    """More clients than decode slots, with unlike adapters and lengths: each gets its own tokens, all of them."""
    wanted = [(i % 3, 1 + i % 7) for i in range(96)]
    names = ["", "one", "two"]
    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda w: shared.ids([5], max_tokens=w[1], adapter=names[w[0]]), wanted))
    assert answers == [expected(slot, count) for slot, count in wanted]


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        ({"ids": [3], "adapter": "three"}, "NOT_FOUND", "lora_adapter_id='three': not served here; served: base, one, two"),
        ({"ids": [3], "adapter": "one", "session_cache": "adapter:two"}, "INVALID_ARGUMENT", "more than once, and not alike"),
        ({"ids": [3], "session_cache": "gs://x"}, "INVALID_ARGUMENT", "session_cache='gs://x': no caches are kept"),
        ({"ids": [3] * MAX_CONTEXT}, "INVALID_ARGUMENT", "16 tokens leave no room for an answer within engine.max_context=16"),
        ({"ids": []}, "INVALID_ARGUMENT", "token_content: empty"),
        ({"ids": [128]}, "INVALID_ARGUMENT", "token id 128: 0 to 127"),
        ({"ids": [-1]}, "INVALID_ARGUMENT", "token id -1"),
        ({"ids": [3], "max_tokens": 0}, "INVALID_ARGUMENT", "max_tokens=0: 1 or more"),
        ({"ids": [OVERFLOWS]}, "INTERNAL", "not finite"),
    ],
)
def test_a_bad_request_ends_with_one_sentence_and_no_other(shared, request_, status, words):
    neighbour = shared.stream([3], max_tokens=40, adapter="one")
    code, details = shared.refusal(**request_)
    assert code == status and words in details and "\n" not in details
    assert [a.stream_content.samples[0].token_ids[0] for a in neighbour if a.stream_content.samples[0].token_ids] == expected(
        1, 40
    )


def test_a_request_without_content_is_refused(shared):
    with pytest.raises(grpc.RpcError, match="text_content or token_content must be given"):
        list(shared.stub.Decode(pb2.DecodeRequest(max_tokens=2), timeout=30))


def test_text_in_text_and_ids_out(shared, tokenizer):
    request = pb2.DecodeRequest(text_content=pb2.DecodeRequest.TextContent(text="hello"), max_tokens=8)
    samples = [part.stream_content.samples[0] for part in shared.stub.Decode(request, timeout=30)]
    ids = [token for sample in samples for token in sample.token_ids]
    assert ids == expected(0, 8)
    assert "".join(sample.text for sample in samples) == tokenizer.decode(ids) != ""


def test_a_client_that_leaves_frees_its_slot(tokenizer):
    """One slot, held by an endless row and a waiting one whose clients leave: the next has it at once."""
    with served(tokenizer, num_slots=1, step_s=0.005) as running:
        endless = running.stream([3, 4, 5], max_tokens=10**6)
        next(endless)
        waiting = running.stream([3, 4, 5, 6], max_tokens=10**6)
        running.await_placed(2)
        waiting.cancel()
        endless.cancel()
        assert running.ids([3], max_tokens=3) == expected(0, 3)
        running.await_placed(0)
        assert running.engine.prefilled[0] == 3 and running.engine.prefilled[-1] == 1


def end_within_half_a_second(row):
    """Returns the status name of a stream that has failed by then."""
    with contextlib.suppress(grpc.FutureTimeoutError):
        return row.exception(timeout=0.5).code().name
    return None


def test_too_many_waiting_are_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(driver, "MAX_WAITING", 2)
    with served(tokenizer, num_slots=1, step_s=0.02) as running:
        rows = [running.stream([3], max_tokens=10**6) for _ in range(12)]
        with ThreadPoolExecutor(12) as threads:
            codes = [code for code in threads.map(end_within_half_a_second, rows) if code]
        assert codes and set(codes) == {"RESOURCE_EXHAUSTED"}
        assert len(rows) - len(codes) >= 3  # running, on their way, waiting
        for row in rows:
            row.cancel()


def test_a_dead_thread_is_told_once_and_ends_what_runs(tokenizer):
    """JetStream alone would kill this very process with SIGKILL."""
    with served(tokenizer, step_s=0.01) as running:
        victim = running.stream([3], max_tokens=10**6)
        next(victim)
        assert running.refusal([RAISES])[0] == "UNAVAILABLE"
        assert running.deaths.get(timeout=30) == "JetStream's prefill thread died: RuntimeError: out of memory"
        with pytest.raises(grpc.RpcError, match="stopping"):
            list(victim)
        assert not running.is_live()
    assert running.deaths.empty()


def test_stop_ends_requests_with_a_sentence(tokenizer):
    with served(tokenizer, num_slots=1, step_s=0.01) as running:
        rows = [running.stream([3], max_tokens=10**6) for _ in range(4)]
        running.await_placed(4)
        with ThreadPoolExecutor(1) as threads:
            stopping = threads.submit(running.running.stop)
            for row in rows:
                with pytest.raises(grpc.RpcError) as caught:
                    list(row)
                assert caught.value.code().name == "UNAVAILABLE" and "stopping" in caught.value.details()
            stopping.result(30)
        assert running.deaths.empty()
        running.running.stop = lambda: None


def test_a_taken_port_is_refused_and_a_kept_one_is_shared_with_grpc(shared):
    """gRPC itself would share the port; and only the loopback is listened on."""
    port = int(shared.address.rpartition(":")[2])
    with pytest.raises(InvalidConfig, match=f"--port {port}: cannot be listened on .Address already in use"):
        server.reserve("127.0.0.1", port)
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.2", port)) != 0
    with pytest.raises(InvalidConfig, match=r"--host 192\.0\.2\.1"):
        server.reserve("192.0.2.1", 0)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "code", "last_line"),
    [
        (RAISES, 1, "error: JetStream's prefill thread died: RuntimeError: out of memory"),
        pytest.param(signal.SIGTERM, 143, "terminated", marks=pytest.mark.slow),
    ],
)
def test_the_command_ends_with_a_sentence_and_its_code(fault, code, last_line):
    """A dead thread, and SIGTERM while a client reads an endless answer."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.jetstream.serve_fake"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'envs'}"},
    )  # fmt: skip
    try:
        address = [json.loads(process.stdout.readline())["address"] for _ in range(2)][1]
        with grpc.insecure_channel(address) as channel:
            answers = [ask(channel, 3)]
            next(answers[0])
            if fault == RAISES:
                answers.append(ask(channel, RAISES))
            else:
                process.send_signal(fault)
            for answer in answers:
                with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                    list(answer)
            assert process.wait(timeout=30) == code
        assert process.stderr.read().strip().splitlines()[-1] == last_line
    finally:
        process.kill()
        process.communicate(timeout=30)


def ask(channel, first):
    """Returns the stream of an endless answer."""
    content = pb2.DecodeRequest.TokenContent(token_ids=[first])
    return pb2_grpc.OrchestratorStub(channel).Decode(pb2.DecodeRequest(token_content=content, max_tokens=10**6), timeout=30)


@pytest.mark.parametrize(
    ("finish", "tokens", "valid"), [(0, [[7]], [[1]]), (LENGTH, [[7, 0]], [[1, 0]]), (STOP, [[7, 0]], [[1, 0]])]
)
def test_a_row_that_ends_says_so_in_the_same_step(finish, tokens, valid):
    data = np.zeros((2, 6), np.int32)
    data[1] = (7, 1, 0, 0, 5, finish)
    slot = RowResult(data, (0, 1), (1, 2), (4, 5), 1).convert_to_numpy().get_result_at_slot(1)
    assert slot.tokens.tolist() == tokens and slot.valid.tolist() == valid and slot.lengths.tolist() == [5]
