"""What a request may hold, paging, repeated requests: over HTTP, against a service whose jobs stay queued."""

import base64
import contextlib
import json
import socket
import threading
import time

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marlaas_jax.errors import StorageError
from marlaas_jax.store import idempotency
from tests.service.live import FILES, live, of

pytestmark = pytest.mark.multiprocess
SENT = {name: base64.b64encode(content).decode() for name, content in FILES.items()}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with live(tmp_path_factory.mktemp("requests"), quotas={"max_running_jobs": 0, "max_queued_jobs": None}) as found:
        yield found


@pytest.fixture(scope="module")
def http(service):
    with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {service.key('ann')}"}, timeout=30) as client:
        yield client


def submission(name="job", **changes):
    return {**of(name), "files": SENT, **changes}


def refused(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (submission(stepps=3), 422, "stepps: unknown key; allowed here: algorithm"),
        (submission(steps=0), 422, "steps=0: input should be greater than or equal to 1"),
        (submission(lora={"rank": 64}), 422, "lora.rank=64: this service's bank allows 1 to 8"),
        (submission(lora={"rnk": 4}), 422, "lora.rnk: unknown key; allowed here: alpha"),
        ({"name": "x"}, 422, "env: missing"),
        ([], 422, "dictionary"),
        (submission(files={}), 400, "rewards.py"),
        (submission(files={"rewards.py": "?"}), 400, "files.rewards.py: must be base64"),
        (submission(labels={"!": "x"}), 400, "labels: key '!'"),
        (submission(priority=10**9), 422, "priority=1000000000"),
        (submission(steps=2**70), 422, "steps=1180591620717411303424"),
        (submission(data={"source": "jsonl:/etc/passwd"}), 400, "data.source='/etc/passwd'"),
        (submission(env="../rewards.py:good"), 400, "env='../rewards.py'"),
        (submission(lora={"init_from": "/etc"}), 400, "JOB_ID"),
        (submission(x="a" * 10_000), 422, "x: unknown key"),
    ],
)
def test_a_wrong_submission_is_refused_in_one_sentence(http, body, status, words):
    message = refused(http.post("/v1/jobs", json=body), status)
    assert words in message and len(message) < 1000 and "\n" not in message


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/../../x", "", ".", "a\0b", "a\nb", "a\\b", "x" * 300, "\u202e.py", "a/./../b", "\u4e00" * 100],
)
def test_an_upload_stays_in_its_folder(http, service, name):
    before = {path for path in service.service.data_dir.rglob("*") if path.suffix not in (".db-wal", ".db-shm")}
    message = refused(http.post("/v1/jobs", json=submission(files={**SENT, name: ""})), 400)
    assert "relative path without '..'" in message
    assert {path for path in service.service.data_dir.rglob("*") if path.suffix not in (".db-wal", ".db-shm")} == before


def test_no_two_uploaded_files_share_a_place(http):
    assert "below another file" in refused(http.post("/v1/jobs", json=submission(files={**SENT, "a": "", "a/b": ""})), 400)
    assert "the same path" in refused(http.post("/v1/jobs", json=submission(files={**SENT, "a/b": "", "a//b": ""})), 400)
    assert http.post("/v1/jobs", json={"name": "none", "env": "words:last_word"}).status_code == 201


def test_the_allowed_keys_are_those_of_the_body(service):
    root = {"Authorization": f"Bearer {service.key('root', is_admin=True)}"}
    answer = httpx.post(f"{service.url}/v1/tenants", json={"name": "x", "quotas": {"x": 1}}, headers=root)
    assert "quotas.x: unknown key; allowed here: burst, max_queued_jobs" in refused(answer, 422)


def test_a_full_disk_leaves_no_job(http, service, monkeypatch):
    def full(folder, files):
        raise StorageError(f"{folder}: cannot be written (No space left on device)")

    monkeypatch.setattr("marlaas_jax.service.service.write_upload", full)
    answer = http.post("/v1/jobs", json=submission("full"), headers={"Idempotency-Key": "full"})
    assert "No space left" in refused(answer, 507)
    assert http.get("/v1/jobs", params={"name": "full"}).json()["jobs"] == []
    monkeypatch.undo()
    assert http.post("/v1/jobs", json=submission("full"), headers={"Idempotency-Key": "full"}).status_code == 201


def test_a_fault_of_ours_tells_a_number_and_no_more(http, service, monkeypatch, caplog):
    def broken(record):
        raise RuntimeError("secret of the service")

    made = http.post("/v1/jobs", json=submission("fault")).json()
    monkeypatch.setattr(service.service, "why", broken)
    message = refused(http.get(f"/v1/jobs/{made['id']}"), 500)
    assert "secret" not in message and "secret of the service" in caplog.text
    assert message.split()[-1] in caplog.text


def test_an_answer_outlives_a_crash_before_it_was_sent(http, service, monkeypatch):
    """H07: the job is in the store, then the process dies: the repeat gets that job, not another."""
    monkeypatch.setattr(service.service.events, "add", lambda *_: 1 / 0)  # right after the store has it
    headers = {"Idempotency-Key": "crash"}
    refused(http.post("/v1/jobs", json=submission("crash"), headers=headers), 500)
    monkeypatch.undo()
    again = http.post("/v1/jobs", json=submission("crash"), headers=headers)
    assert again.status_code == 201 and again.headers["Idempotency-Replayed"] == "true"
    assert [job["id"] for job in http.get("/v1/jobs", params={"name": "crash"}).json()["jobs"]] == [again.json()["id"]]


def test_large_bodies_of_a_tenant_are_few_at_once(http, service):
    address, key = (http.base_url.host, http.base_url.port), service.key("large")
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {2 << 20}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(socket.create_connection(address, timeout=10)).sendall(head.encode())
        time.sleep(0.5)
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{service.url}/v1/jobs", content=bytes(2 << 20), headers=headers)
        assert "large requests" in refused(answer, 429) and answer.headers["Retry-After"] == "1"
    deadline = time.monotonic() + 10
    while httpx.post(f"{service.url}/v1/jobs", content=bytes(2 << 20), headers=headers).status_code == 429:
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": "\\ud800"}', "not JSON in UTF-8"),
        (b'{"a": "\xff"}', "not JSON in UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 40 + b"]" * 40, "nested too deeply; at most 32"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
    ],
)
def test_what_is_not_json_as_it_is_allowed(http, content, words):
    for path in ("/v1/jobs", "/v1/jobs/job_x/clone", "/v1/jobs/job_x/pause", "/v1/tenants"):
        message = refused(http.post(path, content=content, headers={"Content-Type": "application/json"}), 400)
        assert words in message and len(message) < 1000


def test_bodies_have_a_limit(http, service):
    assert "at most 1048576 bytes" in refused(http.post("/v1/tenants", content=b" " * (1 << 20) + b"{}"), 413)
    chunks = (b" " * 65536 for _ in range(17))  # without a Content-Length
    assert "at most" in refused(http.post("/v1/tenants", content=chunks), 413)
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=10) as raw:
        key = service.key("ann")
        raw.sendall(
            f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {10**12}\r\n\r\n".encode()
        )
        answer = b""
        while b"}" not in answer:
            answer += raw.recv(65536)
        assert b"413" in answer.splitlines()[0] and b"at most 90527061 bytes" in answer
    large = base64.b64encode(bytes(3 << 20)).decode()
    made = http.post("/v1/jobs", json=submission("large", files={**SENT, "data/large.bin": large}))
    assert made.status_code == 201
    written = service.service.folder(made.json()["id"]) / "files" / "data" / "large.bin"
    assert written.stat().st_size == 3 << 20


def test_pages_show_each_job_once_and_filters_hold(service):
    client = service.client("pages")
    made = [client.submit(of(f"{'even' if i % 2 == 0 else 'odd'}-{i}"), files=FILES, labels={"i": str(i)}).id for i in range(7)]
    client.cancel(made[0])
    with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {service.key('pages')}"}) as http:
        seen, cursor = [], None
        while True:
            page = http.get("/v1/jobs", params={"limit": 3, **({"cursor": cursor} if cursor else {})}).json()
            seen.append([job["id"] for job in page["jobs"]])
            if (cursor := page["next_cursor"]) is None:
                break
        assert [job_id for page in seen for job_id in page] == made[::-1] and [len(page) for page in seen] == [3, 3, 1]
        for query in ("limit=0", "limit=201", "limit=x", "cursor=x", "state=x", "label=x", "label=%21=x", f"limit={10**30}"):
            assert 400 <= http.get(f"/v1/jobs?{query}").status_code <= 422, query
    assert [job.id for job in client.jobs(name="odd")] == made[5::-2]
    assert [job.id for job in client.jobs(labels={"i": "4"})] == [made[4]]
    assert [job.id for job in client.jobs(state=["cancelled"])] == [made[0]]
    assert len(list(client.jobs(state=["cancelled", "queued"]))) == 7


def test_a_repeated_post_is_done_once(http, service):
    """H07: also after a restart, since the answer is in the store."""
    body, headers = submission("once"), {"Idempotency-Key": "k1"}
    first = http.post("/v1/jobs", json=body, headers=headers)
    again = http.post("/v1/jobs", json=body, headers=headers)
    assert first.status_code == again.status_code == 201 and first.json() == again.json()
    assert again.headers["Idempotency-Replayed"] == "true" and "Idempotency-Replayed" not in first.headers
    other = http.post("/v1/jobs", json=submission("other"), headers=headers)
    assert "k1" in refused(other, 409) and "Retry-After" not in other.headers
    assert refused(http.post(f"/v1/jobs/{first.json()['id']}/pause", headers=headers), 409)
    assert len(http.get("/v1/jobs", params={"name": "once"}).json()["jobs"]) == 1
    stranger = httpx.post(
        f"{service.url}/v1/jobs", json=body, headers=headers | {"Authorization": f"Bearer {service.key('bob')}"}
    )
    assert stranger.status_code == 201 and stranger.json()["id"] != first.json()["id"]
    for key in ("", "x" * 256, "\xe9"):
        assert refused(http.post("/v1/jobs", json=body, headers={"Idempotency-Key": key.encode("latin-1")}), 400)


def test_a_refused_post_may_be_sent_again(http):
    headers = {"Idempotency-Key": "k2"}
    for _ in range(2):
        refused(http.post("/v1/jobs", json=submission("again", steps=0), headers=headers), 422)
    assert http.post("/v1/jobs", json=submission("again"), headers=headers).status_code == 201


def test_one_of_many_posts_at_once_is_done(service, http):
    body, headers = submission("crowd"), {"Idempotency-Key": "k3", "Authorization": f"Bearer {service.key('ann')}"}
    answers = []

    def post():
        answers.append(httpx.post(f"{service.url}/v1/jobs", json=body, headers=headers, timeout=30))

    threads = [threading.Thread(target=post) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = {answer.status_code for answer in answers}
    assert 201 in statuses and statuses <= {201, 409}
    assert len({answer.json()["id"] for answer in answers if answer.status_code == 201}) == 1
    assert all(answer.headers["Retry-After"] == "1" for answer in answers if answer.status_code == 409)
    assert len(http.get("/v1/jobs", params={"name": "crowd"}).json()["jobs"]) == 1


def test_a_request_that_is_under_way_is_not_done_again(service, http):
    service.client("slow")
    tenant = next(t for t in service.client("root", is_admin=True).tenants() if t.name == "slow")
    digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of an empty body
    key = "k4"
    service.service.store.write(idempotency.begin, tenant.id, key, "POST /v1/jobs/x/pause", digest, now=time.time()).result()
    headers = {"Idempotency-Key": key, "Authorization": f"Bearer {service.key('slow')}"}
    answer = httpx.post(f"{service.url}/v1/jobs/x/pause", headers=headers)
    assert "under way" in refused(answer, 409) and answer.headers["Retry-After"] == "1"


def test_a_new_keys_secret_is_not_kept(service):
    headers = {"Idempotency-Key": "k5", "Authorization": f"Bearer {service.key('root', is_admin=True)}"}
    path = f"{service.url}/v1/tenants/root/keys"
    first, again = (httpx.post(path, headers=headers) for _ in range(2))
    assert first.json()["secret"].startswith("mj-") and again.json() == first.json() | {"secret": None}
    secret = first.json()["secret"].encode()
    assert not [path for path in service.service.data_dir.glob("marlaas.db*") if secret in path.read_bytes()]


def test_a_clone_has_the_changes_and_the_files(service):
    client = service.client("cloner")
    parent = client.submit(of("parent", lora={"rank": 4, "alpha": 8}), files=FILES, priority=3, labels={"a": "b"})
    child = client.clone(parent.id, {"name": "child", "lora": {"rank": 2}})
    assert (child.parent, child.priority, child.labels, child.name) == (parent.id, 3, {"a": "b"}, "child")
    assert child.config == parent.config | {"name": "child", "lora": parent.config["lora"] | {"rank": 2}}
    files = service.service.folder(child.id) / "files"
    assert (files / "rewards.py").read_bytes() == FILES["rewards.py"]
    key = service.key("cloner")
    answer = httpx.post(
        f"{service.url}/v1/jobs/{parent.id}/clone", json={"changes": {"stepz": 1}}, headers={"Authorization": f"Bearer {key}"}
    )
    assert "stepz: unknown key" in refused(answer, 422)


def test_unknown_routes_and_methods(http):
    assert "no such route" in refused(http.get("/v1/job"), 404)
    assert "no such route" in refused(http.put("/v1/jobs"), 405)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)
FIELDS = st.sampled_from([*sorted(submission()), "priority", "labels", "lora", "data", "env_args", "seed", "algorithm"])
ASK = {"model": "tiny", "prompt": "x", "max_tokens": 2}
ASKED = st.sampled_from([
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop",
    "seed", "logprobs", "top_logprobs", "stream", "stream_options", "tools", "user", "echo", "best_of", "logit_bias",
    "return_token_ids", "decoding",
])  # fmt: skip
BODIES = st.one_of(
    JSON.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=200),
    st.dictionaries(FIELDS, JSON, max_size=4).map(lambda changes: json.dumps(submission() | changes).encode()),
    st.dictionaries(ASKED, JSON, max_size=4).map(lambda changes: json.dumps(ASK | changes).encode()),
)
PATHS = st.one_of(
    st.sampled_from([
        "/v1/jobs", "/v1/jobs/x", "/v1/jobs/x/clone", "/v1/jobs/x/events", "/v1/jobs/x/episodes", "/v1/tenants", "/v1/keys/x",
        "/v1/jobs/x/metrics", "/v1/tenants/root", "/v1/tenants/root/keys", "/v1/usage", "/metrics", "/v1/models",
        "/v1/models/tiny", "/v1/completions", "/v1/completions", "/v1/chat/completions", "/v1/chat/completions",
    ]),
    st.text(max_size=30).map(lambda text: "/v1/jobs/" + text),
)  # fmt: skip
QUERY = st.dictionaries(
    st.sampled_from(
        ["limit", "cursor", "state", "name", "label", "after", "from", "to", "step", "min_reward", "first_day", "x"]
    ),
    st.one_of(st.text(max_size=20), st.integers().map(str), st.floats().map(str)),
    max_size=3,
)
HEADERS = st.dictionaries(
    st.sampled_from(["Content-Type", "Idempotency-Key", "Last-Event-ID", "X-Other"]),
    st.sampled_from([b"", b"application/json", b"text/plain", b"multipart/form-data", b"\xff", b"-1", b"9" * 40, b"a/b;;;"]),
    max_size=3,
)
METHODS = st.sampled_from(["POST", "POST", "POST", "GET", "POST", "PATCH", "DELETE", "PUT", "HEAD", "OPTIONS"])


def attack(service, count):
    """Sends so many requests that hypothesis makes up, as an admin; none may be answered as the service's own fault."""
    key = service.key("root", is_admin=True)
    with httpx.Client(base_url=service.url, timeout=30) as http:

        @settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
        @given(METHODS, PATHS, QUERY, HEADERS, BODIES)
        def send(method, path, query, headers, body):
            is_stream = method == "GET" and path.endswith("/events")
            try:
                request = http.build_request(
                    method, path, params={} if is_stream else query, content=body,
                    headers={"Content-Type": "application/json", **headers, "Authorization": f"Bearer {key}"},
                )  # fmt: skip
            except (httpx.InvalidURL, ValueError):
                return
            answer = http.send(request)
            assert answer.status_code < 500, (answer.status_code, answer.text)
            if answer.status_code >= 400 and method != "HEAD":
                assert set(answer.json()) == {"error"}

        send()
        assert http.get("/healthz").status_code == 200


def test_300_malformed_requests(service):
    attack(service, 300)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_10_000_malformed_requests(service):
    attack(service, 10_000)
