"""Translations: a record's verdicts for the engine, its complaints for the master, what a log says of both. Pure."""

from typing import NamedTuple, Self, assert_never

from ringfold.errors import DeadlineExceeded
from ringfold.peer.effects import Settle
from ringfold.peer.events import Mismatch, OpCancelled, OpTimedOut
from ringfold.wire import messages
from ringfold.wire.messages import Epoch, GroupId, OpRef, PeerId, Reason, Record, Verdict


class EpochRuns(NamedTuple):
    """What the log says at level debug when an epoch begins to run here: before any op can end in it."""

    group: GroupId
    epoch: Epoch
    fence: int
    ring: tuple[PeerId, ...]

    @classmethod
    def of(cls, record: Record) -> Self:
        return cls(record.group, record.epoch, record.fence, tuple(member.peer for member in record.members))

    def __str__(self) -> str:
        return f"group {self.group}: epoch {self.epoch} (fence {self.fence}) runs here, with ring {list(self.ring)}"


def settlement(before: Record, record: Record) -> Settle:
    """How the ops of the epoch `before` end, by the record that follows it."""
    gone = sorted({member.peer for member in before.members} - {member.peer for member in record.members})
    default = Reason("lost" if gone else "edge", record.reason, gone)
    verdicts = tuple(_with_reason(verdict, default) for verdict in record.verdicts)
    return Settle(record.previous, verdicts, default)


def op_report(
    event: Mismatch | OpTimedOut | OpCancelled,
) -> messages.OpMismatch | messages.OpTimeout | messages.OpCancelled:
    """What the master is told of an op that cannot end well."""
    epoch, op = event.epoch, OpRef(event.tag, event.sequence)
    match event:
        case Mismatch():
            return messages.OpMismatch(epoch, op, event.peer, event.mine, event.theirs)
        case OpTimedOut():
            return messages.OpTimeout(epoch, op, event.waited_ms)
        case OpCancelled():
            return messages.OpCancelled(epoch, op)
        case _:
            assert_never(event)


def join_too_late(
    who: str, waited_ms: int, patience_ms: int, waits: messages.AdmissionWaits | None
) -> DeadlineExceeded:
    """What a program hears that joined in vain: whom its admission waited for, as the master said last."""
    why = "not all peers of the run have called update_topology, or they could not be connected"
    peers: list[PeerId] = []
    if waits is not None:
        why, peers = waits.text, waits.peers
    text = (
        f"join: {who} was not admitted within {waited_ms / 1000:.1f} s: {why}. `steps` calls update_topology between "
        "steps; other programs must call it on all peers. The setting join_timeout_s "
        f"({patience_ms / 1000:.0f} s) says how long to wait while nothing moves"
    )
    return DeadlineExceeded("join", peers, waited_ms, text)


def _with_reason(verdict: Verdict, default: Reason) -> Verdict:
    if verdict.commit or verdict.reason is not None:
        return verdict
    return Verdict(verdict.op, verdict.commit, verdict.registrations, verdict.payloads, default)
