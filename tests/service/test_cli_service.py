"""The commands around a service, as a person or a script uses them."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from marlaas_jax.cli.main import app
from marlaas_jax.client.blocking import Client
from tests.service.live import live, of
from tests.workers.faked import REWARDS, ROOT, steps_of

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with live(tmp_path_factory.mktemp("cli")) as found:
        yield found


@pytest.fixture
def marlaas(service, monkeypatch):
    """Runs a command with a tenant's key; returns its exit code, its output and its sentence on standard error."""
    monkeypatch.setenv("MARLAAS_URL", service.url)

    def run(*arguments, key="ann", **options):
        environment = {"MARLAAS_API_KEY": service.key(key, **options)}
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


@pytest.fixture
def job_file(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(of("mine")))
    return path


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_job_from_submit_to_delete(marlaas, job_file):
    code, out, _ = marlaas("submit", job_file, "--set", "jobs.mine.steps=3", "--label", "team=a", "--priority", 2, "--json")
    (job,) = lines(out)
    assert code == 0 and (job["state"], job["steps"], job["labels"], job["priority"]) == ("queued", 3, {"team": "a"}, 2)
    code, out, _ = marlaas("watch", job["id"])
    assert code == 0 and "step 3/3 reward" in out and out.endswith("mine: succeeded after 3 of 3 steps\n")
    code, out, _ = marlaas("watch", job["id"], "--json")
    told = lines(out)
    assert (
        code == 0 and told[-1]["type"] == "result" and [e["data"]["step"] for e in told if e.get("kind") == "step"] == [1, 2, 3]
    )
    code, out, _ = marlaas("events", job["id"])
    assert code == 0 and "job_queued" in out.splitlines()[0] and "job_succeeded" in out.splitlines()[-1]
    last = int(out.split()[0])
    assert marlaas("events", job["id"], "--after", last)[1].splitlines() == out.splitlines()[1:]
    code, out, _ = marlaas("episodes", job["id"], "--step", 1, "--json")
    assert code == 0 and {episode["ticket"] for episode in lines(out)} == {0, 1}
    code, out, _ = marlaas("episodes", job["id"], "--limit", 1)
    assert code == 0 and "Say yes to question" in out and ">>> " in out
    code, out, _ = marlaas("jobs", "--name", "mine", "--label", "team=a")
    assert code == 0 and job["id"] in out and "succeeded" in out and "3/3" in out
    assert [entry["id"] for entry in lines(marlaas("jobs", "--state", "succeeded", "--json")[1])] == [job["id"]]
    assert "it is over" in marlaas("why", job["id"])[1]
    assert marlaas("delete", job["id"]) == (0, f"{job['id']}: deleted\n", "")
    code, _, sentence = marlaas("why", job["id"])
    assert code == 2 and sentence == f"error: {job['id']}: no such job\n"


def test_a_job_that_fails_is_exit_code_1(marlaas, job_file):
    bad = of("bad", rollout={"max_attempts": 1}, eval={"num_items": 0})
    job_file.write_text(yaml.safe_dump(bad | {"env": "rewards.py:raises"}))
    code, out, sentence = marlaas("submit", job_file)
    assert (code, out) == (2, "") and sentence.startswith(
        "error: env='rewards.py:raises': ValueError: no reward today (rewards.py,"
    )
    job_file.write_text(yaml.safe_dump(bad | {"env": "rewards.py:fickle"}))
    job_id = marlaas("submit", job_file)[1].split()[0]
    code, out, _ = marlaas("watch", job_id)
    assert code == 1 and "no reward today" in out.splitlines()[-1]


def test_pause_resume_cancel(marlaas, job_file):
    job_id = marlaas("submit", job_file, "--set", "jobs.mine.steps=500")[1].split()[0]
    assert marlaas("pause", job_id) == (0, f"{job_id}: asked to pause\n", "")
    assert "pause" in marlaas("why", job_id)[1]
    for _ in range(200):
        if lines(marlaas("why", job_id, "--json")[1])[0]["state"] == "paused":
            break
    assert marlaas("resume", job_id) == (0, f"{job_id}: queued again\n", "")
    assert lines(marlaas("cancel", job_id, "--json")[1])[0]["state"] == "cancelled"
    code, _, sentence = marlaas("resume", job_id)
    assert code == 2 and "cancelled" in sentence


def test_tenants_and_their_keys(marlaas):
    code, out, _ = marlaas(
        "tenant", "create", "team", "--weight", 2, "--quota", "max_running_jobs=1", key="root", is_admin=True
    )
    assert code == 0 and out.splitlines()[1].startswith("mj-")
    made = lines(marlaas("tenant", "key", "team", "--json", key="root")[1])[0]
    (found,) = [t for t in lines(marlaas("tenant", "list", "--json", key="root")[1]) if t["name"] == "team"]
    assert found["quotas"] == {"max_running_jobs": 1} and found["weight"] == 2 and len(found["keys"]) == 2
    assert made["secret"] not in json.dumps(found)
    code, out, _ = marlaas("tenant", "revoke", made["id"], key="root")
    assert code == 0 and "is revoked" in out and "revoked" in marlaas("tenant", "list", key="root")[1]
    code, _, sentence = marlaas("jobs", "--api-key", made["secret"])
    assert code == 2 and "unknown or revoked" in sentence
    for arguments, words in {
        ("create", "team"): "another tenant has this name",
        ("create", "new", "--quota", "x=1"): "quotas.x: unknown key",
        ("create", "new", "--quota", "x"): "KEY=VALUE",
        ("revoke", "key_x"): "no such key",
    }.items():
        code, _, sentence = marlaas("tenant", *arguments, key="root")
        assert code == 2 and words in sentence and sentence.count("\n") == 1, sentence
    assert marlaas("tenant", "list")[0] == 2


def test_what_the_caller_can_mend_is_one_sentence(marlaas, job_file, monkeypatch):
    for arguments, words in {
        ("submit", "missing.yaml"): "no such job file",
        ("submit", job_file, job_file, "--name", "x"): "--name='x'",
        ("submit", job_file, "--label", "x"): "KEY=VALUE",
        ("submit", job_file, "--set", "jobs.mine.lora.rank=64"): "lora.rank=64",
        ("submit", job_file, "--file", "missing.py"): "missing.py",
        ("watch", "job_x"): "no such job",
        ("episodes", "job_x", "--split", "x"): "split='x'",
        ("jobs", "--state", "x"): "state",
        ("jobs", "--url", "http://127.0.0.1:9"): "no service answers there",
        ("jobs", "--url", "ftp:/x"): "ftp:/x",
    }.items():
        code, out, sentence = marlaas(*arguments)
        assert (code, out) == (2, "") and sentence.startswith("error: ") and sentence.count("\n") == 1, (arguments, sentence)
        assert words in sentence, sentence
    monkeypatch.delenv("MARLAAS_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["jobs"])
    assert result.exit_code == 2 and "MARLAAS_API_KEY" in result.stderr


class Served:
    """`marlaas serve` as a process of its own."""

    def __init__(self, folder, **changes):
        self.file = folder / "service.yaml"
        document = {"runtime": {"model": "tiny"}, "data_dir": str(folder / "data"), "port": 0} | changes
        self.file.write_text(yaml.safe_dump(document))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "envs")]), "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.service.serve_fake", str(self.file)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.told = []

    def until(self, kind):
        """Returns the line of this type."""
        for line in self.process.stdout:
            self.told.append(json.loads(line))
            if self.told[-1]["type"] == kind:
                return self.told[-1]
        raise AssertionError(self.process.stderr.read())

    def end(self, number=signal.SIGTERM):
        """Sends the signal; returns the exit code once all its processes are gone."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(number)
        self.until("stopped")
        code = self.process.wait(60)
        self.process.stdout.close()
        self.process.stderr.close()
        gone, alive = psutil.wait_procs(children, 10)
        assert not alive and gone
        return code


@contextlib.contextmanager
def served(folder, **changes):
    found = Served(folder, **changes)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.kill()
            found.process.wait(10)
        found.process.stdout.close()
        found.process.stderr.close()


@pytest.mark.slow
def test_serve_makes_an_admin_drains_and_goes_on(tmp_path):
    """Started, asked to end with a job in the middle of its steps and a client that watches, started again."""
    with served(tmp_path) as first:
        url = first.until("ready")["url"]
        key_file = tmp_path / "data" / "admin.key"
        assert {"type": "admin_key", "path": str(key_file)} in first.told
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        secret = key_file.read_text().strip()
        with Client(url, secret, patience_s=10) as client:
            job = client.submit(of("long", steps=60), files={"rewards.py": REWARDS.encode()})
            events = client.events(job.id)
            seen = [next(event for event in events if event.kind == "step" and event.data["step"] >= 3)]
            assert first.end() == 0
            assert client.url == url
            port = int(url.rpartition(":")[2])
            with served(tmp_path, port=port) as second:
                assert second.until("ready")["url"] == url and not [t for t in second.told if t["type"] == "admin_key"]
                seen += events
                done = client.job(job.id)
                assert (done.state, done.step) == ("succeeded", 60) and seen[-1].kind == "job_succeeded"
                steps = [event.data["step"] for event in seen if event.kind == "step"]
                assert steps == list(range(steps[0], 61))
                assert second.end(signal.SIGINT) == 0
    assert steps_of(tmp_path / "data", job.id) == list(range(1, 61))


def test_serve_refuses_in_one_sentence(tmp_path):
    """H34: a port in use; a data folder in use; a field that is not allowed."""

    def refused(*overrides, options=()):
        arguments = [*options, *(part for override in overrides for part in ("--set", override))]
        result = CliRunner().invoke(app, ["serve", "--set", f"data_dir={tmp_path / 'data'}", *arguments])
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, (result.output, result.exception)
        return result.stderr

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = refused(f"port={port}")
        assert f"port={port}" in sentence and "in use" in sentence and "port=0" in sentence
        assert refused(f"port={port}", options=["--detach"]) == sentence
    assert "prot: unknown key" in refused("prot=1")
    assert "must read KEY=VALUE" in refused("port")
    assert "max_running_jobs=0" in refused("max_running_jobs=0")
    assert "db='mysql'" in refused("db=mysql://x", "port=0") or "mysql" in refused("db=mysql://x", "port=0")
    assert "no such" in CliRunner().invoke(app, ["serve", str(tmp_path / "missing.yaml")]).stderr
    with live(tmp_path / "live"):
        pass
    from marlaas_jax.service.first_start import data_folder

    with data_folder(tmp_path / "data"):
        assert "another service uses it" in refused("port=0")


def test_an_admin_whose_key_was_not_written_gets_another(tmp_path):
    from marlaas_jax.service.first_start import admin_key
    from marlaas_jax.store import tenants
    from marlaas_jax.store.engine import Store

    with Store.open(f"sqlite:///{tmp_path / 'a.db'}") as store:
        path = admin_key(store, tmp_path)
        assert store.read(tenants.find_tenant, path.read_text().strip()).is_admin
        assert admin_key(store, tmp_path) is None
        path.write_text("")
        assert store.read(tenants.find_tenant, admin_key(store, tmp_path).read_text().strip()).name == "admin"
        path.unlink()
        assert admin_key(store, tmp_path) is None
