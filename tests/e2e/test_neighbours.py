"""A broken reward is its own job's affair; the others compute what they would alone (H24, H27, H28; design 13.9, 13.11)."""

import numpy as np
import pytest

from tests.e2e import runs

FAULTS = """
import os, sys, time

ITEMS = [f"upper {word}=" for word in ("abc", "bcd", "cde", "def")]

def raises(prompt, completion, item):
    raise ValueError("this reward is broken")

def nan(prompt, completion, item):
    return float("nan")

def hangs(prompt, completion, item):
    while True:
        pass

def exits(prompt, completion, item):
    os._exit(7)

def prints(prompt, completion, item):
    sys.stdout.write("x" * 50_000_000)
    sys.stdout.flush()
    return float(completion[:1].isupper())
"""


def healthy():
    return runs.job("upper", steps=3, rollout={"group_size": 4, "groups_per_batch": 4, "max_staleness": 0})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_broken_rewards_beside_a_healthy_job(tmp_path):
    (tmp_path / "faults.py").write_text(FAULTS)
    limits = {"group_size": 2, "groups_per_batch": 2, "max_staleness": 0, "step_timeout_s": 2.0, "max_attempts": 2}
    broken = [
        runs.job("upper", name=name, env=f"faults.py:{name}", steps=2, rollout=limits)
        for name in ("raises", "nan", "hangs", "exits", "prints")
    ]
    crowd_dir, alone_dir = tmp_path / "crowd", tmp_path / "alone"
    for run_dir, jobs in ((crowd_dir, [healthy(), *broken]), (alone_dir, [healthy()])):
        file = runs.write(tmp_path / f"{run_dir.name}.yaml", jobs)
        log = tmp_path / f"{run_dir.name}.log"
        result = runs.finish(runs.start(file, "--dir", run_dir, log=log), log, 500)
        ended = {entry["name"]: entry for entry in result["jobs"]}
        assert ended["upper"]["state"] == "succeeded"
    file_size = sum(path.stat().st_size for path in crowd_dir.rglob("*.log"))
    assert file_size < 40e6, "what a reward prints is bounded"

    crowd_result = runs.printed(tmp_path / "crowd.log")[-1]
    ended = {entry["name"]: entry for entry in crowd_result["jobs"]}
    assert crowd_result["type"] == "result"
    for name, text in {"raises": "this reward is broken", "nan": "nan", "hangs": "timeout", "exits": "exit"}.items():
        assert ended[name]["state"] == "failed", ended[name]
        assert ended[name]["kind"] == "EnvironmentFailed", ended[name]
        assert text in ended[name]["reason"].lower() or name == "hangs", ended[name]["reason"]
    assert ended["prints"]["state"] == "succeeded", ended["prints"]

    crowd, alone = (runs.episodes(run_dir, "upper") for run_dir in (crowd_dir, alone_dir))
    assert len(crowd) == len(alone) == 3 * 16
    texts = [[turn["text"] for turn in episode["turns"]] for episode in crowd]
    other = [[turn["text"] for turn in episode["turns"]] for episode in alone]
    first = [episode["turns"][0]["version"] == 0 for episode in crowd]
    assert sum(first) >= 16 and all(a == b for a, b, is_first in zip(texts, other, first, strict=True) if is_first)
    equal = [a == b for a, b in zip(texts, other, strict=True)]
    assert np.mean(equal) >= 0.95  # 99% of ids; an episode has about five
    gaps = [abs(a["mean_logprob"] - b["mean_logprob"]) for a, b, same in zip(crowd, alone, equal, strict=True) if same]
    assert max(gaps) < 1e-4
