"""A server's further doors: gates, encrypted tcp, and that no frame of a stranger's harms it (property-based)."""

import asyncio
import gc
import os
import socket
import tracemalloc

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marlaas_jax.errors import ProtocolMismatch, WorkerLost
from marlaas_jax.messages import EnvDone, Hello, RemoveJob, encode
from marlaas_jax.transport import flow
from marlaas_jax.transport.client import Client
from marlaas_jax.transport.flow import PeerLost, header
from marlaas_jax.transport.server import Server

KEYS = zmq.curve_keypair()
kinds = st.sampled_from([flow.HELLO, flow.DATA, flow.CREDIT, flow.BEAT, flow.BYE, flow.WELCOME, flow.REFUSED, b"?"])
texts = st.text(max_size=20)
hellos = st.builds(
    lambda role, worker_id, version, info: encode(Hello(role, worker_id, 1, version, info)),
    st.sampled_from(["environment", "device", ""]) | texts, texts, st.integers(0, 300),
    st.dictionaries(texts, st.none() | st.integers(-(2**31), 2**31) | texts | st.lists(texts, max_size=3), max_size=3),
)  # fmt: skip
frames = st.lists(
    st.binary(max_size=64) | st.builds(header, kinds, st.integers(0, 255)) | hellos | st.just(encode(EnvDone("j/1/x", 0, 1.0))),
    min_size=1, max_size=5,
) | st.tuples(kinds.map(header), hellos | st.binary(max_size=64)).map(list)  # fmt: skip


async def gate(hello):
    return "" if hello.info.get("pass") == "word" else "who are you?"


def serve(story, **changes):
    """Runs `story(main, door)` with a server on ipc and an encrypted door on tcp."""

    async def main():
        async with (
            Server("ipc") as first,
            Server(
                "tcp://127.0.0.1:0", joined_to=first, gate=gate, key_pair=KEYS, window=8, max_frame_bytes=4096, **changes
            ) as door,
        ):
            await asyncio.wait_for(story(first, door), 100)

    asyncio.run(main())


def known(door, worker_id, **info):
    return Client(door.address, "environment", worker_id, {"pass": "word", **info}, server_key=KEYS[0], connect_timeout_s=20)


def raw(context, address, server_key=KEYS[0]):
    """A socket that sends whatever it likes."""
    made = context.socket(zmq.DEALER)
    made.linger = 0
    made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
    made.curve_serverkey = server_key
    made.connect(address)
    return made


async def next_of(server, kind):
    while True:
        worker_id, message = await server.receive()
        if isinstance(message, kind):
            return worker_id, message


def test_peers_of_every_door_are_reached_and_what_the_gate_was_shown_goes_no_further():
    async def story(first, door):
        own = await asyncio.to_thread(Client, first.address, "environment", "own")
        theirs = await asyncio.to_thread(known, door, "theirs", secret="s")
        assert {(await next_of(first, Hello))[1].info.get("pass") for _ in range(2)} == {None}
        assert not first.peers["theirs"].info and set(first.peers) == {"own", "theirs"}
        for client in (own, theirs):
            first.send(client.worker_id, RemoveJob(client.worker_id, 1))
            assert (await asyncio.to_thread(client.receive, 10)).job == client.worker_id
            await asyncio.to_thread(client.send, EnvDone("j/1/x", 0, 1.0))
            assert (await next_of(first, EnvDone))[0] == client.worker_id
        await asyncio.to_thread(theirs.close)
        assert (await next_of(first, PeerLost)) == ("theirs", PeerLost("environment", "it left"))
        await asyncio.to_thread(own.close)

    serve(story)


def test_whom_the_gate_turns_away_is_told_and_one_that_breaks_the_flow_is_lost():
    async def story(first, door):
        with pytest.raises(ProtocolMismatch, match="who are you"):
            await asyncio.to_thread(known, door, "a", **{"pass": "no"})
        context = zmq.Context()
        greedy = raw(context, door.address)
        greedy.send_multipart([header(flow.HELLO), encode(Hello("environment", "greedy", 1, info={"pass": "word"}))])
        assert (await next_of(first, Hello))[0] == "greedy"
        for _ in range(50):  # its window is 8, and nobody takes them meanwhile
            greedy.send_multipart([header(flow.DATA), encode(EnvDone("j/1/x", 0, 1.0))])
        _, lost = await next_of(first, PeerLost)
        assert "more than the 8 messages" in lost.reason
        context.destroy(linger=0)

    serve(story)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=st.lists(frames, min_size=1, max_size=40), noise=st.binary(max_size=400))
def test_no_frame_of_a_stranger_harms_the_server(sent, noise):
    """Any frames, encrypted and in the clear: an honest peer joins and talks beside them, and nothing is left of the others."""

    async def story(first, door):
        context = zmq.Context()
        strange = raw(context, door.address)
        beats = raw(context, door._welcome_info["heartbeat"])
        port = int(door.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(noise)
            for parts in sent:
                strange.send_multipart(parts)
                beats.send_multipart(parts)
            honest = await asyncio.to_thread(known, door, f"honest-{os.urandom(4).hex()}")
            await asyncio.to_thread(honest.send, EnvDone("j/1/x", 0, 1.0))
            assert (await next_of(first, EnvDone))[0] == honest.worker_id
        while door._admitting:
            await asyncio.sleep(0.01)
        assert set(first.peers) == {honest.worker_id} and first._inbox.empty()
        await asyncio.to_thread(honest.close)
        context.destroy(linger=0)

    serve(story)


@pytest.mark.slow
def test_memory_does_not_grow_with_what_strangers_send():
    """Many thousands of bad frames, Hellos among them: what is kept afterwards is what was kept before."""

    async def story(first, door):
        context = zmq.Context()
        strange = raw(context, door.address)
        strange.sndhwm = 0
        honest = await asyncio.to_thread(known, door, "honest")

        async def flood(count):
            for i in range(count):
                strange.send_multipart([header(flow.HELLO), encode(Hello("environment", f"w{i}", 1, info={"x": "y" * 500}))])
                strange.send_multipart([os.urandom(4), os.urandom(200)])
                if i % 50 == 0:
                    while strange.poll(0):
                        strange.recv_multipart()
                    await asyncio.sleep(0)
            await asyncio.to_thread(honest.send, EnvDone("j/1/x", 0, 1.0))
            await next_of(first, EnvDone)
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        before = await flood(2_000)
        after = await flood(20_000)
        tracemalloc.stop()
        while door._admitting:
            await asyncio.sleep(0.01)
        assert after - before < 300_000 and set(first.peers) == {"honest"}
        await asyncio.to_thread(honest.close)
        context.destroy(linger=0)

    serve(story)


def test_a_worker_that_is_gone_hears_nothing_more():
    async def story(first, door):
        theirs = await asyncio.to_thread(known, door, "theirs")
        await next_of(first, Hello)
        first.lose("theirs", "its key was revoked")
        with pytest.raises(WorkerLost):
            await asyncio.to_thread(theirs.receive, 20)
        with pytest.raises(WorkerLost):
            first.send("theirs", RemoveJob("j", 1))
        await asyncio.to_thread(theirs.close)

    serve(story, heartbeat_s=0.1)
