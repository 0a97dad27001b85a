"""A simulated clock: heavy-tailed latencies, some slow prompts, drops, errors, worker deaths, device restarts."""

import random

import pytest

from marlaas_jax.rollout.commands import JobDone, JobGivenUp
from marlaas_jax.rollout.tickets import TicketBook
from tests.rollout.world import World, ready, settings


class Simulation:
    """Delivers each pending answer when its time comes."""

    def __init__(self, seed, *, caps, drops=0.0, errors=0.0, deaths=0.0, rollbacks=0.0, **changes):
        self.random = random.Random(seed)
        self.world = World(turns=self.random.randint(1, 3), minibatches=self.random.randint(1, 2), workers=["w0", "w1"])
        self.rates = {"drops": drops, "errors": errors, "deaths": deaths, "rollbacks": rollbacks}
        self.due: dict[int, float] = {}  # id of a pending answer -> time
        self.slowness: dict[str, float] = {}
        self.incarnation = {}
        self.changes = {
            "steps": 8,
            "group_size": 2,
            "groups_per_batch": 2,
            "max_attempts": 1000,
            "eval_items": 1,
            "episode_timeout_s": 1e6,
        } | changes
        self.caps = caps
        for name, cap in caps.items():
            self.incarnation[name] = 1
            self.world.add(settings(name, max_staleness=cap, **self.changes), eval_before=True)

    def latency(self, kind, what) -> float:
        if kind == "train":
            return 0.5
        place = str(what.index) if kind == "item" else self.place(kind, what)
        slow = self.slowness.setdefault(place, 60.0 if self.random.random() < 0.15 else 1.0)
        return slow * self.random.lognormvariate(-1, 1) if kind in ("generated", "step") else 0.05

    @staticmethod
    def place(kind, what) -> str:
        if kind == "generated":
            return str(what[0].seeds[0])
        return (what.key[0] if kind == "render" else what[1].episode_id).split("/")[3]

    def run(self) -> None:
        world = self.world
        for _ in range(30000):
            if all(rollout.state == "done" for rollout in world.orchestrator.jobs.values()):
                return
            for pool in world.orchestrator.pools.values():
                pool.deaths_in_a_row = 0  # that cap has a test of its own
            self.due = {id(e[1]): self.due.get(id(e[1]), world.now + self.latency(*e)) for e in world.pending}
            if not world.pending:
                world.tick(10.0)
            else:
                index = min(range(len(world.pending)), key=lambda i: self.due[id(world.pending[i][1])])
                kind, what = world.pending[index]
                world.now = max(world.now, self.due[id(what)])
                self.happen(index, kind)
                world.tick(0.0)
            if not world.workers:
                world.add_worker()
            world.check()
            assert not world.seen[JobGivenUp], world.seen[JobGivenUp]
        raise AssertionError("no end")

    def happen(self, index, kind) -> None:
        world, draw = self.world, self.random.random
        if kind != "train" and draw() < self.rates["drops"]:
            world.pending.pop(index)
        elif kind in ("reset", "step") and draw() < self.rates["errors"]:
            world.fail_call(index, self.random.choice(["raised", "timeout", "bad_answer", "lost"]))
        else:
            world.deliver(index)
        if draw() < self.rates["deaths"] and world.workers:
            world.lose_worker(self.random.choice(world.workers))
        if draw() < self.rates["rollbacks"]:
            self.roll_back(self.random.choice(sorted(self.caps)))

    def roll_back(self, name) -> None:
        """The device restarts from a committed step."""
        world = self.world
        if world.orchestrator.jobs[name].state == "done":
            return
        kept = world.history[name][: max(0, len(world.history[name]) - self.random.randint(0, 2))]
        world.history[name] = kept
        self.incarnation[name] += 1
        job = settings(name, max_staleness=self.caps[name], incarnation=self.incarnation[name], **self.changes)
        world.pending = [e for e in world.pending if e[0] not in ("generated", "train") or owner(e) != name]
        ledger = kept[-1].ledger if kept else b""
        message = ready(name, job.incarnation, len(kept), len(kept) * world.minibatches, ledger)
        world.add(job, eval_before=not kept, ready_message=message)


def owner(entry) -> str:
    kind, what = entry
    return what[0].job if kind == "generated" else what.job


def check_end(simulation) -> None:
    world = simulation.world
    for name in simulation.caps:
        spec = world.settings[name]
        trained = sorted(group.ticket for batch in world.history[name] for group in batch.groups)
        assert trained == list(range(spec.steps * spec.groups_per_batch)), "each ticket exactly once"
        assert [batch.step for batch in world.history[name]] == list(range(spec.steps)), "no step twice or missing"
        assert world.orchestrator.jobs[name].tally.running == 0
    assert len(world.seen[JobDone]) == len(simulation.caps)


@pytest.mark.parametrize("seed", range(8))
def test_slow_groups_are_restarted_and_the_cap_holds(seed, monkeypatch):
    """Design 13.4: with every cap from 0 to 4; slow groups slip, are restarted, and are waited for in the end."""
    restarts = []
    original = TicketBook.restart_stale
    monkeypatch.setattr(TicketBook, "restart_stale", lambda book, ticket: (restarts.append(ticket), original(book, ticket)))
    simulation = Simulation(seed, caps={f"cap{cap}": cap for cap in range(5)}, max_attempts=3, step_timeout_s=1e5)
    simulation.run()
    check_end(simulation)
    assert restarts, "the simulation must reach what it is about"
    assert max(map(restarts.count, restarts)) <= 2 * len(simulation.caps), "a slow ticket is waited for in the end"
    synchronous = simulation.world.orchestrator.jobs["cap0"]
    assert synchronous.tally.outcomes["cancelled"] == 0, "max_staleness 0 throws nothing away"


@pytest.mark.parametrize("seed", range(8))
def test_faults_of_every_kind_delay_and_nothing_more(seed):
    """Design 13.5, 13.6; H27, H28: everything goes wrong now and then; each ticket is trained once, counters balance."""
    simulation = Simulation(
        100 + seed, caps={"a": 0, "b": 1, "c": 3}, drops=0.02, errors=0.05, deaths=0.01, rollbacks=0.003, steps=5
    )
    simulation.run()
    check_end(simulation)
