"""Which stage has the next dispatch: scripted stages of known duration, without a device."""

import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st

from marlaas_jax.device.colocated import MAX_LEAD_S, ColocatedDevice


class Stage:
    """Takes `seconds` of the shared clock per dispatch, as long as it has work."""

    def __init__(self, name: str, seconds: float, turns: list[str], now: list[float]):
        self.busy_by_job_s: dict[str, float] = {}
        self.name, self.seconds, self.turns, self.now, self.is_busy = name, seconds, turns, now, True

    def has_work(self) -> bool:
        return self.is_busy

    def step(self) -> list:
        self.turns.append(self.name)
        self.now[0] += self.seconds
        return []

    def counters(self) -> dict[str, float]:
        return {}

    gauges = counters

    def take_parts(self) -> list:
        return []

    def queued(self) -> dict[str, int]:
        return {"waits": 2, f"{self.name}{len(self.turns) % 2}": 1} if self.is_busy else {}

    with_batches = queued


def make(decode_s: float, learn_s: float) -> tuple[ColocatedDevice, Stage, list[str]]:
    turns: list[str] = []
    now = [0.0]
    sampler: Any = Stage("sampler", decode_s, turns, now)
    learner: Any = Stage("learner", learn_s, turns, now)
    nothing: Any = None
    device = ColocatedDevice(nothing, sampler, learner, {}, nothing, [], "float32", 8, lambda: now[0])
    return device, learner, turns


@hypothesis.given(st.floats(0.01, 1), st.floats(0.01, 1), st.integers(0, 30))
def test_decoding_waits_for_one_learner_dispatch_at_most_and_nobody_starves(decode_s, learn_s, idle):
    device, learner, turns = make(decode_s, learn_s)
    learner.is_busy = False
    for _ in range(idle):
        device.step()
    learner.is_busy = True
    for _ in range(200):
        device.step()
    both = turns[idle:]
    assert ("learner", "learner") not in set(itertools.pairwise(both))
    for longest in ("sampler/longest_wait_s", "learner/longest_dispatch_s"):
        assert abs(device.gauges()[longest] - learn_s) < 1e-9
    spent = {"sampler": both.count("sampler") * decode_s, "learner": both.count("learner") * learn_s}
    allowed = MAX_LEAD_S + decode_s + learn_s
    assert spent["learner"] <= spent["sampler"] + allowed
    if decode_s <= learn_s:  # else turn about gives the learner less
        assert spent["sampler"] <= spent["learner"] + allowed
    else:
        assert both.count("learner") >= both.count("sampler") - 1


def test_backlogged_is_who_had_something_waiting_at_every_dispatch():
    device, learner, _ = make(0.1, 0.1)
    assert device.take_backlogged() == ()
    for _ in range(4):
        device.step()
    assert device.take_backlogged() == ("waits",), "the others had nothing at every second dispatch"
    assert device.take_backlogged() == (), "without a dispatch nobody was kept waiting"
    learner.is_busy = False
    device.step()
    assert "waits" in device.take_backlogged()
