"""The request loop: continuous batching over one engine, for many jobs. Single-threaded; one bounded dispatch per `step`.

A request takes its adapter slot and decode slots together or waits. A group larger than the free slots starts in parts, from
one prefill that is kept for it. Finished rows are refilled between dispatches. Each request runs under one snapshot, resolved
when it starts (as it arrives, if somebody waits for it) and pinned to its end; publishing never disturbs what runs. On
accelerators one dispatch runs ahead while the one before is read; on a CPU, where the host would take the cores from the
device, each is read at once.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from marlaas_jax.engine import compiles, plan, steps
from marlaas_jax.engine.engine import EngineParams, EngineSettings, MarlaasEngine
from marlaas_jax.engine.queue import FairQueue
from marlaas_jax.engine.requests import Request, Row, answer, refusal
from marlaas_jax.engine.residency import NULL_SLOT, Residency
from marlaas_jax.engine.snapshots import SnapshotKey, SnapshotStore, key_of
from marlaas_jax.engine.warmup import warm
from marlaas_jax.errors import InvalidRequest, WrongWeights
from marlaas_jax.lora.snapshot import Snapshot
from marlaas_jax.messages import BASE_MODEL, LATEST, Generate, Generated, GeneratedPart
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.model.transformer import Params
from marlaas_jax.text.tokenizer import Tokenizer
from marlaas_jax.waits import WaitLog

_NULL = (NULL_SLOT, 0)


@dataclasses.dataclass
class _Dispatch:
    """A decode dispatch whose result has not been read."""

    result: Any
    rows: dict[int, Row]  # by decode slot, as they were when it started
    started_s: float


def _has_begun(request: Request) -> bool:
    return request.is_admitted


class Sampler:
    """Answers Generate messages; `step` returns what has finished."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        settings: EngineSettings,
        tokenizer: Tokenizer,
        clock: Callable[[], float],
        run_ahead: bool | None = None,
    ):
        """`run_ahead` None: by backend, as the module says."""
        self.engine = MarlaasEngine(config, settings, tokenizer, tokenizer.end_ids)
        self._tokenizer = tokenizer
        self._clock = clock
        self._run_ahead = jax.default_backend() != "cpu" if run_ahead is None else run_ahead
        self._params: EngineParams = self.engine.load_params(params)
        self._state = self.engine.init_decode_state()
        # By number of blocks: copies of their adapters, made when first used; which (adapter slot, writes) each block holds.
        # In the form "onehot", at 0: a copy of the whole bank, and the writes that it has seen.
        self._sides: dict[int, Any] = {}
        self._held: dict[int, tuple[Any, ...]] = {}
        self._writes = [0] * settings.num_adapter_slots  # how often each adapter slot was written
        self._residency = Residency(settings.num_adapter_slots)
        self._snapshots = SnapshotStore(settings.max_device_snapshots, settings.max_loaded_snapshots)
        self._holds: Counter[SnapshotKey] = Counter()  # snapshots kept on request, and how often each
        # Versions asked for by number that rows run under: they leave most adapter slots to those that follow the newest.
        self._by_number: Counter[SnapshotKey] = Counter()
        self._max_by_number = max(1, (self._residency.max_pinned + 1) // 3)
        self._queue: FairQueue[Request] = FairQueue(4.0 * settings.num_decode_slots * settings.max_context)
        self._requests: dict[str, Request] = {}
        self._rows: dict[int, Row] = {}  # running, by decode slot
        self._in_flight: list[_Dispatch] = []
        self._answers: list[Generated] = []  # for the next `step` to return
        self._parts: list[GeneratedPart] = []
        self._mean_tokens: dict[str, float] = {}  # of a share's completions so far, for its charge in the queue
        self._last_collected_s = float("-inf")
        self._compiles_at_warmup: int | None = None
        self.busy_s: dict[str, float] = defaultdict(float)  # by stage: "prefill", "decode", "publish"
        self.busy_by_job_s: dict[str, float] = defaultdict(float)  # by share, which is the job unless somebody waits
        self.stage_s_by_job: dict[tuple[str, str], float] = defaultdict(float)  # by (stage, share)
        self.waits = WaitLog()  # of each sample, until it has a decode slot
        self.sampled_tokens: dict[str, int] = defaultdict(int)  # by share, since the start
        self.prefilled_tokens: dict[str, int] = defaultdict(int)

    # ---- requests

    def submit(self, message: Generate) -> None:
        """Queues a request. One that cannot be served is answered with an error by the next `step`; a repeat is ignored."""
        if message.request_id in self._requests:
            return
        request = Request(message, frozenset((*self.engine.end_ids, *message.sampling.stop_token_ids)))
        reason, error = self._refusal(message)
        if reason or not message.seeds:
            latest = self._latest_version(message.job)
            self._answers += [answer(request, i, reason, latest, error=error) for i in range(request.num_samples)]
            return
        if message.version >= 0:
            request.pinned_version = SnapshotKey(message.job, message.incarnation, message.version)
        elif message.share and message.version == LATEST:
            request.pinned_version = self._key_for(request)
        if request.pinned_version is not None:
            self._snapshots.use(request.pinned_version)
        request.submitted_s = self._clock()
        self._requests[message.request_id] = request
        self._queue.push(request.share, request, message.weight, message.owner)

    def _refusal(self, message: Generate) -> tuple[str, str]:
        """Returns (finish reason, error) of a request that ends before it starts, else two empty strings."""
        latest = self._snapshots.latest(message.job)
        reason = "missing" if message.share else "error"
        if message.version == LATEST and (latest is None or latest.incarnation != message.incarnation):
            return reason, f"job={message.job!r}: incarnation {message.incarnation} has no published snapshot"
        if message.version >= 0 and not self.holds(message.job, message.incarnation, message.version):
            newest = "" if latest is None else f"; the latest of job {message.job!r} is {latest.version}"
            return reason, f"version={message.version}: not kept{newest}"
        return refusal(message, self.engine.config.vocab_size, self.engine.settings.max_context)

    def cancel(self, request_id: str) -> None:
        """Ends a request's samples; each answers "cancelled" with the tokens it has. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        for row in [row for row in self._rows.values() if row.request is request]:
            row.finish_reason = "cancelled"
            self._finish(row)
        if request.num_started < request.num_samples:
            self._queue.remove(request.share, request)
            latest = self._latest_version(request.message.job)
            waiting = range(request.num_started, request.num_samples)
            self._answers += [answer(request, i, "cancelled", latest) for i in waiting]
            self._end_request(request)

    def forget(self, job: str) -> None:
        """Cancels a job's requests and drops its snapshots; who waits for an answer gets it from the one that was resolved."""
        for request in [r for r in self._requests.values() if r.share == job]:
            self.cancel(request.message.request_id)
        self._queue.forget(job)
        for key in [key for key in self._holds.elements() if key.job == job]:
            self.release(key.job, key.incarnation, key.version)
        self._drop(self._snapshots.forget(job))
        self._mean_tokens.pop(job, None)

    # ---- snapshots

    def publish(self, snapshot: Snapshot) -> str:
        """Makes a snapshot its job's latest and resident; returns the fingerprint of what stands in the bank afterwards."""
        start = self._clock()
        # Its predecessor goes first, if nothing runs under it, so that no other job's snapshot is pushed out for it.
        self._drop(self._snapshots.publish(snapshot))
        slot = self._make_resident(snapshot, self._residency.place)
        fingerprint = self.engine.fingerprint(self._params, slot)
        self._account("publish", self._clock() - start, {snapshot.job: 1.0})
        return fingerprint

    def hold(self, job: str, incarnation: int, version: int) -> None:
        """Keeps a snapshot that is there, though newer ones follow, until as many `release`."""
        key = SnapshotKey(job, incarnation, version)
        self._holds[key] += 1
        self._snapshots.use(key)

    def release(self, job: str, incarnation: int, version: int) -> None:
        """Takes back one `hold`; one that is not there is ignored."""
        key = SnapshotKey(job, incarnation, version)
        if self._holds[key] > 0:
            self._holds[key] -= 1
            self._drop(self._snapshots.release(key))
        self._holds += Counter()  # forgets what is down to zero

    def holds(self, job: str, incarnation: int, version: int) -> bool:
        """Whether a snapshot of this name is here."""
        return self._snapshots.get(SnapshotKey(job, incarnation, version)) is not None

    @property
    def has_room_to_load(self) -> bool:
        """Whether another snapshot may be loaded now; else as many as are allowed are in use."""
        return self._snapshots.has_room_to_load

    def load(self, snapshot: Snapshot) -> None:
        """Takes in a snapshot that no job publishes. Raises WrongWeights if the bank does not hold it afterwards."""
        start = self._clock()
        slot = self._make_resident(snapshot, self._residency.place)
        resident = self.engine.fingerprint(self._params, slot)
        if resident != snapshot.fingerprint:
            self._residency.drop(key_of(snapshot))
            raise WrongWeights(f"{snapshot.job}: the sampler holds {resident}, {snapshot.fingerprint} was loaded")
        self._drop(self._snapshots.load(snapshot))
        self._account("publish", self._clock() - start, {"load": 1.0})

    def score(self, job: str, version: int, token_ids: Sequence[int]) -> np.ndarray:
        """Returns log-probabilities of token_ids[1:] under a snapshot (-1: the latest, -2: the base) as the sampler has it."""
        slot = NULL_SLOT
        if version != BASE_MODEL:
            latest = self._snapshots.latest(job)
            snapshot = latest
            if latest is not None and version != LATEST:
                snapshot = self._snapshots.get(SnapshotKey(job, latest.incarnation, version))
            if snapshot is None:
                raise InvalidRequest(f"version={version}: job {job!r} has no such snapshot here")
            slot = self._make_resident(snapshot, self._residency.place)
        return self.engine.score(self._params, token_ids, slot)

    def _make_resident(self, snapshot: Snapshot, place: Callable[[SnapshotKey], tuple[int, bool]]) -> int:
        key = key_of(snapshot)
        slot, is_missing = place(key)
        if is_missing:
            self._params = self.engine.write_adapter(self._params, slot, snapshot.weights, snapshot.scale)
            self._writes[slot] += 1
        self._snapshots.touch(key, self._residency.resident)
        return slot

    def _drop(self, keys: list[SnapshotKey]) -> None:
        for key in keys:
            self._residency.drop(key)

    def _latest_version(self, job: str) -> int:
        latest = self._snapshots.latest(job)
        return LATEST if latest is None else latest.version

    # ---- the loop

    def has_work(self) -> bool:
        """True if `step` would do or return anything."""
        return bool(self._answers or self._in_flight or self._rows or len(self._queue))

    def step(self) -> list[Generated]:
        """Runs one dispatch - a prefill with its inserts, or a decode chunk - and returns the completions that are known."""
        if self._in_flight and len(self._queue):
            self._collect(len(self._in_flight))  # who waits may start in what that frees
        launched = self._admit() or self._decode()
        keep = 1 if launched and self._run_ahead and not len(self._queue) else 0
        self._collect(len(self._in_flight) - keep)
        answers, self._answers = self._answers, []
        return answers

    def take_parts(self) -> list[GeneratedPart]:
        """Returns what the last steps added to samples that go on, of requests that want to know; before what they ended."""
        parts, self._parts = self._parts, []
        return parts

    def _num_free(self, request: Request) -> int:
        """Returns how many decode slots a request may take now: some are only for those that somebody waits for."""
        settings = self.engine.settings
        free = settings.num_decode_slots - len(self._rows)
        if request.message.share:
            return free
        rollouts = sum(not row.request.message.share for row in self._rows.values())
        return min(free, settings.num_decode_slots - settings.reserved_slots - rollouts)

    def _fits(self, request: Request) -> bool:
        if self._num_free(request) <= 0:
            return False
        if request.is_admitted or request.message.version == BASE_MODEL:
            return True
        key = request.pinned_version
        if key is not None and key not in self._by_number and len(self._by_number) >= self._max_by_number:
            return False
        return self._residency.can_pin(self._key_for(request))

    def _key_for(self, request: Request) -> SnapshotKey:
        """Returns the name of the snapshot that a request would start under now; `submit` made sure that there is one."""
        if request.pinned_version is not None:
            return request.pinned_version
        latest = self._snapshots.latest(request.message.job)
        assert latest is not None, f"job {request.message.job!r} has waiting requests and no snapshot"
        return key_of(latest)

    def _admit(self) -> bool:
        """Starts what may start, in one prefill at most. Returns True if that was a prefill; inserts alone are no dispatch."""
        batch: list[Request] = []
        starting: list[tuple[Request, list[Row]]] = []
        length = 0

        def fits(request: Request) -> bool:
            if not self._fits(request):
                return False
            if request.prefix is not None:
                return True
            if batch and (request.message.exact or batch[0].message.exact):
                return False  # an exact prompt is prefilled alone
            wanted = self.engine.buckets.prefill_length(len(request.message.prompt_ids))
            return len(batch) < self.engine.buckets.prefill_rows[-1] and length in (0, wanted)

        while (found := self._queue.next(fits, _has_begun)) is not None:
            share, request = found
            if not request.is_admitted:
                self._take_adapter(request)
            if request.prefix is None:
                length = self.engine.buckets.prefill_length(len(request.message.prompt_ids))
                batch.append(request)
                self._queue.charge(share, len(request.message.prompt_ids))
                self.prefilled_tokens[share] += len(request.message.prompt_ids)
            starting.append((request, self._take_slots(request)))
        if not starting:
            return False
        self._start(batch, starting)
        return bool(batch)

    def _take_adapter(self, request: Request) -> None:
        request.is_admitted = True
        if request.message.version == BASE_MODEL:
            return
        snapshot = self._snapshots[self._key_for(request)]
        self._snapshots.use(key_of(snapshot))
        request.snapshot = snapshot
        if request.pinned_version is not None:
            self._by_number[request.pinned_version] += 1
        slot = self._make_resident(snapshot, self._residency.pin)
        request.adapter_slot = (slot, self._writes[slot])

    def _take_slots(self, request: Request) -> list[Row]:
        free = [s for s in range(self.engine.settings.num_decode_slots) if s not in self._rows]
        rows = []
        for slot in free[: min(request.num_samples - request.num_started, self._num_free(request))]:
            row = Row(request, request.num_started, slot, self._tokenizer)
            row.charged_tokens = self._expected_tokens(request)
            self._rows[slot] = row
            request.num_started += 1
            rows.append(row)
        self._queue.charge(request.share, sum(row.charged_tokens for row in rows))
        self.waits.add("generate", request.share, self._clock() - request.submitted_s, len(rows))
        if request.num_started == request.num_samples:
            self._queue.remove(request.share, request)
        return rows

    def _expected_tokens(self, request: Request) -> float:
        limit = request.message.sampling.max_tokens
        return min(limit, self._mean_tokens.get(request.share, limit))

    def _start(self, batch: list[Request], starting: list[tuple[Request, list[Row]]]) -> None:
        start = self._clock()
        if batch:
            prompts = [request.message.prompt_ids for request in batch]
            prefix = self.engine.prefill_rows(self._params, prompts, [request.adapter_slot[0] for request in batch])
            for i, request in enumerate(batch):
                request.prefix = (prefix, i)
        entries: dict[int, list] = defaultdict(list)
        prefixes: dict[int, Any] = {}
        for request, rows in starting:
            assert request.prefix is not None
            prefix, source = request.prefix
            prefixes[id(prefix)] = prefix
            entries[id(prefix)] += [(row.slot, source, request.settings(row.sample)) for row in rows]
            if request.num_started == request.num_samples:
                request.prefix = None
        for name, prefix in prefixes.items():
            self._state = self.engine.insert_rows(self._state, prefix, entries[name])
        if batch:
            if not self._run_ahead:
                jax.block_until_ready(self._state.token_S)
            tokens = {request.share: 0.0 for request in batch}
            for request in batch:
                tokens[request.share] += len(request.message.prompt_ids)
            self._account("prefill", self._clock() - start, tokens)

    def _decode(self) -> bool:
        """Launches a decode chunk for the running rows. Returns False if there are none."""
        if not self._rows:
            return False
        settings, buckets = self.engine.settings, self.engine.buckets
        start = self._clock()
        adapters = {slot: row.request.adapter_slot for slot, row in self._rows.items()}
        exact = any(row.request.message.exact for row in self._rows.values())
        forms = (buckets.exact_form,) if exact else buckets.forms
        arranged = plan.arrange(forms, adapters, settings.num_decode_slots, self._held, _NULL)
        sides = self._place(arranged, exact)
        pending = 1 + len(self._in_flight)
        reach = max(row.num_positions for row in self._rows.values()) + pending * settings.decode_steps
        context = settings.max_context if exact else buckets.context_length(reach)
        keep = np.zeros(settings.num_decode_slots, bool)
        keep[list(self._rows)] = True
        self._state, result = self.engine.decode(self._params, self._state, sides, arranged, context, keep, exact)
        result.copy_to_host_async()
        self._in_flight.append(_Dispatch(result, dict(self._rows), start))
        return True

    def _place(self, arranged: plan.Plan, in_blocks: bool) -> Any:
        """Returns the adapters for the plan: blocks of its form with its adapters in them, or all adapters of the bank."""
        if self.engine.form == "onehot" and not in_blocks:
            if self._held.get(0) != tuple(self._writes):
                self._sides[0] = self.engine.all_adapters(self._params)
                self._held[0] = tuple(self._writes)
            return self._sides[0]
        count = arranged.form.num_blocks
        if count not in self._sides:
            self._sides[count] = self.engine.empty_blocks(self._params, count)
            self._held[count] = (_NULL,) * count
        pairs = enumerate(zip(arranged.adapters, self._held[count], strict=True))
        changes = {i: new[0] for i, (new, old) in pairs if new != old}
        if changes:
            self._sides[count] = self.engine.place_blocks(self._params, self._sides[count], changes)
            self._held[count] = arranged.adapters
        return self._sides[count]

    def _collect(self, count: int) -> None:
        """Reads the oldest `count` dispatches and ends the rows that they finished."""
        for _ in range(count):
            dispatch = self._in_flight.pop(0)
            chunk = steps.unpack(np.asarray(dispatch.result.data))
            now = self._clock()
            tokens: dict[str, float] = defaultdict(float)
            for slot, row in dispatch.rows.items():
                tokens[row.request.share] += 1.0
                if self._rows.get(slot) is not row:
                    continue  # ended since: cancelled, or by a stop string in the dispatch before
                before = len(row.token_ids)
                row.take(chunk)
                self.sampled_tokens[row.request.share] += len(row.token_ids) - before
                if row.finish_reason:
                    self._finish(row)
                elif row.request.message.partial and len(row.token_ids) > before:
                    self._parts.append(row.part())
            # While another dispatch runs ahead, this one's time begins where the one before it ended.
            began = max(dispatch.started_s, self._last_collected_s)
            self._last_collected_s = now
            self._account("decode", now - began, tokens)

    def _finish(self, row: Row) -> None:
        """Frees a row's slot and queues its answer."""
        del self._rows[row.slot]
        request, share = row.request, row.request.share
        count = len(row.token_ids)
        self._queue.correct(share, count - row.charged_tokens)
        self._mean_tokens[share] = 0.9 * self._mean_tokens.get(share, float(count)) + 0.1 * count
        self._answers.append(row.result(self._latest_version(request.message.job)))
        request.num_ended += 1
        if request.num_ended == request.num_samples:
            self._end_request(request)

    def _end_request(self, request: Request) -> None:
        del self._requests[request.message.request_id]
        request.prefix = None
        if request.snapshot is not None:
            key = key_of(request.snapshot)
            self._residency.unpin(key)
            self._drop(self._snapshots.release(key))
            if request.pinned_version is not None:
                self._by_number -= Counter((key,))
        if request.pinned_version is not None:
            self._drop(self._snapshots.release(request.pinned_version))

    # ---- figures

    def _account(self, stage: str, seconds: float, share: dict[str, float]) -> None:
        self.busy_s[stage] += seconds
        total = sum(share.values())
        for job, part in share.items():
            self.busy_by_job_s[job] += seconds * part / total
            self.stage_s_by_job[stage, job] += seconds * part / total

    def counters(self) -> dict[str, float]:
        """Returns what the sampler holds now."""
        return {
            "engine/running_rows": len(self._rows),
            "engine/decode_slots": self.engine.settings.num_decode_slots,
            "engine/waiting_requests": len(self._queue),
            "engine/resident_snapshots": len(self._residency.resident),
            "engine/pinned_snapshots": self._residency.num_pinned,
            "engine/kept_snapshots": len(self._snapshots),
            "engine/device_snapshots": self._snapshots.num_on_device,
            "engine/sampled_tokens": sum(self.sampled_tokens.values()),
            "engine/prefilled_tokens": sum(self.prefilled_tokens.values()),
        }

    def s_per_token(self, job: str) -> tuple[float, float]:
        """Returns the device's seconds per prefilled and per sampled token of a job so far; 0 where there was none."""
        prefilled, sampled = self.prefilled_tokens.get(job, 0), self.sampled_tokens.get(job, 0)
        prefill_s, decode_s = (self.stage_s_by_job.get((stage, job), 0.0) for stage in ("prefill", "decode"))
        return (prefill_s / prefilled if prefilled else 0.0), (decode_s / sampled if sampled else 0.0)

    def queued(self) -> dict[str, int]:
        """Returns the number of waiting requests by job."""
        return self._queue.lengths()

    def compiles_since_warmup(self) -> int:
        """Returns how many programs this process has compiled since `warmup`; all of them if that never ran."""
        return compiles.count() - (self._compiles_at_warmup or 0)

    def warmup(self, progress: Callable[[str], None] = lambda name: None) -> None:
        """Compiles every program, calling `progress` with the name of each. Nothing may be running."""
        assert not self._rows and not self._in_flight, "warm up before the first request"
        self._params, self._state = warm(self.engine, self._params, self._state, progress)
        self._compiles_at_warmup = compiles.count()
