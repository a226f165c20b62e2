"""What no master can mean is refused before the peer's machine takes a step."""

import pytest
from msgspec.structs import replace
from test_peer_machine import CONTROL, MASTER_NONCE, ME, NONCE, TOKEN, Peer, joining, record, registered

from ringfold.config import SETTINGS
from ringfold.errors import RemoteProtocolError
from ringfold.peer.control import decode_from_master
from ringfold.peer.effects import CloseConn, Effect, Ended
from ringfold.peer.events import Opened
from ringfold.wire import messages as m
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.frames import encode
from ringfold.wire.proof import prove

MEMBER = m.Member(1, "n", "h", ["10.0.0.1"], 9)
WELCOME = m.Welcome(5, 1, b"", m.Liveness())
RECORD = record(1, [ME, 6])
PLAN = m.SyncPlan(1, 1, 1, b"", [MEMBER], [])
MEASURE = m.Measure(1, MEMBER, True, b"", 1_000)
OP = m.Verdict(m.OpRef(0, 0), commit=False, descriptor=bytes(48))


@pytest.mark.parametrize("message", [WELCOME, RECORD, PLAN, MEASURE, m.Seal(1, ""), m.Registrations(0)])
def test_what_a_master_sends_is_let_through(message: m.FromMaster) -> None:
    assert decode_from_master(encode(message)) == message


def test_the_highest_settings_of_a_master_are_let_through() -> None:
    """The limits here are there for what cannot be meant, not for what is merely large."""
    high = {setting.name: setting.high for setting in SETTINGS.values()}
    longest = m.Liveness(int(high["heartbeat_ms"]), int(high["suspect_after_ms"]), int(high["evict_after_ms"]))
    decode_from_master(encode(replace(WELCOME, liveness=longest)))
    small = 4 * int(high["small_bytes"])
    large = replace(RECORD, lanes=int(high["lanes"]), small_bytes=small, segment_bytes=int(high["segment_bytes"]))
    decode_from_master(encode(large))


@pytest.mark.parametrize(
    "message",
    [
        replace(WELCOME, peer=0),
        replace(WELCOME, fence=-1),
        replace(WELCOME, liveness=m.Liveness(heartbeat_ms=0)),
        replace(WELCOME, liveness=m.Liveness(evict_after_ms=2**40)),
        m.Resumed(-1, b"", m.Liveness()),
        m.Resumed(2**63, b"", m.Liveness()),
        m.Seal(2**32, ""),
        m.Seal(-1, ""),
        m.Installed(2**32, m.World()),
        m.Registrations(-1),
        replace(RECORD, epoch=2**32),
        replace(RECORD, previous=1),
        replace(RECORD, members=[]),
        replace(RECORD, members=[RECORD.members[0]] * 2),
        replace(RECORD, dialers=[ME]),
        replace(RECORD, dialers=[ME, 9]),
        replace(RECORD, lanes=0),
        replace(RECORD, lanes=2**31),
        replace(RECORD, channels=0),
        replace(RECORD, channels=-1, lanes=-1),
        replace(RECORD, channels=17),
        replace(RECORD, channels=16, lanes=17),
        replace(RECORD, segment_bytes=0),
        replace(RECORD, small_bytes=-1),
        replace(RECORD, registrations=-1),
        replace(RECORD, verdicts=[replace(OP, op=m.OpRef(-1, 0))]),
        replace(RECORD, verdicts=[replace(OP, op=m.OpRef(0, 2**32))]),
        replace(RECORD, members=[replace(RECORD.members[0], port=0), RECORD.members[1]]),
        replace(RECORD, members=[replace(RECORD.members[0], paths=2), RECORD.members[1]]),
        replace(PLAN, sync=-1),
        replace(PLAN, holders=[MEMBER, MEMBER]),
        replace(MEASURE, most_ms=0),
        replace(MEASURE, other=replace(MEMBER, port=2**16)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_no_master_can_mean_is_a_protocol_error(message: m.FromMaster) -> None:
    with pytest.raises(RemoteProtocolError, match=type(message).__name__):
        decode_from_master(encode(message))


def _ended(effects: list[Effect]) -> list[Ended]:
    return [each for each in effects if isinstance(each, Ended)]


def test_a_ring_without_its_dialers_ends_the_session_and_not_its_thread() -> None:
    peer = registered()
    [ended] = _ended(peer.receives(CONTROL, replace(RECORD, dialers=[])))
    assert "its dialers are not ends of its edges" in str(ended.error)


def test_a_welcome_that_cannot_be_meant_counts_as_a_failed_try() -> None:
    """It proves nothing: the next master may be the right one."""
    peer = Peer()
    joining(peer)
    peer.step(Opened(CONTROL, NONCE))
    peer.receives(CONTROL, m.Challenge(MASTER_NONCE, VERSION, VERSION))
    proof = prove(TOKEN, "welcome", NONCE, MASTER_NONCE)
    effects = peer.receives(CONTROL, m.Welcome(ME, 1, proof, m.Liveness(heartbeat_ms=0)))
    assert not _ended(effects)
    assert any(isinstance(each, CloseConn) for each in effects)
