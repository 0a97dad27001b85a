"""In one line what a job waits for while it has no rollouts: stage, object, who owes it, since when, and the next deadline."""

from marlaas_jax.rollout.records import Wait
from marlaas_jax.workers.controller_jobs import Job
from marlaas_jax.workers.controller_status import FINISHING, PAUSED, PAUSING

OWNERS = {"device": "the device", "data": "the data worker", "environment": "the environment workers"}


def waiting(job: Job, programs: tuple[int, int], now: float, limit_s: float | None) -> Wait:
    """Returns what a live or paused job without rollouts waits for; `programs` are (compiled, all) of the device."""
    since_s = now - job.since
    if job.state == PAUSED:
        return Wait("pause", "to be resumed", "its owner", since_s, None)
    if job.state == PAUSING:
        return Wait("pause", "what is in training is trained and saved", "the device", since_s, limit_s)
    if job.state == FINISHING:
        return Wait("export", "the last checkpoint and the adapter", "the device", since_s, limit_s)
    missing = job.missing()
    if not missing:
        return Wait("start", "its first group", "the controller", since_s, limit_s)
    compiled, total = programs
    progress = f" ({compiled} of {total} programs compiled)" if "device" in missing and total else ""
    owners = " and ".join(OWNERS[part] for part in missing)
    return Wait("start", f"its {' and '.join(missing)}{progress}", owners, since_s, limit_s)


def told_in_one_line(wait: Wait, others: int) -> str:
    """Returns the line."""
    return str(wait) + (f"; {others} more wait" if others else "")
