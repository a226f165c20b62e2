"""What a master sends, decoded and checked before the machine takes a step. Pure checks, no state.

A master that has proven the token is believed in what it decides, not in what no master can mean: an epoch that does
not fit its field in a frame, a ring without its dialers, a heartbeat every zero milliseconds. What follows from such a
message would fail in the engine, after the machine has changed its state.
"""

from collections.abc import Sequence

from ringfold.errors import RemoteProtocolError
from ringfold.topology.ring import edges_of
from ringfold.wire import frames, messages
from ringfold.wire.decoding import checked
from ringfold.wire.messages import MAX_PATHS, FromMaster, Liveness, Measure, Member, Record, Resumed, SyncPlan, Welcome

_I31, _U32, _U63, _U64 = 1 << 31, 1 << 32, 1 << 63, 1 << 64
MAX_MEMBERS = 65_535
MAX_LANES = 4_096
"""Of one link: far more than the setting `lanes` allows."""
MAX_MEASURE_MS = 3_600_000
MAX_EVICT_MS = 24 * 3_600_000
"""Far more than the setting allows; a peer waits a few times as long, and the engine counts that in 31 bits."""


def decode_from_master(body: bytes) -> FromMaster:
    """The message; RemoteProtocolError if it is none, or none that a master sends."""
    message = frames.decode_from_master(body)
    if (fault := checked(fault_of, message)) is not None:
        raise RemoteProtocolError(f"{type(message).__name__}: {fault}")
    return message


def fault_of(message: FromMaster) -> str | None:
    """What is wrong with the message by itself, whatever the state; None if nothing is."""
    match message:
        case Welcome(peer=peer, fence=fence, liveness=liveness):
            if not 0 < peer < _U63:
                return f"{peer} is no peer's number"
            return _fence_fault(fence) or _liveness_fault(liveness)
        case Resumed(fence=fence, liveness=liveness):
            return _fence_fault(fence) or _liveness_fault(liveness)
        case Record():
            return _record_fault(message)
        case messages.Seal(epoch=epoch) | messages.Installed(epoch=epoch):
            return None if 0 <= epoch < _U32 else f"there is no epoch {epoch}"
        case messages.Registrations(count=count):
            return None if 0 <= count < _U63 else f"there are no {count} registrations"
        case SyncPlan():
            return _plan_fault(message)
        case Measure(test=test, other=other, most_ms=most_ms):
            if not 0 <= test < _U63 or not 0 < most_ms <= MAX_MEASURE_MS:
                return f"measurement {test} for {most_ms} ms"
            return _members_fault([other])
        case _:
            return None


def _fence_fault(fence: int) -> str | None:
    return None if 0 <= fence < _U63 else f"there is no fence {fence}"


def _liveness_fault(liveness: Liveness) -> str | None:
    if 0 < liveness.heartbeat_ms < liveness.evict_after_ms <= MAX_EVICT_MS:
        return None
    return f"a heartbeat every {liveness.heartbeat_ms} ms, and eviction after {liveness.evict_after_ms} ms"


def _record_fault(record: Record) -> str | None:
    if not 0 < record.epoch < _U32 or not 0 <= record.previous < record.epoch:
        return f"epoch {record.epoch} after epoch {record.previous}"
    if not 0 < len(record.members) <= MAX_MEMBERS:
        return f"{len(record.members)} members"
    if (fault := _members_fault(record.members)) is not None:
        return fault
    edges = edges_of([member.peer for member in record.members])
    if len(record.dialers) != len(edges) or any(
        dialer not in edge for dialer, edge in zip(record.dialers, edges, strict=True)
    ):
        return "its dialers are not ends of its edges"
    if not 0 < record.lanes <= MAX_LANES // MAX_PATHS:
        return f"{record.lanes} lanes"
    if not (0 <= record.small_bytes < _I31 and 0 < record.segment_bytes < _I31):
        return f"small ops up to {record.small_bytes} bytes, segments of {record.segment_bytes}"
    if not 0 <= record.registrations < _U63:
        return f"{record.registrations} registrations"
    for verdict in record.verdicts:
        op = verdict.op
        if not (0 <= op.tag < _U64 and 0 <= op.sequence < _U32 and 0 <= verdict.registrations < _U63):
            return f"a verdict about tag {op.tag} sequence {op.sequence}"
        if len(verdict.descriptor) != frames.DESCRIPTOR_BYTES:
            return f"a verdict about an op with a descriptor of {len(verdict.descriptor)} bytes"
    return _fence_fault(record.fence)


def _plan_fault(plan: SyncPlan) -> str | None:
    if not (0 <= plan.sync < _U63 and 0 <= plan.revision < _U63):
        return f"sync {plan.sync} of revision {plan.revision}"
    return _members_fault(plan.holders) or _members_fault(plan.receivers)


def _members_fault(members: Sequence[Member]) -> str | None:
    if len({member.peer for member in members}) < len(members):
        return "a member comes twice"
    for member in members:
        if not 0 < member.peer < _U63 or not 0 < member.port < 1 << 16:
            return f"peer {member.peer} at port {member.port}"
        if not 0 < member.paths <= MAX_PATHS or (member.paths > 1 and len(member.addresses) < member.paths):
            return f"peer {member.peer} has {member.paths} paths over {len(member.addresses)} addresses"
    return None
