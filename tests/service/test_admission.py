"""Admission: weights hold, quotas are never exceeded, nobody starves, and the same input gives the same choice."""

from collections import Counter

import hypothesis
import hypothesis.strategies as st

from marlaas_jax.service.admission import Admission, QueuedJob, TenantState, reasons
from marlaas_jax.service.quotas import Load, Quotas

OPEN = Quotas(max_running_jobs=None, max_resident_adapters=None)


class World:
    """Tenants whose jobs run for a given number of rounds; every round gives the free places away."""

    def __init__(self, places: int):
        self.places = places
        self.admission = Admission()
        self.weights: dict[str, float] = {}
        self.quotas: dict[str, Quotas] = {}
        self.queued: list[QueuedJob] = []
        self.running: list[tuple[QueuedJob, int]] = []  # with the round in which it ends
        self.started: list[QueuedJob] = []
        self.round = 0
        self._durations: dict[str, int] = {}

    def tenant(self, name: str, weight: float = 1.0, quotas: Quotas = OPEN) -> None:
        self.weights[name], self.quotas[name] = weight, quotas

    def submit(self, tenant: str, duration: int = 1, priority: int = 0) -> QueuedJob:
        job = QueuedJob(f"job{len(self._durations):04d}", tenant, created=float(self.round), priority=priority)
        self._durations[job.id] = duration
        self.queued.append(job)
        return job

    def states(self) -> dict[str, TenantState]:
        running = Counter(job.tenant_id for job, _ in self.running)
        return {
            name: TenantState(self.quotas[name], Load(running_jobs=running[name], resident_adapters=running[name]), weight)
            for name, weight in self.weights.items()
        }

    def step(self) -> list[QueuedJob]:
        self.round += 1
        self.running = [(job, end) for job, end in self.running if end > self.round]
        chosen = self.admission.choose(self.queued, self.states(), self.places - len(self.running))
        started = {job.id for job in chosen}
        self.queued = [job for job in self.queued if job.id not in started]
        self.running += [(job, self.round + self._durations[job.id]) for job in chosen]
        self.started += chosen
        return chosen


@st.composite
def worlds(draw):
    world = World(draw(st.integers(1, 6)))
    for i in range(draw(st.integers(1, 5))):
        quotas = Quotas(
            max_running_jobs=draw(st.none() | st.integers(1, 3)), max_resident_adapters=draw(st.none() | st.integers(1, 3))
        )
        world.tenant(f"t{i}", draw(st.floats(0.1, 10)), quotas)
    return world


arrivals = st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(-2, 2)), max_size=5), max_size=30)


def play(world: World, rounds) -> None:
    names = list(world.weights)
    for submissions in rounds:
        for tenant, duration, priority in submissions:
            world.submit(names[tenant % len(names)], duration, priority)
        world.step()


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(worlds(), arrivals)
def test_quotas_and_places_are_never_exceeded_and_no_place_is_wasted(world, rounds):
    names = list(world.weights)
    for submissions in rounds:
        for tenant, duration, priority in submissions:
            world.submit(names[tenant % len(names)], duration, priority)
        world.step()
        assert len(world.running) <= world.places
        free = world.places - len(world.running)
        for name, state in world.states().items():
            limits = [n for n in (state.quotas.max_running_jobs, state.quotas.max_resident_adapters) if n is not None]
            assert state.load.running_jobs <= min(limits, default=10**9)
            waits = any(job.tenant_id == name for job in world.queued)
            assert not (free and waits and state.load.running_jobs < min(limits, default=10**9)), "a place stayed free"


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(worlds(), arrivals)
def test_every_job_starts_in_the_end_and_within_a_tenant_in_order(world, rounds):
    play(world, rounds)
    limit = world.round + 1 + 5 * len(world.queued)  # one place, one job at a time
    while world.queued:
        world.step()
        assert world.round <= limit
    for name in world.weights:
        last: dict[int, tuple[float, str]] = {}
        for job in world.started:
            if job.tenant_id == name:
                assert last.get(job.priority, (0.0, "")) < (job.created, job.id)
                last[job.priority] = (job.created, job.id)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.lists(st.floats(0.2, 8), min_size=2, max_size=5), st.integers(1, 3), st.integers(10, 40))
def test_starts_follow_the_weights_while_all_have_jobs(weights, places, rounds):
    world = World(places)
    for i, weight in enumerate(weights):
        world.tenant(f"t{i}", weight)
        for _ in range(rounds * places + 1):
            world.submit(f"t{i}")
    for _ in range(rounds):
        world.step()
    starts = Counter(job.tenant_id for job in world.started)
    assert starts.total() == rounds * places
    for i, a in enumerate(weights):
        for j, b in enumerate(weights):
            assert abs(starts[f"t{i}"] / a - starts[f"t{j}"] / b) <= max(1 / a, 1 / b) + 1e-6


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.integers(0, 40), st.integers(1, 3), st.integers(1, 200))
def test_a_small_tenant_waits_for_one_start_of_each_other_however_much_they_queue(before, others, flood):
    world = World(1)
    world.tenant("small")
    for i in range(others):
        world.tenant(f"greedy{i}")
        for _ in range(flood + before + 5):
            world.submit(f"greedy{i}", priority=9)
    for _ in range(before):
        world.step()
    job = world.submit("small")
    chosen = [world.step() for _ in range(others + 1)]
    assert any(job in starts for starts in chosen)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(worlds(), arrivals, st.randoms(use_true_random=False))
def test_the_same_input_gives_the_same_choice_in_whatever_order_it_comes(world, rounds, dice):
    twin = World(world.places)
    for name in sorted(world.weights, reverse=True):
        twin.tenant(name, world.weights[name], world.quotas[name])
    names = list(world.weights)
    for submissions in rounds:
        for tenant, duration, priority in submissions:
            for each in (world, twin):
                each.submit(names[tenant % len(names)], duration, priority)
        dice.shuffle(twin.queued)
        assert world.step() == twin.step()


def test_a_tenant_at_its_quota_blocks_nobody_and_saves_nothing_up():
    world = World(4)
    world.tenant("capped", weight=100.0, quotas=OPEN.model_copy(update={"max_running_jobs": 1}))
    world.tenant("free")
    for _ in range(50):
        world.submit("capped", duration=10)
        world.submit("free", duration=10)
    assert [job.tenant_id for job in world.step()] == ["capped", "free", "free", "free"]
    world.quotas["capped"] = OPEN
    world.weights["capped"] = 1.0
    world.round += 10
    assert Counter(job.tenant_id for job in world.step()) == {"capped": 2, "free": 2}


def test_priority_goes_first_within_a_tenant_and_counts_nothing_against_others():
    world = World(1)
    for name in ("a", "b"):
        world.tenant(name)
    low, high, other = world.submit("a"), world.submit("a", priority=5), world.submit("b", priority=-5)
    assert [world.step() for _ in range(3)] == [[high], [other], [low]]


def test_costs_count_and_can_be_corrected():
    admission = Admission()
    tenants = {name: TenantState(OPEN, Load()) for name in "ab"}
    queued = [QueuedJob(f"{name}{i}", name, float(i), cost=10.0 if name == "a" else 1.0) for i in range(20) for name in "ab"]
    first = admission.choose(queued, tenants, 12)
    assert Counter(job.tenant_id for job in first) == {"a": 2, "b": 10}
    admission.charge("a", -19.0)
    admission.charge("gone", 5.0)
    rest = [job for job in queued if job not in first]
    assert [job.tenant_id for job in admission.choose(rest, tenants, 1)] == ["a"]


def test_a_tenant_that_left_is_forgotten():
    admission = Admission()
    admission.choose([QueuedJob("j", "a", 0.0)], {"a": TenantState(OPEN, Load())}, 1)
    assert admission.choose([], {}, 1) == []
    assert "a" not in admission._shares


def test_reasons_name_what_each_job_waits_for():
    queued = [QueuedJob(f"{name}{i}", name, float(i)) for name in ("capped", "free") for i in range(3)]
    capped = TenantState(Quotas(max_running_jobs=1), Load(running_jobs=1))
    tenants = {"capped": capped, "free": TenantState(OPEN, Load())}
    found = reasons(queued, tenants, free_places=1)
    assert [found[f"capped{i}"] for i in range(3)] == ["max_running_jobs=1: this tenant has 1 running"] * 3
    assert [found[f"free{i}"] for i in range(3)] == ["", *(f"is number {n} in the queue of its tenant" for n in (2, 3))]
    assert set(reasons(queued[3:], tenants, free_places=0).values()) == {"all places for running jobs are taken"}
