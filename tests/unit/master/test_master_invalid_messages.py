"""Peers that send invalid messages, new and returning ones: the master evicts them, and uses nothing of it."""

import pytest
from test_master import Stage as NewRun
from test_master import hello
from test_master_journal import NONCE, TOKEN, Stage, sent, taken_over

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
    stage, nonce = Stage(), b"1" * 32
    stage.step(ConnectionOpened(1, "host", nonce))
    proof = prove(TOKEN, "resume", nonce, NONCE)
    lie = m.Resume(VERSION, peer, 1, 1, 0, "h", "n", ["10.0.0.1"], 9, NONCE, proof, b"")
    [refused] = [each for each in sent(stage.say(1, lie)) if isinstance(each, m.Refused)]
    assert "not a peer's number" in refused.reason


def test_a_seal_before_its_time_does_not_count() -> None:
    """It would stay when its sender is gone, and abort ops that others have seen committed."""
    stage = taken_over()
    stage.resume(11, 1)
    [why] = evicted(stage.say(11, m.Sealed(2, [m.SealedOp(m.OpRef(0, 0), "unfinished", 0, None, bytes(48))])), 11)
    assert "before Returned" in why
    stage.back(12, 2)
    [record] = [
        each
        for each in sent(stage.say(12, m.Sealed(2, [m.SealedOp(m.OpRef(0, 0), "committed", 0, None, bytes(48))])), 12)
        if isinstance(each, m.Record)
    ]
    assert [verdict.commit for verdict in record.verdicts] == [True]


def test_a_sync_that_never_existed_excuses_no_peer() -> None:
    stage = taken_over()
    [why] = evicted(stage.back(11, 1, ballot=5, last_sync=m.SyncVoters(1 << 40, {1: 5})), 11)
    assert "there were 4" in why


def test_a_result_is_forwarded_with_those_of_the_other_voters() -> None:
    """The peer that gets it may be the only one left to send it to the next master."""
    stage = taken_over()
    one, two = m.Failure(m.Reason("usage", "one"), {1: 5}), m.Failure(m.Reason("usage", "two"), {2: 9})
    stage.back(11, 1, answers=[m.CallFailed(5, one.reason, one.voters, rest=[two])])
    handed = m.CallFailed(9, two.reason, two.voters, rest=[one])
    assert handed in sent(stage.back(12, 2, ballot=9), 12)


def _watched(stage: NewRun) -> m.Status:
    """What a status request gets now."""
    stage.open(200)
    [status] = stage.say(200, _look(200))
    assert isinstance(status, m.Status)
    return status


def _look(conn: int) -> m.StatusRequest:
    return m.StatusRequest(VERSION, NONCE, prove(TOKEN, "status", bytes([conn]) * 32, NONCE))


def test_ops_of_a_peer_that_is_only_registered_are_ignored() -> None:
    """Its heartbeat names the group's newest epoch, in which it is no member: it is out, and the status is rendered."""
    stage = NewRun()
    stage.ring(2)
    stage.join(3)
    stage.step(HeartbeatReceived(3, Heartbeat(1, 0, epoch=2, ops=[Announced(7, 0, 500, 9, False)])))
    assert 3 in stage.closed()
    assert [peer.peer for peer in _watched(stage).peers] == [1, 2]


def test_a_heartbeat_of_a_future_epoch_is_refused() -> None:
    stage = NewRun()
    stage.ring(2)
    stage.step(HeartbeatReceived(1, Heartbeat(1, 0, epoch=3)))
    assert 1 in stage.closed()
    stage.step(HeartbeatReceived(2, Heartbeat(1, 0, epoch=2)))
    assert 2 not in stage.closed()


def test_only_members_have_announced_ops() -> None:
    """Also if a heartbeat was stored before its sender was a member."""
    stage = NewRun()
    stage.ring(2)
    stage.join(3)
    stage.master._run.peers[3].heartbeat = Heartbeat(1, 0, epoch=2, ops=[Announced(7, 0, 500, 9, False)])
    [registered] = [peer for peer in _watched(stage).peers if peer.peer == 3]
    assert registered.ops == []


def test_a_status_that_cannot_be_rendered_costs_only_the_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = NewRun()
    stage.ring(2)
    stage.open(200)
    with monkeypatch.context() as patch:
        patch.setattr("ringfold.master.machine.render_status", lambda *_: {}["missing"])
        [refused] = stage.say(200, _look(200))
    assert isinstance(refused, m.Refused)
    assert "KeyError" in refused.reason
    assert stage.closed() == [200]
    stage.open(201)
    assert isinstance(stage.say(201, _look(201))[0], m.Status)


def test_rounds_that_break_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run does not depend on probing: its peers stay, a request for a round gets the reason, and it is logged."""
    stage = NewRun()
    stage.ring(2)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a fault of the rounds")

    monkeypatch.setattr(stage.master._probing._rounds, "step", broken)
    command = m.ProbeCommand(VERSION, "round", "", NONCE, prove(TOKEN, "probe", bytes([200]) * 32, NONCE))
    stage.open(200)
    [answer] = stage.say(200, command)
    assert len(stage.notices(ProbingBroke)) == 1
    assert isinstance(answer, ProbeAnswer)
    assert "ZeroDivisionError" in answer.text
    stage.wait(1_000)
    assert [peer.peer for peer in stage.master.status(stage.now).peers] == [1, 2]


def test_a_member_waits_in_one_call_at_a_time() -> None:
    """A second vote while an optimisation has used up the first would begin another one."""
    stage = NewRun()
    stage.ring(2)
    for conn in (1, 2):
        stage.say(conn, m.Vote(5, "optimize", 2))
    assert stage.master._run.optimisation is not None
    stage.say(1, m.Vote(6, "optimize", 2))
    assert 1 in stage.closed()
    assert 2 not in stage.closed()


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
    stage = NewRun()
    stage.open(1)
    [refused] = stage.say(1, hello(1, **facts))
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
