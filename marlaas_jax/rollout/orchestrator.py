"""The rollouts of all jobs: shares the environment pools between them and routes events and commands.

A pool's episodes are shared between owners and their jobs by weight, counted as they start; the sampler and the learner share
their own tokens. One job's fault ends that job: events of a job that is gone are ignored.
"""

from collections.abc import Callable

from marlaas_jax.fairness import Owner, Shares
from marlaas_jax.messages import (
    EnvClose,
    EnvDone,
    EnvError,
    EnvObservation,
    EnvReset,
    Generated,
    Item,
    JobReady,
    StepDone,
)
from marlaas_jax.rollout import settings as limits
from marlaas_jax.rollout.commands import Command, JobGivenUp, KillWorker, Note, Send, ToEnv, TurnKey
from marlaas_jax.rollout.job import JobRollout
from marlaas_jax.rollout.pools import Call, EpisodeKey, Pool, Worker
from marlaas_jax.rollout.records import Wait
from marlaas_jax.rollout.settings import RolloutSettings
from marlaas_jax.rollout.stopping import NOTHING, Past
from marlaas_jax.waits import WaitLog

MAX_DEATHS_IN_A_ROW = 5  # workers of one pool lost without a single answered step in between


class Orchestrator:
    """Events in, commands out. `take()` returns what the shell has to do since the last call."""

    def __init__(self, max_episodes_per_worker: int = 256):
        self.jobs: dict[str, JobRollout] = {}
        self.pools: dict[str, Pool] = {}
        self.max_episodes_per_worker = max_episodes_per_worker
        self._pool_of: dict[str, str] = {}
        self._shares: dict[str, Shares] = {}
        self._workers: dict[str, Pool] = {}
        self._commands: list[Command] = []
        self.waits = WaitLog()  # of episodes, from when their group could start until a worker has them
        self._startable_since: dict[str, float] = {}  # jobs with a group that could start

    # ---- pools and workers

    def register(self, job: str, pool: str, weight: float, owner: Owner | None = None) -> None:
        """Says which pool a job's episodes run in; before its rollouts start."""
        if pool not in self.pools:
            self.pools[pool] = Pool(pool, self.max_episodes_per_worker)
            self._shares[pool] = Shares()
        self.pools[pool].jobs.add(job)
        self._shares[pool].add(job, weight, owner)
        self._pool_of[job] = pool

    def reweigh(self, owner: Owner) -> None:
        """Changes what an owner's jobs weigh together."""
        for shares in self._shares.values():
            shares.reweigh(owner)

    def on_worker_ready(self, pool: str, worker_id: str, job: str, now: float) -> None:
        """A worker of the pool has loaded the job's environment."""
        if job not in self._pool_of:
            return
        self.pools[pool].since = now
        worker = self.pools[pool].workers.setdefault(worker_id, Worker(worker_id, last_answer=now))
        self._workers[worker_id] = self.pools[pool]
        worker.jobs.add(job)
        self._pump(now)

    def on_worker_lost(
        self, worker_id: str, reason: str, now: float, *, pool: str | None = None, may_leave: bool = False
    ) -> None:
        """A worker is gone: its episodes start again elsewhere. `pool`: of a worker that never became ready.

        Too many in a row end the pool's jobs, but for those that `may_leave`.
        """
        owner = self._workers.pop(worker_id, None) or self.pools.get(pool or "")
        if owner is None:
            return
        worker = owner.workers.pop(worker_id, None)
        if worker is not None:
            blamed = worker.oldest_call()
            for key in sorted(worker.episodes):
                if job := self.job_of(key[0]):
                    job.runner.on_episode_lost(key[0], now, blamed=key == blamed, reason=reason)
        if may_leave:
            owner.last_death = reason
        else:
            self._count_death(owner, reason, now)
        self._pump(now)

    # ---- jobs

    def on_job_ready(
        self, settings: RolloutSettings, ready: JobReady, now: float, *, eval_before: bool, past: Past = NOTHING
    ) -> None:
        """Starts (or, as a new incarnation, starts again) the rollouts of a registered job from its committed step."""
        self._close(settings.name, now)
        self.jobs[settings.name] = JobRollout(settings, ready, now, eval_before=eval_before, past=past)
        self._pump(now)

    def pause_job(self, job: str, now: float) -> None:
        """Drops the job's rollouts; they start again with on_job_ready, when workers have loaded the new incarnation."""
        self._close(job, now)
        for worker in self.pools[self._pool_of[job]].workers.values():
            worker.jobs.discard(job)
        self._pump(now)

    def stop_job(self, job: str, reason: str, now: float) -> None:
        """Ends a job well after the batches that have left; it is not evaluated any more."""
        self._deliver(job, lambda rollout: rollout.stop(reason, now), now)

    def remove_job(self, job: str, now: float) -> None:
        """Forgets a job."""
        self._close(job, now)
        self._startable_since.pop(job, None)
        name = self._pool_of.pop(job, None)
        if name is None:
            return
        pool = self.pools[name]
        pool.jobs.discard(job)
        self._shares[name].remove(job)
        for worker in pool.workers.values():
            worker.jobs.discard(job)
        if not pool.jobs:  # its workers are retired
            for worker_id in pool.workers:
                del self._workers[worker_id]
            del self.pools[name], self._shares[name]
        self._pump(now)

    def job_of(self, name: str) -> JobRollout | None:
        """Returns the running job that an episode id, a request id or a job's own name belongs to."""
        return self.jobs.get(name.partition("/")[0])

    # ---- events

    def on_item(self, message: Item, now: float) -> None:
        """Passes on the data worker's answer."""
        self._deliver(message.request_id, lambda job: job.runner.on_item(message, now), now)

    def on_rendered(self, key: TurnKey, token_ids: tuple[int, ...], error: str, now: float) -> None:
        """Passes on the tokenizer's answer."""
        self._deliver(key[0], lambda job: job.runner.on_rendered(key, token_ids, error, now), now)

    def on_env_observation(self, worker_id: str, message: EnvObservation, now: float) -> None:
        """Passes on an observation."""
        if self._answered(worker_id, message.episode_id, message.attempt, now, is_last=False):
            self._deliver(message.episode_id, lambda job: job.runner.on_env_observation(message, now), now)

    def on_env_done(self, worker_id: str, message: EnvDone, now: float) -> None:
        """Passes on an episode's end."""
        if self._answered(worker_id, message.episode_id, message.attempt, now, is_last=True):
            self._deliver(message.episode_id, lambda job: job.runner.on_env_done(message, now), now)

    def on_env_error(self, worker_id: str, message: EnvError, now: float) -> None:
        """Passes on an environment's failure."""
        if self._answered(worker_id, message.episode_id, message.attempt, now, is_last=True):
            self._deliver(message.episode_id, lambda job: job.runner.on_env_error(message, now), now)

    def on_generated(self, message: Generated, now: float) -> None:
        """Passes on a completion."""
        if self._is_current(message.job, message.incarnation):
            self._deliver(message.job, lambda job: job.on_generated(message, now), now)

    def on_step_done(self, message: StepDone, now: float) -> None:
        """Passes on a trained batch."""
        if self._is_current(message.job, message.incarnation):
            self._deliver(message.job, lambda job: job.on_step_done(message, now), now)

    def on_data_worker_ready(self, job: str, now: float) -> None:
        """The data worker (again) has the job's items."""
        self._deliver(job, lambda rollout: rollout.runner.on_data_worker_ready(now), now)

    def on_data_worker_lost(self, job: str, now: float) -> None:
        """Nobody has the job's items for now: what waits for one waits on."""
        self._deliver(job, lambda rollout: rollout.runner.on_data_worker_lost(), now)

    def tick(self, now: float) -> None:
        """Ends what is over its limit."""
        for pool in self.pools.values():
            for worker in list(pool.workers.values()):
                overdue = worker.overdue(now, limits.CALL_GRACE_S)
                if overdue:
                    self._give_up_worker(pool, worker, overdue, now)
        for job in list(self.jobs.values()):
            job.tick(now)
        self._pump(now)

    def take(self) -> list[Command]:
        """Returns and forgets the commands so far."""
        commands, self._commands = self._commands, []
        return commands

    def why(self, job: str, now: float) -> tuple[Wait, int]:
        """Returns (what a job with rollouts waits for longest, how many things more it waits for)."""
        rollout = self.jobs[job]
        pool = self.pools[self._pool_of[job]]
        if not any(job in worker.jobs for worker in pool.workers.values()):
            after = f" (the last ended: {pool.last_death})" if pool.last_death else ""
            return Wait("env worker", f"a ready worker of pool {pool.name}{after}", "the supervisor", now - pool.since, None), 0
        return rollout.why(now)

    # ---- inside

    def _deliver(self, name: str, event: Callable[[JobRollout], None], now: float) -> None:
        job = self.job_of(name)
        if job is not None:
            event(job)
            self._collect(job, now)
            self._fill(self.pools[self._pool_of[job.settings.name]], now)

    def _is_current(self, job: str, incarnation: int) -> bool:
        rollout = self.jobs.get(job)
        return rollout is not None and rollout.settings.incarnation == incarnation

    def _answered(self, worker_id: str, episode_id: str, attempt: int, now: float, *, is_last: bool) -> bool:
        """Settles a worker's call; False for a worker that was given up."""
        pool = self._workers.get(worker_id)
        if pool is None:
            return False
        worker = pool.workers[worker_id]
        worker.last_answer = now
        call = worker.calls.pop((episode_id, attempt), None)
        if call and call.stage == "step":
            pool.deaths_in_a_row = 0
        if is_last:
            worker.episodes.discard((episode_id, attempt))
        return True

    def _give_up_worker(self, pool: Pool, worker: Worker, overdue: tuple[EpisodeKey, Call], now: float) -> None:
        (episode_id, attempt), call = overdue
        waited = now - max(call.since, worker.last_answer)
        reason = (
            f"the worker answered nothing for {waited:.1f} s in {call.stage} of {episode_id}; its limit is {call.timeout_s:g} s"
        )
        self._commands.append(KillWorker(worker.worker_id, reason))
        del pool.workers[worker.worker_id]
        del self._workers[worker.worker_id]
        for key in sorted(worker.episodes):
            job = self.job_of(key[0])
            if job is None:
                continue
            if key == (episode_id, attempt):
                job.runner.on_episode_hung(key[0], now, f"timeout: {reason}")
            else:
                job.runner.on_episode_lost(key[0], now, blamed=False, reason=reason)
        self._count_death(pool, reason, now)

    def _count_death(self, pool: Pool, reason: str, now: float) -> None:
        pool.deaths_in_a_row += 1
        pool.last_death, pool.since = reason, now
        if pool.deaths_in_a_row < MAX_DEATHS_IN_A_ROW:
            return
        text = f"{pool.deaths_in_a_row} environment workers in a row were lost without answering a step, last: {reason}"
        for job in sorted(pool.jobs):
            self._close(job, now)
            self._commands.append(JobGivenUp(job, "EnvironmentFailed", text))
        pool.deaths_in_a_row = 0

    def _close(self, name: str, now: float) -> None:
        rollout = self.jobs.pop(name, None)
        if rollout is not None:
            rollout.close(now)
            self._collect(rollout, now)

    def _pump(self, now: float) -> None:
        """Moves all jobs' commands on and starts what may start."""
        for rollout in list(self.jobs.values()):
            self._collect(rollout, now)
        for pool in self.pools.values():
            self._fill(pool, now)

    def _fill(self, pool: Pool, now: float) -> None:
        self._assign_waiting(pool, now)
        self._start_groups(pool, now)

    def _start_groups(self, pool: Pool, now: float) -> None:
        ready = {job for worker in pool.workers.values() for job in worker.jobs if job in self.jobs}
        running = sum(self.jobs[job].num_running for job in pool.jobs if job in self.jobs)

        while costs := self._startable(pool, ready, now):
            job = self._shares[pool.name].order(costs)[0]
            # A group larger than the pool runs alone. Else nobody starts where the first has no room: small groups would keep a
            # large one out for ever.
            if running and costs[job] > pool.capacity - running:
                break
            self._shares[pool.name].charge(job, costs[job])
            before = self.jobs[job].num_running
            waited_s = now - self._startable_since.pop(job)
            self.jobs[job].start_next(now, waited_s)
            running += self.jobs[job].num_running - before
            self._collect(self.jobs[job], now)

    def _startable(self, pool: Pool, ready: set[str], now: float) -> dict[str, int]:
        """Returns the episodes of the next group of each job that could start one; notes since when it could."""
        costs = {job: cost for job in ready if (cost := self.jobs[job].next_cost()) is not None}
        for job in pool.jobs:
            if job in costs:
                self._startable_since.setdefault(job, now)
            else:
                self._startable_since.pop(job, None)
        return costs

    def _collect(self, rollout: JobRollout, now: float) -> None:
        while rollout.commands:
            commands = rollout.commands.copy()
            rollout.commands.clear()
            for command in commands:
                if isinstance(command, ToEnv):
                    self._to_env(command, now)
                else:
                    self._commands.append(command)

    def _to_env(self, command: ToEnv, now: float) -> None:
        pool = self.pools[self._pool_of[command.job]]
        message = command.message
        if isinstance(message, EnvReset):
            pool.waiting.append(message)
            self._assign_waiting(pool, now)
            return
        key = (message.episode_id, message.attempt)
        worker = next((worker for worker in pool.workers.values() if key in worker.episodes), None)
        if isinstance(message, EnvClose):
            if worker is None:
                pool.waiting = type(pool.waiting)(m for m in pool.waiting if (m.episode_id, m.attempt) != key)
                return
            worker.episodes.discard(key)
            worker.calls.pop(key, None)
        elif worker is None:
            self._commands.append(Note(command.job, "unroutable", f"{type(message).__name__} of {key}: no worker has it"))
            return
        else:
            self._track(worker, key, message.timeout_s, "step", now)
        self._commands.append(Send(worker.worker_id, message))

    def _assign_waiting(self, pool: Pool, now: float) -> None:
        for _ in range(len(pool.waiting)):
            message = pool.waiting.popleft()
            job = self.jobs.get(message.job)
            worker = pool.worker_for(message.job)
            if job is None or worker is None:
                if job is not None:
                    pool.waiting.append(message)
                continue
            key = (message.episode_id, message.attempt)
            worker.episodes.add(key)
            self._track(worker, key, message.timeout_s, "reset", now)
            self._commands.append(Send(worker.worker_id, message))
            if (waited_s := job.runner.on_env_sent(message.episode_id, message.attempt, now)) is not None:
                self.waits.add("environment", message.job, waited_s)

    @staticmethod
    def _track(worker: Worker, key: EpisodeKey, timeout_s: float, stage: str, now: float) -> None:
        worker.calls[key] = Call(now, timeout_s, stage)
