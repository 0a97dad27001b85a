"""The only definition of what travels between processes: frozen, tagged msgspec structs, encoded as MessagePack.

Numeric rows travel as `bytes` of little-endian arrays whose dtype is named beside the field, so the controller forwards them
untouched. Every message that concerns a job names (job, incarnation); a receiver drops what comes from an older incarnation.
Delivery is at least once: receivers are idempotent by `request_id`, (`episode_id`, `turn`) or (job, incarnation, step).
"""

from typing import Any

import msgspec

from marlaas_jax.fairness import Owner
from marlaas_jax.waits import Waits

PROTOCOL_VERSION = 1
LATEST, BASE_MODEL = -1, -2  # values of Generate.version


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


# ---- connection (any process <-> controller)


class Hello(Message, frozen=True):
    """First message of a worker, whose `worker_id` is new on every start.

    role: "device" (sampler and learner), "environment" or "data".
    """

    role: str
    worker_id: str
    pid: int
    protocol_version: int = PROTOCOL_VERSION
    info: dict[str, Any] = {}


class Heartbeat(Message, frozen=True):
    """Sent both ways every second, from a thread or loop that compute does not block."""

    worker_id: str


class Shutdown(Message, frozen=True):
    """The controller asks a worker to end; it finishes its dispatch and exits."""


class WorkerFailed(Message, frozen=True):
    """A worker that cannot go on says why, then exits. `kind` is the exception's class name."""

    worker_id: str
    kind: str
    text: str


# ---- controller -> device


class AddJob(Message, frozen=True):
    """Opens a job on sampler and learner. `config` is the JobConfig as JSON; `job_dir` holds its checkpoints.

    resume: start from the newest committed step in `job_dir` if there is one. The answer is JobReady or JobFailed.
    step: start from this committed step instead, and remove the newer ones once it is read; -1: the newest.
    hold: its first snapshot stays until ReleaseSnapshot.
    owner: whose share of the learner the job's is a part of; None: it has one of its own.
    """

    job: str
    incarnation: int
    config: bytes
    job_dir: str
    resume: bool = False
    step: int = -1
    hold: bool = False
    owner: Owner | None = None


class Reweigh(Message, frozen=True):
    """What an owner's jobs weigh together has changed; their requests say it themselves. No answer."""

    owner: Owner


class RemoveJob(Message, frozen=True):
    """Closes a job: running requests are cancelled, its slots wiped and freed. No answer."""

    job: str
    incarnation: int


class PauseJob(Message, frozen=True):
    """Closes a job after what was sent of it is trained and saved, or at once with `discard`. Answered by JobPaused."""

    job: str
    incarnation: int
    discard: bool = False  # what was trained since the last committed step is not wanted


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are drawn; see config.SamplingConfig."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class Generate(Message, frozen=True):
    """Asks for one completion per seed of one prompt, all under one snapshot.

    version: -1 is the newest snapshot of the job, resolved by the sampler at admission; -2 is the base model (null adapter).
    weight: the share in the sampler's queue, of what `owner` gets if there is one. `eval` requests share their job's queue.
    exact: what is sampled must not depend on what else runs (`isolation: exact`).

    A request with a `share` is of somebody who waits for the answer: its snapshot is resolved as it arrives and outlives its
    job, and some decode slots are kept for its kind. With an `adapter`, (job, incarnation, version) only names those weights.
    """

    request_id: str
    job: str
    incarnation: int
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]  # one per sample, each in [0, 2**63)
    sampling: Sampling
    version: int = -1
    weight: float = 1.0
    owner: Owner | None = None
    exact: bool = False
    share: str = ""  # of the sampler's queue, if it is not the job's own
    adapter: str = ""  # where to load the weights from if they are not here: a PEFT folder, or "RUN_DIR/JOB@STEP"
    partial: bool = False  # each decode chunk of a sample is answered by a GeneratedPart


class CancelGenerate(Message, frozen=True):
    """Ends the request's samples; each still answers, with finish_reason "cancelled"."""

    request_id: str


class TrainRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One episode of a group, as the tokens that follow the group's prompt (all turns; the environment's text included)."""

    token_ids: tuple[int, ...]
    loss_mask: bytes  # uint8 per token: 1 where the policy sampled it
    logprobs: bytes  # float32 per token: of the untempered model distribution when it was sampled; 0 where mask is 0
    versions: bytes  # int32 per token: snapshot version that sampled it; -1 where mask is 0
    advantage: float
    truncated: bool = False


class TrainGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The episodes of one prompt that are trained together."""

    ticket: int
    attempt: int
    prompt_ids: tuple[int, ...]
    rows: tuple[TrainRow, ...]


class TrainBatch(Message, frozen=True):
    """The groups of one batch of one job. `step` counts the job's batches from 0; `ledger` is committed with the weights.

    hold: the snapshot that it publishes stays until ReleaseSnapshot, for an evaluation.
    """

    job: str
    incarnation: int
    step: int
    groups: tuple[TrainGroup, ...]
    ledger: bytes
    reward_mean: float  # decides which checkpoint is the best
    hold: bool = False


class ReleaseSnapshot(Message, frozen=True):
    """Takes back one `hold`: nothing more will be asked of that version by number. No answer."""

    job: str
    incarnation: int
    version: int


class FinishJob(Message, frozen=True):
    """Asks for the job's last checkpoint and its adapter as a PEFT folder at `export_dir`. Answered by JobFinished."""

    job: str
    incarnation: int
    export_dir: str


# ---- device -> controller


class JobReady(Message, frozen=True):
    """The job's version 0 (or resumed) snapshot went the real way to the sampler; generation may start."""

    job: str
    incarnation: int
    step: int  # batches trained so far
    version: int  # optimizer steps so far
    ledger: bytes  # as committed with `step`; empty at step 0
    fingerprint: str
    receipt: dict[str, Any]  # modules that got an adapter, parameters that train, rank, alpha


class JobFailed(Message, frozen=True):
    """The job cannot go on; the others notice nothing. `kind` is the exception's class name, `reason` one sentence."""

    job: str
    incarnation: int
    kind: str
    reason: str


class JobFinished(Message, frozen=True):
    """Answers FinishJob."""

    job: str
    incarnation: int
    step: int
    export_dir: str


class JobPaused(Message, frozen=True):
    """Answers PauseJob: the job is closed, and `step` is committed."""

    job: str
    incarnation: int
    step: int


class Generated(Message, frozen=True):
    """One finished completion. `token_ids` include the end id or the token that completed a stop string.

    finish_reason: "stop" (an end id, a stop id or a stop string), "length" (max_tokens), "context" (the context is full),
    "cancelled", "missing" (of a request with a `share`: its snapshot is not here any more) or "error"; with the last two
    `error` says why and there are no tokens.
    """

    request_id: str
    sample: int  # index into Generate.seeds
    job: str
    incarnation: int
    token_ids: tuple[int, ...]
    logprobs: bytes  # float32: untempered model distribution
    sampled_logprobs: bytes  # float32: the distribution drawn from (tempered, truncated)
    finish_reason: str
    version: int
    latest_version: int
    fingerprint: str
    text: str = ""  # decoded, trimmed at the stop string
    error: str = ""


class GeneratedPart(Message, frozen=True):
    """What a decode chunk added to a sample that goes on. Its Generated holds all of it once more."""

    request_id: str
    sample: int
    token_ids: tuple[int, ...]
    logprobs: bytes  # float32: untempered model distribution
    text: str  # certain to stay: without what may be half a character or the beginning of a stop string
    version: int
    fingerprint: str


class StepDone(Message, frozen=True):
    """A batch is trained and its snapshot published. Metrics are finite floats named `subsystem/quantity_unit`."""

    job: str
    incarnation: int
    step: int  # batches trained, this one included
    version: int  # optimizer steps, this batch's included
    fingerprint: str
    metrics: dict[str, float]


class Checkpointed(Message, frozen=True):
    """The state after `step` batches is committed on disk."""

    job: str
    incarnation: int
    step: int


class JobWarning(Message, frozen=True):
    """Something that the job's owner should read and that does not end the job: a checkpoint that was not written, say."""

    job: str
    incarnation: int
    text: str


class DeviceStatus(Message, frozen=True):
    """Once a second: what the device did since the last one. Seconds are busy seconds per stage and job.

    A job is backlogged where, at every dispatch since the last report, something of it waited in the sampler's queue or was
    with the learner. `busy_by_job_s` and `backlogged` name jobs that had to do with the device in that time; `waits` holds at
    most 256 entries, and what is left over comes with the next report.
    """

    worker_id: str
    busy_s: dict[str, float]  # "prefill", "decode", "train", "update", "publish", "idle"
    busy_by_job_s: dict[str, float]
    counters: dict[str, float]  # tokens, slots, queue lengths
    queued: dict[str, int]  # requests waiting, by job
    compiles_since_warmup: int
    backlogged: tuple[str, ...] = ()
    waits: dict[str, dict[str, Waits]] = {}  # "generate" or "train" -> job -> how long its requests or batches waited


# ---- controller <-> environment and data workers


class LoadEnv(Message, frozen=True):
    """Tells a worker which environment or data set a job uses. The answer is EnvLoaded."""

    job: str
    incarnation: int
    env: str
    env_args: dict[str, Any]
    data: bytes = b""  # DataConfig as JSON; empty: the environment's own items
    seed: int = 0


class EnvLoaded(Message, frozen=True):
    """`error` is empty on success. A data worker says how many items each split has (0: unlimited)."""

    job: str
    incarnation: int
    error: str = ""
    num_train: int = 0
    num_eval: int = 0
    prompt_once: bool = True  # all episodes of an item start with the same prompt
    retry_lost: bool = True  # an episode whose worker died may start again; False: the environment says `retry = "never"`
    reply_roles: tuple[str, ...] = ()  # of the messages that follow a sampled turn, as far as the environment says


class GetItem(Message, frozen=True):
    """Asks the data worker for item `index` of a split ("train": index is the ticket; "eval": 0..num_items-1)."""

    request_id: str
    job: str
    incarnation: int
    split: str
    index: int


class Item(Message, frozen=True):
    """Answers GetItem: the item as JSON, or why there is none."""

    request_id: str
    item: bytes
    error: str = ""


class EnvReset(Message, frozen=True):
    """Starts an episode. `attempt` counts restarts of `episode_id`; answers of an older attempt are ignored."""

    episode_id: str
    attempt: int
    job: str
    incarnation: int
    item: bytes
    seed: int
    timeout_s: float


class EnvStep(Message, frozen=True):
    """Gives the policy's turn to the environment. Never sent twice."""

    episode_id: str
    attempt: int
    turn: int  # 0 for the first completion
    text: str
    finish_reason: str
    num_tokens: int
    timeout_s: float


class EnvClose(Message, frozen=True):
    """The episode ended on the controller's side; the worker forgets it. No answer."""

    episode_id: str
    attempt: int


class EnvObservation(Message, frozen=True):
    """What the policy sees next. Exactly one of `text` (appended as it is) or `messages` (rendered by the chat template)."""

    episode_id: str
    attempt: int
    turn: int  # of the completion that it asks for
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    stop: tuple[str, ...] = ()  # besides the job's own stop strings


class EnvDone(Message, frozen=True):
    """The episode's end. A missing reward is None; a non-finite one arrives as None with `note`."""

    episode_id: str
    attempt: int
    reward: float | None
    metrics: dict[str, float] = {}
    note: str = ""


class EnvError(Message, frozen=True):
    """The environment failed. kind: "raised", "timeout", "bad_answer" or "lost"; `text` is the traceback or the reason."""

    episode_id: str
    attempt: int
    kind: str
    text: str


ANY = (
    Hello | Heartbeat | Shutdown | WorkerFailed
    | AddJob | PauseJob | RemoveJob | Generate | CancelGenerate | TrainBatch | ReleaseSnapshot | FinishJob
    | JobReady | JobFailed | JobFinished | JobPaused | Generated | GeneratedPart | StepDone | Checkpointed
    | JobWarning | DeviceStatus
    | LoadEnv | EnvLoaded | GetItem | Item | EnvReset | EnvStep | EnvClose | EnvObservation | EnvDone | EnvError
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ANY)


def well_formed(value: Any) -> Any:
    """Returns plain data with "?" for each half of a surrogate pair, which user code can make and UTF-8 cannot hold."""
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case dict():
            return {well_formed(key): well_formed(entry) for key, entry in value.items()}
        case list() | tuple():
            return [well_formed(entry) for entry in value]
    return value


def encode(message: Message) -> bytes:
    """Returns the message as MessagePack bytes. Text that is no Unicode is mended, so that it never costs a connection."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(well_formed(msgspec.to_builtins(message, builtin_types=(bytes,))))


def encode_json(value: Any) -> bytes:
    """Returns plain data as JSON, its text mended likewise."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(well_formed(value))


def decode(frame: bytes | memoryview) -> Message:
    """Returns the message in `frame`. Raises msgspec.DecodeError or msgspec.ValidationError on anything else."""
    return _decoder.decode(frame)
