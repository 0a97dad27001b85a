"""What the files of a job must show after whatever happened: no step doubled or skipped, every ticket trained once."""

import json
from pathlib import Path

from marlaas_jax.checkpoint.job_checkpoints import JobCheckpoints
from marlaas_jax.rollout.tickets import Ledger


def history(folder: Path) -> tuple[list[int], list[int]]:
    """Returns (steps, tickets) of what was trained, in order."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().split("\n") if line]
    return [row["step"] for row in rows], [ticket for row in rows for ticket, _ in row["tickets"]]


def faults(folder: Path, config: dict, *, is_whole: bool) -> list[str]:
    """Returns what is wrong with a job's logs. `is_whole`: it succeeded, so all its steps and checkpoints must be there."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().split("\n") if line] if path.is_file() else []
    groups, cap = config["rollout"]["groups_per_batch"], config["rollout"]["max_staleness"]
    steps, tickets = [row["step"] for row in rows], [ticket for row in rows for ticket, _ in row["tickets"]]
    empty = sum(row["rollout/num_empty_places"] for row in rows)
    found = []
    if steps != list(range(1, len(steps) + 1)):
        found.append(f"steps {steps}: one is doubled or skipped")
    if [row["version"] for row in rows] != steps:
        found.append(f"versions {[row['version'] for row in rows]}: an optimizer step is doubled or skipped")
    if len(set(tickets)) != len(tickets):
        found.append(f"tickets {sorted(t for t in set(tickets) if tickets.count(t) > 1)} are trained more than once")
    if len(tickets) + empty != groups * len(steps):
        found.append(f"{len(tickets)} tickets and {empty:.0f} empty places in {len(steps)} steps of {groups}")
    if (stale := max((row["rollout/staleness_max"] for row in rows), default=0)) > cap:
        found.append(f"a token of staleness {stale} was trained; the cap is {cap}")
    if is_whole:
        if len(steps) != config["steps"]:
            found.append(f"{len(steps)} of {config['steps']} steps")
        if not empty and sorted(tickets) != list(range(groups * config["steps"])):
            found.append("not every ticket is trained")
        found += _checkpoint_faults(folder, config)
    return [f"{folder.name}: {fault}" for fault in found]


def _checkpoint_faults(folder: Path, config: dict) -> list[str]:
    """The last checkpoint holds every step once: in its counters, and in its ledger."""
    checkpoints = JobCheckpoints(folder / "checkpoints", config["checkpoint"]["keep"])
    try:
        state = checkpoints.restore()
    finally:
        checkpoints.close()
    steps, groups = config["steps"], config["rollout"]["groups_per_batch"]
    if state is None or state.step != steps:
        return [f"its last checkpoint is of step {state and state.step}, not {steps}"]
    found = []
    counters = state.counters
    minibatches = config["algorithm"]["minibatches"]
    done = counters["count"] + counters["skipped_flat"] + counters["skipped_nonfinite"]
    if not done == counters["version"] == steps * minibatches:
        found.append(f"its counters say {counters}; {steps * minibatches} optimizer steps were asked for")
    ledger = Ledger.from_bytes(state.ledger)
    if ledger.low_water != groups * steps or ledger.above:
        found.append(f"its ledger has all tickets below {ledger.low_water} and {sorted(ledger.above)}, not {groups * steps}")
    return found
