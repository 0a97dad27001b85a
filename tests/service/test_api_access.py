"""Who may do what: every route of the application, from the application itself, with every sort of key."""

import re

import httpx
import pytest

from marlaas_jax.store import events, jobs, sweeps, tenants
from tests.e2e.runs import wait_for
from tests.service.live import FILES, live, of

pytestmark = pytest.mark.multiprocess
OPEN = {"/healthz", "/readyz", "/docs", "/openapi.json", "/docs/oauth2-redirect"}
BODIES = {"clone": {"changes": {}}, "rollback": {"step": 0}}
OPENAI = {"kind", "message", "type", "param", "code"}
METHODS = {"GET", "POST", "PATCH", "DELETE", "PUT"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with live(tmp_path_factory.mktemp("access"), quotas={"max_running_jobs": 0}) as found:
        yield found


@pytest.fixture(scope="module")
def routes(service):
    """(method, path) of everything that OpenAPI lists."""
    document = httpx.get(f"{service.url}/openapi.json").json()
    found = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    assert len(found) >= 24 and all(method in METHODS for method, _ in found)
    return found


@pytest.fixture(scope="module")
def theirs(service):
    """A job, a tenant and a key of somebody."""
    job = service.client("owner").submit(of("theirs"), files=FILES)
    ended = service.client("owner").submit(of("ended"), files=FILES)
    service.client("owner").cancel(ended.id)
    sweep = service.client("owner").submit_sweep(
        {"name": "theirs", "job": of("base"), "grid": {"optimizer.learning_rate": [1e-4, 1e-3]}}, files=FILES
    )
    store = service.service.store
    owner = store.read(tenants.get_tenant, "owner")
    live = service.service.live_ids
    wait_for(lambda: len(live) == 3, 20, "the trials to be queued")
    return {
        "sweep_id": sweep.id,
        "job_id": job.id,
        "ended": ended.id,
        "model": job.id,
        "tenant_id": owner.id,
        "key_id": store.read(tenants.list_keys, owner.id)[0].id,
    }


def send(service, method, path, key=None, **options):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"json": BODIES.get(path.rpartition("/")[2], {})} if method in ("POST", "PATCH") else {}
    return httpx.request(method, service.url + path, headers=headers, timeout=20, **body | options)


def error(response):
    told = response.json()
    assert set(told) == {"error"} and set(told["error"]) in ({"kind", "message"}, OPENAI), told
    assert "Traceback" not in told["error"]["message"]
    return told["error"]


def snapshot(service):
    """All that the store keeps, and the files."""
    store = service.service.store
    files = {path.name: path.stat().st_size for path in (service.service.data_dir / "jobs").rglob("*")}
    return (
        store.read(jobs.list_jobs),
        store.read(tenants.list_tenants),
        [store.read(tenants.list_keys, tenant.id) for tenant in store.read(tenants.list_tenants)],
        [event for event in store.read(events.list_events, tenant_id=None) if event.job_id],
        files,
        store.read(sweeps.list_sweeps, tenant_id=None),
    )


def test_nothing_without_a_good_key(service, routes, theirs):
    revoked = service.key("leaver")
    client = service.client("root", is_admin=True)
    assert send(service, "GET", "/v1/jobs", revoked).status_code == 200  # and so it is remembered
    client.revoke_key(next(t for t in client.tenants() if t.name == "leaver").keys[0].id)
    before = snapshot(service)
    for method, path in routes:
        if path in OPEN:
            assert send(service, method, path).status_code in (200, 503)
            continue
        where = path.format(**theirs)
        for key in (None, "mj-wrong", "x" * 5000, revoked):
            answer = send(service, method, where, key)
            assert answer.status_code == 401, (method, path, key, answer.text)
            assert error(answer)["kind"] == "NotAllowed"
    assert httpx.get(f"{service.url}/v1/jobs", auth=("x", "y")).status_code == 401
    assert snapshot(service) == before


def test_another_tenants_objects_do_not_exist(service, routes, theirs):
    """Each route with a job's id, with a stranger's key: 404, as for an id that was never given, and nothing changes."""
    stranger = service.key("stranger")
    assert [sweep.id for sweep in service.client("owner").sweeps()] == [theirs["sweep_id"]]
    before = snapshot(service)
    tried = [(method, path) for method, path in routes if "{job_id}" in path]
    assert len(tried) >= 12
    for method, path in tried:
        for job_id in (theirs["job_id"], theirs["ended"], "job_" + "0" * 22, "job_x", "%00", "a%2Fb", "'; --"):
            answer = send(service, method, path.replace("{job_id}", job_id), stranger)
            assert answer.status_code == 404, (method, path, job_id, answer.text)
        mine, never = (
            error(send(service, method, path.replace("{job_id}", job_id), stranger))["message"]
            for job_id in (theirs["job_id"], "job_" + "0" * 22)
        )
        assert mine.replace(theirs["job_id"], "*") == never.replace("job_" + "0" * 22, "*")
    assert send(service, "GET", "/v1/jobs", stranger).json() == {"jobs": [], "next_cursor": None}
    for method, path in [(method, path) for method, path in routes if "{sweep_id}" in path]:
        for sweep_id in (theirs["sweep_id"], theirs["job_id"], "sweep_" + "0" * 22, "%00", "'; --"):
            answer = send(service, method, path.replace("{sweep_id}", sweep_id), stranger)
            assert answer.status_code == 404 and "no such sweep" in error(answer)["message"], (method, path, answer.text)
    assert send(service, "GET", "/v1/sweeps", stranger).json() == {"sweeps": []}
    assert theirs["job_id"] not in send(service, "GET", "/metrics", stranger).text
    billed = service.service.metering  # the owner has used something
    owner = theirs["tenant_id"]
    billed.record_request(owner, prompt_tokens=5, sampled_tokens=7, job_id=theirs["job_id"])
    service.run(billed.flush())
    for query in ("", f"?job={theirs['job_id']}", "?by=tenant&by=job", f"?by=tenant&job={theirs['job_id']}"):
        told = send(service, "GET", f"/v1/usage{query}", stranger)
        assert told.json()["usage"] == [] and told.json()["total"]["sampled_tokens"] == 0.0, query
        assert owner not in told.text and "owner" not in told.text
    shares = send(service, "GET", "/v1/fairness", stranger)
    assert shares.json()["tenants"] == [] and owner not in shares.text
    body = of("mine", lora={"init_from": theirs["job_id"]}) | {"files": {"rewards.py": ""}}
    assert send(service, "POST", "/v1/quotes", stranger, json=body).status_code == 404
    assert snapshot(service) == before
    assert send(service, "GET", "/v1/usage", service.key("owner")).json()["total"]["sampled_tokens"] == 7.0


def test_another_tenants_jobs_are_no_models(service, routes, theirs):
    """Each route that takes a model's name, with another tenant's job, whatever its state: 404, as for one that never was."""
    stranger = service.key("stranger")
    before = snapshot(service)
    ask = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}}
    assert {path for _, path in routes if path.endswith("completions")} == set(ask)
    for name in (theirs["job_id"], theirs["ended"], f"{theirs['ended']}@2", "job_" + "0" * 22, "job_x", "%00", "'; --"):
        told = [send(service, "POST", path, stranger, json={"model": name} | body) for path, body in ask.items()]
        told.append(send(service, "GET", f"/v1/models/{name}", stranger))
        assert [answer.status_code for answer in told] == [404, 404, 404], (name, [answer.text for answer in told])
        assert {error(answer)["code"] for answer in told} == {"model_not_found"}
    mine, never = (
        error(send(service, "POST", "/v1/completions", stranger, json={"model": name, "prompt": "x"}))["message"]
        for name in (theirs["job_id"], "job_" + "0" * 22)
    )
    assert mine.replace(theirs["job_id"], "*") == never.replace("job_" + "0" * 22, "*")
    listed = send(service, "GET", "/v1/models", stranger).json()["data"]
    assert [model["id"] for model in listed] == ["tiny"] and snapshot(service) == before


def test_tenants_and_keys_are_for_admins(service, routes, theirs):
    before = snapshot(service)
    admin_only = [(method, path) for method, path in routes if re.match(r"/v1/(tenants|keys)", path)]
    assert len(admin_only) == 5
    for method, path in admin_only:
        body = {"json": {"name": "new"}} if (method, path) == ("POST", "/v1/tenants") else {}
        answer = send(service, method, path.format(**theirs), service.key("owner"), **body)
        assert answer.status_code == 403 and "admin" in error(answer)["message"], (method, path, answer.text)
    after = snapshot(service)
    assert (after[0], after[1]) == before[:2] and not any(
        key.revoked for keys in after[2] for key in keys if key.id == theirs["key_id"]
    )
    root = service.client("root", is_admin=True)
    assert root.job(theirs["job_id"]).name == "theirs"
    made = root.create_tenant("fresh", weight=2.0, quotas={"max_running_jobs": 1})
    assert made.quotas == {"max_running_jobs": 1} and root.create_key("fresh").secret
    assert root.change_tenant(made.id, weight=3.0).weight == 3.0
    key = root.create_key(made.id).secret
    assert send(service, "GET", "/v1/jobs", key).status_code == 200
    root.change_tenant(made.id, is_disabled=True)
    assert send(service, "GET", "/v1/jobs", key).status_code == 401


def test_a_tenant_that_sends_too_much_is_told_when_to_come_back(service):
    key = service.key("busy")
    root = service.client("root", is_admin=True)
    root.change_tenant(next(t for t in root.tenants() if t.name == "busy").id, quotas={"requests_per_second": 0.5, "burst": 3})
    answers = [send(service, "GET", "/v1/jobs", key) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert 1 <= int(answers[-1].headers["Retry-After"]) <= 2 and "requests_per_second=0.5" in error(answers[-1])["message"]
    assert send(service, "GET", "/v1/jobs", service.key("calm")).status_code == 200


def test_the_figures_name_jobs_of_the_asking_tenant_only(service, theirs):
    own = send(service, "GET", "/metrics", service.key("owner")).text
    every = send(service, "GET", "/metrics", service.key("root", is_admin=True)).text
    assert 'marlaas_jobs{state="queued",tenant="owner"} 3.0' in own and "marlaas_loop_lag_s" not in own
    assert 'marlaas_queue_wait_s{tenant="owner"}' in every and "marlaas_loop_lag_s" in every


def test_every_route_is_described(service):
    document = httpx.get(f"{service.url}/openapi.json").json()
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            assert route.get("description"), (method, path)
    assert "Submission" in document["components"]["schemas"] and httpx.get(f"{service.url}/docs").status_code == 200
