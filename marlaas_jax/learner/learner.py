"""The learner: many jobs' batches in, one optimizer step per minibatch each, snapshots out. Single-threaded.

`step` runs one bounded dispatch. Jobs share micro-batches: the job furthest behind in service fills one first, blocks of the
same shape of the others take the places that are left. Accumulators stay on the device between dispatches, so a micro-batch
may be interrupted after any of its programs. A job's version rises by `minibatches` with every batch, also where a step was
skipped (nothing to learn, or a gradient that is not finite), so versions keep pace with batches.
"""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marlaas_jax.config import JobConfig, RuntimeConfig
from marlaas_jax.errors import CorruptFile, InternalError, InvalidRequest, NotFound, WrongWeights
from marlaas_jax.fairness import Shares
from marlaas_jax.learner import buckets, figures, rows, state
from marlaas_jax.learner.batch import SCORE_BASE, SCORE_PROXIMAL, TRAIN, Batch, Work
from marlaas_jax.learner.buckets import LearnerSizes
from marlaas_jax.learner.cost import CostModel, Unit
from marlaas_jax.learner.executor import Chain, Executor
from marlaas_jax.learner.schedule import learning_rate
from marlaas_jax.lora.adapter import AdapterSpec, Weights, init_weights
from marlaas_jax.lora.snapshot import Snapshot, fingerprint
from marlaas_jax.messages import JobFailed, StepDone, TrainBatch
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.rl.objective import Objective, resolve
from marlaas_jax.rl.packing import BlockShape, lay_out, lay_out_sequence

NUM_SLICES = 4  # of a dispatch: it may end after each
ARRAYS = ("adapter", "first_moment", "second_moment")
COUNTERS = ("step", "version", "count", "nonfinite_in_row", "skipped_nonfinite", "skipped_flat")


@dataclasses.dataclass
class _Job:
    name: str
    incarnation: int
    config: JobConfig
    spec: AdapterSpec
    slot: int
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
    ):
        self.sizes = sizes
        self._model, self._clock, self._dtype = model, clock, jnp.dtype(sampler_dtype)
        self._executor = Executor(model, params, sizes, num_slots, max_rank)
        self._free_slots = list(range(num_slots - 1, 0, -1))
        self._jobs: dict[str, _Job] = {}
        self._shares = Shares()
        self.busy_by_job_s: dict[str, float] = defaultdict(float)  # of micro-batches, each block its part
        self._cost = CostModel()
        self._running: _Running | None = None
        self.counters = {"micro_batches": 0, "padded_tokens": 0, "tokens": 0, "updates": 0, "scored_micro_batches": 0}

    @classmethod
    def from_runtime(
        cls,
        model: ModelConfig,
        params: Any,
        runtime: RuntimeConfig,
        *,
        clock: Callable[[], float],
        sampler_dtype: Any,
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
            model, params, sizes, num_slots=num_slots, max_rank=runtime.bank.max_rank, clock=clock, sampler_dtype=sampler_dtype
        )

    # ---- jobs

    def add_job(
        self,
        job: str,
        incarnation: int,
        config: JobConfig,
        spec: AdapterSpec,
        state: Mapping[str, Any] | None = None,
        weights: Weights | None = None,
    ) -> None:
        """Opens a job: fresh, from given weights (padded to the bank's rank), or exactly where `state` left it."""
        if job in self._jobs:
            raise InternalError(f"job {job!r} is open already, as incarnation {self._jobs[job].incarnation}")
        if not self._free_slots:
            raise InvalidRequest(
                f"job {job!r}: all {len(self._jobs)} adapter slots of the learner are in use (runtime.bank.num_learner_slots)"
            )
        executor = self._executor
        added = _Job(job, incarnation, config, spec, self._free_slots[-1], resolve(config.algorithm))
        first = second = executor.zeros
        if state is not None:
            weights, first, second = _restore(state, self._model, spec, executor.max_rank)
            for name in COUNTERS:
                setattr(added, name, int(state["counters"][name]))
        elif weights is None:
            weights = init_weights(self._model, spec, executor.max_rank)
        executor.place(added.slot, weights, first, second, spec.scale)
        self._free_slots.pop()
        self._jobs[job] = added
        self._shares.add(job, config.weight)

    def remove_job(self, job: str) -> None:
        """Closes a job and wipes its slot: weights, moments, gradients, counters (H02). An unknown job is no error."""
        removed = self._jobs.pop(job, None)
        if removed is None:
            return
        self._shares.remove(job)
        if self._running is not None:
            self._running.chain.redirect(removed.slot)
        self._executor.wipe(removed.slot)
        self._free_slots.append(removed.slot)

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
        job.batches.append(Batch(batch, job.objective, job.config.sampling.max_tokens, self.sizes.shapes))
        return True

    # ---- dispatches

    def has_work(self) -> bool:
        """True if `step` has something to run."""
        return self._running is not None or any(job.batches for job in self._live())

    def step(self) -> list[StepDone | JobFailed]:
        """Runs one bounded dispatch and waits for it: optimizer steps of the jobs that are due, or a part of a micro-batch.

        A part runs in slices, so that a machine slower than predicted stops it early rather than late.
        """
        start = self._clock()
        if self._running is None:
            if due := self._due():
                return self._update(due[: self.sizes.update_buckets[-1]], start)
            waiting = self._waiting()
            if not waiting:
                return []
            self._running = self._start(waiting)
        running = self._running
        calls = running.chain.calls
        slice_s = self.sizes.max_dispatch_s / NUM_SLICES
        spent = 0.0
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
        self._account(running, self._clock() - start)
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
        return [job for job in self._live() if job.batches and job.batches[0].is_due]

    def _waiting(self) -> list[_Job]:
        """Returns the jobs with blocks to run, in the order of the queue."""
        names = [job.name for job in self._live() if job.batches and job.batches[0].waiting()]
        return [self._jobs[name] for name in self._shares.order(names)]

    def _start(self, waiting: list[_Job]) -> _Running:
        """Takes blocks of one shape and kind from the waiting jobs and makes them a micro-batch."""
        head = waiting[0].batches[0].waiting()[0]
        shape, trains = head.block.shape, head.purpose == TRAIN
        work: list[tuple[_Job, Work]] = []
        for job in waiting:
            queue = job.batches[0].waiting()
            fitting = [w for w in queue if w.block.shape == shape and (w.purpose == TRAIN) == trains]
            for taken in fitting[: shape.blocks - len(work)]:
                queue.remove(taken)
                work.append((job, taken))
                self._shares.charge(job.name, shape.tokens_per_block)
        layout = lay_out(shape, [w.block for _, w in work], self.sizes.capacity, self.sizes.num_rows, self.sizes.num_suffix)
        slots = np.zeros(shape.blocks, np.int32)
        for m, (job, w) in enumerate(work):
            slots[m] = 0 if w.purpose == SCORE_BASE else job.slot
        self.counters["padded_tokens"] += shape.num_tokens
        self.counters["tokens"] += sum(len(w.block.prompt) + sum(len(r.token_ids) for r in w.block.rows) for _, w in work)
        if not trains:
            self.counters["scored_micro_batches"] += 1
            return _Running(self._executor.score_chain(layout, slots), work)
        self.counters["micro_batches"] += 1
        owners = [(job.objective, job.version) for job, _ in work]
        loss_rows = rows.loss_rows(layout, owners, self.sizes.num_rows, self.sizes.num_suffix)
        return _Running(self._executor.train_chain(layout, slots, loss_rows), work)

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
            norms = np.asarray(jax.device_get(self._executor.update([job.slot for job in stepping], hyper)))
            self.counters["updates"] += 1
            self._cost.observe([self._update_unit(len(stepping))], self._clock() - start)
        done: list[StepDone | JobFailed] = []
        for job in due:
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

    def _update_unit(self, num_adapters: int) -> Unit:
        shapes = jax.tree.leaves(self._executor.zeros)
        return Unit("update", 20.0 * num_adapters * sum(array.size for array in shapes))

    # ---- what others read

    def snapshot(self, job: str) -> Snapshot:
        """Returns a copy of the job's weights under its version, in the sampler's dtype, with its fingerprint.

        Raises WrongWeights if an update with a gradient left the weights as they were published before (H09, H26).
        """
        owner = self._job(job)
        weights = self._executor.published(owner.slot, self._dtype)
        mark = fingerprint(weights, owner.spec.scale)
        if owner.moved and mark == owner.published:
            raise WrongWeights(
                f"job {job!r} version {owner.version}: an update with a gradient changed nothing that is published"
            )
        owner.published, owner.moved = mark, False
        return Snapshot(job, owner.incarnation, owner.version, weights, owner.spec.scale, mark)

    def weights(self, job: str) -> Weights:
        """Returns the job's master weights as NumPy arrays, padded to the bank's rank."""
        return self._executor.extract(self._job(job).slot)[0]

    def score(self, job: str, token_ids: Any) -> np.ndarray:
        """Returns the log-probs of token_ids[1:] under the job's masters, float32, at once: for short sequences."""
        ids = np.asarray(token_ids, np.int32)
        if len(ids) < 2:
            return np.zeros(0, np.float32)
        slots = lambda shape: np.full(shape.blocks, self._job(job).slot, np.int32)
        shapes = [s for s in (self.sizes.probe, *self.sizes.shapes) if s.prompt + s.suffix >= len(ids) - 1]
        if not shapes:
            longest = max(s.prompt + s.suffix for s in self.sizes.shapes) + 1
            raise InvalidRequest(f"score: {len(ids)} tokens; the learner's buckets allow at most {longest}")
        shape = min(shapes, key=lambda s: s.num_tokens)
        chain = self._executor.score_chain(lay_out_sequence(shape, ids, self.sizes.capacity), slots(shape))
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
        arrays = {
            name: state.flatten(tree, owner.spec) for name, tree in zip(ARRAYS, self._executor.extract(owner.slot), strict=True)
        }
        return {"arrays": arrays, "counters": {name: int(getattr(owner, name)) for name in COUNTERS}}

    def _job(self, job: str) -> _Job:
        if job not in self._jobs:
            raise NotFound(f"job {job!r} is not open in the learner; open: {', '.join(sorted(self._jobs)) or 'none'}")
        return self._jobs[job]

    # ---- programs

    def warmup(self, compiled: Callable[[str], None] = lambda program: None) -> None:
        """Compiles and runs every program on padding, then once more to time it. Afterwards nothing compiles (H44).

        `compiled` is told the name of each of the `sizes.num_programs` programs once it is there.
        """
        executor, known = self._executor, set()

        def announce(program: str) -> None:
            if program not in known:
                known.add(program)
                compiled(program)

        for shape in (*self.sizes.shapes, self.sizes.probe):
            for timed in (False, True):
                self._run_padding(shape, announce, timed)
        for bucket in self.sizes.update_buckets:
            for _ in range(2):
                start = self._clock()
                jax.block_until_ready(executor.update([], [], at_least=bucket))
            self._cost.calibrate(self._update_unit(bucket), max(self._clock() - start, 1e-6))
            announce(f"update of {bucket}")
        executor.wipe(0)
        announce("place")
        published = executor.published(0, self._dtype)
        announce("published")
        fingerprint(published, 0.0)
        announce("fingerprint")
        executor.extract(0)
        announce("extract")

    def _run_padding(self, shape: BlockShape, announce: Callable[[str], None], timed: bool) -> None:
        """Runs a micro-batch without blocks: training for the shapes of the sizes, scoring for the probe."""
        layout = lay_out_sequence(shape, np.zeros(2, np.int32), self.sizes.capacity)
        slots = np.zeros(shape.blocks, np.int32)
        if shape == self.sizes.probe:
            chain = self._executor.score_chain(layout, slots)
        else:
            nowhere = np.full((self.sizes.num_rows, self.sizes.num_suffix), self.sizes.capacity, np.int32)
            layout = dataclasses.replace(layout, index_BT=nowhere)
            chain = self._executor.train_chain(layout, slots, rows.loss_rows(layout, [], *nowhere.shape))
        # One group of layers stands for all: the first forward and, for its input, the last backward.
        forwards = [call for call in chain.calls if call[0].kind == "forward"]
        backwards = [call for call in chain.calls if call[0].kind == "backward"]
        left_out = [*forwards[1:], *backwards[:-1]]
        chain.calls = deque(call for call in chain.calls if call not in left_out)
        while chain.calls:
            start = self._clock()
            unit, out = chain.run()
            jax.block_until_ready(out)
            of_shape = f" of {shape.blocks} x ({shape.prompt} + {shape.rows} x {shape.suffix}) tokens"
            announce(unit.kind + (of_shape if unit.kind in ("forward", "backward") else ""))
            if timed:
                self._cost.calibrate(unit, max(self._clock() - start, 1e-6))


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
