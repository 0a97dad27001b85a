"""The rollouts of one job: tickets, batches and evaluations on top of the running groups. No clock, no I/O.

A group that has ended is scored at once and enters the open step; a full step leaves for the learner at once. A group without
any reward is replaced by a new attempt of its ticket; after `max_attempts` of them its place stays empty or the job fails, as
the job says, and a step of empty places only fails the job in any case. Evaluations run beside that, from a snapshot that is
held for them, with a small share of the episodes that start and run.
"""

import dataclasses
from collections.abc import Iterable

from marlaas_jax.fairness import Shares
from marlaas_jax.messages import Generated, JobReady, ReleaseSnapshot, StepDone, TrainBatch
from marlaas_jax.rollout import evaluation, meters
from marlaas_jax.rollout import settings as limits
from marlaas_jax.rollout.batches import ScoredGroup, batch_metrics, score
from marlaas_jax.rollout.commands import BatchSent, Command, JobDone, JobGivenUp, Note, Stopping
from marlaas_jax.rollout.evaluation import AFTER, BEFORE, DURING, Evaluation
from marlaas_jax.rollout.groups import Group
from marlaas_jax.rollout.records import Wait, episode_waits, stage_counts
from marlaas_jax.rollout.requests import Fingerprints
from marlaas_jax.rollout.runner import GroupRunner
from marlaas_jax.rollout.settings import RolloutSettings
from marlaas_jax.rollout.stopping import NOTHING, Past, StopRule
from marlaas_jax.rollout.tickets import Ledger, TicketBook, VersionLog


class JobRollout:
    """Rollouts of one incarnation of one job, from its committed step to its end."""

    def __init__(self, settings: RolloutSettings, ready: JobReady, now: float, *, eval_before: bool, past: Past = NOTHING):
        """`past` is what the job has behind it. With `eval_every_steps` its first snapshot is held by the device."""
        self.settings = settings
        self.book = TicketBook(
            steps=settings.steps,
            groups_per_batch=settings.groups_per_batch,
            max_staleness=settings.max_staleness,
            max_attempts=settings.max_attempts,
            ledger=Ledger.from_bytes(ready.ledger),
            steps_done=ready.step,
        )
        self.versions = VersionLog(ready.version, ready.step)
        self._fingerprints = Fingerprints(ready.version, ready.fingerprint)
        self.state = "running"  # running, done, failed
        self.commands: list[Command] = []
        self.runner = GroupRunner(settings, self.commands.append, self._group_ended, now)
        self.runner.steps_done = ready.step
        self.tally = self.runner.tally
        last_evaluation = past.evaluations[-1] if past.evaluations else None
        beside_training = max(2, int(evaluation.SHARE * settings.group_size * settings.groups_per_batch))
        self._evaluation = Evaluation(settings.eval_items, settings.eval_every_steps, beside_training, last_evaluation)
        self._shares = Shares()  # of this job's episodes, between training and evaluation
        self._shares.add("train", 1.0)
        self._shares.add("eval", evaluation.SHARE)
        self._stop = StopRule(settings.stop, past)
        self._is_wanted = not past.stop  # False: whoever ended it does not want it evaluated either
        self._version = ready.version
        self._ran_before_s, self._started = past.running_s, now
        self._scored: dict[int, ScoredGroup] = {}
        self._too_long: set[int] = set()  # tickets given up because no prompt of theirs fits into the context
        self._beside = meters.total(())  # used by evaluations since the last batch left
        self._last_trained = now
        if settings.exact:
            self.commands.append(Note(settings.name, "isolation", limits.EXACT_PRICE))
        if self._stop.reason and not self.book.finished:
            self._stop_now(self._stop.reason, now)
        self._evaluate_first(ready, eval_before=eval_before)
        self._advance(now)

    def next_cost(self) -> int | None:
        """Returns how many episodes the next group has, None when none may start now."""
        costs = self._startable() if self.state == "running" else {}
        return costs[self._shares.order(costs)[0]] if costs else None

    def start_next(self, now: float, waited_s: float = 0.0) -> None:
        """Starts the next group: of training or of an evaluation, whichever is further behind its share.

        It could have started `waited_s` ago.
        """
        costs = self._startable()
        split = self._shares.order(costs)[0]
        self._shares.charge(split, costs[split])
        if split == "eval":
            running = self._evaluation.running
            assert running is not None
            item = self._evaluation.start()
            phase = running.phase if running.phase != DURING else f"{DURING}-{running.step}"
            draw = 0 if self.settings.exact else None
            self.runner.start("eval", item, 0, 1, now, phase=phase, version=running.version, draw=draw, waited_s=waited_s)
        else:
            ticket, attempt = self.book.start()
            draw = self.book.failures(ticket) if self.settings.exact else None
            self.runner.start("train", ticket, attempt, self.settings.group_size, now, draw=draw, waited_s=waited_s)

    def stop(self, reason: str, now: float) -> None:
        """Ends the job after the batches that have left, without another evaluation."""
        if self.state != "running":
            return
        self._is_wanted = False
        self._abandon_evaluation(now)
        if not self.is_stopping:
            self._stop_now(reason, now)
        self._advance(now)

    @property
    def is_stopping(self) -> bool:
        """True once no further batch is begun though not all are trained that were to be."""
        return self.book.steps < self.settings.steps

    @property
    def num_running(self) -> int:
        """Episodes that have started and not ended."""
        return self.tally.running

    def on_generated(self, message: Generated, now: float) -> None:
        """A completion: checked for the weights that it came from, then given to its environment."""
        if wrong := self._fingerprints.check(message.version, message.fingerprint):
            self._give_up("WrongWeights", wrong, now)
        else:
            self.runner.on_generated(message, now)

    def on_step_done(self, message: StepDone, now: float) -> None:
        """A batch is trained and its snapshot published."""
        if message.step <= self.book.steps_done or message.step > self.book.open_step:
            return
        self._last_trained = now
        self.versions.record(message.version, message.step)
        if wrong := self._fingerprints.publish(message.version, message.fingerprint):
            self._give_up("WrongWeights", wrong, now)
            return
        self._version = message.version
        self.book.step_done(message.step)
        self.runner.steps_done = message.step
        if self._evaluation.is_due(message.step, self.settings.steps):
            self._evaluate_in_between(message)
        self._advance(now)

    def tick(self, now: float) -> None:
        """Ends what is over its limit."""
        if self.state != "running":
            return
        self.runner.check_limits(now)
        if not self.is_stopping and (reason := self._stop.time(self._running_s(now))):
            self._stop_now(reason, now)
            self._advance(now)
        sent = self.book.open_step - self.book.steps_done
        if sent and now - self._last_trained > limits.TRAIN_TIMEOUT_S:
            self._give_up(
                "WorkerLost", f"batch {self.book.steps_done} was not trained within {limits.TRAIN_TIMEOUT_S:.0f} s", now
            )

    def close(self, now: float) -> None:
        """Cancels everything that runs: the job ends, or goes on as another incarnation."""
        for group in list(self.runner.groups.values()):
            self.runner.cancel(group, now)
        if self.state == "running":
            self.state = "done"

    def waits(self, now: float) -> list[Wait]:
        """Returns everything that waits, oldest first."""
        found = episode_waits(self.runner.groups.values(), self.settings, now)
        sent = self.book.open_step - self.book.steps_done
        if sent:
            what = f"batch {self.book.steps_done}" + (f" (and {sent - 1} more)" if sent > 1 else "")
            found.append(Wait("train", what, "the device", now - self._last_trained, limits.TRAIN_TIMEOUT_S))
        return sorted(found, key=lambda wait: -wait.since_s)

    def why(self, now: float) -> tuple[Wait, int]:
        """Returns (what the job waits for longest, how many things more it waits for)."""
        waits = self.waits(now)
        if not waits:
            what = "its share of the environment workers, while nothing of it runs"
            waits = [Wait("episodes", what, "the controller", now - self._last_trained, None)]
        return waits[0], len(waits) - 1

    def queue_lengths(self) -> dict[str, int]:
        """Returns how many episodes are in each stage, and the groups that are ready or being trained."""
        lengths = stage_counts(self.runner.groups.values())
        lengths["ready_groups"] = len(self.book.ready)
        lengths["training_batches"] = self.book.open_step - self.book.steps_done
        return lengths

    # ---- inside

    def _startable(self) -> dict[str, int]:
        """Returns the episodes of the next group of training and of the evaluation, where one may start."""
        found = {}
        if self._evaluation.may_start(is_training=not self.book.finished):
            found["eval"] = 1
            if self._evaluation.is_first:
                return found  # batches wait for it
        if self.book.next_startable() is not None:
            found["train"] = self.settings.group_size
        return found

    def _running_s(self, now: float) -> float:
        return self._ran_before_s + now - self._started

    def _evaluate_first(self, ready: JobReady, *, eval_before: bool) -> None:
        """Evaluates the snapshot that the job starts from where that is due, or lets go of it."""
        is_held = self.settings.eval_every_steps > 0
        is_wanted = self._is_wanted and self.settings.eval_items > 0
        if eval_before and is_wanted:
            self._evaluation.begin(BEFORE, ready.step, ready.version, is_held=is_held)
        elif is_wanted and self._evaluation.was_missed(ready.step, self.book.steps):
            self._evaluation.begin(DURING, ready.step, ready.version, is_held=is_held)
        elif is_held:
            self._release(ready.version)

    def _evaluate_in_between(self, done: StepDone) -> None:
        """Evaluates the snapshot of a step after which that is due; it was asked to be held."""
        running = self._evaluation.running
        if running is None and self._is_wanted and done.step < self.book.steps:
            self._evaluation.begin(DURING, done.step, done.version, is_held=True)
            return
        if running is not None:
            text = f"the evaluation of step {done.step} is left out: that of step {running.step} still runs, with "
            self.commands.append(Note(self.settings.name, "evaluation_skipped", text + self._evaluation.progress()))
        self._release(done.version)

    def _abandon_evaluation(self, now: float) -> None:
        running = self._evaluation.abandon()
        for group in [group for group in self.runner.groups.values() if group.split == "eval"]:
            self.runner.cancel(group, now)
        if running is not None and running.is_held:
            self._release(running.version)

    def _release(self, version: int) -> None:
        self.commands.append(ReleaseSnapshot(self.settings.name, self.settings.incarnation, version))

    def _stop_now(self, reason: str, now: float) -> None:
        """Begins no further batch; those that have left are trained."""
        self.book.stop()
        self._scored.clear()
        for group in [group for group in self.runner.groups.values() if group.split == "train"]:
            self.runner.cancel(group, now)
        self.commands.append(Stopping(self.settings.name, self.book.steps, reason))

    def _group_ended(self, group: Group, now: float) -> None:
        if group.split == "eval":
            self._beside = meters.total((self._beside, meters.of_group(group)))
            self._evaluation.add(group.episodes[0].reward)
            self._advance(now)
            return
        self.book.reserve_attempts(group.ticket, group.next_attempt())
        scored = score(group, normalize_std=self.settings.normalize_std, now=now)
        if scored is None:
            self._replace(group, now)
        elif self.book.finish(group.ticket, self.versions.batches(scored.oldest_version)):
            self._scored[group.ticket] = scored
            self._send_batches(now)

    def _replace(self, group: Group, now: float) -> None:
        """A group without anything to train: another attempt, or the job's rule."""
        final = all(episode.is_hopeless for episode in group.episodes)
        if self.book.fail(group.ticket, final=final):
            return
        s = self.settings
        if final:
            self._too_long.add(group.ticket)
        reason = f"ticket {group.ticket} failed {self.book.failures(group.ticket)} times, last: {self.runner.last_failure}"
        if s.fail_when_exhausted:
            self._give_up(self._blame([group.ticket]), reason, now)
            return
        self.commands.append(Note(s.name, "ticket_given_up", reason))
        self.book.give_up(group.ticket)
        self._send_batches(now)

    def _send_batches(self, now: float) -> None:
        if self._evaluation.is_first:
            return  # the first evaluation is of the untrained policy, and is over before anything is trained
        s = self.settings
        while self.state == "running" and len(self.book.ready) >= s.groups_per_batch:
            step = self.book.open_step
            chosen = self.book.take_batch(self._floors())
            if chosen is None:
                return
            groups = [self._scored.pop(ticket) for ticket in chosen if ticket in self._scored]
            if not groups:
                reason = f"no group of batch {step} could be scored, last: {self.runner.last_failure}"
                self._give_up(self._blame(chosen), reason, now)
                return
            self._too_long.difference_update(chosen)
            metrics = batch_metrics(
                groups,
                step=step,
                batches_of=self.versions.batches,
                num_empty=s.groups_per_batch - len(groups),
                running_s=self._running_s(now),
                beside=self._beside,
            )
            self._beside = meters.total(())
            if step == self.book.steps_done:
                self._last_trained = now
            batch = TrainBatch(
                job=s.name,
                incarnation=s.incarnation,
                step=step,
                groups=tuple(scored.group for scored in groups),
                ledger=self.book.ledger.to_bytes(),
                reward_mean=metrics["rollout/reward_mean"],
                hold=self._evaluation.is_due(step + 1, s.steps),
            )
            tickets = tuple((scored.group.ticket, scored.group.attempt) for scored in groups)
            self.commands += [BatchSent(s.name, step, metrics, tickets), batch]  # written down before it leaves
            if step + 1 < s.steps and (
                reason := self._stop.batch(batch.reward_mean, int(metrics["rollout/num_tokens"]))
                or self._stop.time(metrics["rollout/running_s"])
            ):
                self._stop_now(reason, now)
            self._drop_too_old(now)

    def _floors(self) -> dict[int, int]:
        done = self.book.steps_done
        return {
            group.ticket: group.floor(self.versions.batches, done)
            for group in self.runner.groups.values()
            if group.split == "train"
        }

    def _drop_too_old(self, now: float) -> None:
        """The open step moved on: restarts what could enter neither it nor a later one."""
        for ticket, oldest in list(self.book.ready.items()):
            if oldest is not None and self.book.is_too_old(oldest):
                del self._scored[ticket]
                self.book.restart_stale(ticket)
        for ticket, floor in self._floors().items():
            if self.book.is_too_old(floor):
                group = self.runner.groups["train", ticket]
                self.runner.cancel(group, now)
                self.book.reserve_attempts(ticket, group.next_attempt())
                self.book.restart_stale(ticket)

    def _advance(self, now: float) -> None:
        """Ends evaluations; once all is trained, moves to the last of them, and to the end."""
        if done := self._evaluation.finish(self.settings.name):
            self.commands.append(done)
            if done.is_held:
                self._release(done.version)
            if done.phase == BEFORE:
                self._send_batches(now)
            if not self.is_stopping and not self.book.finished and (reason := self._stop.evaluation(done)):
                self._stop_now(reason, now)
        if self.state != "running" or not self.book.finished or self._evaluation.running is not None:
            return
        last, step = self._evaluation.last, self.book.steps_done
        if not self._is_wanted or not self._evaluation.num_items or (last and (last.phase, last.step) == (AFTER, step)):
            self._done()
        elif last is not None and last.step == step and last.phase == DURING:  # of these very weights
            self.commands.append(dataclasses.replace(last, phase=AFTER, is_held=False))
            self._done()
        else:
            self._evaluation.begin(AFTER, step, self._version, is_held=False)

    def _done(self) -> None:
        self.state = "done"
        self.commands.append(JobDone(self.settings.name, self.book.steps_done, self._beside))

    def _blame(self, tickets: Iterable[int]) -> str:
        """Returns what gave these tickets up: prompts that nobody could serve, or the environment."""
        return "InvalidRequest" if self._too_long.issuperset(tickets) else "EnvironmentFailed"

    def _give_up(self, kind: str, reason: str, now: float) -> None:
        if self.state != "running":
            return
        self.state = "failed"
        self.close(now)
        self.commands.append(JobGivenUp(self.settings.name, kind, reason))
