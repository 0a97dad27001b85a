"""32 jobs learn at once on `tiny`, each with its own rank, learning rate and loss; nothing compiles after warm-up (H44)."""

import json

import pytest

from tests.e2e import runs

# Learning rates by what a task bears within 40 steps; the slow ones rise by 0.15 at 2e-3 only.
RATES = {task: (5e-4, 1e-3) for task in ("first", "lower", "max", "upper")}
RATES |= {task: (1e-3, 2e-3) for task in ("calc", "ends", "last", "rev", "second", "swap")}
RATES |= {task: (2e-3,) for task in ("double", "join", "min", "next", "sort", "triple")}
LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "importance_sampling")
NUM_JOBS, STEPS = 32, 40


def jobs():
    tasks = sorted(RATES)
    for i in range(NUM_JOBS):
        task = tasks[i % len(tasks)]
        yield runs.job(
            task,
            name=f"{task}-{i}",
            seed=i,
            steps=STEPS,
            lora={"rank": (1, 2, 4, 8)[i % 4], "alpha": 2.0 * (1, 2, 4, 8)[i % 4]},
            optimizer={"learning_rate": RATES[task][i // len(tasks) % len(RATES[task])]},
            algorithm={"loss": LOSSES[i % len(LOSSES)]},
            rollout={"group_size": 8, "groups_per_batch": 4, "max_staleness": i % 3},
            checkpoint={"every_steps": 10},
        )


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_32_jobs_on_tiny_learn_together(tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    engine = runs.RUNTIME["engine"] | {"num_decode_slots": 64}
    learner = runs.RUNTIME["learner"] | {"suffix_buckets": [16, 32]}  # most answers are short
    file = runs.write(tmp_path / "jobs.yaml", list(jobs()), engine=engine, learner=learner)
    result = runs.finish(runs.start(file, "--dir", run_dir, log=log), log, 1400)
    assert result["exit_code"] == 0, [entry["reason"] for entry in result["jobs"] if entry["reason"]]
    rises = {}
    for entry in jobs():
        rows = runs.lines(run_dir / "jobs" / entry["name"] / "metrics.jsonl")
        rewards = [row["rollout/reward_mean"] for row in rows]
        assert all(reward is not None for reward in rewards) and len(rows) == STEPS
        assert max(row["rollout/staleness_max"] for row in rows) <= entry["rollout"]["max_staleness"]
        assert all(row["learner/num_skipped_nonfinite"] == 0 for row in rows)
        rises[entry["name"]] = sum(rewards[-5:]) / 5 - sum(rewards[:3]) / 3
    print(json.dumps({name: round(rise, 3) for name, rise in sorted(rises.items(), key=lambda item: item[1])}))
    statuses = [record for record in runs.printed(log) if record["type"] == "status"]
    assert statuses[-1]["compiles_since_warmup"] == 0
    assert sum(rise >= 0.15 for rise in rises.values()) >= 28
    assert sum(rises.values()) / len(rises) >= 0.25
    assert max(rise for name, rise in rises.items() if name.startswith("calc")) >= 0.15
