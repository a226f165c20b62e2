"""Peers that come back and lie: the master evicts them, goes on, and believes nothing of what they said."""

import pytest

from ringfold.master.events import Effect, Opened
from ringfold.wire import messages as m
from ringfold.wire.proof import prove
from tests.unit.test_master_journal import NONCE, TOKEN, Stage, sent, taken_over


def evicted(effects: list[Effect], conn: int) -> list[str]:
    return [each.reason for each in sent(effects, conn) if isinstance(each, m.Evicted)]


@pytest.mark.parametrize("peer", [0, -1, -(1 << 63)])
def test_a_number_that_no_peer_has_is_refused(peer: int) -> None:
    stage, nonce = Stage(), b"1" * 32
    stage.step(Opened(1, "host", nonce))
    proof = prove(TOKEN, "resume", nonce, NONCE)
    lie = m.Resume(1, peer, 1, 1, 0, "h", "n", ["10.0.0.1"], 9, NONCE, proof, b"")
    [refused] = [each for each in sent(stage.say(1, lie)) if isinstance(each, m.Refused)]
    assert "no peer's number" in refused.reason


def test_a_seal_before_its_time_does_not_count() -> None:
    """It would stay when its sender is gone, and abort ops that others have seen committed."""
    stage = taken_over()
    stage.resume(11, 1)
    [why] = evicted(stage.say(11, m.Sealed(2, [m.SealedOp(m.OpRef(0, 0), "unfinished", 0)])), 11)
    assert "brings along" in why
    stage.back(12, 2)
    [record] = [
        each
        for each in sent(stage.say(12, m.Sealed(2, [m.SealedOp(m.OpRef(0, 0), "committed", 0)])), 12)
        if isinstance(each, m.Record)
    ]
    assert [verdict.commit for verdict in record.verdicts] == [True]


def test_a_sync_that_never_was_excuses_nobody() -> None:
    stage = taken_over()
    [why] = evicted(stage.back(11, 1, ballot=5, last_sync=m.SyncVoters(1 << 40, {1: 5})), 11)
    assert "there were 4" in why


def test_an_answer_is_handed_on_with_what_the_other_voters_were_told() -> None:
    """Who gets it may be the only one who is left to show it to the master after this one."""
    stage = taken_over()
    one, two = m.Failure(m.Reason("usage", "one"), {1: 5}), m.Failure(m.Reason("usage", "two"), {2: 9})
    stage.back(11, 1, answers=[m.CallFailed(5, one.reason, one.voters, rest=[two])])
    handed = m.CallFailed(9, two.reason, two.voters, rest=[one])
    assert handed in sent(stage.back(12, 2, ballot=9), 12)
