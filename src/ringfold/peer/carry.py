"""Between the machine and the engine: an effect becomes a command, a report becomes an event.

The peer's session and the simulation both use this file, so that what is simulated is what runs.
"""

from collections.abc import Callable
from typing import assert_never

import msgspec

from ringfold.peer.codes import OpStatus
from ringfold.peer.effects import (
    CloseConn,
    EngineEffect,
    FailAll,
    Fill,
    Install,
    MakeBulk,
    MakeControl,
    Promote,
    RefuseCalls,
    RestartCalls,
    Resume,
    SealEngine,
    SendMessage,
    SetRegistrations,
    Settle,
)
from ringfold.peer.engine import Commands, RawEvent, RawSealedOp, RawVerdict
from ringfold.peer.events import (
    Accepted,
    BlocksReceived,
    Closed,
    EngineSealed,
    Event,
    LinkLost,
    MessageReceived,
    Mismatch,
    OpCancelled,
    Opened,
    OpTimedOut,
    Sampled,
    Silent,
)
from ringfold.peer.reports import finality
from ringfold.wire import frames
from ringfold.wire.descriptor import Descriptor, fingerprint
from ringfold.wire.messages import OpRef, OpState, Reason, SealedOp, Verdict

_reasons = msgspec.msgpack.Decoder(Reason)
_STATES: tuple[OpState, ...] = ("unfinished", "done", "committed")


def command(engine: Commands, effect: EngineEffect) -> EngineSealed | None:
    """Give the engine the command of `effect`; return the event that answers it, where there is one."""
    match effect:
        case SendMessage(conn, message):
            engine.send(conn, frames.encode(message))
        case Resume(conn):
            engine.resume(conn)
        case MakeControl(conn, heartbeat_ms, dead_after_ms):
            engine.make_control(conn, heartbeat_ms, dead_after_ms)
        case Promote(conn, outgoing, peer, lane, shared, path, paths, epoch):
            engine.promote(conn, outgoing, peer, lane, shared, path, paths, epoch)
        case MakeBulk(conn):
            engine.make_bulk(conn)
        case Fill(conn, on, sample_ns):
            engine.fill(conn, on)
            engine.sample(conn, sample_ns)
        case CloseConn(conn, reason):
            engine.close(conn, reason)
        case SetRegistrations(count):
            engine.set_registrations(count)
        case SealEngine(epoch):
            return EngineSealed(epoch, tuple(_sealed_op(raw) for raw in engine.seal(epoch)))
        case Settle(epoch, verdicts, default_reason):
            engine.settle(epoch, [_raw_verdict(verdict) for verdict in verdicts], encode_reason(default_reason))
        case RefuseCalls(verdicts):
            for verdict in verdicts:
                op = Descriptor.unpack(verdict.descriptor)
                assert verdict.reason is not None
                engine.refuse(verdict.op.tag, op.step, op.call, encode_reason(verdict.reason))
        case RestartCalls():
            engine.restart_calls()
        case Install():
            engine.install(
                effect.epoch,
                effect.rank,
                len(effect.members),
                list(effect.members),
                effect.evidence_by_master,
                effect.small_bytes,
                effect.segment_bytes,
                effect.peers_here,
                effect.multipath,
            )
        case FailAll(reason):
            engine.fail_all(OpStatus.FAILED, encode_reason(reason))
        case _:
            assert_never(effect)
    return None


def event_of(engine: Commands, raw: RawEvent, nonce: Callable[[], bytes]) -> Event | None:
    """The event that an engine's report is; None for a mere wake-up."""
    match raw:
        case ("opened", conn):
            return Opened(conn, nonce())
        case ("accepted", conn, remote):
            return Accepted(conn, remote, nonce())
        case ("message", conn, body):
            return MessageReceived(conn, body)
        case ("closed", conn, reason):
            return Closed(conn, reason)
        case ("link_lost", peer, outgoing, reason):
            lanes = [lane for lane in engine.lanes() if lane[1:3] == (outgoing, peer)]
            return LinkLost(peer, outgoing, reason, tuple(lane[0] for lane in lanes))
        case ("mismatch", peer, epoch, tag, sequence, mine, theirs):
            return Mismatch(peer, epoch, tag, sequence, mine, theirs)
        case ("op_timeout", epoch, tag, sequence, waited_ms, descriptor):
            return OpTimedOut(epoch, tag, sequence, waited_ms, descriptor)
        case ("op_cancelled", epoch, tag, sequence):
            return OpCancelled(epoch, tag, sequence)
        case ("blocks", conn, batch, bad):
            return BlocksReceived(conn, batch, tuple(bad))
        case ("sample", conn, elapsed_ns, counted_ns, received):
            return Sampled(conn, elapsed_ns, counted_ns, received)
        case ("silent", conn, silent_ms):
            return Silent(conn, silent_ms)
        case ("wake",):
            return None
    raise AssertionError(f"the engine reports {raw!r}")


def encode_reason(reason: Reason) -> bytes:
    return msgspec.msgpack.encode(reason)


def decode_reason(raw: bytes) -> Reason:
    """A reason that this process gave the engine and gets back with an op's result."""
    return _reasons.decode(raw) if raw else Reason("lost", "the op was aborted")


def _sealed_op(raw: RawSealedOp) -> SealedOp:
    tag, sequence, state, registrations, payloads, descriptor = raw
    return SealedOp(OpRef(tag, sequence), _STATES[state], registrations, payloads, descriptor)


def _raw_verdict(verdict: Verdict) -> RawVerdict:
    told = b"" if verdict.reason is None else encode_reason(verdict.reason)
    op, called, final = verdict.op, fingerprint(verdict.descriptor), finality(verdict)
    return (op.tag, op.sequence, called, verdict.commit, verdict.registrations, verdict.payloads, final, told)
