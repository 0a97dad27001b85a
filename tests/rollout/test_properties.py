"""Random latencies, drops, failures, worker losses and restarts: what must hold at all times and at the end.

Design section 13: item 4 (the cap holds for every trained token), 5 (every episode ends once, sent = done + running + failed),
6 (nothing is trained twice, nothing is lost), and progress: from any state the job ends once faults stop.
"""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from marlaas_jax.rollout.commands import EpisodeEnded, JobDone, JobGivenUp
from tests.rollout.world import World, ready
from tests.rollout.world import settings as job_settings


class Rollouts(RuleBasedStateMachine):
    """Two jobs on shared workers; the machine decides what answers next."""

    @initialize(
        cap=st.integers(0, 4),
        group_size=st.integers(1, 3),
        groups_per_batch=st.integers(1, 3),
        turns=st.integers(1, 3),
        minibatches=st.integers(1, 3),
        num_workers=st.integers(1, 3),
        eval_items=st.integers(0, 2),
        eval_every_steps=st.integers(0, 2),
    )
    def start(self, cap, group_size, groups_per_batch, turns, minibatches, num_workers, eval_items, eval_every_steps):
        self.world = World(turns=turns, minibatches=minibatches, workers=[f"w{i}" for i in range(num_workers)])
        # enough attempts that the machine's faults cannot use them up: then every ticket must be trained
        self.specs = {
            name: job_settings(
                name, steps=6, group_size=group_size, groups_per_batch=groups_per_batch,
                max_staleness=cap if name == "a" else 1,
                max_attempts=1000, eval_items=eval_items, eval_every_steps=eval_every_steps, weight=1.0 + (name == "b"),
            )
            for name in ("a", "b")
        }  # fmt: skip
        self.incarnation = {"a": 1, "b": 1}
        self.slow: set[tuple[str, int]] = set()  # (job, ticket) that the others overtake
        for spec in self.specs.values():
            self.world.add(spec, eval_before=True)

    def pick(self, number, kinds=None):
        indices = [i for i, (kind, _) in enumerate(self.world.pending) if kinds is None or kind in kinds]
        return indices[number % len(indices)] if indices else None

    @rule(numbers=st.lists(st.integers(0, 50), min_size=1, max_size=25))
    def answer_any(self, numbers):
        for number in numbers:
            if (index := self.pick(number)) is not None:
                self.world.deliver(index)

    @rule(number=st.integers(0, 50), kind=st.sampled_from(["item", "render", "generated", "train", "reset", "step"]))
    def answer_one_kind_completely(self, number, kind):
        for _ in range(number):
            if (index := self.pick(0, (kind,))) is None:
                return
            self.world.deliver(index)

    @rule(name=st.sampled_from(["a", "b"]), number=st.integers(0, 9), limit=st.integers(10, 400))
    def ticket_is_overtaken(self, name, number, limit):
        """A slow group: everything else goes on, until nothing else is left to do."""
        running = sorted(t for split, t in self.world.orchestrator.jobs[name].runner.groups if split == "train")
        if running:
            self.slow.add((name, running[number % len(running)]))
        for _ in range(limit):
            fast = [i for i, (kind, what) in enumerate(self.world.pending) if self.ticket_of(kind, what) not in self.slow]
            if not fast:
                self.slow.clear()
                return
            self.world.deliver(fast[0])

    def ticket_of(self, kind, what):
        if kind == "train":
            return None
        if kind == "generated":
            request, sample = what
            waiting = self.world.orchestrator.jobs[request.job].runner._requests._waiting.get(request.request_id)
            entry = waiting[sample] if waiting else None
            return entry and (request.job, entry[0].ticket)
        if kind == "item":
            return (what.job, what.index)
        episode_id = what.key[0] if kind == "render" else what[1].episode_id
        name, _, _, place, _ = episode_id.split("/")
        return (name, int(place.split("-")[-1]))

    @rule(number=st.integers(0, 50), kind=st.sampled_from(["raised", "timeout", "bad_answer", "lost"]))
    def call_fails(self, number, kind):
        if (index := self.pick(number, ("reset", "step"))) is not None:
            self.world.fail_call(index, kind)

    @rule(number=st.integers(0, 5))
    def worker_dies(self, number):
        for pool in self.world.orchestrator.pools.values():
            pool.deaths_in_a_row = 0  # the cap has a test of its own
        self.world.lose_worker(self.world.workers[number % len(self.world.workers)])

    @rule(number=st.integers(0, 50), kind=st.sampled_from(["item", "reset", "step", "generated", "render"]))
    def answer_is_dropped(self, number, kind):
        """The answer never comes; the limits notice."""
        if (index := self.pick(number, (kind,))) is not None:
            self.world.pending.pop(index)

    @rule(seconds=st.sampled_from([0.1, 5.0, 16.0, 70.0, 700.0]))
    def time_passes(self, seconds):
        for pool in self.world.orchestrator.pools.values():
            pool.deaths_in_a_row = 0
        self.world.tick(seconds)
        if not self.world.workers:
            self.world.add_worker()

    @rule(name=st.sampled_from(["a", "b"]), back=st.integers(0, 3))
    def device_restarts(self, name, back):
        """The job goes on from a committed step: what was trained after it is undone."""
        world = self.world
        if world.orchestrator.jobs[name].state == "done":
            return
        kept = world.history[name][: max(0, len(world.history[name]) - back)]
        world.history[name] = kept
        self.incarnation[name] += 1
        spec = self.specs[name]
        spec = job_settings(
            **{**{f: getattr(spec, f) for f in spec.__dataclass_fields__}, "incarnation": self.incarnation[name]}
        )
        world.pending = [(k, x) for k, x in world.pending if k not in ("generated", "train") or job_of(k, x) != name]
        version = len(kept) * world.minibatches
        ledger = kept[-1].ledger if kept else b""
        world.add(spec, eval_before=not kept, ready_message=ready(name, spec.incarnation, len(kept), version, ledger))

    @invariant()
    def always(self):
        if hasattr(self, "world"):
            self.world.check()
            assert not self.world.seen[JobGivenUp], self.world.seen[JobGivenUp]
            for name, rollout in self.world.orchestrator.jobs.items():
                assert rollout.why(self.world.now)
                assert rollout.book.open_step - rollout.book.steps_done <= rollout.settings.max_staleness + 1
                if rollout.state == "running" and not self.world.pending:
                    assert rollout.waits(self.world.now), f"{name} waits for nothing that has a name"

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(400):  # faults stop: everything answers, dropped answers run into their limits
            for _ in range(5000):
                if not world.pending:
                    break
                world.deliver()
            assert not world.pending
            if all(rollout.state == "done" for rollout in world.orchestrator.jobs.values()):
                break
            for pool in world.orchestrator.pools.values():
                pool.deaths_in_a_row = 0
            world.tick(20.0)
            if not world.workers:
                world.add_worker()
        world.check()
        assert len(world.seen[JobDone]) == 2, {name: r.why(world.now) for name, r in world.orchestrator.jobs.items()}
        for name, spec in self.specs.items():
            trained = sorted(group.ticket for batch in world.history[name] for group in batch.groups)
            assert trained == list(range(spec.steps * spec.groups_per_batch)), "each ticket exactly once"
            assert [batch.step for batch in world.history[name]] == list(range(spec.steps))
            assert world.orchestrator.jobs[name].tally.running == 0
        assert not +world.held, "a snapshot is held for ever"
        assert all(record.record["outcome"] for record in world.seen[EpisodeEnded])
        assert not any(
            pool.waiting or w.episodes or w.calls for pool in world.orchestrator.pools.values() for w in pool.workers.values()
        )


def job_of(kind, what):
    return what[0].job if kind == "generated" else what.job


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
