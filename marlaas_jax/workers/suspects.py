"""Finds the job that kills the device's process. Pure bookkeeping: no clock, no process.

At a death those jobs on the device are suspects that did not get further in that life of the process than they ever were. From
the second death in a row on, half of them are *held back* and the other half is *tried*; a single one is tried all alone.
Those on trial pass once they got a batch further, or were aboard for `QUIET_S` without a death; then half of the group that was
held back last is tried. Only a job that was alone on the device when it died is to blame: whatever the others would have
done, it was not they. n suspects cost about 3 + log2(n) deaths; whoever gets further runs on, but for the lonely trials.
"""

import dataclasses

DEATHS_BEFORE_TRIAL = 2
DEATHS_BEFORE_BLAME = 3
QUIET_S = 300.0  # a job may wait for its environment all the time


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
        self._passed: set[str] = set()  # got further in this life of the process
        self._tried: list[str] = []
        self._held: list[list[str]] = []  # groups; the last is tried next

    @property
    def tried(self) -> tuple[str, ...]:
        """Jobs on trial."""
        return tuple(self._tried)

    def is_held(self, job: str) -> bool:
        """Whether the job must stay off the device for now."""
        return any(job in group for group in self._held)

    def must_wait(self, newcomer: str) -> bool:
        """Whether a job that is new must stay off because another is tried alone; then it counts as held back."""
        is_lonely = len(self._tried) == 1 and bool(self._held) and self._aboard.keys() <= set(self._tried)
        if is_lonely and newcomer not in self._tried and not self.is_held(newcomer):
            self._held[0].append(newcomer)
        return self.is_held(newcomer)

    def joined(self, job: str, now: float) -> None:
        """A job is given to the device."""
        self._aboard[job] = now

    def left(self, job: str) -> None:
        """A job is off the device for good, or until it joins again."""
        for known in (self._aboard, self._reached):
            known.pop(job, None)
        self._passed.discard(job)
        self._tried = [name for name in self._tried if name != job]
        self._held = [left for group in self._held if (left := [name for name in group if name != job])]

    def trained(self, job: str, step: int) -> None:
        """A job has so many batches trained."""
        if step > self._reached.get(job, 0):
            self._reached[job] = step
            self._pass(job)

    def died(self, *, was_serving: bool) -> Verdict:
        """The device's process is gone. While it still compiled its programs, no job can have been the reason."""
        aboard, passed = list(self._aboard), self._passed
        self._aboard, self._passed = {}, set()
        if not was_serving or not aboard:
            return self._verdict()
        suspects = [job for job in aboard if job not in passed]
        if not suspects:  # everybody got further: that is no loop
            self._end_row()
            return self._verdict()
        self.deaths += 1
        if len(aboard) == 1 and self.deaths >= DEATHS_BEFORE_BLAME:
            verdict = Verdict(self.deaths, blamed=aboard[0])
            self._end_row()
            return verdict
        if self.deaths >= DEATHS_BEFORE_TRIAL:
            suspects.sort(key=lambda job: job not in self._tried)  # those on trial stay the first
            count = (len(suspects) + 1) // 2
            others = suspects[count:] if len(suspects) > 1 else [job for job in aboard if job not in suspects]
            self._tried = suspects[:count]
            self._held += [others] if others else []
        return self._verdict()

    def released(self, now: float) -> list[str]:
        """Returns the jobs that were held back and may join now; call it once in a while."""
        if not self.deaths:
            return []
        for job in [job for job, since in self._aboard.items() if now - since > QUIET_S]:
            self._pass(job)
        if self._tried:
            return []
        if self._held:
            group = self._held.pop()
            count = (len(group) + 1) // 2
            self._tried = group[:count]
            self._held += [group[count:]] if group[count:] else []
        elif self._aboard and self._passed.issuperset(self._aboard):
            self._end_row()
        return list(self._tried)

    def _pass(self, job: str) -> None:
        self._passed.add(job)
        self._tried = [name for name in self._tried if name != job]

    def _end_row(self) -> None:
        self.deaths = 0
        self._tried, self._held = [], []

    def _verdict(self) -> Verdict:
        return Verdict(self.deaths, self.tried, tuple(job for group in self._held for job in group))
