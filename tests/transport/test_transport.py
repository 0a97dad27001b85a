"""Server and Client over real sockets in one process, and their in-memory twins under the same tests."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import zmq

from marlaas_jax.errors import InvalidConfig, ProtocolMismatch, WorkerLost
from marlaas_jax.messages import CancelGenerate, EnvClose, EnvDone, Hello, Shutdown, encode
from marlaas_jax.transport import flow
from marlaas_jax.transport.client import Client
from marlaas_jax.transport.flow import PeerLost
from marlaas_jax.transport.memory import MemoryClient, MemoryServer
from marlaas_jax.transport.server import Server


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def connect(server, role="environment", worker_id=None, **options):
    if isinstance(server, MemoryServer):
        return MemoryClient(server, role, worker_id)
    return await asyncio.to_thread(Client, server.address, role, worker_id, **options)


def make_server(kind):
    return MemoryServer() if kind == "memory" else Server("tcp://127.0.0.1:0" if kind == "tcp" else "ipc")


@pytest.mark.parametrize("kind", ["ipc", "tcp", "memory"])
def test_hello_messages_both_ways_and_close(kind):
    async def main():
        async with make_server(kind) as server:
            client = await connect(server, "data", "data-1")
            worker_id, hello = await server.receive()
            assert worker_id == "data-1" and isinstance(hello, Hello) and hello.role == "data"
            assert server.peers["data-1"].role == "data"
            server.send("data-1", CancelGenerate("r1"))
            assert await asyncio.to_thread(client.receive, 5) == CancelGenerate("r1")
            assert client.receive(0) is None
            client.send(EnvDone("e", 0, 1.0))
            assert await server.receive() == ("data-1", EnvDone("e", 0, 1.0))
            await asyncio.sleep(0.1)
            assert client.counters().delivered == 1 and client.counters().in_flight == 0
            assert server.counters().delivered == 1 and server.counters().received == 1
            server.send("data-1", Shutdown())
            await asyncio.sleep(0.1)
            await server.close()
            assert await asyncio.to_thread(client.receive, 5) == Shutdown()
            for _ in range(2):
                with pytest.raises(WorkerLost):
                    await asyncio.to_thread(client.receive, 5)
            with pytest.raises(WorkerLost):
                client.send(Shutdown())
            client.close()

    run(main())


@pytest.mark.parametrize("kind", ["ipc", "memory"])
def test_worker_id_is_for_one_start_only_and_unknown_peers_raise(kind):
    async def main():
        async with make_server(kind) as server:
            client = await connect(server, worker_id="w1")
            assert isinstance((await server.receive())[1], Hello)
            with pytest.raises(ProtocolMismatch, match="used before"):
                await connect(server, worker_id="w1")
            server.lose("w1", "its process died")
            assert await server.receive() == ("w1", PeerLost("environment", "its process died"))
            with pytest.raises(WorkerLost, match="w1: not connected"):
                server.send("w1", Shutdown())
            with pytest.raises(ProtocolMismatch, match="used before"):
                await connect(server, worker_id="w1")
            again = await connect(server, worker_id="w2")  # H31: a restart is a new id
            assert (await server.receive())[0] == "w2"
            await asyncio.to_thread(client.close)
            await asyncio.to_thread(again.close)

    run(main())


@pytest.mark.parametrize("window", [1, 10, 1024])
def test_slow_joiner_and_slow_reader_lose_nothing(window):
    """H30, scaled down: 1,000 tasks wait before the worker reads its first; the queue limit is small; ids are counted."""

    async def main():
        async with Server("ipc", window=window) as server:
            client = await connect(server)
            worker_id, _ = await server.receive()
            for i in range(1000):
                server.send(worker_id, CancelGenerate(str(i)))
            assert server.counters().in_flight == 1000
            await asyncio.sleep(0.2)  # the consumer is paused
            out = server.peers[worker_id].outgoing
            assert out.in_flight - out.queued <= window

            def work():
                for _ in range(1000):
                    message = client.receive(5)
                    client.send(EnvClose(message.request_id, 0))

            thread = threading.Thread(target=work)
            thread.start()
            await server.drain(worker_id)
            got = [(await server.receive())[1].episode_id for _ in range(1000)]
            thread.join()
            assert got == [str(i) for i in range(1000)]
            await asyncio.sleep(0.1)
            ours, theirs = server.counters(), client.counters()
            assert (ours.sent, ours.delivered, ours.in_flight, ours.failed) == (1000, 1000, 0, 0)
            assert (theirs.sent, theirs.delivered, theirs.in_flight, theirs.failed) == (1000, 1000, 0, 0)
            await asyncio.to_thread(client.close)

    run(main())


@pytest.mark.slow
def test_late_worker_and_long_pause_under_full_load():
    """H30 as reported: 5,000 tasks wait for a worker that comes 5 s late, its queue is 10, and it pauses for 30 s."""

    async def main():
        async with Server("ipc", window=10) as server:
            tasks = [CancelGenerate(str(i)) for i in range(5000)]
            await asyncio.sleep(5)
            client = await connect(server)
            worker_id, _ = await server.receive()
            for task in tasks:
                server.send(worker_id, task)

            def work():
                for i in range(5000):
                    if i == 100:
                        time.sleep(30)
                    client.send(EnvClose(client.receive(60).request_id, 0))

            thread = threading.Thread(target=work)
            thread.start()
            got = [(await server.receive())[1].episode_id for _ in range(5000)]
            thread.join()
            assert got == [str(i) for i in range(5000)]
            await asyncio.to_thread(client.close)

    asyncio.run(asyncio.wait_for(main(), 110))


def test_client_send_blocks_when_the_server_does_not_read():
    async def main():
        async with Server("ipc", window=10) as server:
            client = await connect(server, max_queued=5)
            for i in range(15):
                await asyncio.to_thread(client.send, EnvClose(str(i), 0), 5)
                if i == 9:
                    await asyncio.sleep(0.1)  # ten are on the wire, five may wait
            with pytest.raises(WorkerLost, match=r"took nothing for 0\.2 s"):
                await asyncio.to_thread(client.send, EnvClose("x", 0), 0.2)
            await server.receive()
            got = [(await server.receive())[1].episode_id for _ in range(15)]
            assert got == [str(i) for i in range(15)]
            await asyncio.to_thread(client.send, EnvClose("y", 0), 5)
            assert (await server.receive())[1].episode_id == "y"
            await asyncio.to_thread(client.close)

    run(main())


def test_counts_hold_when_a_peer_is_lost_with_messages_under_way():
    async def main():
        async with Server("ipc", window=10) as server:
            client = await connect(server)
            worker_id, _ = await server.receive()
            for i in range(50):
                server.send(worker_id, CancelGenerate(str(i)))
            taken = [await asyncio.to_thread(client.receive, 5) for _ in range(7)]
            await asyncio.sleep(0.2)
            server.lose(worker_id, "test")
            c = server.counters()
            assert len(taken) == 7 and c.sent == 50 and c.in_flight == 0
            assert c.sent == c.delivered + c.failed and c.failed >= 43
            await asyncio.to_thread(client.close)

    run(main())


def test_malformed_frames_are_counted_and_dropped_and_the_rest_goes_on():
    async def main():
        async with Server("ipc") as server:
            client = await connect(server)
            worker_id, _ = await server.receive()
            raw = zmq.Context()
            stranger = raw.socket(zmq.DEALER)
            stranger.connect(server.address)
            good = encode(Hello("environment", "x", 1))
            for frames in (
                [b""],
                [b"a"],
                [b"\x80\x04pickle", b"x"],
                [flow.header(b"h"), b"junk"],
                [flow.header(b"?"), good],
                [b"x"] * 9,
            ):
                stranger.send_multipart(frames)
            stranger.send_multipart([flow.header(flow.DATA), encode(Shutdown())])  # before any Hello
            stranger.send_multipart([flow.header(flow.HELLO), good])
            assert (await server.receive())[0] == "x"
            stranger.send_multipart([flow.header(flow.DATA), b"\xc1 not msgpack"])
            stranger.send_multipart([flow.header(flow.CREDIT), flow.pack_credit(10**6)])
            stranger.send_multipart([flow.header(flow.DATA), encode(Shutdown())])
            assert await server.receive() == ("x", Shutdown())
            assert server.counters().malformed == 7
            assert server.counters().ignored == 2
            client.send(Shutdown())
            assert await server.receive() == (worker_id, Shutdown())
            raw.destroy(linger=0)
            await asyncio.to_thread(client.close)

    run(main())


def test_other_protocol_version_is_answered_and_refused(monkeypatch):
    async def main():
        async with Server("ipc") as server:
            raw = zmq.Context()
            old = raw.socket(zmq.DEALER)
            old.connect(server.address)
            old.send_multipart([flow.header(flow.HELLO, version=99), b"a Hello of a later age"])
            assert await asyncio.to_thread(old.poll, 5000)
            header, text = old.recv_multipart()
            assert flow.parse_header(header)[1] == flow.REFUSED and b"protocol version 99" in text and b"speaks 1" in text
            raw.destroy(linger=0)
            assert not server.peers

    run(main())


def test_client_refuses_a_controller_of_another_version():
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def answer():
        identity, *_ = router.recv_multipart()
        router.send_multipart([identity, flow.header(flow.WELCOME, version=7), b"?"])

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ProtocolMismatch, match="speaks protocol version 7"):
        Client(f"tcp://127.0.0.1:{port}", "data")
    thread.join()
    context.destroy(linger=0)


def test_no_controller_is_one_sentence():
    with pytest.raises(WorkerLost, match=r"no controller answered at tcp:..127\.0\.0\.1:9 within 0\.2 s"):
        Client("tcp://127.0.0.1:9", "data", connect_timeout_s=0.2)


def test_addresses_are_checked(tmp_path):
    """H34: too long a local path, a port and a path in use, an address that is not loopback."""

    async def main():
        with pytest.raises(InvalidConfig, match="exceed the"):
            Server(f"ipc://{tmp_path}/{'x' * 120}")
        with pytest.raises(InvalidConfig, match="loopback only"):
            Server("tcp://0.0.0.0:0")
        with pytest.raises(InvalidConfig, match="allowed are"):
            Server("udp://127.0.0.1:1")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(InvalidConfig, match=f"127.0.0.1:{port}'?: in use"):
                Server(f"tcp://127.0.0.1:{port}")
        path = tmp_path / "s" if len(str(tmp_path)) < 90 else None
        if path:
            async with Server(f"ipc://{path}") as server:
                assert server.address == f"ipc://{path}"
                with pytest.raises(InvalidConfig, match="in use"):
                    Server(f"ipc://{path}")
            async with Server(f"ipc://{path}"):  # what is left of an earlier run does not matter
                pass

    run(main())


def test_long_tmpdir_still_gets_a_short_socket_path(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    async def main():
        async with Server("ipc") as server:
            assert len(server.address) < 100
            await asyncio.to_thread((await connect(server)).close)

    run(main())


def test_folders_of_runs_that_were_killed_are_removed_and_no_others(monkeypatch, tmp_path):
    """H33: only our own, of dead processes, that nobody serves."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f"marlaas-{dead.pid}-abc", f"marlaas-{os.getpid()}-abc", "marlaas-other-abc", f"mine-{dead.pid}-abc"):
        (tmp_path / name).mkdir()

    async def main():
        async with Server("ipc") as server:
            if str(tmp_path) in server.address:  # else the test's folder is too deep for a socket
                kept = {path.name for path in tmp_path.iterdir()}
                assert f"marlaas-{dead.pid}-abc" not in kept and len(kept) == 4

    run(main())


def test_eight_servers_start_at_once():
    async def main():
        servers = [Server("tcp://127.0.0.1:0") for _ in range(8)]
        assert len({server.address for server in servers}) == 8
        await asyncio.gather(*(server.close() for server in servers))

    run(main())


def test_silent_peer_is_lost_and_its_late_messages_are_ignored():
    async def main():
        async with Server("ipc", heartbeat_s=0.1, lost_after_s=0.5) as server:
            raw = zmq.Context()
            mute = raw.socket(zmq.DEALER)
            mute.connect(server.address)
            mute.send_multipart([flow.header(flow.HELLO), encode(Hello("environment", "mute", 1))])
            client = await connect(server)
            names = {(await server.receive())[0] for _ in range(2)}
            assert "mute" in names
            start = time.monotonic()
            worker_id, event = await server.receive()
            assert worker_id == "mute" and event == PeerLost("environment", "no heartbeat for 0.5 s")
            assert time.monotonic() - start < 2
            mute.send_multipart([flow.header(flow.DATA), encode(Shutdown())])
            await asyncio.sleep(0.7)
            assert server.counters().ignored == 1
            assert list(server.peers) == [client.worker_id]  # the one that beats is still there
            raw.destroy(linger=0)
            await asyncio.to_thread(client.close)

    run(main())


def test_busy_event_loop_and_busy_reader_do_not_look_dead():
    async def main():
        async with Server("ipc", heartbeat_s=0.1, lost_after_s=0.4) as server:
            client = await connect(server)
            worker_id, _ = await server.receive()
            server.send(worker_id, Shutdown())
            time.sleep(1.0)  # the loop is blocked, and the client's application reads nothing
            assert await asyncio.to_thread(client.receive, 1) == Shutdown()
            client.send(Shutdown())
            assert await server.receive() == (worker_id, Shutdown())
            await asyncio.to_thread(client.close)

    run(main())


def test_client_notices_that_it_was_given_up():
    async def main():
        async with Server("ipc", heartbeat_s=0.1, lost_after_s=5) as server:
            client = await connect(server)
            worker_id, _ = await server.receive()
            server.lose(worker_id, "test")
            with pytest.raises(WorkerLost, match="given this worker up"):
                await asyncio.to_thread(client.receive, 5)
            await asyncio.to_thread(client.close)

    run(main())


def test_many_threads_send_through_one_client():
    async def main():
        async with Server("ipc") as server:
            client = await connect(server)
            worker_id, _ = await server.receive()
            threads = [
                threading.Thread(target=lambda t=t: [client.send(EnvClose(f"{t}", i)) for i in range(200)]) for t in range(4)
            ]
            for thread in threads:
                thread.start()
            got = [(await server.receive())[1] for _ in range(800)]
            for thread in threads:
                thread.join()
            for t in range(4):
                assert [m.attempt for m in got if m.episode_id == f"{t}"] == list(range(200))
            assert worker_id in server.peers
            await asyncio.to_thread(client.close)

    run(main())


def test_memory_twin_carries_only_what_can_travel():
    async def main():
        async with MemoryServer() as server:
            client = MemoryClient(server, "environment")
            await server.receive()
            with pytest.raises(TypeError):
                client.send(EnvDone("e", 0, 1.0, {"x": object()}))
            client.close()
            assert isinstance((await server.receive())[1], PeerLost)
            c = server.counters()
            assert c.sent == c.delivered + c.in_flight + c.failed

    run(main())
