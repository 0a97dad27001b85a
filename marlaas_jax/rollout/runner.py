"""Runs a job's groups: from an item to the end of the last episode. Events in, commands out; no clock, no I/O.

A group's item is fetched, G environments are reset, their first observations rendered; when the last first prompt is there,
equal prompts leave as one request with G seeds. Each completion goes to its environment, which answers with an observation
(a new turn: a new request with all ids, under the newest snapshot) or with a reward.

An environment that raises or times out ends its episode without a reward; a lost worker's episodes start again as new
attempts. A conversation cut off by the context limit or by `max_turns` ends as truncated with reward 0: the environment never
said that it succeeded.
"""

import math
from collections.abc import Callable
from typing import Any

from marlaas_jax.messages import (
    EnvClose,
    EnvDone,
    EnvError,
    EnvObservation,
    EnvReset,
    EnvStep,
    Generated,
    GetItem,
    Item,
)
from marlaas_jax.rollout import settings as limits
from marlaas_jax.rollout.commands import Command, EpisodeEnded, Note, Render, ToEnv, TurnKey
from marlaas_jax.rollout.episodes import TRUNCATING, Episode, observation_record
from marlaas_jax.rollout.groups import Group, prompt_key
from marlaas_jax.rollout.records import Tally, episode_record
from marlaas_jax.rollout.requests import Requests
from marlaas_jax.rollout.settings import RolloutSettings
from marlaas_jax.rollout.tickets import derive_seed

MAX_REWARD = 1e30  # beyond this a float32 sum of squares is lost; counts as non-finite
MAX_NOTE = 4000  # characters of a traceback that are kept


class GroupRunner:
    """The running groups of one incarnation of one job."""

    def __init__(
        self,
        settings: RolloutSettings,
        send: Callable[[Command], None],
        on_ended: Callable[[Group, float], None],
        now: float,
    ):
        self.settings = settings
        self.tally = Tally()
        self.last_failure = ""
        self.groups: dict[tuple[str, int], Group] = {}
        self.steps_done = 0  # batches trained, as the job tells
        self._send = send
        self._on_ended = on_ended
        self._episodes: dict[str, tuple[Group, Episode]] = {}
        self._items: dict[str, Group] = {}
        self._num_items = 0
        self._is_data_away = False
        self._renders: dict[TurnKey, tuple[Group, str]] = {}  # key -> group, prompt key ("" for a later turn)
        self._requests = Requests(settings, send, now)

    def start(
        self,
        split: str,
        ticket: int,
        attempt: int,
        size: int,
        now: float,
        *,
        phase: str = "",
        version: int = -1,
        draw: int | None = None,
        waited_s: float = 0.0,
    ) -> None:
        """Starts a group of `size` episodes: asks for its item. `phase` tells evaluations of one item apart.

        version: the one that all turns are sampled from; -1: the newest at each turn.
        draw: the attempt whose seeds are used, however many are lost on the way; None: each attempt draws anew.
        waited_s: the group could have started so much earlier.
        """
        s = self.settings
        # One for the group: its episodes share the prompt.
        env_seed = derive_seed(s.seed, ticket, attempt if draw is None else draw, -1, -1, split)
        place = ticket if split == "train" else f"{phase}-{ticket}"
        episodes = [Episode(f"{s.name}/{s.incarnation}/{split}/{place}/{i}", i, env_seed, attempt, now) for i in range(size)]
        group = Group(split, ticket, attempt, now, episodes, started_at=now, version=version, draw=draw, waited_s=waited_s)
        self.groups[split, ticket] = group
        for episode in episodes:
            self._episodes[episode.episode_id] = (group, episode)
        self.tally.sent += size
        self._request_item(group, now)

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

    def on_env_sent(self, episode_id: str, attempt: int, now: float) -> float | None:
        """A reset has left for a worker that is ready: the episode's clock starts. Returns how long it waited for that."""
        found = self._find(episode_id, attempt)
        if found is None or found[1].stage != "reset":
            return None
        group, episode = found
        waited_s = group.waited_s + now - episode.since
        episode.on_worker = True
        episode.since = now
        return waited_s

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
            episode.reset_s = now - episode.since
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
        self._send(Render(episode.key, self.settings.name, message, first=False, last_id=last_id))

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
        found = self._requests.take(message, now)
        if found is None:
            self.tally.late_answers += 1
            return
        group, episode = found
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
            self._send(ToEnv(self.settings.name, step))

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

    def on_data_worker_ready(self, now: float) -> None:
        """Asks again for the items that a lost data worker owes."""
        self._is_data_away = False
        for group in list(self._items.values()):
            self._request_item(group, now)

    def on_data_worker_lost(self) -> None:
        """Nobody can answer: items have no limit until somebody can."""
        self._is_data_away = True

    def check_limits(self, now: float) -> None:
        """Ends what is over its limit."""
        for group in list(self.groups.values()):
            if group.item_request and now - group.since > limits.ITEM_TIMEOUT_S and not self._is_data_away:
                self._item_overdue(group, now)
        for group, episode in list(self._episodes.values()):
            if not episode.ended:
                self._check_limits(group, episode, now)

    def cancel(self, group: Group, now: float) -> None:
        """Ends what still runs of a group, without scoring it."""
        self._forget(group)
        for episode in group.episodes:
            if not episode.ended:
                self._requests.withdraw(episode)
                self._finish_episode(group, episode, "cancelled", now)

    # ---- inside

    def _request_item(self, group: Group, now: float) -> None:
        self._items.pop(group.item_request, None)
        self._num_items += 1
        group.item_requests += 1
        group.item_request = f"{self.settings.name}/{self.settings.incarnation}/item/{self._num_items}"
        group.since = now
        self._items[group.item_request] = group
        s = self.settings
        self._send(GetItem(group.item_request, s.name, s.incarnation, group.split, group.ticket))

    def _item_overdue(self, group: Group, now: float) -> None:
        if group.item_requests < self.settings.max_attempts:
            self._request_item(group, now)
        else:
            self._items.pop(group.item_request, None)
            group.item_request = ""
            self._not_exact(group, "its item did not come in time")
            self._fail_all(group, f"item {group.ticket}: no answer within {limits.ITEM_TIMEOUT_S:.0f} s", now)

    def _fail_all(self, group: Group, reason: str, now: float) -> None:
        for episode in group.episodes:
            if not episode.ended:
                self._end(group, episode, "failed", now, note=reason)

    def _forget(self, group: Group) -> None:
        self._items.pop(group.item_request, None)
        group.item_request = ""
        del self.groups[group.split, group.ticket]
        for episode in group.episodes:
            del self._episodes[episode.episode_id]

    def _find(self, episode_id: str, attempt: int) -> tuple[Group, Episode] | None:
        found = self._episodes.get(episode_id)
        return found if found and found[1].attempt == attempt and not found[1].ended else None

    def _reset(self, episode: Episode, group: Group, now: float) -> None:
        episode.enter("reset", now)
        s = self.settings
        message = EnvReset(
            episode.episode_id, episode.attempt, s.name, s.incarnation, group.item, episode.env_seed, s.step_timeout_s
        )
        self._send(ToEnv(s.name, message))

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
            self._send(Render(episode.key, self.settings.name, message, first=True))

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
                self._requests.ask(group, [episode], self.steps_done, now)
            else:
                self._gather(group, now)

    def _gather(self, group: Group, now: float) -> None:
        if group.may_gather:
            group.is_gathered = True
            for episodes in group.gathered().values():
                self._requests.ask(group, episodes, self.steps_done, now)

    def _take_followup(self, group: Group, episode: Episode, token_ids: tuple[int, ...], now: float) -> None:
        length = len(episode.prompt_ids) + len(episode.token_ids) + len(token_ids)
        if length >= self.settings.max_context:
            note = (
                f"turn {episode.turn} would start at {length} tokens of runtime.engine.max_context={self.settings.max_context}"
            )
            self._truncate(group, episode, note, now)
            return
        episode.add_observed(token_ids)
        self._requests.ask(group, [episode], self.steps_done, now)

    def _truncate(self, group: Group, episode: Episode, note: str, now: float) -> None:
        """Ends a conversation that was cut off: the environment never said that it succeeded, so the reward is 0."""
        self._end(group, episode, "truncated", now, reward=0.0, note=note)

    def _lose(self, group: Group, episode: Episode, now: float, *, blamed: bool, reason: str) -> None:
        """Starts the episode again as a new attempt, or fails it."""
        self._requests.withdraw(episode)
        episode.lost_attempts += blamed
        if not self.settings.retry_lost or episode.lost_attempts >= self.settings.max_attempts:
            self._not_exact(group, "a lost worker's episode was given up")
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
            self._not_exact(group, note)
            self._end(group, episode, "failed", now, note=note)
        elif episode.stage == "generate":
            if now - max(episode.since, self._requests.last_answer) > limits.GENERATE_TIMEOUT_S:
                self._end(group, episode, "timed_out", now, note=f"no completion within {limits.GENERATE_TIMEOUT_S:.0f} s")
        elif episode.clock(now) > s.episode_timeout_s:
            note = f"rollout.episode_timeout_s={s.episode_timeout_s:g} used up in {episode.stage} of turn {episode.turn}"
            self._end(group, episode, "timed_out", now, note=note)

    def _end(self, group: Group, episode: Episode, outcome: str, now: float, **result: Any) -> None:
        """Ends one episode; scores the group when it was the last."""
        self._requests.withdraw(episode)
        self._finish_episode(group, episode, outcome, now, **result)
        if episode.reward is None and episode.note:
            self.last_failure = episode.note.strip().splitlines()[-1][:500]
        if group.ended:
            self._forget(group)
            self._on_ended(group, now)
        else:
            self._gather(group, now)

    def _finish_episode(
        self, group: Group, episode: Episode, outcome: str, now: float, *, reward: float | None = None, note: str = ""
    ) -> None:
        if outcome == "timed_out":
            self._not_exact(group, "an episode timed out")
        self._close_env(episode)
        episode.drop_trailing_observation()
        episode.end(outcome, now, reward=reward, note=note[:MAX_NOTE])
        self.tally.outcomes[outcome] += 1
        self._send(EpisodeEnded(self.settings.name, episode_record(group, episode)))

    def _not_exact(self, group: Group, reason: str) -> None:
        """Says of an exact job that the load on the machine, not the job alone, has decided something."""
        if self.settings.exact:
            text = f"{group.split} ticket {group.ticket}: {reason}; from here on the job need not equal its run alone"
            self._send(Note(self.settings.name, "not_exact", text))

    def _close_env(self, episode: Episode) -> None:
        if episode.stage == "reset" or episode.on_worker:
            self._send(ToEnv(self.settings.name, EnvClose(episode.episode_id, episode.attempt)))
            episode.on_worker = False
