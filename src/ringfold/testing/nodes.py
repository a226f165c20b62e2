"""The simulated master process: the production machine, and a shell that moves bytes over the simulated network.

The shell does what `ringfold.master`'s server does with sockets: frames in, frames out, a tick every 50 ms. The peer's
process is in `peers.py`.
"""

from typing import TYPE_CHECKING, assert_never

import msgspec

from ringfold.errors import RemoteProtocolError
from ringfold.master.events import (
    Beat,
    Close,
    Closed,
    DoneSeen,
    Effect,
    Event,
    Malformed,
    MoonshotFound,
    Opened,
    Piece,
    Received,
    Send,
    SendBeat,
    SendEvidence,
    StartMoonshot,
    Tell,
    Tick,
    Trust,
)
from ringfold.master.machine import Master
from ringfold.testing.network import End
from ringfold.testing.scheduler import MS
from ringfold.topology.moonshot import Question, answer
from ringfold.wire.events import EpochInstalled, EpochRecorded, LinksMeasured, PeerGone, RingChosen, SyncBegun
from ringfold.wire.frames import (
    MAX_FRAME_BYTES,
    FrameKind,
    FrameReader,
    decode_done,
    decode_heartbeat,
    decode_to_master,
    evidence_frame,
    master_beat,
    message_frame,
)
from ringfold.wire.messages import Message, Record, SyncDone, SyncPlan
from ringfold.wire.proof import NONCE_BYTES

if TYPE_CHECKING:
    from ringfold.testing.simulation import Simulation

MASTER_PORT = 48148
TICK_NS = 50 * MS
SEARCH_BUDGET = 200


class _Control:
    """One connection at the master: what is being read, and what waits to be sent."""

    __slots__ = ("closing", "end", "out", "reader")

    def __init__(self, end: End) -> None:
        self.end = end
        self.reader = FrameReader()
        self.out = bytearray()
        self.closing = False


class SimMaster:
    """A process that runs the production master machine."""

    def __init__(self, sim: "Simulation", machine: Master) -> None:
        self.sim, self.machine = sim, machine
        self.name = "master"
        self.host = sim.network.add_host(self.name, self)
        self.host.listening.add(MASTER_PORT)
        self._conns: dict[int, _Control] = {}
        self._ticking = True
        sim.scheduler.after(TICK_NS, self._tick)

    # What the network calls

    def accepted(self, end: End) -> None:
        self._conns[end.id] = _Control(end)
        self._step(Opened(end.id, end.remote.name, self.sim.rng.randbytes(NONCE_BYTES)))

    def opened(self, end: End) -> None:
        raise AssertionError("the master dials nobody")

    def received(self, end: End, chunk: bytes) -> None:
        control = self._conns.get(end.id)
        if control is None or control.closing:
            return
        try:
            for kind, body in control.reader.feed(chunk):
                self._step(_event(end.id, kind, body))
                if control.closing:
                    return
            if control.reader.is_inside:
                self._step(Piece(end.id))
        except RemoteProtocolError as error:
            self._step(Malformed(end.id, str(error)))

    def writable(self, end: End) -> None:
        control = self._conns.get(end.id)
        if control is not None:
            self._flush(control)

    def lost(self, end: End, reason: str) -> None:
        control = self._conns.pop(end.id, None)
        if control is not None and not control.closing:
            self._step(Closed(end.id, reason))

    def woken(self) -> None:
        for control in list(self._conns.values()):
            self._flush(control)
        if not self._ticking:
            self._ticking = True
            self.sim.scheduler.after(self.sim.rng.randint(0, MS), self._tick)

    # Inside

    def _tick(self) -> None:
        if self.host.frozen:
            self._ticking = False
            return
        self._step(Tick())
        self.sim.scheduler.after(TICK_NS, self._tick)

    def _step(self, event: Event) -> None:
        for effect in self.machine.step(self.sim.scheduler.now, event):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(conn, message):
                if self.sim.verbose:
                    self.sim.note(self.name, f"to {self._whom(conn)}: {message}")
                self._watch(conn, message)
                self._send(conn, message_frame(message))
            case SendBeat(conn, number, echo):
                self._send(conn, master_beat(number, echo))
            case SendEvidence(conns, evidence):
                frame = evidence_frame(evidence)
                for conn in conns:
                    self._send(conn, frame)
            case Close(conn, reason):
                self.sim.note(self.name, f"closes {self._whom(conn)}: {reason}")
                control = self._conns.get(conn)
                if control is not None:
                    control.closing = True
                    self._flush(control)
            case Trust(conn):
                if conn in self._conns:
                    self._conns[conn].reader.limit = MAX_FRAME_BYTES
            case Tell(notice):
                self.sim.note(self.name, str(notice))
                if isinstance(notice, EpochRecorded):
                    self.sim.epochs += 1
                elif isinstance(notice, EpochInstalled):
                    self.sim.installed += 1
                elif isinstance(notice, RingChosen):
                    self.sim.rings["kept" if notice.kept else "better"] += 1
                elif isinstance(notice, LinksMeasured):
                    self.sim.rings["with links that could not be measured"] += bool(notice.failed)
                elif isinstance(notice, PeerGone):
                    self.sim.syncs.gone(self.sim.scheduler.now, notice.peer, notice.how)
                elif isinstance(notice, SyncBegun):
                    self.sim.syncs.all_planned(notice.sync)
                    self.sim.sync_begins(notice.holders, notice.receivers)
            case StartMoonshot(group, question):
                self.sim.scheduler.after(MS, self._search, group, question)
            case _:
                assert_never(effect)

    def _watch(self, conn: int, message: Message) -> None:
        """Let checkers and faults know what the master says about members and syncs."""
        control = self._conns.get(conn)
        if control is None or not isinstance(message, SyncPlan | SyncDone | Record):
            return
        peer = self.sim.by_name[control.end.remote.name]
        match message:
            case SyncPlan():
                self.sim.syncs.planned(peer.peer, message)
            case SyncDone():
                self.sim.syncs.done(peer.peer, message)
            case Record(members=members, newcomers=newcomers):
                self.sim.syncs.recorded(peer.group, [member.peer for member in members])
                if newcomers and len(newcomers) < len(members):
                    self.sim.admission_begins([member.name for member in members if member.peer in newcomers])

    def _search(self, group: int, question: Question) -> None:
        """The long search, as short as a test can afford."""
        found = answer(msgspec.structs.replace(question, budget=SEARCH_BUDGET))
        if found.solution is not None and not self.host.frozen:
            self._step(MoonshotFound(group, found.solution))

    def _send(self, conn: int, frame: bytes) -> None:
        control = self._conns.get(conn)
        if control is not None and not control.closing:
            control.out += frame
            self._flush(control)

    def _flush(self, control: _Control) -> None:
        end = control.end
        take = min(end.room, len(control.out))
        if take:
            self.sim.network.send(end, bytes(control.out[:take]))
            del control.out[:take]
        if control.out:
            end.starved = True
        elif control.closing:
            self._conns.pop(end.id, None)
            self.sim.network.close(end)

    def _whom(self, conn: int) -> str:
        control = self._conns.get(conn)
        return f"{control.end.remote.name}#{conn}" if control else f"#{conn}"


def _event(conn: int, kind: FrameKind, body: bytes) -> Event:
    match kind:
        case FrameKind.MESSAGE:
            return Received(conn, decode_to_master(body))
        case FrameKind.HEARTBEAT:
            return Beat(conn, decode_heartbeat(body))
        case FrameKind.DONE:
            return DoneSeen(conn, decode_done(body))
        case FrameKind.EVIDENCE:
            raise RemoteProtocolError("evidence comes from the master only")
