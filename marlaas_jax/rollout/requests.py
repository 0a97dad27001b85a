"""What one job has asked of the sampler: builds requests, matches completions with episodes, checks which weights answered."""

from collections.abc import Callable

import msgspec

from marlaas_jax.messages import CancelGenerate, Generate, Generated, Sampling
from marlaas_jax.rollout.commands import Command, TurnKey
from marlaas_jax.rollout.episodes import Episode
from marlaas_jax.rollout.groups import Group
from marlaas_jax.rollout.settings import RolloutSettings
from marlaas_jax.rollout.tickets import derive_seed


class Requests:
    """The requests of one incarnation of one job that are not answered completely."""

    def __init__(self, settings: RolloutSettings, send: Callable[[Command], None], now: float):
        self.last_answer = now  # or the time from which an answer is due
        self._settings = settings
        self._send = send
        self._count = 0
        self._waiting: dict[str, list[tuple[Group, Episode, TurnKey] | None]] = {}  # by request; one entry per sample

    def ask(self, group: Group, episodes: list[Episode], batches_done: int, now: float) -> None:
        """Sends one request for episodes that have the same ids so far."""
        s = self._settings
        self._count += 1
        request_id = f"{s.name}/{s.incarnation}/gen/{self._count}"
        first = episodes[0]
        sampling = s.sampling if group.split == "train" else s.eval_sampling
        drawn = lambda e: e.attempt if group.draw is None else group.draw
        seeds = tuple(derive_seed(s.seed, group.ticket, drawn(e), e.sample, e.turn, group.split) for e in episodes)
        for episode in episodes:
            episode.enter("generate", now)
            episode.request_id = request_id
            episode.sent_at_batch = batches_done
        if not self._waiting:
            self.last_answer = now
        self._waiting[request_id] = [(group, episode, episode.key) for episode in episodes]
        self._send(
            Generate(
                request_id=request_id,
                job=s.name,
                incarnation=s.incarnation,
                prompt_ids=first.prompt_ids + tuple(first.token_ids),
                seeds=seeds,
                sampling=_with_stop(sampling, first.stop),
                version=group.version,
                weight=s.weight,
                exact=s.exact,
            )
        )

    def take(self, message: Generated, now: float) -> tuple[Group, Episode] | None:
        """Returns the episode that waits for this completion, None for a late or repeated one."""
        self.last_answer = now
        waiting = self._waiting.get(message.request_id)
        entry = waiting[message.sample] if waiting and 0 <= message.sample < len(waiting) else None
        if waiting is None or entry is None:
            return None
        waiting[message.sample] = None
        if not any(waiting):
            del self._waiting[message.request_id]
        group, episode, key = entry
        return (group, episode) if episode.key == key and episode.stage == "generate" else None

    def withdraw(self, episode: Episode) -> None:
        """Takes an episode out of its request; a request that nobody waits for is cancelled."""
        waiting = self._waiting.get(episode.request_id)
        if waiting is None:
            return
        for i, entry in enumerate(waiting):
            if entry is not None and entry[1] is episode:
                waiting[i] = None
        if not any(waiting):
            del self._waiting[episode.request_id]
            self._send(CancelGenerate(episode.request_id))


class Fingerprints:
    """Checks that every completion came from weights that the learner published under that version (H09)."""

    def __init__(self, version: int, fingerprint: str):
        self._published = {version: fingerprint}
        self._sampled: dict[int, str] = {}  # of versions that no StepDone has announced yet

    def publish(self, version: int, fingerprint: str) -> str:
        """Notes what the learner published; returns what is wrong, if something is."""
        self._published[version] = fingerprint
        return self.check(version, self._sampled.pop(version, fingerprint))

    def check(self, version: int, fingerprint: str) -> str:
        """Returns what is wrong with a completion's weights, "" if nothing is."""
        if not fingerprint or version < 0:
            return ""  # an error, or the base model
        published = self._published.get(version)
        if published is None:
            self._sampled[version] = fingerprint
        elif published != fingerprint:
            return f"version {version} was published as {published} but sampled from {fingerprint}"
        return ""


def _with_stop(sampling: Sampling, stop: tuple[str, ...]) -> Sampling:
    """Returns the sampling with more stop strings."""
    return msgspec.structs.replace(sampling, stop=sampling.stop + tuple(s for s in stop if s not in sampling.stop))
