"""What a run tells about itself: the live snapshot, and the result at its end. Plain data; written by the controller."""

import dataclasses

STARTING, RUNNING, PAUSING, PAUSED, FINISHING = "starting", "running", "pausing", "paused", "finishing"
SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """One job now. Rewards are means of a batch; None: not known yet."""

    name: str
    state: str  # starting, running, pausing, paused, finishing, succeeded, failed, cancelled
    step: int  # batches trained
    steps: int
    reward: float | None  # of the last batch trained
    reward_first: float | None
    reward_last3: float | None  # mean of the last three batches
    eval_before: float | None
    eval_after: float | None
    live_share: float | None  # groups whose rewards differ, last batch
    staleness: float | None  # mean over the last batch's tokens, in batches
    tokens_per_s: float  # sampled, over the last seconds
    tokens: int  # sampled by this process
    queues: dict[str, int]  # episodes by stage, groups ready, batches being trained
    episodes: dict[str, int]  # sent = done + running + failed
    waits_for: str  # one line
    device_share: float  # of the last second
    reason: str = ""  # why it failed
    eta_s: float | None = None  # seconds until it has succeeded, pauses left out; None: not known, or nothing is left
    eta_low_s: float | None = None  # the band
    eta_high_s: float | None = None
    eta_basis: str = ""  # "steps", or "quote" before there were enough of them
    eval_last: float | None = None  # mean reward of the newest evaluation
    eval_step: int | None = None  # the batches trained before it
    stop_reason: str = ""  # why it ends before its last step


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """The run now."""

    elapsed_s: float
    phase: str  # "checking", "loading", "running", "stopping"
    jobs: tuple[JobStatus, ...]
    device_share: dict[str, float]  # of the last second, by stage; "idle" is the rest
    device_counters: dict[str, float]
    programs: tuple[int, int]  # compiled, in all
    compiles_since_warmup: int
    env_workers: dict[str, int]  # ready workers by pool
    transport: dict[str, int]  # sent = delivered + in_flight + failed
    loop_lag_s: float


@dataclasses.dataclass(frozen=True)
class JobResult:
    """How a job ended; also its summary.json."""

    name: str
    state: str  # succeeded, failed or cancelled
    kind: str  # of the failure: an exception class of errors.py; "" on success
    reason: str
    steps: int  # batches trained
    steps_asked: int
    reward_first: float | None  # mean reward of the first batch
    reward_last3: float | None  # mean of the last three batches
    eval_before: float | None
    eval_after: float | None
    tokens: int  # sampled tokens that were trained
    restarts: int  # new attempts of episodes and tickets in what was trained, and of the job (incarnations)
    incarnations: int
    episodes: dict[str, int]  # of the last incarnation
    elapsed_s: float
    adapter: str | None  # folder in PEFT form
    eval_last: float | None = None  # mean reward of the newest evaluation
    stop_reason: str = ""  # why it ended well before its last step


@dataclasses.dataclass(frozen=True)
class RunResult:
    """How the run ended."""

    jobs: tuple[JobResult, ...]
    elapsed_s: float

    @property
    def succeeded(self) -> bool:
        """True where every job did."""
        return all(job.state == SUCCEEDED for job in self.jobs)
