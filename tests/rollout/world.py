"""A world for the rollout core: data worker, tokenizer, environments, sampler and learner as instant, scripted answers.

Nothing happens by itself: commands become pending answers, and a test decides which is delivered, dropped or delayed.
"""

import struct
from collections import Counter

from marlaas_jax.fairness import Owner
from marlaas_jax.messages import (
    CancelGenerate,
    EnvClose,
    EnvDone,
    EnvError,
    EnvObservation,
    EnvReset,
    EnvStep,
    Generate,
    Generated,
    GetItem,
    Item,
    JobReady,
    ReleaseSnapshot,
    Sampling,
    StepDone,
    TrainBatch,
)
from marlaas_jax.rollout.commands import (
    BatchSent,
    EpisodeEnded,
    EvalDone,
    JobDone,
    JobGivenUp,
    KillWorker,
    Note,
    Render,
    Send,
    Stopping,
)
from marlaas_jax.rollout.orchestrator import Orchestrator
from marlaas_jax.rollout.settings import RolloutSettings
from marlaas_jax.rollout.stopping import NOTHING

END = 1  # the end id of this world's policy


def settings(name="job", **changes) -> RolloutSettings:
    """Returns small settings; `changes` override them."""
    values = dict(
        name=name, incarnation=1, seed=0, steps=3, weight=1.0, sampling=Sampling(max_tokens=4), group_size=2,
        groups_per_batch=2, max_staleness=1, max_turns=3, max_attempts=3, fail_when_exhausted=False, step_timeout_s=10.0,
        episode_timeout_s=100.0, normalize_std=True, max_context=64, eval_items=0, eval_temperature=0.0,
    )  # fmt: skip
    return RolloutSettings(**(values | changes))


def ready(job="job", incarnation=1, step=0, version=0, ledger=b"") -> JobReady:
    """Returns what the device says when a job may start."""
    return JobReady(job, incarnation, step, version, ledger, f"fp{version}", {})


class World:
    """Drives an Orchestrator; keeps what was trained for the tests to look at."""

    def __init__(self, *, turns=1, minibatches=1, reward=lambda seed, text: float(seed % 2), workers=("w0",), pool="pool"):
        self.orchestrator = Orchestrator()
        self.now = 0.0
        self.turns = turns
        self.minibatches = minibatches
        self.reward = reward
        self.pool = pool
        self.settings: dict[str, RolloutSettings] = {}
        self.version: dict[str, int] = {}  # newest published, by job
        self.steps: dict[str, int] = {}
        self.history: dict[str, list[TrainBatch]] = {}
        self.pending: list[tuple[str, object]] = []  # answers that may be delivered, in order of asking
        self.batches_of: dict[tuple[str, int], int] = {}  # (job, version) -> batches when published
        self.generates: list[Generate] = []
        self.held: Counter[tuple[str, int]] = Counter()  # (job, version) -> holds of that snapshot
        self.envs: dict[str, dict[tuple[str, int], int]] = {}  # worker -> episode -> turns taken
        self.seen: dict[type, list] = {
            kind: [] for kind in (BatchSent, EpisodeEnded, EvalDone, JobDone, JobGivenUp, KillWorker, Note, Stopping)
        }
        self.checked: dict[str, tuple[int, int]] = {}
        self.resets: set[tuple[str, int]] = set()
        self.workers = list(workers)
        self.num_workers = len(workers)

    def add(
        self, job: RolloutSettings, owner: Owner | None = None, eval_before=False, ready_message=None, past=NOTHING
    ) -> None:
        """Registers and starts a job."""
        message = ready_message or ready(job.name, job.incarnation)
        self.settings[job.name] = job
        self.version[job.name] = message.version
        self.steps[job.name] = message.step
        self.history.setdefault(job.name, [])
        self.batches_of[job.name, message.version] = message.step
        self.orchestrator.register(job.name, self.pool, job.weight, owner)
        for worker in self.workers:
            self.envs.setdefault(worker, {})
            self.orchestrator.on_worker_ready(self.pool, worker, job.name, self.now)
        self.held = Counter({key: count for key, count in self.held.items() if key[0] != job.name})
        self.held[job.name, message.version] += job.eval_every_steps > 0
        self.orchestrator.on_job_ready(job, message, self.now, eval_before=eval_before, past=past)
        self.collect()

    def collect(self) -> None:
        """Turns commands into pending answers."""
        for command in self.orchestrator.take():
            if type(command) in self.seen:
                self.seen[type(command)].append(command)
                if isinstance(command, KillWorker):
                    self.envs.pop(command.worker_id, None)
                    self._drop_worker(command.worker_id)
            elif isinstance(command, Send):
                self._to_env(command.worker_id, command.message)
            elif isinstance(command, CancelGenerate):
                self.pending = [
                    (kind, x) for kind, x in self.pending if kind != "generated" or x[0].request_id != command.request_id
                ]
            elif isinstance(command, Generate):
                self.generates.append(command)
                for sample in range(len(command.seeds)):
                    self.pending.append(("generated", (command, sample)))
            elif isinstance(command, TrainBatch):
                self.pending.append(("train", command))
            elif isinstance(command, ReleaseSnapshot):
                if command.incarnation == self.settings[command.job].incarnation:
                    self.held[command.job, command.version] -= 1
                    assert self.held[command.job, command.version] >= 0, "released more often than held"
            elif isinstance(command, GetItem):
                self.pending.append(("item", command))
            elif isinstance(command, Render):
                self.pending.append(("render", command))
            else:
                raise AssertionError(command)

    def deliver(self, index: int = 0) -> None:
        """Delivers one pending answer."""
        kind, what = self.pending[index]
        if kind == "train":  # the learner takes a job's batches in order
            index = next(i for i, (k, x) in enumerate(self.pending) if k == kind and x.job == what.job)
        kind, what = self.pending.pop(index)
        getattr(self, f"_{kind}")(what)
        self.collect()

    def run(self, limit: int = 20000) -> None:
        """Delivers everything, in order, until nothing is pending."""
        while self.pending:
            limit -= 1
            assert limit > 0, "no end"
            self.deliver()

    def tick(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds
        self.orchestrator.tick(self.now)
        self.collect()

    def lose_worker(self, worker: str, *, replace=True) -> None:
        """A worker dies; another takes its place."""
        self.workers.remove(worker)
        self.envs.pop(worker, None)
        self._drop_worker(worker)
        self.orchestrator.on_worker_lost(worker, "killed", self.now)
        if replace:
            self.add_worker()
        self.collect()

    def add_worker(self) -> str:
        """A new worker becomes ready for all jobs."""
        worker = f"w{self.num_workers}"
        self.num_workers += 1
        self.workers.append(worker)
        self.envs[worker] = {}
        for job in self.settings:
            self.orchestrator.on_worker_ready(self.pool, worker, job, self.now)
        self.collect()
        return worker

    def _drop_worker(self, worker: str) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
        self.pending = [(kind, x) for kind, x in self.pending if kind not in ("reset", "step") or x[0] != worker]

    def _to_env(self, worker: str, message) -> None:
        if worker not in self.envs:
            return
        key = (message.episode_id, message.attempt)
        if isinstance(message, EnvReset):
            assert key not in self.resets, "an attempt number was used twice"
            self.resets.add(key)
            self.envs[worker][key] = 0
            self.pending.append(("reset", (worker, message)))
        elif isinstance(message, EnvStep):
            assert key in self.envs[worker], "a step for an episode that the worker does not know"
            self.pending.append(("step", (worker, message)))
        elif isinstance(message, EnvClose):
            self.envs[worker].pop(key, None)

    def _item(self, message: GetItem) -> None:
        self.orchestrator.on_item(Item(message.request_id, b"%d" % message.index), self.now)

    def _reset(self, what) -> None:
        worker, message = what
        observation = EnvObservation(message.episode_id, message.attempt, 0, text=f"item {message.item.decode()}")
        self.orchestrator.on_env_observation(worker, observation, self.now)

    def _step(self, what) -> None:
        worker, message = what
        key = (message.episode_id, message.attempt)
        if message.turn + 1 < self.turns:
            answer = EnvObservation(*key, message.turn + 1, text=f"turn {message.turn}")
            self.orchestrator.on_env_observation(worker, answer, self.now)
            return
        self.envs[worker].pop(key, None)
        reward = self.reward(hash(key), message.text)
        self.orchestrator.on_env_done(worker, EnvDone(*key, reward), self.now)

    def _render(self, command: Render) -> None:
        ids = (90, 91) if command.first else (92, 93)
        self.orchestrator.on_rendered(command.key, ids, "", self.now)

    def _generated(self, what) -> None:
        message, sample = what
        version = self.version[message.job]
        if message.version >= 0:
            is_kept = message.version == version or self.held[message.job, message.version] > 0
            assert is_kept, f"version {message.version} is gone"
            version = message.version
        ids = (10 + message.seeds[sample] % 5, END)
        self.orchestrator.on_generated(
            Generated(
                message.request_id,
                sample,
                message.job,
                message.incarnation,
                ids,
                struct.pack("<2f", -0.5, -0.25),
                bytes(8),
                "stop",
                version,
                version,
                f"fp{version}",
                text=str(ids[0]),
            ),
            self.now,
        )

    def _train(self, batch: TrainBatch) -> None:
        job = batch.job
        assert batch.step == self.steps[job], "the learner trains batches in order"
        self.history[job].append(batch)
        self.steps[job] += 1
        self.version[job] += self.minibatches
        self.batches_of[job, self.version[job]] = self.steps[job]
        version = self.version[job]
        self.held[job, version] += batch.hold
        self.orchestrator.on_step_done(StepDone(job, batch.incarnation, self.steps[job], version, f"fp{version}", {}), self.now)

    # ---- failures, for tests

    def fail_call(self, index: int, kind: str) -> None:
        """The environment call that is pending at `index` answers with an error."""
        what, (worker, message) = self.pending.pop(index)
        assert what in ("reset", "step")
        key = (message.episode_id, message.attempt)
        self.envs[worker].pop(key, None)
        self.orchestrator.on_env_error(worker, EnvError(*key, kind, f"{kind} in {what}"), self.now)
        self.collect()

    def check(self) -> None:
        """What must hold at all times and for all batches so far."""
        for rollout in self.orchestrator.jobs.values():
            counts = rollout.tally.as_dict()
            failed = counts["timed_out"] + counts["failed"] + counts["cancelled"]
            assert counts["sent"] == counts["done"] + counts["running"] + failed
            assert counts["running"] == sum(
                rollout.queue_lengths()[s] for s in ("item", "reset", "render", "gather", "generate", "step")
            )
        for job, batches in self.history.items():
            if self.checked.get(job) != (id(batches), len(batches)):
                self.checked[job] = (id(batches), len(batches))
                self.check_history(job, batches)

    def check_history(self, job: str, batches: list[TrainBatch]) -> None:
        """What must hold for all batches of a job: nothing twice, nothing older than the cap."""
        cap = self.settings[job].max_staleness
        trained = [group.ticket for batch in batches for group in batch.groups]
        assert len(trained) == len(set(trained)), "a ticket was trained twice"
        for batch in batches:
            assert [group.ticket for group in batch.groups] == sorted(group.ticket for group in batch.groups)
            for group in batch.groups:
                for row in group.rows:
                    for version in struct.unpack(f"<{len(row.token_ids)}i", row.versions):
                        if version >= 0:
                            assert batch.step - self.batches_of[job, version] <= cap, "the cap is exceeded"
