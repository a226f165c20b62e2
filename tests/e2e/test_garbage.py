"""Garbage at the master's port and at a peer's data port, during a running loop.

The run goes on in the same epoch, the log has which client was dropped, and why, and afterwards master and peer hold as
many descriptors, and about as much memory, as before.
"""

import contextlib
import random
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from programs import WAIT_S, ClusterProcess, MasterProcess, ProgramCluster, ProgramContext, until
from training_program import end_training, start_training, step_with

from ringfold.runtime.master_client import MasterClient
from ringfold.wire.frames import (
    FrameKind,
    FrameReader,
    Heartbeat,
    decode_handshake,
    frame,
    heartbeat_frame,
    message_frame,
)
from ringfold.wire.messages import PROTOCOL_VERSION as VERSION
from ringfold.wire.messages import Attached, Challenge, Hello, LaneHello, Message, StatusRequest
from ringfold.wire.proof import prove

TOKEN = b"the token of this run"
WORLD = 3
TIMES = 25
"""How often each kind of garbage comes: a leak of one descriptor each is then far outside of what may differ."""
IDLE = 500
MEMORY_BYTES = 48 * 1024 * 1024
"""How much a process may have grown: an allocator keeps something, but not a frame of 64 MiB."""
NONCE = bytes(32)

Say = Callable[[bytes], bytes]
"""What a client sends, given the nonce of its challenge."""


def _hello(nonce: bytes, *, version: int = VERSION, token: bytes = TOKEN, own_nonce: bytes = NONCE) -> Message:
    proof = prove(token, "hello", nonce, own_nonce)
    return Hello(version, 0, "a host", "a client", ["127.0.0.1"], 1, own_nonce, proof)


def _raw(data: bytes) -> Say:
    return lambda nonce: data


def _said(message: Callable[[bytes], Message]) -> Say:
    return lambda nonce: message_frame(message(nonce))


ANYWHERE: dict[str, tuple[Say, str]] = {
    "random bytes": (_raw(b"\xff" + random.Random(1).randbytes(4_096)), "a frame of"),
    "an HTTP request": (_raw(b"GET / HTTP/1.1\r\nHost: ringfold\r\n\r\n"), "a frame of 542393671 bytes"),
    "an oversized frame": (_raw(struct.pack("<IB", 1 << 30, 0) + bytes(1_000)), "a frame of 1073741824 bytes"),
    "a frame above the handshake's limit": (_raw(struct.pack("<IB", 16_385, 0)), "a frame of 16385 bytes"),
    "an empty frame": (_raw(struct.pack("<IB", 0, 0)), "a frame of 0 bytes"),
    "an unknown kind of frame": (_raw(struct.pack("<IB", 9, 77) + bytes(8)), "frame kind 77"),
    "wrong magic": (_raw(b"RFLX" + bytes(60)), "a frame of"),
    "a lane frame before any handshake": (_raw(b"RFLD\x01\x01" + bytes(58)), "a frame of"),
    "no msgpack": (_raw(frame(FrameKind.MESSAGE, b"\xc1\xc1\xc1")), "not a message of this protocol"),
    "a type that is no text": (
        _raw(frame(FrameKind.MESSAGE, b"\x81\xa4type\xa2\xff\xfe")),  # 14 bytes in all
        "not a message of this protocol: 'utf-8' codec can't decode",
    ),
    "15 kB of nested arrays": (
        _raw(frame(FrameKind.MESSAGE, b"\x82\xa1x" + b"\x91" * 15_000)),
        "not a message of this protocol: maximum recursion depth exceeded",
    ),
    "an unknown message": (_raw(frame(FrameKind.MESSAGE, b"\x81\xa4type\xa4oops")), "not a message of this protocol"),
}
AT_THE_MASTER: dict[str, tuple[Say, str]] = {
    "a wrong token": (_said(lambda nonce: _hello(nonce, token=b"guessed")), "wrong token"),
    "a replayed proof": (_said(lambda nonce: _hello(NONCE)), "wrong token"),
    "a wrong version": (_said(lambda nonce: _hello(nonce, version=99)), "protocol version 99 is not supported"),
    "a short nonce": (_said(lambda nonce: _hello(nonce, own_nonce=b"1")), "a nonce of 1 bytes is too short"),
    "a question without the token": (_said(lambda nonce: StatusRequest(VERSION, NONCE, NONCE)), "wrong token"),
    "a message out of turn": (_said(lambda nonce: Attached(1)), "Attached where Hello, NodeHello"),
    "a heartbeat before joining": (
        _raw(heartbeat_frame(Heartbeat(1, 0))),
        "a heartbeat from a client that has not joined",
    ),
    "a broken heartbeat": (_raw(frame(FrameKind.HEARTBEAT, b"123")), "a fixed frame of 3 bytes"),
    "evidence": (_raw(frame(FrameKind.EVIDENCE, bytes(40))), "only the master sends evidence"),
}


def _at_a_peer(epoch: int) -> dict[str, tuple[Say, str]]:
    def lane(version: int = VERSION, epoch: int = epoch, source: int = 1) -> Say:
        return _said(lambda nonce: LaneHello(version, epoch, source, 2, 0, NONCE, NONCE))

    return {
        "a lane without the secret": (lane(), "it does not know the epoch's secret"),
        "a lane of an old epoch": (lane(epoch=epoch - 1), f"epoch {epoch - 1} is over"),
        "a lane of a wrong version": (lane(version=99), "protocol version 99"),
        "a lane with absurd numbers": (lane(source=-5), "numbers out of range"),
        "a heartbeat": (_raw(heartbeat_frame(Heartbeat(1, 0))), "unexpected frame kind 1"),
        "a challenge": (_said(lambda nonce: Challenge(NONCE, VERSION, VERSION)), "it sent Challenge out of turn"),
    }


def test_garbage_at_the_ports_disturbs_nothing(cluster: ProgramCluster, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_bytes(TOKEN)
    token_file.chmod(0o600)
    master = cluster.start_master(arguments=["--token-file", str(token_file)])
    peers = start_training(cluster, WORLD, floats=20_000, join={"token": TOKEN.decode()})
    victim = peers[0]
    epoch, data_port = _epoch_and_port(master, victim)
    before = step_with(peers[0], WORLD)
    with _unchanged(master, victim):
        _throw(master, int(master.address.rpartition(":")[2]), {**ANYWHERE, **AT_THE_MASTER})
        _throw(victim, data_port, {**ANYWHERE, **_at_a_peer(epoch)})
    after = step_with(peers[0], WORLD, after=time.monotonic())
    assert after["number"] > before["number"]
    assert after["epoch"] == before["epoch"], "no new epoch was needed"
    end_training(peers)


def test_idle_connections_and_half_frames_exhaust_nothing(cluster: ProgramCluster, tmp_path: Path) -> None:
    """Many come and say nothing, or half of something. The oldest go at once, the others when their time is over."""
    master = cluster.start_master()
    peers = start_training(cluster, WORLD, floats=20_000)
    victim = peers[0]
    epoch, data_port = _epoch_and_port(master, victim)
    before = step_with(peers[0], WORLD)
    ports = [int(master.address.rpartition(":")[2]), data_port]
    early = _said(lambda nonce: LaneHello(VERSION, epoch + 9, 1, 2, 0, NONCE, NONCE))
    with _unchanged(master, victim), _many_descriptors():
        clients = [_connect(port) for port in ports for _ in range(IDLE)]
        for port in ports:
            half = _connect(port)
            half.sendall(struct.pack("<IB", 1_000, 0) + b"\x81")
            clients.append(half)
        clients.append(_connect(data_port))
        clients[-1].sendall(early(NONCE))
        during = step_with(peers[0], WORLD, after=time.monotonic())
        assert during["number"] > before["number"]
        _wait_dropped(clients)
    master.expect_log("more than 256 connections are not authenticated yet")
    master.expect_log("it was not authenticated within 5000 ms")
    victim.expect_log("too many connections that have proven nothing")
    victim.expect_log("no handshake in time")
    victim.expect_log("its epoch was not recorded here in time")
    after = step_with(peers[0], WORLD, after=time.monotonic())
    assert after["epoch"] == before["epoch"]
    end_training(peers)


def test_clients_that_connect_while_python_is_busy_do_not_use_up_the_descriptors(cluster: ProgramCluster) -> None:
    """Native code accepts connections and Python checks them. While the GIL is held, none is checked."""
    master = cluster.start_master(evict_after_ms=20_000)
    trainer = cluster.start_one(hold_the_gil)
    trainer.expect("joined")
    _, data_port = _epoch_and_port(master, trainer)
    with _many_descriptors():
        trainer.send("hold")
        trainer.expect("holding")
        clients = []
        for _ in range(2 * IDLE):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", data_port))  # more than the backlog takes: not all of them get through
            clients.append(client)
        # The port takes no more for the moment, and no connection is in between.
        until(lambda: trainer.descriptors() > 200, "clients are accepted")
        held = trainer.expect("held", timeout_s=60)
        for client in clients:
            client.close()
    assert held["highest"] < 400, "clients took the trainer's descriptors"
    trainer.send("end")
    assert trainer.expect("reduced")["opened"] == 50
    trainer.wait_success()


def hold_the_gil(me: ProgramContext) -> None:
    """Hold the GIL, as a long call into a library does, and look how many descriptors there are meanwhile."""
    import ctypes
    import os

    with me.join() as run:
        me.report("joined", peer=run.peer_id)
        me.receive("hold")
        me.report("holding")
        highest = 0
        for _ in range(20):
            # PyDLL calls with the GIL held.
            ctypes.PyDLL("libc.so.6").usleep(100_000)
            highest = max(highest, len(os.listdir("/proc/self/fd")))
        me.report("held", highest=highest)
        me.receive("end")
        files = [open(os.devnull) for _ in range(50)]  # noqa: SIM115 - descriptors, as a data loader needs them
        me.report("reduced", opened=len(files))


def test_a_member_that_lies_goes_alone(cluster: ProgramCluster) -> None:
    """A client proves the token and then breaks the protocol: it is dropped, and the log has the reason."""
    master = cluster.start_master()
    peers = start_training(cluster, 2, floats=20_000)
    with _connect(int(master.address.rpartition(":")[2])) as liar:
        nonce = _challenge(liar)
        liar.sendall(message_frame(_hello(nonce, token=b"")))
        liar.sendall(frame(FrameKind.DONE, bytes(3)))
        _wait_dropped([liar])
    line = master.expect_log("a fixed frame of 3 bytes")
    assert "peer 3 (a client) at 127.0.0.1" in line
    step_with(peers[0], 2, after=time.monotonic())
    end_training(peers)


def _throw(target: MasterProcess | ClusterProcess, port: int, garbage: dict[str, tuple[Say, str]]) -> None:
    """Throw each kind at the port many times, see every thrower dropped, and the reason in the log, a few times."""
    for say, reason in garbage.values():
        for _ in range(TIMES):
            with _connect(port) as client:
                nonce = _challenge(client)
                with contextlib.suppress(ConnectionError):
                    client.sendall(say(nonce))
                _wait_dropped([client])
        target.expect_log(reason)


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def _challenge(client: socket.socket) -> bytes:
    """The nonce that every acceptor begins with."""
    reader = FrameReader()
    while True:
        for _, body in reader.feed(client.recv(4_096)):
            challenge = decode_handshake(body)
            assert isinstance(challenge, Challenge)
            return challenge.nonce


def _wait_dropped(clients: Sequence[socket.socket]) -> None:
    """Until the other side has closed all of these connections."""
    deadline = time.monotonic() + WAIT_S
    poll = select.poll()
    left = {client.fileno(): client for client in clients}
    for fd in left:
        poll.register(fd, select.POLLIN)
    while left:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1_000)
        assert ready, f"{len(left)} connections are still open"
        for fd, _ in ready:
            try:
                gone = not left[fd].recv(65_536)
            except ConnectionError:
                gone = True
            if gone:
                poll.unregister(fd)
                left.pop(fd).close()


def _epoch_and_port(master: MasterProcess, peer: ClusterProcess) -> tuple[int, int]:
    name = f"p{peer.name.rpartition(' ')[2]}"
    token = TOKEN if "--token-file" in master.command else b""
    with MasterClient(master.address, token) as connection:
        status = connection.status()
    [port] = [each.port for each in status.peers if each.name == name]
    return status.groups[0].epoch, port


@contextlib.contextmanager
def _unchanged(*children: ClusterProcess) -> Iterator[None]:
    """Afterwards the processes hold as many descriptors as before, and not much more memory."""
    before = [(child.descriptors(), child.resident_bytes()) for child in children]
    yield
    for child, (descriptors, resident) in zip(children, before, strict=True):
        until(lambda: child.descriptors() <= descriptors, f"{child.name} has closed everything")  # noqa: B023
        grown = child.resident_bytes() - resident
        assert grown < MEMORY_BYTES, f"{child.name} has grown by {grown} bytes"


@contextlib.contextmanager
def _many_descriptors() -> Iterator[None]:
    """This test itself holds a connection for each client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * IDLE + 200
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"needs {wanted} descriptors, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
