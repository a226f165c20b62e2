"""Translations: a record's verdicts for the engine, its complaints for the master, what a log says of both. Pure."""

from typing import NamedTuple, Self, assert_never

from msgspec import structs

from ringfold.errors import DeadlineExceeded
from ringfold.peer.codes import Final, Retry
from ringfold.peer.effects import Settle
from ringfold.peer.events import Mismatch, OpCancelled, OpTimedOut
from ringfold.wire import messages
from ringfold.wire.descriptor import Descriptor
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
    default = _default_reason(before, record)
    return Settle(record.previous, _with_reasons(record, default), default)


def refusals(before: Record, record: Record) -> tuple[Verdict, ...]:
    """The calls of the epoch before that ended without success, and that nobody tries again."""
    verdicts = _with_reasons(record, _default_reason(before, record))
    return tuple(verdict for verdict in verdicts if finality(verdict) is Final.OVER)


def is_admission(before: Record, record: Record) -> bool:
    """Whether somebody is a member of the new record who was in none before. All others wait in `update_topology`."""
    return not {member.peer for member in record.members} <= {member.peer for member in before.members}


def finality(verdict: Verdict) -> Final:
    """Whether a call ended for good without success: its time is over, or it asked for no retry."""
    kind = None if verdict.commit or verdict.reason is None else verdict.reason.kind
    is_single = not verdict.commit and Descriptor.unpack(verdict.descriptor).retry == Retry.NEVER
    return Final.OVER if kind == "deadline" or is_single else Final.NO


def op_report(
    event: Mismatch | OpTimedOut | OpCancelled,
) -> messages.OpMismatch | messages.OpTimeout | messages.OpCancelled:
    """What the master is told of an op that cannot end well."""
    epoch, op = event.epoch, OpRef(event.tag, event.sequence)
    match event:
        case Mismatch():
            return messages.OpMismatch(epoch, op, event.peer, event.mine, event.theirs)
        case OpTimedOut():
            return messages.OpTimeout(epoch, op, event.waited_ms, event.descriptor, event.final)
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


def _default_reason(before: Record, record: Record) -> Reason:
    gone = sorted({member.peer for member in before.members} - {member.peer for member in record.members})
    return Reason("lost" if gone else "edge", record.reason, gone)


def _with_reasons(record: Record, default: Reason) -> tuple[Verdict, ...]:
    return tuple(
        verdict if verdict.commit or verdict.reason is not None else structs.replace(verdict, reason=default)
        for verdict in record.verdicts
    )
