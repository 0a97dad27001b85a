"""Finds the job that kills the device's process. Pure bookkeeping: no clock, no process.

After a death every job that was on the device is a suspect until it gets further than it ever was: a batch more than before
clears it. At the second death in a row with suspects left, half of them are *held back* and the other half is *tried*. A
further death narrows the suspects down to those on trial; when all of these are cleared, or were aboard for `QUIET_S` without a
death, half of those held back are tried next. A job that is the only suspect on trial when the device dies is to blame. Cleared
jobs run all the while, and n suspects cost about 2 + log2(n) deaths.
"""

import dataclasses

DEATHS_BEFORE_TRIAL = 2
QUIET_S = 300.0  # aboard so long without a death clears a job too: it may wait for its environment all the time


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a death led to."""

    deaths: int  # in a row
    tried: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    blamed: str = ""  # "": nobody yet


class Suspects:
    """Who may be to blame for deaths of the device's process, and who must stay off it meanwhile."""

    def __init__(self) -> None:
        self.deaths = 0  # in a row
        self._aboard: dict[str, float] = {}  # jobs on the device, and since when
        self._reached: dict[str, int] = {}  # most batches that a job ever had trained
        self._cleared: set[str] = set()  # in this row of deaths
        self._tried: list[str] = []
        self._held: list[str] = []

    @property
    def tried(self) -> tuple[str, ...]:
        """Jobs on trial."""
        return tuple(self._tried)

    def is_held(self, job: str) -> bool:
        """Whether the job must stay off the device for now."""
        return job in self._held

    def joined(self, job: str, now: float) -> None:
        """A job is given to the device."""
        self._aboard[job] = now

    def left(self, job: str) -> None:
        """A job is off the device for good, or until it joins again."""
        for known in (self._aboard, self._reached):
            known.pop(job, None)
        self._cleared.discard(job)
        self._tried = [name for name in self._tried if name != job]
        self._held = [name for name in self._held if name != job]

    def trained(self, job: str, step: int) -> None:
        """A job has so many batches trained."""
        if step > self._reached.get(job, 0):
            self._reached[job] = step
            self._clear(job)

    def died(self, *, was_serving: bool) -> Verdict:
        """The device's process is gone. While it still compiled its programs, no job can have been the reason."""
        aboard, self._aboard = list(self._aboard), {}
        if not was_serving or not aboard:
            return self._verdict()
        self.deaths += 1
        suspects = [job for job in aboard if job not in self._cleared]
        if not suspects:  # everybody got further since the last death: that row is over
            self.deaths, self._cleared, suspects = 1, set(), aboard
        if self._tried == suspects and len(suspects) == 1:
            verdict = Verdict(self.deaths, blamed=suspects[0])
            self._end_row()
            return verdict
        if self.deaths >= DEATHS_BEFORE_TRIAL:
            count = (len(suspects) + 1) // 2
            self._tried, self._held = suspects[:count], suspects[count:] + self._held
        return self._verdict()

    def released(self, now: float) -> list[str]:
        """Returns the jobs that were held back and may join now; call it once in a while."""
        if not self.deaths:
            return []
        for job in [job for job, since in self._aboard.items() if now - since > QUIET_S]:
            self._clear(job)
        if self._tried:
            return []
        if self._held:
            count = (len(self._held) + 1) // 2
            self._tried, self._held = self._held[:count], self._held[count:]
        elif self._aboard and self._cleared.issuperset(self._aboard):
            self._end_row()
        return list(self._tried)

    def _clear(self, job: str) -> None:
        if self.deaths:
            self._cleared.add(job)
            self._tried = [name for name in self._tried if name != job]

    def _end_row(self) -> None:
        self.deaths = 0
        self._cleared, self._tried, self._held = set(), [], []

    def _verdict(self) -> Verdict:
        return Verdict(self.deaths, self.tried, tuple(self._held))
