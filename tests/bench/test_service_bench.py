"""The scripted day in its short form, on a real service; how jobs end counts here, how fast and how fairly does not."""

import json

import pytest

from marlaas_jax.bench.service import command


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(1200)
def test_a_short_day_ends_as_planned(tmp_path, capsys):
    out = tmp_path / "day"
    report = command.run(json=True, quick=True, seed=7, out=out)
    assert report["lines"][0]["holds"], report["lines"][0]["wrong"]
    assert json.loads(capsys.readouterr().out)["seed"] == 7
    jobs = [json.loads(line) for line in (out / "jobs.jsonl").read_text().splitlines()]
    assert {job["planned"]["phase"] for job in jobs} == {"alone", "shares", "flood", "small", "crowd"}
    assert all((out / f"{name}.png").stat().st_size for name in ("rewards", "waits", "shares"))
    assert "Traceback" not in (out / "service.log").read_text()
    assert (out / "snapshots.jsonl").stat().st_size
