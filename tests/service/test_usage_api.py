"""Use, cost, quotes and forecasts over HTTP, with real workers and a fake device."""

import csv
import io
import json
import time

import httpx
import pytest
import typer.testing

from marlaas_jax.cli.main import app
from marlaas_jax.errors import InvalidConfig, NotFound
from marlaas_jax.store import usage as usage_table
from marlaas_jax.workers.controller_files import read_lines
from tests.service.live import FILES, live, of

pytestmark = pytest.mark.multiprocess
PRICES = {"currency": "EUR", "prompt_tokens": 1.0, "sampled_tokens": 20.0, "trained_tokens": 30.0, "device_hour": 2.0}
TOKENS = ("prompt_tokens", "sampled_tokens", "trained_tokens")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with live(tmp_path_factory.mktemp("usage"), prices=PRICES) as found:
        yield found


@pytest.fixture(scope="module")
def done(service):
    """A job that has succeeded, and what was quoted before."""
    client = service.client("ann")
    quoted = client.quote(of("a", steps=10), files=FILES)
    started = time.monotonic()
    job = client.submit(of("a", steps=10), files=FILES)
    ended = client.wait(job.id)
    assert ended.state == "succeeded", ended
    return ended, quoted, time.monotonic() - started


def test_a_job_is_billed_for_what_its_history_holds(service, done):
    job = done[0]
    rows = read_lines(service.service.folder(job.id) / "metrics.jsonl")
    used = service.service.folder(job.id) / "state.json"
    after = json.loads(used.read_text())["used_after"]
    assert after["sampled_tokens"] > 0 and after["trained_tokens"] == 0, "the last evaluation"
    expected = {meter: sum(row[f"meter/{meter}"] for row in rows) + after[meter] for meter in (*TOKENS, "env_s")}
    assert expected["trained_tokens"] == sum(row["rollout/num_tokens"] for row in rows)
    episodes = read_lines(service.service.folder(job.id) / "episodes-00000.jsonl")
    assert expected["sampled_tokens"] <= sum(episode["num_sampled_tokens"] for episode in episodes)
    found = service.client("ann").usage()
    assert [row["job_id"] for row in found["usage"]] == [job.id] and found["usage"][0]["day"] == usage_table.utc_day(
        time.time()
    )
    for meter, amount in expected.items():
        assert found["total"][meter] == pytest.approx(amount), meter
    seconds = 10 * 0.015 + expected["prompt_tokens"] * 0.001 + expected["sampled_tokens"] * 0.002
    assert found["total"]["device_s"] == pytest.approx(seconds)
    cost = sum(expected[meter] * PRICES[meter] for meter in TOKENS) / 1e6 + seconds * 2.0 / 3600
    assert found["total"]["cost"] == pytest.approx(cost) and found["total"]["currency"] == "EUR"
    assert service.client("ann").job(job.id).usage["cost"] == pytest.approx(cost)
    tokens_today = service.service.metering.tokens_today(job.tenant_id)
    assert tokens_today == pytest.approx(sum(expected[meter] for meter in TOKENS)), "what the quota goes by"
    figures = httpx.get(f"{service.url}/metrics", headers={"Authorization": f"Bearer {service.key('ann')}"}).text
    assert f'marlaas_tokens_total{{kind="sampled",tenant="ann"}} {expected["sampled_tokens"]}' in figures
    assert 'marlaas_stage_wait_s_count{stage="environment",tenant="ann"}' in figures and "jain" not in figures


def test_tenants_see_their_own_use_and_an_admin_all_by_tenant(service, done):
    stranger, root = service.client("stranger"), service.client("root", is_admin=True)
    assert stranger.usage()["usage"] == [] and stranger.usage(job_id=done[0].id)["usage"] == []
    rows = root.usage()["usage"]
    assert [(row["tenant"], row["tenant_id"]) for row in rows] == [("ann", done[0].tenant_id)]
    assert root.usage(last_day="2000-01-01")["usage"] == []
    assert root.usage(by=["day", "tenant", "job"])["usage"][0]["job_id"] == done[0].id
    assert [tenant["tenant"] for tenant in root.fairness()["tenants"]] == ["ann"]
    assert stranger.fairness(10.0)["tenants"] == [] and root.fairness()["tenants"][0]["waits"]["environment"]["number"] > 0
    with pytest.raises(Exception, match="window_s"):
        root.fairness(0.0)


def test_a_quote_brackets_what_the_job_took_and_queues_nothing(service, done):
    job, quoted, took_s = done
    assert quoted["basis"] == "default" and quoted["load"] == 1.0 and quoted["waits_for"] == ""
    for meter in TOKENS:
        assert quoted["amounts"][meter]["low"] <= job.usage[meter] <= quoted["amounts"][meter]["high"], meter
    assert quoted["now_s"]["low"] <= took_s <= max(60.0, quoted["now_s"]["high"])
    assert quoted["cost"]["low"] <= quoted["cost"]["expected"] <= quoted["cost"]["high"]
    client = service.client("ann")
    num_jobs = len(list(client.jobs()))
    again = client.quote(of("b", steps=10), files=FILES)
    assert again["basis"] == "measured"
    for meter in (*TOKENS, "device_s"):
        amount = again["amounts"][meter]
        assert amount["low"] <= job.usage[meter] <= amount["high"] or amount["expected"] == pytest.approx(
            job.usage[meter], rel=0.3
        )
        assert amount["high"] - amount["low"] < quoted["amounts"][meter]["high"] - quoted["amounts"][meter]["low"]
    assert client.quote(of("b", steps=20), files=FILES)["amounts"]["trained_tokens"]["expected"] == pytest.approx(
        2 * again["amounts"]["trained_tokens"]["expected"]
    )
    with pytest.raises(InvalidConfig, match=r"lora\.rank=64"):
        client.quote(of("b", lora={"rank": 64}), files=FILES)
    with pytest.raises(NotFound, match="no such job"):
        service.client("stranger").quote(of("b", lora={"init_from": job.id}), files=FILES)
    assert len(list(client.jobs())) == num_jobs and not list(service.service.data_dir.glob("uploads/*"))


def test_forecasts_are_written_down_and_checked(service, done):
    events = list(service.client("ann").events(done[0].id))
    marks = [event.data for event in events if event.kind == "eta"]
    checked = [event.data for event in events if event.kind == "eta_checked"]
    assert (
        [(mark["share"], mark["step"]) for mark in marks] == [(0.2, 2), (0.5, 5)] == [(c["share"], c["step"]) for c in checked]
    )
    for mark, check in zip(marks, checked, strict=True):
        assert mark["low_s"] <= mark["expected_s"] <= mark["high_s"] and check["took_s"] > 0
        assert check["is_within"] == (mark["low_s"] <= check["took_s"] <= mark["high_s"])
    steps = [event.data for event in events if event.kind == "step"]
    assert all(step["eta_low_s"] <= step["eta_s"] <= step["eta_high_s"] for step in steps)
    assert done[0].status is None or done[0].status["eta_s"] is None


def test_the_commands_print_use_quotes_and_fairness(service, done, tmp_path):
    run = lambda *args: typer.testing.CliRunner().invoke(app, [*args, "--url", service.url, "--api-key", service.key("ann")])
    shown = run("usage")
    assert shown.exit_code == 0 and "cost EUR" in shown.stdout and "total" in shown.stdout
    (row,) = csv.DictReader(io.StringIO(run("usage", "--csv", "--by", "job").stdout))
    assert row["job_id"] == done[0].id and float(row["sampled_tokens"]) == done[0].usage["sampled_tokens"]
    assert json.loads(run("usage", "--json").stdout)["total"]["currency"] == "EUR"
    assert run("usage", "--by", "week").exit_code == 2
    (tmp_path / "rewards.py").write_bytes(FILES["rewards.py"])
    (tmp_path / "job.yaml").write_text(json.dumps(of("quoted", steps=3)))
    quoted = run("submit", "--quote", str(tmp_path / "job.yaml"))
    assert quoted.exit_code == 0 and "EUR" in quoted.stdout and "time alone" in quoted.stdout, quoted.output
    assert "quoted" not in [job.name for job in service.client("ann").jobs()]
    assert "Jain index" in run("fairness").stdout
    assert "left" in run("jobs").stdout
