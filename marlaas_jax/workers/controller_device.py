"""What the controller knows of the device's process: which one it is, when it spoke last, what it is busy with."""

from marlaas_jax.messages import DeviceStatus

SILENCE_S = 900.0  # it says something every second, and between two compilations


class DeviceLink:
    """The present device process, "" while there is none."""

    def __init__(self) -> None:
        self.worker_id = ""
        self.programs = (0, 0)  # compiled, in all
        self.status: DeviceStatus | None = None
        self._heard = 0.0

    @property
    def is_serving(self) -> bool:
        """True once the process has compiled its programs and takes jobs."""
        compiled, total = self.programs
        return bool(self.worker_id) and (self.status is not None or 0 < total == compiled)

    def joined(self, worker_id: str, now: float) -> None:
        """A device's process said Hello."""
        self.worker_id = worker_id
        self.programs = (0, 0)
        self._heard = now

    def gone(self) -> bool:
        """Forgets the present process; False if there was none."""
        was_there = bool(self.worker_id)
        self.worker_id = ""
        self.status = None
        return was_there

    def heard(self, worker_id: str, now: float) -> None:
        """Notes that a message came from somebody."""
        if worker_id == self.worker_id:
            self._heard = now

    def is_silent(self, now: float) -> bool:
        """True where the process lives and does not get on: a dispatch that never ends."""
        return bool(self.worker_id) and now - self._heard > SILENCE_S

    def report(self, message: DeviceStatus) -> None:
        """Takes a report: on the programs compiled so far, or on the last second."""
        total = message.counters.get("programs_total")
        if total is None:
            self.status = message
        else:
            self.programs = (int(message.counters.get("programs_compiled", 0)), int(total))

    def shares(self) -> dict[str, float]:
        """Returns the share of the last second by stage."""
        return _normalised(self.status.busy_s, self.status.busy_s) if self.status else {}

    @property
    def busy_share(self) -> float:
        """The share of the last second in which the device worked; 1 where that is not known."""
        return 1.0 - self.shares().get("idle", 0.0)

    def share_of(self, job: str) -> float:
        """Returns a job's share of the last second."""
        return _normalised(self.status.busy_by_job_s, self.status.busy_s).get(job, 0.0) if self.status else 0.0


def _normalised(seconds: dict[str, float], whole: dict[str, float]) -> dict[str, float]:
    total = sum(whole.values()) or 1.0
    return {name: value / total for name, value in seconds.items()}
