"""Whom the controller hears about what: property-based, with workers of three jobs and messages about all of them."""

import asyncio
import math
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from marlaas_jax.messages import (
    EnvDone,
    EnvError,
    EnvLoaded,
    EnvObservation,
    Generated,
    Hello,
    Item,
    JobFailed,
    StepDone,
    WorkerFailed,
)
from marlaas_jax.transport.flow import PeerLost
from marlaas_jax.workers.controller_doors import FROM_ENVIRONMENTS, Doors
from marlaas_jax.workers.controller_jobs import remote_group
from marlaas_jax.workers.controller_processes import Processes
from marlaas_jax.workers.env_answers import MAX_METRICS, MAX_NOTE_CHARACTERS, MAX_TEXT_CHARACTERS
from marlaas_jax.workers.user_calls import MAX_TRACEBACK_CHARACTERS

OWNERS = ("ann", "bob")
names = st.sampled_from(["ann", "bob", "gone", "", "ann/../bob", "bob/1"])
ids = st.builds("{}/1/train/0/0".format, names) | names
texts = st.text(max_size=5) | st.integers(0, 400_000).map(lambda n: "x" * n)
floats = st.floats(allow_nan=True, allow_infinity=True)
messages = st.one_of(
    st.builds(EnvLoaded, names, st.integers(0, 3), texts, st.integers(-5, 5), st.integers(-5, 5)),
    st.builds(EnvObservation, ids, st.integers(0, 2), st.integers(0, 2), texts | st.none()),
    st.builds(EnvDone, ids, st.integers(0, 2), floats | st.none(), st.dictionaries(texts, floats, max_size=3), texts),
    st.builds(EnvDone, ids, st.just(0), st.just(1.0), st.just({f"m{i}": 1.0 for i in range(200)})),
    st.builds(EnvError, ids, st.integers(0, 2), texts, texts),
    st.builds(Item, ids, st.binary(max_size=9), texts),
    st.builds(WorkerFailed, texts, texts, texts),
    st.builds(StepDone, names, st.just(1), st.just(1), st.just(1), texts, st.just({})),
    st.builds(JobFailed, names, st.just(1), texts, texts),
    st.builds(lambda job: Generated("r", 0, job, 1, (), b"", b"", "stop", 0, 0, ""), names),
)


def test_a_tenants_worker_is_heard_about_its_owners_jobs_only_and_within_bounds():
    async def story():
        groups = {owner: remote_group(owner, "x", "environment") for owner in OWNERS}
        jobs = {owner: SimpleNamespace(name=owner, pool=group, data_worker="data") for owner, group in groups.items()}
        async with Doors(jobs, None) as doors:
            doors.processes = Processes(doors.server.address, "", None, "none", 1, 5)
            for owner, group in groups.items():
                doors.processes.adopt(f"remote-{owner}", group, is_pool=True)
            any_messages(doors)
            for message in (Hello("environment", "a", 1), PeerLost("environment", "gone")):
                assert doors.heard("remote-ann", message) is message  # made by the server, not by the peer
            await doors.processes.stop(0.0)

    @settings(max_examples=200, deadline=None)
    @given(sent=st.lists(st.tuples(st.sampled_from(["ann", "bob", "nobody"]), messages), max_size=10))
    def any_messages(doors, sent):
        for sender, message in sent:
            heard = doors.heard(f"remote-{sender}", message)
            about = getattr(message, "job", "") or getattr(message, "episode_id", "") or getattr(message, "request_id", "")
            if isinstance(message, WorkerFailed):
                assert len(heard.text) <= MAX_TRACEBACK_CHARACTERS and heard.worker_id == f"remote-{sender}"
            elif isinstance(message, FROM_ENVIRONMENTS) and sender != "nobody" and about.partition("/")[0] == sender:
                check(message, heard)
            else:
                assert heard is None, (sender, message)

    asyncio.run(story())


def check(message, heard):
    """What is passed on is the same answer, cut."""
    assert isinstance(heard, type(message) | EnvError)
    match heard:
        case EnvLoaded():
            assert min(heard.num_train, heard.num_eval) >= 0 and len(heard.error) <= MAX_TRACEBACK_CHARACTERS
        case EnvDone():
            assert (heard.episode_id, heard.attempt) == (message.episode_id, message.attempt)
            assert len(heard.metrics) <= MAX_METRICS and len(heard.note) <= MAX_NOTE_CHARACTERS
            assert all(map(math.isfinite, heard.metrics.values())) and (heard.reward is None or math.isfinite(heard.reward))
        case EnvError():
            assert heard.kind in ("raised", "timeout", "bad_answer", "lost") and len(heard.text) <= MAX_TRACEBACK_CHARACTERS
        case EnvObservation():
            assert len(heard.text) <= MAX_TEXT_CHARACTERS + 40
