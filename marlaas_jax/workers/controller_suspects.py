"""What the controller tells of deaths of the device's process: events, the reason of the job to blame, why others wait."""

import dataclasses
from collections.abc import Callable
from typing import Any

from marlaas_jax.workers.suspects import QUIET_S, Suspects


@dataclasses.dataclass(frozen=True)
class Blamed:
    """The job that kills the device, and what its owner reads."""

    job: str
    text: str


class SuspectJobs(Suspects):
    """Suspects that tell by `event` whom they try and hold back."""

    def __init__(self, event: Callable[..., Any]):
        super().__init__()
        self._event = event

    def on_death(self, reason: str, *, was_serving: bool) -> Blamed | None:
        """Takes note of a death; returns who is to blame, None while that is not known."""
        verdict = self.died(was_serving=was_serving)
        if verdict.tried or verdict.held:
            self._event("device_suspects", deaths=verdict.deaths, tried=list(verdict.tried), held=list(verdict.held))
        if not verdict.blamed:
            return None
        text = f"the device's process died {verdict.deaths} times in a row with this job on it, the last time with no other"
        return Blamed(verdict.blamed, f"{text} job there: {reason}")

    def why(self) -> str:
        """Returns in one line what a job that is held back waits for."""
        one = len(self.tried) == 1
        tried = "another job" if one else f"{len(self.tried)} other jobs"
        return (
            f"held back, since the device died {self.deaths} times in a row with it; {tried} of those that were there "
            f"{'is' if one else 'are'} tried first, each for at most {QUIET_S:.0f} s"
        )
