"""A tenant's own environment worker, over encrypted tcp: who may join, what it hears, what it may say, coming and going."""

import os
import signal
import stat
import subprocess
import sys
import time

import pytest
import zmq

from marlaas_jax.errors import CorruptFile, InvalidConfig, NotFound, ProtocolMismatch, WorkerLost
from marlaas_jax.messages import EnvDone, EnvError, EnvLoaded, EnvReset, Generated, Item, LoadEnv, RemoveJob
from marlaas_jax.service.strangers import key_pair
from marlaas_jax.store import tenants
from marlaas_jax.transport.client import Client
from marlaas_jax.workers import controller_doors
from tests.service.live import live, of
from tests.workers.faked import REWARDS, ROOT

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(controller_doors, "LOOK_INTERVAL_S", 0.2)
    with live(tmp_path_factory.mktemp("elsewhere"), env_workers_at="tcp://127.0.0.1:0") as found:
        yield found
    patch.undo()


SLOW = {"step_timeout_s": 300.0}  # for workers of tests that never answer


def join(service, tenant, *, role="environment", name="mine", key=None, server_key=None, worker_id=None, **info):
    """Joins as such a worker would."""
    told = service.client(tenant).env_workers()
    info = {"api_key": key or service.key(tenant), "environment": name, **info}
    worker_id = worker_id or f"remote-{role}-{os.urandom(6).hex()}"
    known = (server_key or told["server_key"]).encode()
    return Client(told["address"], role, worker_id, info, server_key=known, connect_timeout_s=10.0)


def remote(name, env="remote:mine", **changes):
    return of(name, **changes) | {"env": env}


def until(condition, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def heard(worker, kind, timeout_s=30.0):
    """Returns the next message of a kind."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if isinstance(message := worker.receive(0.5), kind):
            return message
    raise AssertionError(f"no {kind.__name__}")


def test_the_key_pair_is_made_once_and_for_this_user_only(tmp_path):
    path = tmp_path / "workers.key"
    made = key_pair(path)
    assert key_pair(path) == made and stat.S_IMODE(path.stat().st_mode) == 0o600 and zmq.curve_public(made[1]) == made[0]
    path.write_text('{"public": "a"}')
    with pytest.raises(CorruptFile, match="holds no key pair"):
        key_pair(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": "mj-nobody"}, "the API key is unknown or revoked"),
        ({"key": 7}, "the API key is unknown or revoked"),
        ({"role": "device"}, "only environment and data workers join from elsewhere"),
        ({"name": "../x"}, "name: must be 1 to 64"),
        ({"worker_id": "device-0"}, "worker id"),
    ],
)
def test_who_may_not_join_is_told_in_one_sentence(service, changes, words):
    with pytest.raises(ProtocolMismatch, match=words) as caught:
        join(service, "ann", **changes)
    assert "\n" not in str(caught.value)


def test_without_the_servers_key_nobody_is_reached(service):
    """Encrypted to another key, or not at all, nothing arrives; what is sent in the clear is never read."""
    other, _ = zmq.curve_keypair()
    told = service.client("ann").env_workers()
    for known in (other, None):
        with pytest.raises(WorkerLost, match="no controller answered"):
            Client(told["address"], "environment", "remote-clear-12345678", {}, server_key=known, connect_timeout_s=1.0)


def test_a_revoked_key_ends_its_connections(service):
    store = service.service.store
    tenant = store.write(tenants.create_tenant, "leaver", now=1.0, quotas={"requests_per_second": None}).result()
    key, secret = store.write(tenants.create_key, tenant.id, now=1.0).result()
    worker = join(service, "ann", key=secret)
    assert until(lambda: service.client("leaver").env_workers()["connected"]) == {"mine": 1}
    store.write(tenants.revoke_key, key.id, tenant_id=tenant.id, now=2.0).result()
    with pytest.raises(WorkerLost):
        while True:
            worker.receive(20.0) or pytest.fail("it stayed connected")
    worker.close()
    with pytest.raises(ProtocolMismatch, match="unknown or revoked"):
        join(service, "ann", key=secret)


@pytest.mark.slow
def test_a_worker_hears_of_its_owners_jobs_only_and_can_answer_only_for_them(service):
    """Workers of the same name: each gets its own job; answers forged for the other's are refused and change nothing."""
    controller = service.service.controller
    data = {"source": "jsonl:items.jsonl"}
    files = {"items.jsonl": b"".join(b'{"prompt": "q%d", "answer": "yes"}\n' % i for i in range(20))}
    ann, bob = join(service, "ann", name="shared"), join(service, "bob", name="shared")
    theirs = {}
    try:
        for tenant, worker in (("ann", ann), ("bob", bob)):
            job = service.client(tenant).submit(remote("job", "remote:shared", data=data, steps=50, rollout=SLOW), files=files)
            load = heard(worker, LoadEnv)
            assert load.job == job.id and load.env == "remote:shared"
            worker.send(EnvLoaded(job.id, load.incarnation))
            theirs[tenant] = job, heard(worker, EnvReset)
        job, reset = theirs["bob"]
        assert reset.job == job.id and reset.episode_id.startswith(job.id)
        before, refused = controller.orchestrator.jobs[job.id].tally.as_dict(), controller._doors.num_refused
        forged = [
            EnvDone(reset.episode_id, reset.attempt, 1.0),
            EnvError(reset.episode_id, reset.attempt, "raised", "forged"),
            EnvLoaded(job.id, 1, error="forged"),
            Item(f"{job.id}/1/item/1", b"{}"),
            Generated("x", 0, job.id, 1, (), b"", b"", "stop", 0, 0, ""),
        ]
        for message in forged:
            ann.send(message)
        until(lambda: controller._doors.num_refused == refused + len(forged))
        now = controller.orchestrator.jobs[job.id].tally.as_dict()
        assert {k: v for k, v in now.items() if k != "running"} == {k: v for k, v in before.items() if k != "running"}
        assert service.client("bob").job(job.id).state == "running"
        service.client("bob").cancel(job.id)
        assert heard(bob, RemoveJob).job == job.id
        while (message := ann.receive(0.3)) is not None:
            assert job.id not in repr(message)
    finally:
        service.client("ann").cancel(theirs["ann"][0].id)
        ann.close()
        bob.close()


def test_a_job_of_a_service_without_such_workers_is_refused(tmp_path):
    with live(tmp_path) as service:
        client = service.client("ann")
        with pytest.raises(InvalidConfig, match=r"env='remote:mine': this service takes no environment workers"):
            client.submit(remote("job"))
        with pytest.raises(NotFound, match="env_workers_at"):
            client.env_workers()


@pytest.mark.slow
def test_the_command_serves_a_job_and_may_come_and_go(service, tmp_path):
    """`marlaas env-worker`: a job waits for it and says so, trains while it is there, waits while it is not, and ends well."""
    (tmp_path / "mine.py").write_text(REWARDS)
    told = service.client("ann").env_workers()
    command = [sys.executable, "-m", "marlaas_jax.cli.main", "env-worker", "--connect", told["address"], "--server-key"]
    command += [told["server_key"], str(tmp_path / "mine.py:good")]
    environment = os.environ | {"MARLAAS_API_KEY": service.key("ann")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "envs")])

    def start():
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    client = service.client("ann")
    job = client.submit(remote("job", steps=12))
    why = until(lambda: (text := client.why(job.id)).startswith("env worker") and text)
    assert "none is connected; start one with `marlaas env-worker --name mine`, by its owner, since" in why
    first = start()
    try:
        until(lambda: client.job(job.id).step >= 1)
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 0, first.stderr.read()
        until(lambda: client.why(job.id) == why)
        second = start()
        try:
            done = client.wait(job.id)
            assert (done.state, done.step) == ("succeeded", 12), done
        finally:
            second.send_signal(signal.SIGINT)
            assert second.wait(30) == 0
            second.communicate()
    finally:
        first.kill()
        first.communicate()
    environment["MARLAAS_API_KEY"] = "mj-nobody"
    wrong = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "the API key is unknown or revoked" in wrong.stderr and "Traceback" not in wrong.stderr
