"""Guardians: who may open a connection for one, and what the master makes of what it sends, and of its end."""

import pytest
from msgspec import structs
from test_master_journal import NONCE, TOKEN, MasterHarness, pair, sent, taken_over
from test_master_runs import MasterHarness as RunsHarness

from ringfold.master.effects import CloseConnection, Effect, Notify
from ringfold.master.events import (
    ConnectionClosed,
    ConnectionOpened,
    HeartbeatReceived,
    MalformedReceived,
    MessageReceived,
)
from ringfold.wire import messages as m
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.frames import Heartbeat
from ringfold.wire.notices import ConnectionDropped, PeerGone
from ringfold.wire.proof import prove, proven

SAW = "its process has died, as its guardian saw"


def hello_of(conn: int, peer: int, control: int, token: bytes = TOKEN) -> m.GuardianHello:
    """What peer `peer`, whose control connection is `control`, sends on connection `conn`."""
    nonce, key = bytes([conn]) * 32, bytes([control]) * 32 + NONCE
    proofs = prove(token, "guardian", nonce, NONCE), prove(key, "guarded", nonce, NONCE)
    return m.GuardianHello(VERSION, peer, NONCE, *proofs)


def guard(harness: MasterHarness, conn: int, peer: int, control: int | None = None) -> list[Effect]:
    harness.step(ConnectionOpened(conn, "host", bytes([conn]) * 32))
    return harness.receive(conn, hello_of(conn, peer, control or peer))


def guarded_pair() -> MasterHarness:
    """Peers 1 and 2 in epoch 2; connection 12 is that of peer 2's guardian."""
    harness = pair()
    guard(harness, 12, 2)
    return harness


def gone(effects: list[Effect]) -> list[tuple[int, str]]:
    notices = [each.notice for each in effects if isinstance(each, Notify)]
    return [(each.peer, each.reason) for each in notices if isinstance(each, PeerGone)]


def refused(effects: list[Effect], conn: int) -> str:
    [refusal] = [each for each in sent(effects, conn) if isinstance(each, m.Refused)]
    assert any(isinstance(each, CloseConnection) and each.conn == conn for each in effects)
    assert not gone(effects)
    return refusal.reason


def test_a_guardian_is_welcomed_with_a_proof() -> None:
    [welcome] = sent(guard(pair(), 12, 2))
    assert isinstance(welcome, m.GuardianWelcome)
    assert proven(TOKEN, welcome.proof, "guardian welcome", NONCE, bytes([12]) * 32)


def test_a_peer_that_has_died_is_lost_at_once() -> None:
    harness = guarded_pair()
    effects = harness.receive(12, m.PeerDied())
    assert gone(effects) == [(2, SAW)]
    assert [each.conn for each in effects if isinstance(each, CloseConnection)] == [2, 12]
    assert any(isinstance(each, m.Seal) and "died" in str(each.reason) for each in sent(effects, 1))
    assert not gone(harness.step(ConnectionClosed(2, "")))


def test_a_peer_that_is_not_admitted_yet_is_lost_as_well() -> None:
    harness = pair()
    harness.join(3)
    guard(harness, 13, 3)
    assert gone(harness.receive(13, m.PeerDied())) == [(3, SAW)]


def test_the_end_of_a_guardian_means_nothing_and_another_may_take_its_place() -> None:
    harness = guarded_pair()
    assert not harness.step(ConnectionClosed(12, "reset"))
    [welcome] = sent(guard(harness, 13, 2))
    assert isinstance(welcome, m.GuardianWelcome)


def test_a_guardian_is_not_idle_and_gets_no_heartbeats() -> None:
    harness = pair()
    harness.join(3)
    guard(harness, 13, 3)
    for _ in range(20):
        for conn in (1, 2, 3):
            harness.step(HeartbeatReceived(conn, Heartbeat(0, 0)))
        effects = harness.wait(4_000)
    assert not any(isinstance(each, CloseConnection) and each.conn == 13 for each in effects)


@pytest.mark.parametrize("how", ["left", "closed", "evicted"])
def test_the_guardian_of_a_peer_that_is_gone_is_let_go(how: str) -> None:
    harness = pair()
    harness.join(3)
    guard(harness, 13, 3)
    if how == "left":
        effects = harness.receive(3, m.Leave())
    elif how == "closed":
        effects = harness.step(ConnectionClosed(3, ""))
    else:
        effects = harness.step(MalformedReceived(3, "garbage"))
    assert any(isinstance(each, CloseConnection) and each.conn == 13 for each in effects)
    assert not harness.receive(13, m.PeerDied())


def test_a_second_guardian_is_refused() -> None:
    assert refused(guard(guarded_pair(), 13, 2), 13) == "peer 2 has a guardian already"


@pytest.mark.parametrize("peer", [0, -1, 3, 1 << 70])
def test_a_guardian_of_an_unknown_peer_is_refused(peer: int) -> None:
    assert "which is not here" in refused(guard(pair(), 12, peer, 2), 12)


def test_a_guardian_of_another_peer_or_of_an_earlier_connection_is_refused() -> None:
    assert "has not started" in refused(guard(pair(), 12, 2, control=1), 12)


def test_a_guardian_without_the_token_is_refused() -> None:
    harness = pair()
    harness.step(ConnectionOpened(12, "host", bytes([12]) * 32))
    assert "wrong token" in refused(harness.receive(12, hello_of(12, 2, 2, b"another")), 12)


@pytest.mark.parametrize("message", [m.Leave(), hello_of(12, 2, 2), m.Vote(1, "update", 2)])
def test_a_guardian_that_sends_something_else_is_dropped_and_its_peer_stays(message: m.ToMaster) -> None:
    effects = guarded_pair().receive(12, message)
    assert refused(effects, 12) == f"{type(message).__name__} from a guardian"
    assert any(isinstance(each, Notify) and isinstance(each.notice, ConnectionDropped) for each in effects)


def test_a_guardian_that_sends_garbage_or_a_heartbeat_is_dropped_and_its_peer_stays() -> None:
    assert refused(guarded_pair().step(MalformedReceived(12, "a frame of 4 GB")), 12) == "a frame of 4 GB"
    assert "heartbeat" in refused(guarded_pair().step(HeartbeatReceived(12, Heartbeat(0, 0))), 12)


@pytest.mark.parametrize("conn", [1, 9])
def test_only_a_guardian_reports_a_death(conn: int) -> None:
    harness = pair()
    harness.step(ConnectionOpened(9, "host", bytes([9]) * 32))
    effects = harness.receive(conn, m.PeerDied())
    if conn == 9:
        assert "PeerDied where Hello" in refused(effects, 9)
    else:
        assert gone(effects) == [(1, "PeerDied from a peer that has joined")]


def test_at_a_new_master_only_the_guardian_of_the_resumed_connection_counts() -> None:
    harness = taken_over()
    harness.back(21, 1)
    harness.resume(22, 2)
    assert "has not started" in refused(guard(harness, 31, 2), 31), "proven with the old control connection"
    guard(harness, 32, 2, control=22)
    assert gone(harness.receive(32, m.PeerDied())) == [(2, SAW)], "before it has returned"
    assert harness.master.info().away == 0


def test_a_peer_that_fails_to_return_takes_its_guardian_along() -> None:
    harness = taken_over()
    harness.resume(22, 2)
    guard(harness, 32, 2, control=22)
    effects = harness.step(ConnectionClosed(22, ""))
    assert [each.conn for each in effects if isinstance(each, CloseConnection)] == [32]
    harness.resume(23, 2)
    guard(harness, 33, 2, control=23)
    assert gone(harness.receive(33, m.PeerDied())) == [(2, SAW)]


def test_a_guardian_makes_no_run() -> None:
    harness = RunsHarness()
    harness.step(ConnectionOpened(1, "host", bytes([1]) * 32))
    before = harness.runs.names
    wanted = structs.replace(hello_of(1, 1, 1), run="nightly")
    effects = harness.step(MessageReceived(1, wanted))
    assert any("there is no run nightly" in str(effect) for _, effect in effects)
    assert harness.runs.names == before
