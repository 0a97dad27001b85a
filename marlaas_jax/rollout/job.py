"""The rollouts of one job: tickets, batches and evaluations on top of the running groups. No clock, no I/O.

A group that has ended is scored at once and enters the open step; a full step leaves for the learner at once. A group without
any reward is replaced by a new attempt of its ticket; after `max_attempts` of them its place stays empty or the job fails, as
the job says, and a step of empty places only fails the job in any case.
"""

from collections.abc import Iterable

from marlaas_jax.messages import Generated, JobReady, StepDone, TrainBatch
from marlaas_jax.rollout import settings as limits
from marlaas_jax.rollout.batches import ScoredGroup, batch_metrics, score
from marlaas_jax.rollout.commands import BatchSent, Command, JobDone, JobGivenUp, Note
from marlaas_jax.rollout.evaluation import Evaluation
from marlaas_jax.rollout.groups import Group
from marlaas_jax.rollout.records import Wait, episode_waits, stage_counts
from marlaas_jax.rollout.requests import Fingerprints
from marlaas_jax.rollout.runner import GroupRunner
from marlaas_jax.rollout.settings import RolloutSettings
from marlaas_jax.rollout.tickets import Ledger, TicketBook, VersionLog


class JobRollout:
    """Rollouts of one incarnation of one job, from its committed step to its end."""

    def __init__(self, settings: RolloutSettings, ready: JobReady, now: float, *, eval_before: bool):
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
        self._evaluation = Evaluation(settings.eval_items)
        self._scored: dict[int, ScoredGroup] = {}
        self._too_long: set[int] = set()  # tickets given up because no prompt of theirs fits into the context
        self._last_trained = now
        if settings.exact:
            self.commands.append(Note(settings.name, "isolation", limits.EXACT_PRICE))
        if eval_before and settings.eval_items:
            self._evaluation.begin("before")
        self._advance(now)

    def next_cost(self) -> int | None:
        """Returns how many episodes the next group has, None when none may start now."""
        if self.state != "running":
            return None
        if self._evaluation.waiting:
            return 1
        return None if self.book.next_startable() is None else self.settings.group_size

    def start_next(self, now: float) -> None:
        """Starts the next group."""
        if self._evaluation.waiting:
            draw = 0 if self.settings.exact else None
            self.runner.start("eval", self._evaluation.waiting.popleft(), 0, 1, now, self._evaluation.phase, draw)
        else:
            ticket, attempt = self.book.start()
            draw = self.book.failures(ticket) if self.settings.exact else None
            self.runner.start("train", ticket, attempt, self.settings.group_size, now, draw=draw)

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
        self.book.step_done(message.step)
        self.runner.steps_done = message.step
        self._advance(now)

    def tick(self, now: float) -> None:
        """Ends what is over its limit."""
        if self.state != "running":
            return
        self.runner.check_limits(now)
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
            found.append(Wait("train", what, now - self._last_trained, limits.TRAIN_TIMEOUT_S))
        return sorted(found, key=lambda wait: -wait.since_s)

    def why(self, now: float) -> str:
        """Returns in one line what the job waits for."""
        waits = self.waits(now)
        if self.state != "running":
            return self.state
        if not waits:
            return "episodes: nothing runs; waits for its share of the environment workers"
        return str(waits[0]) + (f"; {len(waits) - 1} more wait" if len(waits) > 1 else "")

    def queue_lengths(self) -> dict[str, int]:
        """Returns how many episodes are in each stage, and the groups that are ready or being trained."""
        lengths = stage_counts(self.runner.groups.values())
        lengths["ready_groups"] = len(self.book.ready)
        lengths["training_batches"] = self.book.open_step - self.book.steps_done
        return lengths

    # ---- inside

    def _group_ended(self, group: Group, now: float) -> None:
        if group.split == "eval":
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
        if self._evaluation.phase == "before":
            return  # the first evaluation is of the untrained policy
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
                groups, step=step, batches_of=self.versions.batches, num_empty=s.groups_per_batch - len(groups)
            )
            if step == self.book.steps_done:
                self._last_trained = now
            batch = TrainBatch(
                job=s.name,
                incarnation=s.incarnation,
                step=step,
                groups=tuple(scored.group for scored in groups),
                ledger=self.book.ledger.to_bytes(),
                reward_mean=metrics["rollout/reward_mean"],
            )
            tickets = tuple((scored.group.ticket, scored.group.attempt) for scored in groups)
            self.commands += [BatchSent(s.name, step, metrics, tickets), batch]  # written down before it leaves
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
        """Moves from the first evaluation to training, to the last evaluation, to the end."""
        if done := self._evaluation.finish(self.settings.name, self.book.steps_done):
            self.commands.append(done)
            if done.phase == "after":
                self._done()
                return
            self._send_batches(now)
        if self.state == "running" and self.book.finished and not self._evaluation.phase:
            if self._evaluation.num_items:
                self._evaluation.begin("after")
            else:
                self._done()

    def _done(self) -> None:
        self.state = "done"
        self.commands.append(JobDone(self.settings.name, self.book.steps_done))

    def _blame(self, tickets: Iterable[int]) -> str:
        """Returns what gave these tickets up: prompts that nobody could serve, or the environment."""
        return "InvalidRequest" if self._too_long.issuperset(tickets) else "EnvironmentFailed"

    def _give_up(self, kind: str, reason: str, now: float) -> None:
        if self.state != "running":
            return
        self.state = "failed"
        self.close(now)
        self.commands.append(JobGivenUp(self.settings.name, kind, reason))
