"""`isolation: exact` through `marlaas run`: the same bits alone and beside three others."""

import numpy as np
import pytest

from marlaas_jax.checkpoint.job_checkpoints import JobCheckpoints
from tests.e2e import runs

ENGINE = runs.RUNTIME["engine"] | {"context_buckets": [32, 64]}


def exact_job():
    rollout = {"group_size": 4, "groups_per_batch": 3}  # max_staleness: 0 is what exact jobs have
    return runs.job("upper", steps=4, isolation="exact", rollout=rollout, eval={"num_items": 6})


def neighbours():
    yield runs.job("rev", steps=6, sampling={"max_tokens": 20, "top_p": 0.9}, rollout={"group_size": 8, "groups_per_batch": 2})
    yield runs.job("calc", steps=3, lora={"rank": 2}, sampling={"max_tokens": 6, "temperature": 0.5})
    yield runs.job("sort", steps=3, isolation="exact", rollout={"group_size": 2, "groups_per_batch": 2})


def untimed(value):
    """Returns a record without what the clock and the neighbours decide."""
    if isinstance(value, dict):
        is_timed = lambda key: key == "time" or key.endswith("_s") or key.startswith(("device/", "job/"))
        return {key: untimed(one) for key, one in value.items() if not is_timed(key)}
    return [untimed(one) for one in value] if isinstance(value, list) else value


def arrays(run_dir):
    """Returns the job's last committed state."""
    checkpoints = JobCheckpoints(run_dir / "jobs" / "upper" / "checkpoints", read_only=True)
    state = checkpoints.restore()
    checkpoints.close()
    assert state is not None
    return {name: np.asarray(array).tobytes() for name, array in state.arrays.items()}, state.counters, state.ledger


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_an_exact_job_alone_and_beside_three_others(tmp_path):
    alone, crowd = tmp_path / "alone", tmp_path / "crowd"
    for run_dir, jobs in ((alone, [exact_job()]), (crowd, [*neighbours(), exact_job()])):
        file = runs.write(tmp_path / f"{run_dir.name}.yaml", jobs, engine=ENGINE)
        log = tmp_path / f"{run_dir.name}.log"
        result = runs.finish(runs.start(file, "--dir", run_dir, log=log), log, 800)
        assert result["exit_code"] == 0, [entry["reason"] for entry in result["jobs"] if entry["reason"]]
        statuses = [record for record in runs.printed(log) if record["type"] == "status"]
        assert statuses[-1]["compiles_since_warmup"] == 0
    for split in ("train", "eval"):
        ours, theirs = (runs.episodes(run_dir, "upper", split) for run_dir in (alone, crowd))
        assert len(ours) == (4 * 3 * 4 if split == "train" else 2 * 6)
        assert untimed(ours) == untimed(theirs)
    assert all(episode["mean_logprob"] < 0 for episode in runs.episodes(alone, "upper"))
    metrics = [untimed(runs.lines(run_dir / "jobs" / "upper" / "metrics.jsonl")) for run_dir in (alone, crowd)]
    assert len(metrics[0]) == 4 and "learner/grad_norm" in metrics[0][0] and metrics[0] == metrics[1]
    assert arrays(alone) == arrays(crowd)
    events = [line for line in runs.lines(crowd / "events.jsonl") if line["kind"] in ("isolation", "not_exact")]
    assert {line["job"] for line in events if line["kind"] == "isolation"} == {"upper", "sort"}
    assert not [line for line in events if line["kind"] == "not_exact"]
