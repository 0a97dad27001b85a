"""Whether jobs fit the runtime that the service was started with. One that does not waits; a later start may have room.

Number of slots and buckets never matter: jobs page, and rows are padded. Only a rank above the bank's and answers as long as
the context cannot be served.
"""

from marlaas_jax.config import JobConfig, RuntimeConfig
from marlaas_jax.errors import InvalidConfig
from marlaas_jax.service.config import check_fits
from marlaas_jax.store.jobs import JobRecord


class Fitting:
    """Remembers by job why it does not fit, "" for one that does."""

    def __init__(self, runtime: RuntimeConfig):
        self._runtime = runtime
        self._faults: dict[str, str] = {}

    def fault(self, record: JobRecord) -> str:
        """Returns in one sentence what the job waits for in a runtime, "" if it fits."""
        if record.id not in self._faults:
            self._faults[record.id] = self._check(record)
        return self._faults[record.id]

    def forget(self, job_id: str) -> None:
        """Drops what is remembered of a job that is over."""
        self._faults.pop(job_id, None)

    def _check(self, record: JobRecord) -> str:
        try:
            check_fits(JobConfig.model_validate(record.config), self._runtime)
        except InvalidConfig as error:
            return f"{error}; it waits for a start with more"
        except ValueError:  # of another version; that is told where the job is started
            return ""
        return ""
