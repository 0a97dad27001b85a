"""What the service tells about itself: that it started, that it stood still, what its device holds."""

import json
import time

import httpx
import pytest

from marlaas_jax.workers import controller
from tests.service.live import live

pytestmark = pytest.mark.multiprocess


def test_a_start_and_a_standstill_are_told_with_the_name_of_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(controller, "STALL_S", 0.5)

    async def stands_still():
        time.sleep(1.5)

    with live(tmp_path) as service:
        service.run(stands_still())
        log = tmp_path / "data" / "events.jsonl"
        end = time.monotonic() + 20
        while not (told := [e for e in map(json.loads, log.read_text().splitlines()) if e["kind"] == "stalled"]):
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        assert told[0]["worker"] == "service" and "stood still" in told[0]["reason"]
        started = json.loads(log.read_text().splitlines()[0])
        assert started["kind"] == "service_started" and started["worker"] == "service" and started["pid"] > 0


def test_an_admin_sees_what_the_device_holds(tmp_path):
    with live(tmp_path) as service:
        shown = lambda key: (
            httpx.get(f"{service.url}/metrics", headers={"Authorization": f"Bearer {key}"}, trust_env=False).text
        )
        admin, line = service.key("root", is_admin=True), 'marlaas_device{figure="learner/open_jobs"} 0.0'
        end = time.monotonic() + 20
        while line not in shown(admin):
            assert time.monotonic() < end, shown(admin)
            time.sleep(0.1)
        assert "marlaas_device{" not in shown(service.key("other"))
