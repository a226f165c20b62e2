"""Peers that send invalid messages, new and returning ones: the master evicts them, and uses nothing of it."""

import pytest
from test_master import MasterHarness as NewRun
from test_master import hello
from test_master_journal import NONCE, TOKEN, MasterHarness, sent, taken_over

from ringfold.master.effects import Effect
from ringfold.master.events import ConnectionOpened, HeartbeatReceived
from ringfold.wire import messages as m
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.frames import Announced, Heartbeat, encode, message_frame
from ringfold.wire.notices import ProbingBroke
from ringfold.wire.probing import ProbeAnswer, RoundAlarm, RoundId
from ringfold.wire.proof import prove
from tests.fuzz.master import MasterRun


def evicted(effects: list[Effect], conn: int) -> list[str]:
    return [each.reason for each in sent(effects, conn) if isinstance(each, m.Evicted)]


@pytest.mark.parametrize("peer", [0, -1, -(1 << 63)])
def test_a_number_that_no_peer_has_is_refused(peer: int) -> None:
    harness, nonce = MasterHarness(), b"1" * 32
    harness.step(ConnectionOpened(1, "host", nonce))
    proof = prove(TOKEN, "resume", nonce, NONCE)
    lie = m.Resume(VERSION, peer, 1, 1, 0, "h", "n", ["10.0.0.1"], 9, NONCE, proof, b"")
    [refused] = [each for each in sent(harness.receive(1, lie)) if isinstance(each, m.Refused)]
    assert "not a peer's number" in refused.reason


def test_a_seal_before_its_time_does_not_count() -> None:
    """It would stay when its sender is gone, and abort ops that others have seen committed."""
    harness = taken_over()
    harness.resume(11, 1)
    [why] = evicted(harness.receive(11, m.Sealed(2, [m.SealedOp(m.OpRef(0, 0), "unfinished", 0, None, bytes(48))])), 11)
    assert "before Returned" in why
    harness.back(12, 2)
    [record] = [
        each
        for each in sent(
            harness.receive(12, m.Sealed(2, [m.SealedOp(m.OpRef(0, 0), "committed", 0, None, bytes(48))])), 12
        )
        if isinstance(each, m.Record)
    ]
    assert [verdict.commit for verdict in record.verdicts] == [True]


def test_a_sync_that_never_existed_excuses_no_peer() -> None:
    harness = taken_over()
    [why] = evicted(harness.back(11, 1, ballot=5, last_sync=m.SyncVoters(1 << 40, {1: 5})), 11)
    assert "there were 4" in why


def test_a_result_is_forwarded_with_those_of_the_other_voters() -> None:
    """The peer that gets it may be the only one left to send it to the next master."""
    harness = taken_over()
    one, two = m.Failure(m.Reason("usage", "one"), {1: 5}), m.Failure(m.Reason("usage", "two"), {2: 9})
    harness.back(11, 1, answers=[m.CallFailed(5, one.reason, one.voters, rest=[two])])
    handed = m.CallFailed(9, two.reason, two.voters, rest=[one])
    assert handed in sent(harness.back(12, 2, ballot=9), 12)


def _watched(harness: NewRun) -> m.Status:
    """What a status request gets now."""
    harness.open(200)
    [status] = harness.receive(200, _status_request(200))
    assert isinstance(status, m.Status)
    return status


def _status_request(conn: int) -> m.StatusRequest:
    return m.StatusRequest(VERSION, NONCE, prove(TOKEN, "status", bytes([conn]) * 32, NONCE))


def test_ops_of_a_peer_that_is_only_registered_are_ignored() -> None:
    """Its heartbeat names the group's newest epoch, in which it is no member: it is out, and the status is rendered."""
    harness = NewRun()
    harness.ring(2)
    harness.join(3)
    harness.step(HeartbeatReceived(3, Heartbeat(1, 0, epoch=2, ops=[Announced(7, 0, 500, 9, False)])))
    assert 3 in harness.closed()
    assert [peer.peer for peer in _watched(harness).peers] == [1, 2]


def test_a_heartbeat_of_a_future_epoch_is_refused() -> None:
    harness = NewRun()
    harness.ring(2)
    harness.step(HeartbeatReceived(1, Heartbeat(1, 0, epoch=3)))
    assert 1 in harness.closed()
    harness.step(HeartbeatReceived(2, Heartbeat(1, 0, epoch=2)))
    assert 2 not in harness.closed()


def test_only_members_have_announced_ops() -> None:
    """Also if a heartbeat was stored before its sender was a member."""
    harness = NewRun()
    harness.ring(2)
    harness.join(3)
    harness.master._run.peers[3].heartbeat = Heartbeat(1, 0, epoch=2, ops=[Announced(7, 0, 500, 9, False)])
    [registered] = [peer for peer in _watched(harness).peers if peer.peer == 3]
    assert registered.ops == []


def test_a_status_that_cannot_be_rendered_costs_only_the_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = NewRun()
    harness.ring(2)
    harness.open(200)
    with monkeypatch.context() as patch:
        patch.setattr("ringfold.master.machine.render_status", lambda *_: {}["missing"])
        [refused] = harness.receive(200, _status_request(200))
    assert isinstance(refused, m.Refused)
    assert "KeyError" in refused.reason
    assert harness.closed() == [200]
    harness.open(201)
    assert isinstance(harness.receive(201, _status_request(201))[0], m.Status)


def test_rounds_that_break_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run does not depend on probing: its peers stay, a request for a round gets the reason, and it is logged."""
    harness = NewRun()
    harness.ring(2)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a fault of the rounds")

    monkeypatch.setattr(harness.master._probing._rounds, "step", broken)
    command = m.ProbeCommand(VERSION, "round", "", NONCE, prove(TOKEN, "probe", bytes([200]) * 32, NONCE))
    harness.open(200)
    [answer] = harness.receive(200, command)
    assert len(harness.notices(ProbingBroke)) == 1
    assert isinstance(answer, ProbeAnswer)
    assert "ZeroDivisionError" in answer.text
    harness.wait(1_000)
    assert [peer.peer for peer in harness.master.status(harness.now).peers] == [1, 2]


def test_a_member_waits_in_one_call_at_a_time() -> None:
    """A second vote while an optimisation has used up the first would begin another one."""
    harness = NewRun()
    harness.ring(2)
    for conn in (1, 2):
        harness.receive(conn, m.Vote(5, "optimize", 2))
    assert harness.master._run.optimisation is not None
    harness.receive(1, m.Vote(6, "optimize", 2))
    assert 1 in harness.closed()
    assert 2 not in harness.closed()


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"name": "n" * 1_025}, "more than 1024 characters"),
        ({"host": "h" * 1_025}, "more than 1024 characters"),
        ({"addresses": ["1" * 1_025]}, "more than 1024 characters"),
        ({"addresses": ["10.0.0.1"] * 65}, "65 addresses"),
        ({"addresses": ["10.0.0.1\x1b[2J"]}, "not printable"),
    ],
)
def test_what_goes_into_every_record_is_short_and_printable(facts: dict[str, object], why: str) -> None:
    """A few thousand such names would make a record that no frame can hold."""
    harness = NewRun()
    harness.open(1)
    [refused] = harness.receive(1, hello(1, **facts))
    assert isinstance(refused, m.Refused)
    assert why in refused.reason


def test_an_alarm_of_a_node_is_accepted() -> None:
    """A peer whose edge strays in the middle of a window sends an alarm, in bytes, and stays in the run."""
    run = MasterRun()
    for step in (["open"], ["claim", 1, encode(hello(1, probes=True)).hex()], ["honest"]):
        run.apply(step)
    alarm = RoundAlarm(RoundId(1, 1), 1, 2, 500_000, 0)
    run.apply(["bytes", 1, message_frame(alarm).hex()])
    assert 1 in run.peers
