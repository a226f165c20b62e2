"""The master on real sockets: it serves, it survives garbage, and it leaves nothing behind."""

import asyncio
import contextlib
import gc
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringfold.errors import ConfigError
from ringfold.master.effects import Effect, Notify
from ringfold.master.events import Event, MessageReceived
from ringfold.master.machine import Master
from ringfold.master.runs import Runs
from ringfold.master.server import MasterServer, MasterThread
from ringfold.master.settings import MasterSettings
from ringfold.probe.logs.files import ExportSettings, ProbeLog
from ringfold.wire.frames import (
    MAX_FRAME_BYTES,
    FrameKind,
    FrameReader,
    Heartbeat,
    decode_from_master,
    decode_master_heartbeat,
    frame,
    heartbeat_frame,
    message_frame,
)
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    Attached,
    Challenge,
    FromMaster,
    Hello,
    Installed,
    Leave,
    Left,
    Message,
    Record,
    Refused,
    Status,
    StatusRequest,
    Welcome,
)
from ringfold.wire.notices import ConnectionDropped, Notice, PeerGone, RoundDone
from ringfold.wire.probing import RoundId, RoundSummary
from ringfold.wire.proof import prove, proven, run_token

TOKEN = b"a token"
LIMIT_S = 20.0


class Client:
    """A blocking connection to a master that speaks the protocol, or does not."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host.strip("[]"), int(port)), LIMIT_S)
        self.reader = FrameReader(MAX_FRAME_BYTES)
        self.frames: list[tuple[FrameKind, bytes]] = []
        self.heartbeats = 0

    def send(self, message: Message) -> None:
        self.socket.sendall(message_frame(message))

    def next_frame(self) -> tuple[FrameKind, bytes] | None:
        """The next frame; None when the master has closed."""
        while not self.frames:
            try:
                chunk = self.socket.recv(65_536)
            except ConnectionResetError:
                return None
            if not chunk:
                return None
            self.frames += self.reader.feed(chunk)
        return self.frames.pop(0)

    def next(self) -> FromMaster | None:
        """The next message. Heartbeats before it are echoed, as a living peer does."""
        while (got := self.next_frame()) is not None:
            kind, body = got
            if kind is FrameKind.MESSAGE:
                return decode_from_master(body)
            self.heartbeats += 1
            self.socket.sendall(heartbeat_frame(Heartbeat(self.heartbeats, decode_master_heartbeat(body)[0])))
        return None

    def expect(self, kind: type[FromMaster]) -> FromMaster:
        while not isinstance(message := self.next(), kind):
            assert message is not None, f"closed before {kind.__name__}"
        return message

    def hello(
        self, token: bytes = TOKEN, version: int = PROTOCOL_VERSION, run: str = "", name: str = "client"
    ) -> Challenge:
        challenge = self.expect(Challenge)
        assert isinstance(challenge, Challenge)
        nonce = b"n" * 32
        proof = prove(token, "hello", challenge.nonce, nonce)
        self.send(Hello(version, 0, "host", name, ["127.0.0.1"], 9, nonce, proof, run=run))
        return challenge

    def join(self, run: str = "") -> None:
        """Join an empty run, and be its only member."""
        token = run_token(TOKEN, run or "default")
        challenge = self.hello(token, run=run)
        welcome = self.expect(Welcome)
        assert isinstance(welcome, Welcome)
        assert proven(token, welcome.proof, "welcome", b"n" * 32, challenge.nonce)
        record = self.expect(Record)
        assert isinstance(record, Record)
        self.send(Attached(record.epoch))
        self.expect(Installed)

    def status(self) -> Status:
        challenge = self.expect(Challenge)
        assert isinstance(challenge, Challenge)
        self.send(StatusRequest(PROTOCOL_VERSION, b"n" * 32, prove(TOKEN, "status", challenge.nonce, b"n" * 32)))
        status = self.expect(Status)
        assert isinstance(status, Status)
        return status

    def live(self) -> None:
        """Answer heartbeats until the master closes."""
        while self.next() is not None:
            pass

    def refusal(self) -> str:
        refused = self.expect(Refused)
        assert isinstance(refused, Refused)
        assert self.next() is None, "a refused connection is closed"
        return refused.reason

    def close(self) -> None:
        self.socket.close()


def wait_for(what: Callable[[], bool]) -> None:
    """Wait until it is so, with a deadline."""
    end = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < end, "it never came"
        threading.Event().wait(0.005)


@contextlib.contextmanager
def a_master(**changed: object) -> Iterator[tuple[MasterThread, list[Notice]]]:
    notices: list[Notice] = []
    settings = MasterSettings(**changed)  # type: ignore[arg-type]
    with MasterThread(settings, token=TOKEN, on_notice=notices.append) as master:
        yield master, notices


def test_a_peer_joins_and_a_watcher_sees_it() -> None:
    with a_master() as (master, _):
        peer, watcher = Client(master.address), Client(master.address)
        peer.join()
        assert [each.state for each in watcher.status().peers] == ["IDLE"]
        peer.close()
        watcher.close()


def test_garbage_is_dropped_with_a_reason_and_a_peer_lives_on() -> None:
    rng = random.Random(7)
    with a_master(handshake_ms=60_000) as (master, notices):
        peer = Client(master.address)
        peer.join()
        alive = threading.Thread(target=peer.live, daemon=True)
        alive.start()

        def throw(garbage: bytes) -> str:
            client = Client(master.address)
            client.socket.sendall(garbage)
            client.expect(Challenge)
            reason = client.refusal()
            client.close()
            return reason

        for _ in range(20):
            # A first byte that makes every length too large: the refusal needs no further bytes.
            throw(rng.randbytes(3) + b"\xff" + rng.randbytes(rng.randrange(2000)))
        assert "limit 16384" in throw(struct.pack("<IB", 1 << 20, 0))
        assert "unknown frame kind" in throw(struct.pack("<IB", 10, 77))
        assert "not a message" in throw(frame(FrameKind.MESSAGE, b"\xc1\xc1"))
        assert "heartbeat" in throw(heartbeat_frame(Heartbeat(1, 0)))
        assert "evidence" in throw(frame(FrameKind.EVIDENCE, b""))
        truncated = Client(master.address)
        truncated.socket.sendall(struct.pack("<IB", 1000, 0) + b"half")
        truncated.close()

        wrong_token, wrong_version = Client(master.address), Client(master.address)
        wrong_token.hello(token=b"wrong")
        assert "token" in wrong_token.refusal()
        wrong_version.hello(version=99)
        assert "version 99" in wrong_version.refusal()
        for client in (wrong_token, wrong_version):
            client.close()

        idle = [Client(master.address) for _ in range(300)]
        wait_for(lambda: sum("not authenticated" in str(each) for each in notices) >= 300 - 256)
        watcher = Client(master.address)
        status = watcher.status()
        assert [(each.phase, each.state) for each in status.peers] == [("PEER_ACCEPTED", "IDLE")]
        assert not status.peers[0].suspected
        assert not [each for each in notices if isinstance(each, PeerGone)]
        assert all(each.remote.startswith("127.0.0.1:") for each in notices if isinstance(each, ConnectionDropped))
        for client in (*idle, watcher):
            client.close()
    alive.join(LIMIT_S)
    peer.close()


def test_a_silent_connection_is_closed_in_time() -> None:
    with a_master(handshake_ms=200) as (master, _):
        client = Client(master.address)
        client.expect(Challenge)
        assert client.next() is None, "closed without a refusal: a client that was only slow may try again"
        client.close()


def test_a_client_that_requests_and_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfold.master.server.MAX_QUEUED_BYTES", 64 * 1024)
    with a_master() as (master, notices):
        peer, deaf = Client(master.address), Client(master.address)
        peer.join()
        challenge = deaf.expect(Challenge)
        assert isinstance(challenge, Challenge)
        proof = prove(TOKEN, "status", challenge.nonce, b"n" * 32)
        request = message_frame(StatusRequest(PROTOCOL_VERSION, b"n" * 32, proof))

        def ask_for_ever() -> None:
            while True:
                deaf.socket.sendall(request * 1000)

        with pytest.raises(ConnectionError):
            ask_for_ever()
        deaf.close()
        assert not [each for each in notices if isinstance(each, PeerGone)]
        peer.close()


def test_nothing_is_left_behind() -> None:
    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    with a_master() as (master, _):
        pass
    files, threads = open_files(), threading.active_count()
    for _ in range(3):
        with a_master() as (master, _):
            clients = [Client(master.address) for _ in range(10)]
            clients[0].join()
            address = master.address
        master.stop()
        for client in clients:
            client.live()
            client.close()
        host, port = address.split(":")
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((host, int(port)), 1)
    assert (open_files(), threading.active_count()) == (files, threads)


def test_the_same_port_can_be_taken_again_at_once() -> None:
    with a_master() as (master, _):
        client = Client(master.address)
        client.join()
        address = master.address
    client.close()
    with MasterThread(listen=[address]) as again:
        assert again.address == address


def test_it_listens_on_several_addresses_and_host_names() -> None:
    with MasterThread(listen=["127.0.0.1:0", "localhost:0"], token=TOKEN) as master:
        assert len(master.addresses) >= 2
        for address in master.addresses:
            client = Client(address)
            client.status()
            client.close()


def test_it_listens_on_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with MasterThread(listen=["[::1]:0"], token=TOKEN) as master:
        assert master.address.startswith("[::1]:")
        client = Client(master.address)
        client.status()
        client.close()


def test_a_public_address_needs_a_token_or_the_insecure_setting() -> None:
    for address in ("0.0.0.0:0", "[::]:0", "some.host:0"):
        with pytest.raises(ConfigError, match=r"reached from other machines, and there is no token: make one with \("):
            MasterServer(MasterSettings(), [address])
        with pytest.raises(ConfigError, match=r"and the token has 15 bytes, fewer than 16: make one with \("):
            MasterServer(MasterSettings(), [address], token=b"t" * 15)
    MasterServer(MasterSettings(), ["0.0.0.0:0"], token=b"t" * 16)
    MasterServer(MasterSettings(), ["127.0.0.1:0"], token=b"t")
    MasterServer(MasterSettings(), ["0.0.0.0:0"], insecure=True)
    with pytest.raises(ConfigError):
        MasterServer(MasterSettings(), [])


def test_a_port_that_is_taken_is_an_error_at_the_start() -> None:
    with a_master() as (master, _), pytest.raises(OSError, match="in use"):
        MasterThread(listen=[master.address])


def test_a_run_that_breaks_ends_alone_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its peers are notified, those of another run notice nothing, and it restarts."""
    step = Master.step

    def fragile(self: Master, now_ns: int, event: Event) -> list[Effect]:
        if isinstance(event, MessageReceived) and isinstance(event.message, Hello) and event.message.name == "breaker":
            raise ZeroDivisionError("planted")
        return step(self, now_ns, event)

    monkeypatch.setattr(Master, "step", fragile)
    with a_master() as (master, _):
        [default, other] = [Client(master.address) for _ in range(2)]
        default.join()
        other.join("other")
        breaker = Client(master.address)
        breaker.hello(name="breaker")
        refused = default.expect(Refused)
        assert isinstance(refused, Refused)
        assert "run default broke in the master: ZeroDivisionError: planted" in refused.reason
        again = Client(master.address)
        while True:
            again.hello()
            reply = again.next()
            if isinstance(reply, Welcome):
                break
            assert isinstance(reply, Refused)
            assert reply.again
            again.close()
            threading.Event().wait(0.05)
            again = Client(master.address)
        while (got := other.next_frame()) is not None and got[0] is not FrameKind.HEARTBEAT:
            assert not isinstance(decode_from_master(got[1]), Refused)
        assert got is not None, "it is still there"
        for client in (default, other, breaker, again):
            client.close()
    assert caplog.text.count("ZeroDivisionError: planted\n") == 1


def test_what_breaks_outside_of_a_run_ends_the_server_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("planted")

    async def serve() -> None:
        server = MasterServer(MasterSettings(), ["127.0.0.1:0"])
        monkeypatch.setattr(Runs, "step", broken)
        async with asyncio.timeout(LIMIT_S):
            await server.serve()

    with pytest.raises(AssertionError, match="planted"):
        asyncio.run(serve())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_connections_open() -> None:
    """A data loader's child that outlives a master must not keep its peers waiting for ever."""
    asleep, wake = os.pipe()
    with a_master() as (master, _):
        client = Client(master.address)
        client.join()
        child = os.fork()
        if child == 0:
            os.close(wake)
            os.read(asleep, 1)
            os._exit(0)
    client.live()
    client.close()
    os.close(wake)
    os.close(asleep)
    assert os.waitpid(child, 0)[1] == 0


def test_a_log_of_rounds_that_fails_does_not_end_the_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk is its own matter; this is whatever else may go wrong in there."""

    def fail(*_: object) -> None:
        raise OverflowError("a number that no line can carry")

    monkeypatch.setattr(ProbeLog, "round", fail)
    server = MasterServer(MasterSettings(export=tmp_path), ["127.0.0.1:0"])
    server._rounds = ProbeLog(ExportSettings(directory=tmp_path))
    summary = RoundSummary(RoundId(1, 1), "master", "", 0, 0, -1, [], [])
    server._execute_one("default", Notify(RoundDone(summary)))
    server._rounds.close()
    assert "no line can carry" in caplog.text


def test_many_frames_at_once_are_all_handled_in_order_and_delay_no_other_client() -> None:
    with a_master() as (master, notices):
        flood, calm = Client(master.address), Client(master.address)
        flood.join()
        calm.join("calm")
        heartbeats = b"".join(heartbeat_frame(Heartbeat(number, 0)) for number in range(1, 20_001))
        flood.socket.sendall(heartbeats + message_frame(Leave()))
        calm.send(Leave())
        calm.expect(Left)
        flood.expect(Left)
        wait_for(lambda: sum(isinstance(notice, PeerGone) and notice.how == "left" for notice in notices) == 2)
        flood.close()
        calm.close()
