"""The rollouts of one job: events in, commands out. Owns tickets, groups, episodes and evaluations; no clock, no I/O.

Life of a group: its item is fetched, G environments are reset, their first observations rendered; when the last first prompt
is there, equal prompts leave as one request with G seeds. Each completion goes to its environment, which answers with an
observation (a new turn: a new request with all ids, under the newest snapshot) or with a reward. The group is scored when its
last episode ends and enters the open step; a full step leaves for the learner at once.

Failures: an environment that raises or times out ends its episode without a reward; a lost worker's episodes start again as
new attempts. A conversation that is cut off by the context limit or by `max_turns` ends as truncated with reward 0. A group
without any reward is replaced by a new attempt of its ticket; after `max_attempts` of them its place stays empty or the job
fails, as the job says, and a step with empty places only fails the job in any case.
"""

import collections
import math
from typing import Any

import msgspec

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
    Sampling,
    StepDone,
    TrainBatch,
)
from marlaas_jax.rollout import settings as limits
from marlaas_jax.rollout.batches import ScoredGroup, batch_metrics, score
from marlaas_jax.rollout.commands import BatchSent, Command, EpisodeEnded, EvalDone, JobDone, JobGivenUp, Note, Render, ToEnv, TurnKey
from marlaas_jax.rollout.episodes import TRUNCATING, Episode, observation_record
from marlaas_jax.rollout.groups import Group, prompt_key
from marlaas_jax.rollout.records import Tally, Wait, episode_record
from marlaas_jax.rollout.settings import RolloutSettings
from marlaas_jax.rollout.tickets import Ledger, TicketBook, VersionLog, derive_seed

MAX_REWARD = 1e30  # beyond this a float32 sum of squares is lost; counts as non-finite
MAX_NOTE = 4000  # characters of a traceback that are kept


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
        self._published = {ready.version: ready.fingerprint}
        self._sampled_from: dict[int, str] = {}  # fingerprints of versions that no StepDone has announced yet
        self.tally = Tally()
        self.state = "running"  # running, done, failed
        self.commands: list[Command] = []
        self.num_requests = 0
        self.last_failure = ""
        self._groups: dict[tuple[str, int], Group] = {}
        self._episodes: dict[str, tuple[Group, Episode]] = {}
        self._items: dict[str, Group] = {}
        self._renders: dict[TurnKey, tuple[Group, str]] = {}  # key -> group, prompt key ("" for a later turn)
        self._requests: dict[str, list[tuple[Group, Episode, TurnKey] | None]] = {}
        self._scored: dict[int, ScoredGroup] = {}
        self._last_generated = now
        self._last_trained = now
        self._eval_phase = ""
        self._eval_waiting: collections.deque[int] = collections.deque()
        self._eval_rewards: list[float | None] = []
        if eval_before and settings.eval_items:
            self._begin_eval("before")
        self._advance(now)

    # ---- what may start

    def next_cost(self) -> int | None:
        """Returns how many episodes the next group has, None when none may start now."""
        if self.state != "running":
            return None
        if self._eval_waiting:
            return 1
        return None if self.book.next_startable() is None else self.settings.group_size

    def start_next(self, now: float) -> None:
        """Starts the next group: asks for its item."""
        if self._eval_waiting:
            group = self._new_group("eval", self._eval_waiting.popleft(), 0, 1, now)
        else:
            ticket, attempt = self.book.start()
            group = self._new_group("train", ticket, attempt, self.settings.group_size, now)
        self._request_item(group, now)

    @property
    def num_running(self) -> int:
        """Episodes that have started and not ended."""
        return self.tally.running

    # ---- events

    def on_item(self, message: Item, now: float) -> None:
        """The data worker's answer: resets the group's environments."""
        group = self._items.pop(message.request_id, None)
        if group is None:
            self.tally.late_answers += 1
            return
        group.item_request = ""
        if message.error:
            self._fail_all(group, f"no item {group.ticket}: {message.error}", now)
            return
        group.item = message.item
        for episode in group.episodes:
            self._reset(episode, group, now)

    def on_env_sent(self, episode_id: str, attempt: int, now: float) -> None:
        """A reset has left for a worker that is ready: the episode's clock starts."""
        found = self._find(episode_id, attempt)
        if found and found[1].stage == "reset":
            found[1].on_worker = True
            found[1].since = now

    def on_env_observation(self, message: EnvObservation, now: float) -> None:
        """The environment shows something: a first prompt, or what follows a turn."""
        found = self._find(message.episode_id, message.attempt)
        expected = None if not found else {"reset": 0, "step": found[1].turn + 1}.get(found[1].stage)
        if found is None or message.turn != expected:
            self.tally.late_answers += 1
            return
        group, episode = found
        if (message.text is None) == (message.messages is None):
            self._end(group, episode, "failed", now, note="the environment gave neither text nor messages, or both")
            return
        if episode.stage == "reset":
            episode.first_observation = observation_record(message)
            self._render_first(group, episode, message, now)
            return
        last = episode.turns[-1]
        last.env_s = now - episode.since
        last.observation = observation_record(message)
        if episode.turn + 1 >= self.settings.max_turns:
            self._truncate(group, episode, f"rollout.max_turns={self.settings.max_turns} reached", now)
            return
        episode.turn += 1
        episode.stop = message.stop
        episode.enter("render", now)
        self._renders[episode.key] = (group, "")
        last_id = episode.token_ids[-1] if last.num_tokens else -1
        self.commands.append(Render(episode.key, self.settings.name, message, first=False, last_id=last_id))

    def on_rendered(self, key: TurnKey, token_ids: tuple[int, ...], error: str, now: float) -> None:
        """The tokenizer's answer to a Render."""
        group, prompt = self._renders.pop(key, (None, ""))
        if group is None:
            self.tally.late_answers += 1
            return
        if prompt:
            waiting = [e for e in group.waiting_for_prompt.pop(prompt, ()) if e.stage == "render"]
            if error:
                group.prompts.pop(prompt, None)
            else:
                group.prompts[prompt] = token_ids
            for episode in waiting:
                if episode.stage != "render":
                    continue  # ended with the job meanwhile
                if error:
                    self._end(group, episode, "failed", now, note=f"the prompt cannot be rendered: {error}")
                else:
                    self._take_prompt(group, episode, token_ids, now)
            return
        found = self._find(key[0], key[1])
        if found is None or found[1].key != key or found[1].stage != "render":
            self.tally.late_answers += 1
        elif error:
            self._end(group, found[1], "failed", now, note=f"the observation cannot be rendered: {error}")
        else:
            self._take_followup(group, found[1], token_ids, now)

    def on_generated(self, message: Generated, now: float) -> None:
        """A completion: goes to its environment."""
        self._last_generated = now
        waiting = self._requests.get(message.request_id)
        entry = waiting[message.sample] if waiting and 0 <= message.sample < len(waiting) else None
        if waiting is None or entry is None:
            self.tally.late_answers += 1
            return
        waiting[message.sample] = None
        if not any(waiting):
            del self._requests[message.request_id]
        if not self._is_published(message.version, message.fingerprint, now):
            return
        group, episode, key = entry
        if episode.key != key or episode.stage != "generate":
            self.tally.late_answers += 1
            return
        if message.finish_reason == "error" or len(message.logprobs) != 4 * len(message.token_ids):
            reason = message.error or "log-probabilities do not fit the tokens"
            self._end(group, episode, "failed", now, note=f"the sampler could not generate: {reason}")
        elif message.finish_reason == "cancelled":
            self._lose(group, episode, now, blamed=True, reason="the sampler cancelled the request")
        else:
            episode.add_sampled(message, now)
            episode.enter("step", now)
            step = EnvStep(
                episode_id=episode.episode_id,
                attempt=episode.attempt,
                turn=episode.turn,
                text=message.text,
                finish_reason=message.finish_reason,
                num_tokens=len(message.token_ids),
                timeout_s=self.settings.step_timeout_s,
            )
            self.commands.append(ToEnv(self.settings.name, step))

    def on_env_done(self, message: EnvDone, now: float) -> None:
        """The environment ends the episode, with a reward or without."""
        found = self._find(message.episode_id, message.attempt)
        if found is None or found[1].stage not in ("step", "reset"):
            self.tally.late_answers += 1
            return
        group, episode = found
        episode.on_worker = False
        if episode.stage == "reset":
            self._end(group, episode, "failed", now, note="the environment ended before the first turn")
            return
        episode.turns[-1].env_s = now - episode.since
        episode.metrics = message.metrics
        episode.note = message.note[:MAX_NOTE]
        reward = message.reward
        if reward is not None and not (math.isfinite(reward) and abs(reward) <= MAX_REWARD):
            episode.note = f"reward {reward!r} counts as missing: it must be finite and at most {MAX_REWARD:g} in size"
            reward = None
        if reward is None:
            self.last_failure = episode.note or "the environment gave no reward"
        cut_off = any(turn.finish_reason in TRUNCATING for turn in episode.turns)
        self._end(group, episode, "truncated" if cut_off else "finished", now, reward=reward)

    def on_env_error(self, message: EnvError, now: float) -> None:
        """The environment failed: the episode ends without a reward, or starts again where its worker lost it."""
        found = self._find(message.episode_id, message.attempt)
        if found is None or not found[1].on_worker:
            self.tally.late_answers += 1
            return
        group, episode = found
        episode.on_worker = False
        if message.kind == "lost":
            self._lose(group, episode, now, blamed=True, reason=message.text)
        else:
            outcome = "timed_out" if message.kind == "timeout" else "failed"
            self._end(group, episode, outcome, now, note=f"{message.kind}: {message.text}")

    def on_episode_lost(self, episode_id: str, now: float, *, blamed: bool, reason: str) -> None:
        """The worker that held the episode is gone. `blamed`: it was busy with this episode."""
        found = self._episodes.get(episode_id)
        if found and found[1].on_worker and not found[1].ended:
            found[1].on_worker = False
            self._lose(*found, now, blamed=blamed, reason=reason)

    def on_episode_hung(self, episode_id: str, now: float, reason: str) -> None:
        """The episode's call blocked its worker beyond the limit: it ends as timed out."""
        found = self._episodes.get(episode_id)
        if found and not found[1].ended:
            found[1].on_worker = False
            self._end(*found, "timed_out", now, note=reason)

    def on_step_done(self, message: StepDone, now: float) -> None:
        """A batch is trained and its snapshot published."""
        if message.step <= self.book.steps_done or message.step > self.book.open_step:
            return
        self._last_trained = now
        self.versions.record(message.version, message.step)
        self._published[message.version] = message.fingerprint
        sampled = self._sampled_from.pop(message.version, message.fingerprint)
        if not self._is_published(message.version, sampled, now):
            return
        self.book.step_done(message.step)
        self._advance(now)

    def on_data_worker_ready(self, now: float) -> None:
        """Asks again for the items that a lost data worker owes."""
        for group in list(self._items.values()):
            self._request_item(group, now)

    def tick(self, now: float) -> None:
        """Ends what is over its limit."""
        if self.state != "running":
            return
        for group in list(self._groups.values()):
            if group.item_request and now - group.since > limits.ITEM_TIMEOUT_S:
                self._item_overdue(group, now)
        for group, episode in list(self._episodes.values()):
            if not episode.ended:
                self._check_limits(group, episode, now)
        sent = self.book.open_step - self.book.steps_done
        if sent and now - self._last_trained > limits.TRAIN_TIMEOUT_S:
            self._give_up("WorkerLost", f"batch {self.book.steps_done} was not trained within {limits.TRAIN_TIMEOUT_S:.0f} s", now)

    def close(self, now: float) -> None:
        """Cancels everything that runs: the job ends, or goes on as another incarnation."""
        for group in list(self._groups.values()):
            self._cancel(group, now)
        if self.state == "running":
            self.state = "done"

    # ---- what it waits for

    def waits(self, now: float) -> list[Wait]:
        """Returns everything that waits, oldest first."""
        found = []
        for group in self._groups.values():
            if group.item_request:
                found.append(Wait("item", f"{group.split} item {group.ticket}", now - group.since, limits.ITEM_TIMEOUT_S))
        for _, episode in self._episodes.values():
            limit = {
                "reset": self.settings.step_timeout_s,
                "step": self.settings.step_timeout_s,
                "render": limits.RENDER_TIMEOUT_S,
                "generate": limits.GENERATE_TIMEOUT_S,
            }.get(episode.stage)
            if limit is not None:
                stage = "env worker" if episode.stage == "reset" and not episode.on_worker else episode.stage
                what = f"episode {episode.episode_id} attempt {episode.attempt} turn {episode.turn}"
                found.append(Wait(stage, what, now - episode.since, limit))
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
        stages = collections.Counter(episode.stage for _, episode in self._episodes.values() if not episode.ended)
        lengths = {stage: stages[stage] for stage in ("item", "reset", "render", "gather", "generate", "step")}
        lengths["ready_groups"] = len(self.book.ready)
        lengths["training_batches"] = self.book.open_step - self.book.steps_done
        return lengths

    # ---- groups

    def _new_group(self, split: str, ticket: int, attempt: int, size: int, now: float) -> Group:
        s = self.settings
        env_seed = derive_seed(s.seed, ticket, attempt, -1, -1, split)  # one for the group: its episodes share the prompt
        place = ticket if split == "train" else f"{self._eval_phase}-{ticket}"
        episodes = [
            Episode(f"{s.name}/{s.incarnation}/{split}/{place}/{i}", i, env_seed, attempt, now) for i in range(size)
        ]
        group = Group(split, ticket, attempt, now, episodes, started_at=now)
        self._groups[split, ticket] = group
        for episode in episodes:
            self._episodes[episode.episode_id] = (group, episode)
        self.tally.sent += size
        return group

    def _request_item(self, group: Group, now: float) -> None:
        self._items.pop(group.item_request, None)
        self.num_requests += 1
        group.item_requests += 1
        group.item_request = f"{self.settings.name}/{self.settings.incarnation}/item/{self.num_requests}"
        group.since = now
        self._items[group.item_request] = group
        s = self.settings
        self.commands.append(GetItem(group.item_request, s.name, s.incarnation, group.split, group.ticket))

    def _item_overdue(self, group: Group, now: float) -> None:
        if group.item_requests < self.settings.max_attempts:
            self._request_item(group, now)
        else:
            self._items.pop(group.item_request, None)
            group.item_request = ""
            self._fail_all(group, f"item {group.ticket}: no answer within {limits.ITEM_TIMEOUT_S:.0f} s", now)

    def _fail_all(self, group: Group, reason: str, now: float) -> None:
        for episode in group.episodes:
            if not episode.ended:
                self._end(group, episode, "failed", now, note=reason)

    def _cancel(self, group: Group, now: float) -> None:
        """Ends what still runs of a group, without scoring it."""
        self._forget(group)
        for episode in group.episodes:
            if not episode.ended:
                self._withdraw_request(episode)
                self._finish_episode(group, episode, "cancelled", now)

    def _forget(self, group: Group) -> None:
        self._items.pop(group.item_request, None)
        del self._groups[group.split, group.ticket]
        for episode in group.episodes:
            del self._episodes[episode.episode_id]

    def _group_ended(self, group: Group, now: float) -> None:
        self._forget(group)
        if group.split == "eval":
            self._eval_rewards.append(group.episodes[0].reward)
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
        reason = f"ticket {group.ticket} failed {self.book.failures(group.ticket)} times, last: {self.last_failure}"
        if s.fail_when_exhausted:
            self._give_up("EnvironmentFailed", reason, now)
            return
        self.commands.append(Note(s.name, "ticket_given_up", reason))
        self.book.give_up(group.ticket)
        self._send_batches(now)

    # ---- batches and evaluations

    def _send_batches(self, now: float) -> None:
        if self._eval_phase == "before":
            return  # the first evaluation is of the untrained policy
        s = self.settings
        while self.state == "running" and len(self.book.ready) >= s.groups_per_batch:
            step = self.book.open_step
            chosen = self.book.take_batch(self._floors())
            if chosen is None:
                return
            groups = [self._scored.pop(ticket) for ticket in chosen if ticket in self._scored]
            if not groups:
                self._give_up("EnvironmentFailed", f"no group of batch {step} could be scored, last: {self.last_failure}", now)
                return
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
            self.commands += [batch, BatchSent(s.name, step, metrics, tickets)]
            self._drop_too_old(now)

    def _floors(self) -> dict[int, int]:
        done = self.book.steps_done
        return {
            group.ticket: group.floor(self.versions.batches, done) for group in self._groups.values() if group.split == "train"
        }

    def _drop_too_old(self, now: float) -> None:
        """The open step moved on: restarts what could enter neither it nor a later one."""
        for ticket, oldest in list(self.book.ready.items()):
            if oldest is not None and self.book.is_too_old(oldest):
                del self._scored[ticket]
                self.book.restart_stale(ticket)
        for ticket, floor in self._floors().items():
            if self.book.is_too_old(floor):
                group = self._groups["train", ticket]
                self._cancel(group, now)
                self.book.reserve_attempts(ticket, group.next_attempt())
                self.book.restart_stale(ticket)

    def _begin_eval(self, phase: str) -> None:
        self._eval_phase = phase
        self._eval_rewards = []
        self._eval_waiting.extend(range(self.settings.eval_items))

    def _advance(self, now: float) -> None:
        """Moves from the first evaluation to training, to the last evaluation, to the end."""
        s = self.settings
        if self._eval_phase and len(self._eval_rewards) == s.eval_items:
            known = [reward for reward in self._eval_rewards if reward is not None]
            mean = sum(known) / len(known) if known else None
            self.commands.append(
                EvalDone(s.name, self._eval_phase, self.book.steps_done, mean, len(known), len(self._eval_rewards))
            )
            is_last = self._eval_phase == "after"
            self._eval_phase = ""
            if is_last:
                self._done()
                return
            self._send_batches(now)
        if self.state == "running" and self.book.finished and not self._eval_phase:
            if s.eval_items:
                self._begin_eval("after")
            else:
                self._done()

    def _done(self) -> None:
        self.state = "done"
        self.commands.append(JobDone(self.settings.name, self.book.steps_done))

    def _give_up(self, kind: str, reason: str, now: float) -> None:
        if self.state != "running":
            return
        self.state = "failed"
        self.close(now)
        self.commands.append(JobGivenUp(self.settings.name, kind, reason))

    # ---- episodes

    def _find(self, episode_id: str, attempt: int) -> tuple[Group, Episode] | None:
        found = self._episodes.get(episode_id)
        return found if found and found[1].attempt == attempt and not found[1].ended else None

    def _reset(self, episode: Episode, group: Group, now: float) -> None:
        episode.enter("reset", now)
        s = self.settings
        message = EnvReset(
            episode.episode_id, episode.attempt, s.name, s.incarnation, group.item, episode.env_seed, s.step_timeout_s
        )
        self.commands.append(ToEnv(s.name, message))

    def _render_first(self, group: Group, episode: Episode, message: EnvObservation, now: float) -> None:
        episode.stop = message.stop
        episode.enter("render", now)
        key = prompt_key(message)
        known = group.prompts.get(key)
        if known is not None:
            self._take_prompt(group, episode, known, now)
            return
        group.waiting_for_prompt.setdefault(key, []).append(episode)
        if key not in group.prompts:
            group.prompts[key] = None
            self._renders[episode.key] = (group, key)
            self.commands.append(Render(episode.key, self.settings.name, message, first=True))

    def _take_prompt(self, group: Group, episode: Episode, token_ids: tuple[int, ...], now: float) -> None:
        siblings = [e.prompt_ids for e in group.episodes if e.prompt_ids]
        room = self.settings.max_context - 1
        if not token_ids:
            self._end(group, episode, "failed", now, note="the first observation has no tokens")
        elif len(token_ids) > room:
            note = f"the prompt has {len(token_ids)} tokens: runtime.engine.max_context={room + 1} allows {room}"
            episode.is_hopeless = True
            self._end(group, episode, "truncated", now, note=note)
        elif siblings and siblings[0][0] != token_ids[0]:
            self._end(group, episode, "failed", now, note="its prompt has no token in common with its group's: no shared start")
        else:
            episode.prompt_ids = tuple(token_ids)
            episode.enter("gather", now)
            if group.is_gathered:
                self._generate(group, [episode], now)
            else:
                self._gather(group, now)

    def _gather(self, group: Group, now: float) -> None:
        if group.may_gather:
            group.is_gathered = True
            for episodes in group.gathered().values():
                self._generate(group, episodes, now)

    def _is_published(self, version: int, fingerprint: str, now: float) -> bool:
        """Whether a completion came from weights that the learner published; ends the job where it did not (H09)."""
        if not fingerprint or version < 0:
            return True  # an error or the base model
        published = self._published.get(version)
        if published is None:
            self._sampled_from[version] = fingerprint
        elif published != fingerprint:
            reason = f"version {version} was published as {published} but sampled from {fingerprint}"
            self._give_up("WrongWeights", reason, now)
            return False
        return True

    def _take_followup(self, group: Group, episode: Episode, token_ids: tuple[int, ...], now: float) -> None:
        length = len(episode.prompt_ids) + len(episode.token_ids) + len(token_ids)
        if length >= self.settings.max_context:
            note = f"turn {episode.turn} would start at {length} tokens of runtime.engine.max_context={self.settings.max_context}"
            self._truncate(group, episode, note, now)
            return
        episode.add_observed(token_ids)
        self._generate(group, [episode], now)

    def _generate(self, group: Group, episodes: list[Episode], now: float) -> None:
        """Sends one request for episodes that have the same ids so far."""
        s = self.settings
        self.num_requests += 1
        request_id = f"{s.name}/{s.incarnation}/gen/{self.num_requests}"
        first = episodes[0]
        sampling = s.sampling if group.split == "train" else s.eval_sampling
        if first.stop:
            sampling = _with_stop(sampling, first.stop)
        seeds = tuple(derive_seed(s.seed, group.ticket, e.attempt, e.sample, e.turn, group.split) for e in episodes)
        for episode in episodes:
            episode.enter("generate", now)
            episode.request_id = request_id
            episode.sent_at_batch = self.book.steps_done
        if not self._requests:
            self._last_generated = now
        self._requests[request_id] = [(group, episode, episode.key) for episode in episodes]
        self.commands.append(
            Generate(
                request_id=request_id,
                job=s.name,
                incarnation=s.incarnation,
                prompt_ids=first.prompt_ids + tuple(first.token_ids),
                seeds=seeds,
                sampling=sampling,
                weight=s.weight,
            )
        )

    def _withdraw_request(self, episode: Episode) -> None:
        """Takes an episode out of its request; a request that nobody waits for is cancelled."""
        waiting = self._requests.get(episode.request_id)
        if waiting is None:
            return
        for i, entry in enumerate(waiting):
            if entry is not None and entry[1] is episode:
                waiting[i] = None
        if not any(waiting):
            del self._requests[episode.request_id]
            self.commands.append(CancelGenerate(episode.request_id))

    def _truncate(self, group: Group, episode: Episode, note: str, now: float) -> None:
        """Ends a conversation that was cut off: the environment never said that it succeeded, so the reward is 0."""
        self._end(group, episode, "truncated", now, reward=0.0, note=note)

    def _lose(self, group: Group, episode: Episode, now: float, *, blamed: bool, reason: str) -> None:
        """Starts the episode again as a new attempt, or fails it."""
        self._withdraw_request(episode)
        episode.lost_attempts += blamed
        if not self.settings.retry_lost or episode.lost_attempts >= self.settings.max_attempts:
            self._end(group, episode, "failed", now, note=f"lost: {reason}")
            return
        self.tally.restarts += 1
        self._close_env(episode)
        episode.restart(episode.attempt + 1, now)
        self._reset(episode, group, now)

    def _check_limits(self, group: Group, episode: Episode, now: float) -> None:
        s = self.settings
        if episode.stage == "render" and now - episode.since > limits.RENDER_TIMEOUT_S:
            note = f"rendering turn {episode.turn} took more than {limits.RENDER_TIMEOUT_S:.0f} s"
            self._end(group, episode, "failed", now, note=note)
        elif episode.stage == "generate":
            if now - max(episode.since, self._last_generated) > limits.GENERATE_TIMEOUT_S:
                self._end(group, episode, "timed_out", now, note=f"no completion within {limits.GENERATE_TIMEOUT_S:.0f} s")
        elif episode.clock(now) > s.episode_timeout_s:
            note = f"rollout.episode_timeout_s={s.episode_timeout_s:g} used up in {episode.stage} of turn {episode.turn}"
            self._end(group, episode, "timed_out", now, note=note)

    def _end(self, group: Group, episode: Episode, outcome: str, now: float, **result: Any) -> None:
        """Ends one episode; scores the group when it was the last."""
        self._withdraw_request(episode)
        self._finish_episode(group, episode, outcome, now, **result)
        if episode.reward is None and episode.note:
            self.last_failure = episode.note.strip().splitlines()[-1][:500]
        if group.ended:
            self._group_ended(group, now)
        else:
            self._gather(group, now)

    def _finish_episode(
        self, group: Group, episode: Episode, outcome: str, now: float, *, reward: float | None = None, note: str = ""
    ) -> None:
        self._close_env(episode)
        episode.drop_trailing_observation()
        episode.end(outcome, now, reward=reward, note=note[:MAX_NOTE])
        self.tally.outcomes[outcome] += 1
        self.commands.append(EpisodeEnded(self.settings.name, episode_record(group, episode)))

    def _close_env(self, episode: Episode) -> None:
        if episode.stage == "reset" or episode.on_worker:
            self.commands.append(ToEnv(self.settings.name, EnvClose(episode.episode_id, episode.attempt)))
            episode.on_worker = False


def _with_stop(sampling: Sampling, stop: tuple[str, ...]) -> Sampling:
    """Returns the sampling with more stop strings."""
    return msgspec.structs.replace(sampling, stop=sampling.stop + tuple(s for s in stop if s not in sampling.stop))
