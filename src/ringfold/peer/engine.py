"""The native engine: its commands as types, effects as commands, and its reports as events.

`Commands` is what the sans-I/O core and the engine with sockets have in common; the simulation drives the first, a peer
the second. All commands are cheap and never block, except where their docstring says so. The session of a peer and the
simulation both use `execute` and `event_of`, so the simulation runs the production translation.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, assert_never, cast

import msgspec
from numpy import ndarray

from ringfold._native import (
    EngineEvent,
    EpochSpec,
    LaneInfo,
    LanePromotion,
    OpAtSeal,
    OpRequest,
    OpResult,
    OpVerdict,
)
from ringfold.peer.codes import Final, OpStatus
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
    ResumeReading,
    SealEngine,
    SendMessage,
    SetRegistrations,
    Settle,
)
from ringfold.peer.events import (
    Accepted,
    BlocksReceived,
    Closed,
    EngineInstalled,
    EngineSealed,
    Event,
    LinkLost,
    MessageReceived,
    OpCancelled,
    Opened,
    OpMismatched,
    OpTimedOut,
    Sampled,
    Silent,
)
from ringfold.wire import frames
from ringfold.wire.descriptor import Descriptor, fingerprint
from ringfold.wire.messages import OpRef, OpState, Reason, SealedOp, Verdict

Array = ndarray[Any, Any]
RawBlock = tuple[Array, int, int, int | None]
"""memory (uint8, one dimension, contiguous), offset, length, and the rf64 hash that the content should have"""

FIXED = 1 << 16
"""Among the flags of `set_path_shares`: the shares bind over whole transfers. Below it is one veto bit per path."""


class Commands(Protocol):
    """The commands that carry out the machine's effects."""

    def send(self, conn: int, body: bytes) -> None: ...
    def resume(self, conn: int) -> None: ...
    def make_control(self, conn: int, heartbeat_ms: int, dead_after_ms: int) -> None: ...
    def promote(self, lane: LanePromotion) -> None: ...
    def close(self, conn: int, reason: str) -> None: ...
    def lanes(self) -> list[LaneInfo]: ...
    def set_registrations(self, count: int) -> None: ...
    def seal(self, epoch: int) -> list[OpAtSeal]: ...
    def settle(self, epoch: int, verdicts: list[OpVerdict], default_reason: bytes) -> None: ...
    def refuse(self, tag: int, step: int, call: int, reason: bytes) -> None:
        """This call fails, even if it has not been made here yet."""

    def set_step(self, step: int) -> None:
        """The program begins this step (2**64 - 1: it is outside of any): calls are counted from 0 again."""

    def restart_calls(self) -> None:
        """Peers were admitted: all members count their calls from 0 again."""

    def install(self, epoch: EpochSpec) -> None: ...
    def fail_all(self, status: int, reason: bytes) -> None: ...
    def progress(self) -> list[tuple[int, int]]: ...
    def set_path_shares(self, peer: int, shares: Sequence[int], flags: int = 0) -> None:
        """Set the path shares towards a neighbour, from the next segment on. Shares (out of 65535) hold for the first
        segments of an op; with `FIXED` each path carries its share of all bytes. A path whose bit is set in `flags`
        gets nothing while another one is up. Without shares and flags lanes just pull."""

    def path_bytes(self, to_next: bool) -> list[int]:
        """Bytes of payload given to each path of a link since the epoch began."""

    # Bulk connections. Commands for one that is gone are ignored.

    def make_bulk(self, conn: int) -> None:
        """The handshake is over: the connection carries messages, blocks and filler from now on."""

    def send_blocks(self, conn: int, blocks: Sequence[RawBlock]) -> list[int]:
        """Queue blocks, straight from their memory. If some have another hash by now, none is sent, and the indices of
        those are returned. The arrays are kept until the blocks are sent or the connection is gone; a change of their
        content in the meantime is sent, too."""

    def expect_blocks(self, conn: int, batch: int, blocks: Sequence[RawBlock]) -> None:
        """The next blocks on the connection are these, in this order, and go straight into their memory. The event
        `blocks` comes when all are in: `bad` are the indices of those with another hash. Several batches may be
        expected. When the connection is lost, they are forgotten before `closed` is reported, and their memory is
        written no more."""

    def fill(self, conn: int, on: bool) -> None:
        """Send filler whenever there is nothing else to send; messages and blocks go before it."""

    def sample(self, conn: int, every_ns: int) -> None:
        """From the first filler on, report the event `sample` so often (0: stop). Its times count from that first
        filler; `received_bytes` are the bytes that arrived after it until `counted_ns`, the last moment at which
        something had arrived and nothing was left to read."""


class Engine(Commands, Protocol):
    """The engine with sockets and a thread of its own."""

    def listen(self, host: str, first_port: int, tries: int) -> int: ...
    def listen_here(self) -> str:
        """Listen for peers of this host, which can share memory; the name to dial, or "" where that is impossible."""

    def dial(
        self, host: str, port: int, timeout_ms: int, source: str = "", name: str = "", carries_little: bool = False
    ) -> int: ...
    def start_guardian(self, program: str, master: int, message: str) -> bool:
        """Start a process that sends the message (in hex) over the connection when this process dies; False if it
        cannot be started."""

    def next_event(self, timeout_s: float) -> EngineEvent | None:
        """Block without the GIL until there is an event, or until the timeout."""

    def wake(self) -> None: ...
    def follow_hints(self, peer: int, file: str, slot: int, generation: int) -> None:
        """Read the host agent's hint about the paths to this neighbour at this place of its file, before each segment.
        There is no hint while the agent is silent or the place belongs to another flow."""

    def forget_hints(self, peer: int) -> None: ...
    def path_rates(self, peer: int) -> list[int]:
        """Bytes per second acknowledged on each path to the next member while it was busy; 0: not in the last second.
        To the previous member too little is sent for a rate, so it is always 0."""

    def path_rtts(self, peer: int) -> list[tuple[int, int]]:
        """The smoothed and the minimum RTT on each path to a neighbour, in microseconds; 0: none was measured in the
        last second."""

    def submit(self, request: OpRequest) -> int:
        """Begin an op that the engine's own thread drives; its number."""

    def collective(self, request: OpRequest) -> OpResult:
        """Submit, and drive the engine from this thread until the op ended."""

    def all_reduce(self, array: Array, dtype: int, reduce_op: int, tag: int, retry: int, timeout_ns: int) -> OpResult:
        """`collective` for one array in place, for the hot path."""

    def run_op(self, op: int) -> OpResult:
        """Drive the engine from this thread until the op ended, and forget the op."""

    def wait_op(self, op: int, timeout_s: float) -> bool:
        """Block without the GIL until the op has ended (True), or until the timeout."""

    def poll(self, op: int) -> OpResult | None: ...
    def tags_in_flight(self) -> list[int]:
        """The tags of all ops that have not ended, including those that another thread drives."""

    def cancel(self, op: int) -> bool:
        """Cancel an op. False if it may be committed elsewhere already, so that its end must be waited for."""

    def release(self, op: int) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def set_report(self, report: bytes) -> None:
        """What the next heartbeat carries at its end, and the first one to every new master: a `Progress`."""

    def ended_ops(self, since: int) -> tuple[int, bytes]:
        """The number of the next op that ends, and those from number `since` on that are still known, packed as
        `recording.OpEntry`."""

    def shutdown(self) -> None: ...
    def before_fork(self) -> None:
        """Stop the engine until one of the next two is called in each of the two processes."""

    def forked_parent(self) -> None: ...
    def forked_child(self) -> None: ...


def new_engine(spin_us: int, congestion: str = "auto") -> Engine:
    """A new engine without sockets. `congestion` is the congestion control of its lanes, as in the setting."""
    native = importlib.import_module("ringfold._native")
    return cast(Engine, native.Engine(spin_us=spin_us, congestion=congestion))


_reasons = msgspec.msgpack.Decoder(Reason)
_STATES: tuple[OpState, ...] = ("unfinished", "done", "committed")


def execute(engine: Commands, effect: EngineEffect) -> EngineInstalled | EngineSealed | None:
    """Give the engine the command of `effect`; return its response, if it has one."""
    match effect:
        case SendMessage(conn, message):
            engine.send(conn, frames.encode(message))
        case ResumeReading(conn):
            engine.resume(conn)
        case MakeControl(conn, heartbeat_ms, dead_after_ms):
            engine.make_control(conn, heartbeat_ms, dead_after_ms)
        case Promote():
            engine.promote(_lane(effect))
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
            return EngineSealed(epoch, tuple(_sealed_op(op) for op in engine.seal(epoch)))
        case Settle(epoch, verdicts, default_reason):
            engine.settle(epoch, [_verdict(verdict) for verdict in verdicts], encode_reason(default_reason))
        case RefuseCalls(verdicts):
            for verdict in verdicts:
                op = Descriptor.unpack(verdict.descriptor)
                assert verdict.reason is not None
                engine.refuse(verdict.op.tag, op.step, op.call, encode_reason(verdict.reason))
        case RestartCalls():
            engine.restart_calls()
        case Install():
            engine.install(_epoch(effect))
            return EngineInstalled(effect.epoch, tuple(lane.conn for lane in engine.lanes() if lane.in_memory))
        case FailAll(reason):
            engine.fail_all(OpStatus.FAILED, encode_reason(reason))
        case _:
            assert_never(effect)
    return None


def event_of(engine: Commands, event: EngineEvent, nonce: Callable[[], bytes]) -> Event | None:
    """The peer machine's event for an event of the engine; None for a wake-up."""
    match event.kind:
        case "opened":
            return Opened(event.conn, nonce())
        case "accepted":
            return Accepted(event.conn, event.text, nonce())
        case "message":
            return MessageReceived(event.conn, event.body)
        case "closed":
            return Closed(event.conn, event.text)
        case "link_lost":
            lanes = [lane for lane in engine.lanes() if (lane.peer, lane.direct) == (event.peer, event.direct)]
            left = tuple(lane.conn for lane in lanes if event.direct or lane.outgoing == event.outgoing)
            return LinkLost(event.peer, event.outgoing, event.text, left, event.died, event.direct)
        case "mismatch":
            op = (event.epoch, event.tag, event.sequence)
            return OpMismatched(event.peer, *op, event.descriptor, event.other_descriptor)
        case "op_timeout":
            return OpTimedOut(event.epoch, event.tag, event.sequence, event.waited_ms, event.descriptor)
        case "op_cancelled":
            return OpCancelled(event.epoch, event.tag, event.sequence)
        case "blocks":
            return BlocksReceived(event.conn, event.batch, tuple(event.bad))
        case "sample":
            return Sampled(event.conn, event.elapsed_ns, event.counted_ns, event.received_bytes)
        case "silent":
            return Silent(event.conn, event.waited_ms)
        case "wake":
            return None
    raise AssertionError(f"the engine reports {event!r}")


def encode_reason(reason: Reason) -> bytes:
    return msgspec.msgpack.encode(reason)


def decode_reason(raw: bytes) -> Reason:
    """A reason that this process passed to the engine, which returns it with the result of an op."""
    return _reasons.decode(raw) if raw else Reason("lost", "the op was aborted")


def _sealed_op(op: OpAtSeal) -> SealedOp:
    return SealedOp(OpRef(op.tag, op.sequence), _STATES[op.state], op.registrations, op.payloads, op.descriptor)


def _verdict(verdict: Verdict) -> OpVerdict:
    return OpVerdict(
        tag=verdict.op.tag,
        sequence=verdict.op.sequence,
        fingerprint=fingerprint(verdict.descriptor),
        commit=verdict.commit,
        registrations=verdict.registrations,
        payloads=verdict.payloads,
        final=Final.of(verdict),
        reason=b"" if verdict.reason is None else encode_reason(verdict.reason),
    )


def _lane(effect: Promote) -> LanePromotion:
    return LanePromotion(
        conn=effect.conn,
        outgoing=effect.outgoing,
        peer=effect.peer,
        lane=effect.lane,
        shared=effect.shared,
        path=effect.path,
        paths=effect.paths,
        epoch=effect.epoch,
        channel=effect.channel,
        direct=effect.direct,
    )


def _epoch(effect: Install) -> EpochSpec:
    return EpochSpec(
        epoch=effect.epoch,
        rank=effect.rank,
        members=effect.members,
        evidence_by_master=effect.evidence_by_master,
        small_bytes=effect.small_bytes,
        segment_bytes=effect.segment_bytes,
        peers_here=effect.peers_here,
        multipath=effect.multipath,
        channels=effect.channels,
        direct=effect.direct,
        hosts=effect.hosts,
    )
