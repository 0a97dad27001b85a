"""Who is blamed for deaths of the device: simulated devices with jobs that kill them, compared with what is known."""

import random

import pytest

from marlaas_jax.workers.suspects import QUIET_S, Suspects

LIVES = 400


class Machine:
    """A device on which a poisonous job dies at a batch of its own; everything before is redone from the last commit."""

    def __init__(self, jobs, poison, *, commit_every=3, seed=0):
        self.suspects = Suspects()
        self.jobs, self.poison, self.commit_every = dict.fromkeys(jobs, 0), dict(poison), commit_every
        self.failed, self.held_ever, self.deaths, self.now = [], set(), 0, 0.0
        self.dice = random.Random(seed)

    def board(self, jobs):
        for job in jobs:
            if job in self.jobs and not self.suspects.is_held(job):
                self.suspects.joined(job, self.now)
                self.aboard[job] = self.jobs[job]

    def life(self, rounds):
        """One life of the process; returns whether it ended by itself."""
        self.aboard = {}
        self.board(self.jobs)
        for _ in range(rounds):
            self.now += 1.0
            self.board(self.suspects.released(self.now))
            for job in self.dice.sample(list(self.aboard), len(self.aboard)):
                step = self.aboard[job] + 1
                if step == self.poison.get(job):
                    verdict = self.suspects.died(was_serving=True)
                    self.deaths += 1
                    self.held_ever |= set(verdict.held)
                    if verdict.blamed:
                        self.failed.append(verdict.blamed)
                        self.suspects.left(verdict.blamed)
                        del self.jobs[verdict.blamed]
                    return True
                self.aboard[job] = step
                self.suspects.trained(job, step)
                if step % self.commit_every == 0:
                    self.jobs[job] = step
        return False


@pytest.mark.parametrize("seed", range(30))
def test_every_job_that_kills_the_device_is_found_and_no_other_is_blamed(seed):
    dice = random.Random(seed)
    jobs = [f"job{i}" for i in range(dice.randint(1, 24))]
    guilty = dice.sample(jobs, min(len(jobs), dice.randint(1, 3)))
    machine = Machine(jobs, {job: dice.randint(1, 12) for job in guilty}, commit_every=dice.randint(1, 6), seed=seed)
    for _ in range(LIVES):
        if not machine.life(rounds=60):
            break
    assert sorted(machine.failed) == sorted(guilty)
    assert machine.deaths <= len(guilty) * 14, "about 3 + log2(24) each, and what several guilty ones at once cost"
    assert all(machine.aboard[job] >= 12 for job in machine.jobs), "whoever was held back runs again"


def test_a_job_alone_is_blamed_at_the_third_death_without_progress():
    suspects, verdicts = Suspects(), []
    for _ in range(3):
        suspects.joined("a", 0.0)
        verdicts.append(suspects.died(was_serving=True))
    assert [verdict.blamed for verdict in verdicts] == ["", "", "a"] and verdicts[1].tried == ("a",)


def test_deaths_between_which_all_get_further_blame_nobody():
    """As when somebody else kills the process now and then."""
    suspects = Suspects()
    for life in range(1, 50):
        for job in "abc":
            suspects.joined(job, 0.0)
            suspects.trained(job, life)
        verdict = suspects.died(was_serving=True)
        assert (verdict.deaths, verdict.held, verdict.blamed) == (0, (), "")


def test_deaths_while_programs_compile_blame_nobody():
    suspects = Suspects()
    for _ in range(10):
        suspects.joined("a", 0.0)
        assert suspects.died(was_serving=False).deaths == 0


def test_steps_that_are_only_done_again_clear_nobody():
    suspects, blamed = Suspects(), []
    for _ in range(4):
        suspects.joined("a", 0.0)
        suspects.trained("a", 4)  # each time from the committed step 3; the first life got further than ever before
        blamed.append(suspects.died(was_serving=True).blamed)
    assert blamed == ["", "", "", "a"]


def test_a_trial_ends_after_a_quiet_time_too_and_those_held_back_come_next():
    suspects = Suspects()
    for _ in range(2):
        for job in "abcd":
            suspects.joined(job, 0.0)
        verdict = suspects.died(was_serving=True)
    assert (verdict.tried, verdict.held) == (("a", "b"), ("c", "d"))
    for job in "ab":
        suspects.joined(job, 10.0)
    assert suspects.released(10.0 + QUIET_S) == []
    assert suspects.released(10.1 + QUIET_S) == ["c"] and suspects.is_held("d")
    suspects.joined("c", 400.0)
    suspects.trained("c", 1)
    assert suspects.released(401.0) == ["d"]
    suspects.joined("d", 401.0)
    suspects.trained("d", 1)
    suspects.released(402.0)
    assert suspects.deaths == 0


def test_a_newcomer_that_kills_is_not_mistaken_for_the_job_on_trial():
    suspects = Suspects()
    for _ in range(2):
        suspects.joined("innocent", 0.0)
        suspects.died(was_serving=True)
    suspects.joined("innocent", 0.0)
    suspects.joined("newcomer", 0.0)
    verdict = suspects.died(was_serving=True)
    assert verdict.blamed == "" and verdict.tried == ("innocent",) and verdict.held == ("newcomer",)
    suspects.joined("innocent", 0.0)
    assert suspects.must_wait("another"), "who is tried alone stays alone"
    suspects.trained("innocent", 1)
    assert suspects.released(1.0) == ["newcomer"] and suspects.is_held("another")
