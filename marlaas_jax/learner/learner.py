"""The learner: many jobs' batches in, one optimizer step per minibatch each, snapshots out. Single-threaded.

`step` runs one bounded dispatch. Jobs share micro-batches: the job furthest behind in service fills one first, blocks of the
same shape of the others take the places that are left. Accumulators stay on the device between dispatches, so a micro-batch
may be interrupted after any of its programs. What an exact job computes depends on its own batches alone: its micro-batches
and its optimizer steps are shared with nobody. A job's version rises by `minibatches` with every batch, also where a step was
skipped (nothing to learn, or a gradient that is not finite), so versions keep pace with batches.

Any number of jobs may be open. As many as there are slots are resident, with masters, moments and gradients on the device; the
others' masters and moments wait on a shelf in host memory or on disk, bit for bit, until a batch of theirs is next to run
(`paging`).
"""

import contextlib
import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.config import JobConfig, RuntimeConfig
from marlaas_jax.errors import CorruptFile, InternalError, InvalidRequest, NotFound, UserError, WrongWeights
from marlaas_jax.fairness import Owner, Shares
from marlaas_jax.learner import buckets, figures, rows, state
from marlaas_jax.learner.batch import SCORE_BASE, SCORE_PROXIMAL, TRAIN, Batch, Work
from marlaas_jax.learner.buckets import LearnerSizes
from marlaas_jax.learner.cost import CostModel, Unit, update_unit
from marlaas_jax.learner.executor import Chain, Executor
from marlaas_jax.learner.paging import HostMemory, Shelf, Slots
from marlaas_jax.learner.schedule import learning_rate
from marlaas_jax.learner.warmup import warm
from marlaas_jax.lora.adapter import AdapterSpec, Weights, init_weights
from marlaas_jax.lora.snapshot import Snapshot, fingerprint
from marlaas_jax.messages import JobFailed, StepDone, TrainBatch
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.rl.objective import Objective, resolve
from marlaas_jax.rl.packing import lay_out, lay_out_sequence
from marlaas_jax.waits import WaitLog

NUM_SLICES = 4  # of a dispatch: it may end after each
ARRAYS = ("adapter", "first_moment", "second_moment")
COUNTERS = ("step", "version", "count", "nonfinite_in_row", "skipped_nonfinite", "skipped_flat")


@dataclasses.dataclass
class _Job:
    name: str
    incarnation: int
    config: JobConfig
    spec: AdapterSpec
    objective: Objective
    step: int = 0  # batches trained
    version: int = 0  # optimizer steps, skipped ones included
    count: int = 0  # optimizer steps applied
    nonfinite_in_row: int = 0
    skipped_nonfinite: int = 0
    skipped_flat: int = 0
    batches: deque[Batch] = dataclasses.field(default_factory=deque)
    failed: bool = False
    published: str = ""  # fingerprint of the newest snapshot
    moved: bool = False  # an update with a gradient was applied since

    @property
    def is_exact(self) -> bool:
        """Whether its programs hold nobody else's rows (`isolation: exact`)."""
        return self.config.isolation == "exact"


@dataclasses.dataclass
class _Running:
    """The micro-batch in progress."""

    chain: Chain
    work: list[tuple[_Job, Work]]  # by block


class Learner:
    """Owns masters, gradients and optimizer state of all jobs; see the module's docstring."""

    def __init__(
        self,
        model: ModelConfig,
        params: Any,
        sizes: LearnerSizes,
        *,
        num_slots: int,
        max_rank: int,
        clock: Callable[[], float],
        sampler_dtype: Any = jnp.float32,
        shelf: Shelf | None = None,
    ):
        self.sizes = sizes
        self._model, self._clock, self._dtype = model, clock, jnp.dtype(sampler_dtype)
        self._executor = Executor(model, params, sizes, num_slots, max_rank)
        self._slots = Slots(num_slots)
        self._shelf: Shelf = HostMemory() if shelf is None else shelf
        self._failures: list[JobFailed] = []  # of jobs that could not be paged in, until `step` returns them
        self._jobs: dict[str, _Job] = {}
        self._shares = Shares()
        self.busy_by_job_s: dict[str, float] = defaultdict(float)  # of micro-batches and optimizer steps, each block its part
        self.waits = WaitLog()  # of batches, until their first block is computed
        self._submitted_s: dict[tuple[str, int], float] = {}  # by job and step, until then
        self._cost = CostModel()
        self._running: _Running | None = None
        self._paging_s = 0.0
        self.counters = dict.fromkeys(
            ("micro_batches", "padded_tokens", "tokens", "updates", "scored_micro_batches", "page_ins", "page_outs"), 0
        )

    @classmethod
    def from_runtime(
        cls,
        model: ModelConfig,
        params: Any,
        runtime: RuntimeConfig,
        *,
        clock: Callable[[], float],
        sampler_dtype: Any,
        shelf: Shelf | None = None,
    ) -> "Learner":
        """Returns the learner that a runtime describes; its number of slots must be filled in (`RuntimeConfig.sized_for`)."""
        sizes = buckets.plan(
            runtime.learner,
            model,
            max_context=runtime.engine.max_context,
            max_rank=runtime.bank.max_rank,
            on_cpu=jax.default_backend() == "cpu",
        )
        num_slots = runtime.bank.num_learner_slots
        assert num_slots is not None
        return cls(
            model, params, sizes, num_slots=num_slots, max_rank=runtime.bank.max_rank, clock=clock,
            sampler_dtype=sampler_dtype, shelf=shelf,
        )  # fmt: skip

    # ---- jobs

    def add_job(
        self,
        job: str,
        incarnation: int,
        config: JobConfig,
        spec: AdapterSpec,
        state: Mapping[str, Any] | None = None,
        weights: Weights | None = None,
        owner: Owner | None = None,
    ) -> None:
        """Opens a job: fresh, from given weights (padded to the bank's rank), or exactly where `state` left it."""
        if job in self._jobs:
            raise InternalError(f"job {job!r} is open already, as incarnation {self._jobs[job].incarnation}")
        executor = self._executor
        added = _Job(job, incarnation, config, spec, resolve(config.algorithm))
        first = second = executor.zeros
        if state is not None:
            weights, first, second = _restore(state, self._model, spec, executor.max_rank)
            for name in COUNTERS:
                setattr(added, name, int(state["counters"][name]))
        elif weights is None:
            weights = init_weights(self._model, spec, executor.max_rank)
        slot = self._slots.take(job)
        if slot is None:
            self._shelf.put(job, (weights, first, second))
        else:
            executor.place(slot, weights, first, second, spec.scale)
        self._jobs[job] = added
        self._shares.add(job, config.weight, owner)

    def reweigh(self, owner: Owner) -> None:
        """Changes what the owner's jobs weigh together."""
        self._shares.reweigh(owner)

    def remove_job(self, job: str) -> None:
        """Closes a job and wipes its slot: weights, moments, gradients, counters (H02). An unknown job is no error."""
        self._jobs.pop(job, None)
        self._shares.remove(job)
        self._shelf.drop(job)
        self._submitted_s = {key: since for key, since in self._submitted_s.items() if key[0] != job}
        slot = self._slots.release(job)
        if slot is None:
            return
        if self._running is not None:
            self._running.chain.redirect(slot)
        self._executor.wipe(slot)

    def submit(self, batch: TrainBatch) -> bool:
        """Queues a batch; returns False for one that is stale or was seen before, which changes nothing.

        Raises InvalidRequest if its rows cannot be trained as they are, InternalError if a batch before it is missing.
        """
        job = self._jobs.get(batch.job)
        if job is None or job.incarnation != batch.incarnation or job.failed:
            return False
        wanted = job.step + len(job.batches)
        if batch.step < wanted:
            return False
        if batch.step > wanted:
            raise InternalError(f"job {batch.job!r}: batch {batch.step} came before batch {wanted}")
        self._submitted_s[batch.job, batch.step] = self._clock()
        job.batches.append(Batch(batch, job.objective, job.config.sampling.max_tokens, self.sizes.shapes))
        return True

    # ---- dispatches

    def has_work(self) -> bool:
        """True if `step` has something to run."""
        return self._running is not None or any(job.batches for job in self._live())

    def step(self) -> list[StepDone | JobFailed]:
        """Runs one bounded dispatch and waits for it: optimizer steps of the jobs that are due, or a part of a micro-batch.

        A part runs in slices, so that a machine slower than predicted stops it early rather than late. One that begins a
        micro-batch may bring a job in from host memory first, another one out: never more than one each.
        """
        start = self._clock()
        paging_s = 0.0
        if self._running is None:
            if due := self._due():
                return self._update(due[: self.sizes.update_buckets[-1]], start)
            ready, paging_s = self._admit()
            if self._failures:
                failures, self._failures = self._failures, []
                return [*failures]
            if not ready:
                return []
            self._running = self._start(ready)
        running = self._running
        calls = running.chain.calls
        slice_s = self.sizes.max_dispatch_s / NUM_SLICES
        spent = paging_s
        for _ in range(NUM_SLICES):
            units = self._affordable(calls, slice_s)
            if not units or (spent and spent + self._cost.predict_s(units) > self.sizes.max_dispatch_s):
                break
            for _ in units:
                _, out = running.chain.run()
            jax.block_until_ready(out)
            before, spent = spent, self._clock() - start
            self._cost.observe(units, spent - before)
        if not calls:
            self._running = None
            self._collect(running)
        self._account(running, self._clock() - start - paging_s)
        return []

    def _affordable(self, calls: deque[tuple[Unit, Any]], seconds: float) -> list[Unit]:
        """Returns the next calls that run within `seconds` by prediction; at least one if there is any."""
        units: list[Unit] = []
        total = 0.0
        for unit, _ in calls:
            total += self._cost.predict_s([unit])
            if units and total > seconds:
                break
            units.append(unit)
        return units

    def _live(self) -> list[_Job]:
        return [job for job in self._jobs.values() if not job.failed]

    def _due(self) -> list[_Job]:
        """Returns the jobs whose optimizer steps may run as one; that of an exact job runs alone, in the smallest bucket."""
        due = [job for job in self._live() if job.batches and job.batches[0].is_due]
        return [job for job in due if not job.is_exact] or due[:1]

    def _admit(self) -> tuple[list[_Job], float]:
        """Returns the resident jobs whose blocks may run now, in the order of the queue, and the seconds that paging took.

        The first of them is paged in if it has to be.
        """
        queue = self._shares.order([job.name for job in self._live() if job.batches and job.batches[0].waiting()])
        held = {job.name for job in self._live() if job.batches and job.batches[0].has_begun}
        admitted = self._slots.admitted(queue, held)
        seconds = 0.0
        if admitted and admitted[0] not in self._slots:
            start = self._clock()
            try:
                self._page_in(admitted[0], self._slots.leaving(queue, held))
            except UserError as error:  # its state on the disk is damaged or gone: that is this job's end alone
                self._fail(self._jobs[admitted[0]], error)
            seconds = self._clock() - start
            self._paging_s += seconds
        return [self._jobs[name] for name in admitted if name in self._slots], seconds

    def _page_in(self, job: str, leaving: str | None) -> None:
        """Moves a job from the shelf into a free slot, or into that of `leaving`, which moves to the shelf, and waits."""
        executor, state = self._executor, self._shelf.get(job)
        self._shelf.drop(job)
        if leaving is not None:
            self._shelf.put(leaving, executor.extract(self._slots[leaving]))
            self._slots.release(leaving)
            self.counters["page_outs"] += 1
        slot = self._slots.take(job)
        assert slot is not None, f"job {job!r} cannot be paged in"
        executor.place(slot, *state, self._jobs[job].spec.scale)
        jax.block_until_ready(executor.masters)
        self.counters["page_ins"] += 1

    def _fail(self, job: _Job, error: UserError) -> None:
        job.failed = True
        job.batches.clear()
        reason = f"{error}; its checkpoints are whole: roll it back to the newest to go on"
        self._failures.append(JobFailed(job.name, job.incarnation, type(error).__name__, reason))

    def _start(self, ready: list[_Job]) -> _Running:
        """Takes blocks of one shape and kind from the jobs that may run and makes them a micro-batch."""
        head = ready[0].batches[0].waiting()[0]
        shape, trains = head.block.shape, head.purpose == TRAIN
        work: list[tuple[_Job, Work]] = []
        is_alone = ready[0].is_exact
        for job in ready[:1] if is_alone else [job for job in ready if not job.is_exact]:
            queue = job.batches[0].waiting()
            fitting = [w for w in queue if w.block.shape == shape and (w.purpose == TRAIN) == trains]
            for taken in fitting[: shape.blocks - len(work)]:
                job.batches[0].has_begun = True
                self._note_wait(job)
                self._slots.use(job.name)
                queue.remove(taken)
                work.append((job, taken))
                self._shares.charge(job.name, shape.tokens_per_block)
        if is_alone:  # the places that nobody else may take are part of its price
            self._shares.charge(ready[0].name, (shape.blocks - len(work)) * shape.tokens_per_block)
        layout = lay_out(shape, [w.block for _, w in work], self.sizes.capacity, self.sizes.num_rows, self.sizes.num_suffix)
        slots = np.zeros(shape.blocks, np.int32)
        for m, (job, w) in enumerate(work):
            slots[m] = 0 if w.purpose == SCORE_BASE else self._slots[job.name]
        self.counters["padded_tokens"] += shape.num_tokens
        self.counters["tokens"] += sum(len(w.block.prompt) + sum(len(r.token_ids) for r in w.block.rows) for _, w in work)
        if not trains:
            self.counters["scored_micro_batches"] += 1
            return _Running(self._executor.score_chain(layout, slots), work)
        self.counters["micro_batches"] += 1
        owners = [(job.objective, job.version) for job, _ in work]
        loss_rows = rows.loss_rows(layout, owners, self.sizes.num_rows, self.sizes.num_suffix)
        return _Running(self._executor.train_chain(layout, slots, loss_rows), work)

    def _note_wait(self, job: _Job) -> None:
        """Counts the wait of a job's first batch, once."""
        since = self._submitted_s.pop((job.name, job.batches[0].message.step), None)
        if since is not None:
            self.waits.add("train", job.name, self._clock() - since)

    def _collect(self, running: _Running) -> None:
        """Takes a finished micro-batch's results to the batches that they belong to."""
        layout, results = running.chain.layout, running.chain.results
        if "metrics" in results:
            metrics = jax.device_get(results["metrics"])
            for b, m, row in layout.rows:
                job, _ = running.work[m]
                if self._jobs.get(job.name) is job:
                    figures.add(job.batches[0].current.totals, figures.row_totals(metrics, b, row, job.version))
        else:
            logprobs = np.concatenate(jax.device_get(results["logprobs"]))
            start = 0
            for _, m, row in layout.rows:
                scored = np.zeros(len(row.token_ids), np.float32)
                scored[row.mask] = logprobs[start : start + row.num_tokens]
                start += row.num_tokens
                if running.work[m][1].purpose == SCORE_PROXIMAL:
                    row.proximal = scored
                else:
                    row.base = scored
        for job, work in running.work:
            if self._jobs.get(job.name) is job:
                job.batches[0].finished(work)

    def _account(self, running: _Running, seconds: float) -> None:
        part = seconds / len(running.work)
        for job, _ in running.work:
            self.busy_by_job_s[job.name] += part
            if self._jobs.get(job.name) is job and job.batches:
                figures.add(job.batches[0].busy, {"busy_s": part})

    # ---- optimizer

    def _update(self, due: list[_Job], start: float) -> list[StepDone | JobFailed]:
        """Runs the optimizer steps of these jobs' minibatches; returns what ended with them."""
        stepping = [job for job in due if job.batches[0].current.totals.get("tokens")]
        hyper = []
        for job in stepping:
            o = job.config.optimizer
            rate = learning_rate(o, job.version, job.config.steps * job.objective.minibatches)
            hyper.append({
                "learning_rate": rate, "beta1": o.beta1, "beta2": o.beta2, "eps": o.eps, "weight_decay": o.weight_decay,
                "max_norm": np.inf if o.max_grad_norm is None else o.max_grad_norm, "count": job.count,
            })  # fmt: skip
        norms = np.zeros(0)
        if stepping:
            norms = np.asarray(jax.device_get(self._executor.update([self._slots[job.name] for job in stepping], hyper)))
            self.counters["updates"] += 1
            self._cost.observe([update_unit(self._model, self._executor.max_rank, len(stepping))], self._clock() - start)
        part = (self._clock() - start) / len(due)
        done: list[StepDone | JobFailed] = []
        for job in due:
            self._note_wait(job)  # of a batch in which nothing had to be computed
            self.busy_by_job_s[job.name] += part
            figures.add(job.batches[0].busy, {"busy_s": part})
            if job in stepping:
                i = stepping.index(job)
                self._count_step(job, float(norms[i]), hyper[i]["learning_rate"])
            else:
                job.skipped_flat += 1
                figures.add(job.batches[0].current.totals, {"skipped_flat": 1})
            done += self._end_minibatch(job)
        return done

    def _count_step(self, job: _Job, norm: float, rate: float) -> None:
        totals = job.batches[0].current.totals
        if np.isfinite(norm):
            job.count += 1
            job.nonfinite_in_row = 0
            job.moved |= norm > 0 and rate > 0
            figures.add(totals, {"steps": 1, "grad_norm": norm, "learning_rate": rate})
        else:
            job.skipped_nonfinite += 1
            job.nonfinite_in_row += 1
            # Its sums are not finite either: only the counts stay.
            totals.clear()
            figures.add(totals, {"skipped_nonfinite": 1})

    def _end_minibatch(self, job: _Job) -> list[StepDone | JobFailed]:
        batch = job.batches[0]
        ended = batch.minibatches.popleft()
        figures.add(ended.totals, {"minibatches": 1, "rows": ended.num_rows, "counted_tokens": ended.num_tokens})
        batch.done.append(ended.totals)
        job.version += 1
        limit = job.config.optimizer.max_nonfinite_steps
        if job.nonfinite_in_row >= limit:
            job.failed = True
            job.batches.clear()
            reason = f"job {job.name!r}: {limit} gradients in a row were not finite (optimizer.max_nonfinite_steps={limit})"
            return [JobFailed(job.name, job.incarnation, "NonFinite", reason)]
        if batch.minibatches:
            return []
        job.batches.popleft()
        job.step += 1
        metrics = figures.summarize(figures.merge([*batch.done, batch.busy]))
        return [StepDone(job.name, job.incarnation, job.step, job.version, "", metrics)]

    # ---- what others read

    def snapshot(self, job: str) -> Snapshot:
        """Returns a copy of the job's weights under its version, in the sampler's dtype, with its fingerprint.

        Raises WrongWeights if an update with a gradient left the weights as they were published before (H09, H26).
        """
        owner = self._job(job)
        with self._slot_of(owner) as slot:
            weights = self._executor.published(slot, self._dtype)
        mark = fingerprint(weights, owner.spec.scale)
        if owner.moved and mark == owner.published:
            raise WrongWeights(
                f"job {job!r} version {owner.version}: an update with a gradient changed nothing that is published"
            )
        owner.published, owner.moved = mark, False
        return Snapshot(job, owner.incarnation, owner.version, weights, owner.spec.scale, mark)

    def weights(self, job: str) -> Weights:
        """Returns the job's master weights as NumPy arrays, padded to the bank's rank."""
        return self._arrays_of(self._job(job))[0]

    def score(self, job: str, token_ids: Any) -> np.ndarray:
        """Returns the log-probs of token_ids[1:] under the job's masters, float32, at once: for short sequences."""
        ids = np.asarray(token_ids, np.int32)
        if len(ids) < 2:
            return np.zeros(0, np.float32)
        shapes = [s for s in (self.sizes.probe, *self.sizes.shapes) if s.prompt + s.suffix >= len(ids) - 1]
        if not shapes:
            longest = max(s.prompt + s.suffix for s in self.sizes.shapes) + 1
            raise InvalidRequest(f"score: {len(ids)} tokens; the learner's buckets allow at most {longest}")
        shape = min(shapes, key=lambda s: s.num_tokens)
        layout = lay_out_sequence(shape, ids, self.sizes.capacity)
        with self._slot_of(self._job(job)) as slot:
            chain = self._executor.score_chain(layout, np.full(shape.blocks, slot, np.int32))
            while chain.calls:
                chain.run()
        return np.concatenate(jax.device_get(chain.results["logprobs"]))[: len(ids) - 1]

    def state(self, job: str) -> dict[str, Any]:
        """Returns the job's state after its last whole batch: "arrays" (flat float32) and "counters".

        With several minibatches it may only be asked for between batches; gradients of a batch in progress are not state.
        """
        owner = self._job(job)
        if owner.batches and owner.batches[0].done:
            raise InternalError(f"job {job!r}: its state was asked for between two minibatches of batch {owner.step}")
        arrays = {name: state.flatten(tree, owner.spec) for name, tree in zip(ARRAYS, self._arrays_of(owner), strict=True)}
        return {"arrays": arrays, "counters": {name: int(getattr(owner, name)) for name in COUNTERS}}

    def with_batches(self) -> list[str]:
        """Returns the jobs of which a batch is not trained yet."""
        return [job.name for job in self._live() if job.batches]

    def gauges(self) -> dict[str, float]:
        """Returns the jobs held now, and what paging did since the start: moves either way and the seconds they took."""
        return {
            "learner/open_jobs": len(self._jobs),
            "learner/resident_jobs": len(self._slots),
            "learner/page_ins": self.counters["page_ins"],
            "learner/page_outs": self.counters["page_outs"],
            "learner/paging_s": self._paging_s,
            **self._shelf.gauges(),
        }

    def _arrays_of(self, job: _Job) -> tuple[Weights, Weights, Weights]:
        """Returns (weights, first, second) of a job as NumPy arrays, wherever they are."""
        return self._shelf.get(job.name) if job.name in self._shelf else self._executor.extract(self._slots[job.name])

    def _slot_of(self, job: _Job) -> contextlib.AbstractContextManager[int]:
        """Returns the slot in which a job's masters stand as long as the context is open; a paged-out job is a guest there."""
        if job.name not in self._shelf:
            return contextlib.nullcontext(self._slots[job.name])
        return self._executor.guest(self._shelf.get(job.name)[0], job.spec.scale)

    def _job(self, job: str) -> _Job:
        if job not in self._jobs:
            raise NotFound(f"job {job!r} is not open in the learner; open: {', '.join(sorted(self._jobs)) or 'none'}")
        return self._jobs[job]

    # ---- programs

    def warmup(self, compiled: Callable[[str], None] = lambda program: None) -> None:
        """Compiles every program, those that page included, and times them. Afterwards nothing compiles (H44).

        `compiled` is told the name of each of the `sizes.num_programs` programs once it is there.
        """
        warm(self._executor, self._dtype, self._cost, self._clock, compiled)


def _restore(
    saved: Mapping[str, Any], model: ModelConfig, spec: AdapterSpec, max_rank: int
) -> tuple[Weights, Weights, Weights]:
    """Returns (weights, first, second) of a saved state."""
    missing = [n for n in ARRAYS if n not in saved["arrays"]]
    missing += [n for n in COUNTERS if n not in saved["counters"]]
    if missing:
        raise CorruptFile(f"learner state: {', '.join(missing)} missing")
    adapter, first, second = (state.unflatten(np.asarray(saved["arrays"][n]), model, spec, max_rank, n) for n in ARRAYS)
    return adapter, first, second
