"""The simulated master process: the production machine, and a shell that moves bytes over the simulated network.

The shell does what `ringfold.master`'s server does with sockets: frames in, frames out, a tick every 50 ms. The peer's
process is in `peers.py`.
"""

from itertools import permutations
from random import Random
from typing import TYPE_CHECKING, assert_never

import msgspec

from ringfold.config import DEFAULT_RUN
from ringfold.errors import RemoteProtocolError
from ringfold.master.effects import (
    CloseConnection,
    Effect,
    Notify,
    RaiseFrameLimit,
    RecordEvents,
    ReportBrokenRun,
    SendEvents,
    SendEvidence,
    SendHeartbeat,
    SendMessage,
    StartMoonshot,
    WriteJournal,
    WriteLinks,
)
from ringfold.master.events import (
    ConnectionClosed,
    ConnectionOpened,
    DoneReceived,
    Event,
    FramePartReceived,
    HeartbeatReceived,
    MalformedReceived,
    MessageReceived,
    MoonshotFinished,
    Tick,
)
from ringfold.master.journal import Outbox, encode
from ringfold.master.machine import Master
from ringfold.master.runs import Runs
from ringfold.master.topology import FOUND_BY_SEARCH
from ringfold.testing.checks import Violation
from ringfold.testing.masters import LEASE_MS, SimStore, lead_later
from ringfold.testing.network import End
from ringfold.testing.scheduler import MS
from ringfold.testing.stalling import judge_stall
from ringfold.topology.moonshot import MoonshotRequest, solve
from ringfold.topology.ring import edges_of
from ringfold.topology.solve import Solution
from ringfold.wire.frames import (
    MAX_FRAME_BYTES,
    FrameKind,
    FrameReader,
    decode_done,
    decode_heartbeat,
    decode_to_master,
    evidence_frame,
    master_heartbeat,
    message_frame,
)
from ringfold.wire.messages import Message, Record, SyncDone, SyncPlan
from ringfold.wire.notices import (
    EpochInstalled,
    EpochRecorded,
    LinksMeasured,
    PeerGone,
    PeersStalled,
    RingChosen,
    SyncBegun,
)
from ringfold.wire.proof import NONCE_BYTES

if TYPE_CHECKING:
    from ringfold.testing.peers import SimPeer
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
    """A process that runs the production master machines."""

    outbox_type = Outbox

    def __init__(
        self, sim: "Simulation", runs: Runs, fence: int = 1, name: str = "master", store: SimStore | None = None
    ) -> None:
        self.sim, self.runs, self.fence = sim, runs, fence
        self.name = name
        self.host = sim.network.add_host(self.name, self)
        self.host.listening.add(MASTER_PORT)
        self.is_over = False
        self._store = store
        self._versions = {} if store is None else {run: store.version(run) for run in store.journals}
        self._outboxes: dict[str, Outbox] = {}
        self._learned: list[tuple[str, int | None]] = []
        """What the store answered while the process was frozen."""
        self._doomed: tuple[str, int, float] | None = None
        self._conns: dict[int, _Control] = {}
        self._watched: dict[str, list[Effect]] = {}
        self._names: dict[int, str] = {}
        """The other end, also when it is gone."""
        self._ticking = True
        self._last_tick = sim.scheduler.now
        sim.scheduler.after(TICK_NS, self._tick)

    @property
    def machine(self) -> Master:
        """That of the default run."""
        machine = self.runs.machine_of(DEFAULT_RUN)
        assert machine is not None
        return machine

    def raise_fences(self) -> None:
        """Begin to write the fence of a new leader into every journal."""
        for run, journal in self.runs.first_journals().items():
            self._carry_out_all(run, self._outbox(run).put([WriteJournal(journal)]))
            self._write(run)

    # What the network calls

    def accepted(self, end: End) -> None:
        self._conns[end.id] = _Control(end)
        self._names[end.id] = end.remote.name
        self._step(ConnectionOpened(end.id, end.remote.name, self.sim.rng.randbytes(NONCE_BYTES)))

    def opened(self, end: End) -> None:
        raise AssertionError("the master never dials")

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
                self._step(FramePartReceived(end.id))
        except RemoteProtocolError as error:
            self._step(MalformedReceived(end.id, str(error)))

    def writable(self, end: End) -> None:
        control = self._conns.get(end.id)
        if control is not None:
            self._flush(control)

    def lost(self, end: End, reason: str) -> None:
        control = self._conns.pop(end.id, None)
        if control is not None and not control.closing:
            self._step(ConnectionClosed(end.id, reason))

    def woken(self) -> None:
        if self._slept_too_long():
            self._lost_lease()
            return
        learned, self._learned = self._learned, []
        for run, version in learned:
            self.sim.scheduler.after(self.sim.rng.randint(0, MS), self._learn, run, version)
        for control in list(self._conns.values()):
            self._flush(control)
        if not self._ticking:
            self._ticking = True
            self.sim.scheduler.after(self.sim.rng.randint(0, MS), self._tick)

    # Inside

    def _tick(self) -> None:
        if self.is_over:
            return
        if self.host.frozen:
            self._ticking = False
            return
        self._last_tick = self.sim.scheduler.now
        self._step(Tick())
        if self._store is not None and self._store.fence > self.fence and self.sim.rng.random() < 0.2:
            self.die("finds that its lease is lost")
            return
        self.sim.scheduler.after(TICK_NS, self._tick)

    def _step(self, event: Event) -> None:
        if self.is_over:
            return
        for run, effects in self.runs.step(self.sim.scheduler.now, event):
            for effect in effects:
                if isinstance(effect, Notify) and isinstance(effect.notice, PeersStalled):
                    judge_stall(self.sim, run, effect.notice)
            if run:
                self._carry_out_all(run, self._outbox(run).put(effects))
                self._write(run)
            else:
                self._carry_out_all(run, effects)

    def _outbox(self, run: str) -> Outbox:
        return self._outboxes.setdefault(run, self.outbox_type())

    def _carry_out_all(self, run: str, effects: list[Effect]) -> None:
        watched = self._watched.get(run, [])
        for effect in effects:
            if watched and watched[0] is effect:
                del watched[0]
            elif not self.is_over:
                self._watch(run, effect)
            if not self.is_over:
                self._carry_out(run, effect)

    # The journal

    def _write(self, run: str) -> None:
        journal = None if self.is_over else self._outbox(run).begin()
        if journal is not None:
            delay = self.sim.rng.randint(*self.sim.setup.write_us) * 1_000
            self.sim.scheduler.after(delay, self._apply, run, encode(journal))

    def _apply(self, run: str, raw: bytes) -> None:
        """The write reaches the store, unless the process died before."""
        if self.is_over:
            return
        assert self._store is not None
        version = self._store.write(run, self._versions.get(run, 0), raw)
        if version is not None:
            for effect in self._outbox(run).covered():
                self._watch(run, effect)  # it is decided now, whether or not it is ever sent
                self._watched.setdefault(run, []).append(effect)
        self.sim.scheduler.after(self.sim.rng.randint(*self.sim.setup.write_us) * 1_000, self._learn, run, version)

    def _learn(self, run: str, version: int | None) -> None:
        """The store's answer."""
        if self.is_over:
            return
        if self.host.frozen:
            self._learned.append((run, version))
        elif version is None:
            self.die(f"cannot write the journal of {run}: it is deposed")
            assert self._store is not None
            if self._store.fence == self.fence:
                # The one before it wrote once more, after this one had read: it leads no run, and tries again.
                lead_later(self.sim, self.sim.rng.uniform(1, 50))
        else:
            self._versions[run] = version
            self._carry_out_all(run, self._outbox(run).written())
            self._write(run)

    # Its end

    def die(self, how: str) -> None:
        """The process ends, and all its connections with it."""
        if not self.is_over:
            self.is_over = True
            self.host.frozen = False
            self.sim.note(self.name, how)
            self.sim.network.kill(self.host)

    def _slept_too_long(self) -> bool:
        """Whether it must not decide any more, by its own clock. It may not notice that another master leads."""
        if self._store is None or self.sim.scheduler.now - self._last_tick <= LEASE_MS * MS:
            return False
        return self._store.fence == self.fence or self.sim.rng.random() < 0.5

    def _lost_lease(self) -> None:
        """It slept through its lease: another master leads, or it starts again."""
        self.die("has lost its lease")
        lead_later(self.sim, self.sim.rng.uniform(1, 50))

    def doom(self, message: str, count: int, lead_ms: float) -> None:
        """Die right after so many more messages of this kind."""
        self._doomed = message, count, lead_ms

    def _meet_doom(self, message: Message) -> None:
        if self._doomed is None or type(message).__name__ != self._doomed[0]:
            return
        kind, count, lead_ms = self._doomed
        self._doomed = kind, count - 1, lead_ms
        if count <= 1:
            self.die(f"is killed after a {kind}")
            lead_later(self.sim, lead_ms)

    def _carry_out(self, run: str, effect: Effect) -> None:
        match effect:
            case SendMessage(conn, message):
                self._check_apart(run, conn, message)
                if self.sim.verbose:
                    self.sim.note(self.name, f"to {self._target_name(conn)}: {message}")
                is_admission = isinstance(message, Record) and 0 < len(message.newcomers) < len(message.members)
                if is_admission and isinstance(message, Record) and run == DEFAULT_RUN:
                    new = [member.name for member in message.members if member.peer in message.newcomers]
                    self.sim.admission_begins(new)
                self._send(conn, message_frame(message))
                self._meet_doom(message)
            case SendHeartbeat(conn, number, echo):
                self._send(conn, master_heartbeat(number, echo))
            case SendEvidence(conns, evidence):
                frame = evidence_frame(evidence)
                for conn in conns:
                    self._send(conn, frame)
            case CloseConnection(conn, reason):
                self.sim.note(self.name, f"closes {self._target_name(conn)}: {reason}")
                control = self._conns.get(conn)
                if control is not None:
                    control.closing = True
                    self._flush(control)
            case RaiseFrameLimit(conn):
                if conn in self._conns:
                    self._conns[conn].reader.limit = MAX_FRAME_BYTES
            case Notify(notice):
                self.sim.note(self.name, str(notice))
                if isinstance(notice, EpochRecorded):
                    self.sim.epochs += 1
                elif isinstance(notice, EpochInstalled):
                    self.sim.installed += 1
                elif isinstance(notice, RingChosen):
                    self.sim.rings["kept" if notice.kept else "better"] += 1
                    self.sim.rings["found by a search"] += notice.reason == FOUND_BY_SEARCH
                elif isinstance(notice, LinksMeasured):
                    self.sim.rings["with links that could not be measured"] += bool(notice.failed)
                elif isinstance(notice, SyncBegun) and run == DEFAULT_RUN:
                    self.sim.sync_begins(notice.holders, notice.receivers)
            case RecordEvents() | SendEvents():
                pass  # nobody looks at events here
            case WriteLinks(raw):
                if self._store is not None:
                    self._store.links[run] = raw
            case WriteJournal():
                raise AssertionError("the outbox keeps these")
            case ReportBrokenRun(error):
                raise error
            case StartMoonshot(group, question):
                self.sim.scheduler.after(MS, self._search, run, group, question)
            case _:
                assert_never(effect)

    def _check_apart(self, run: str, conn: int, message: Message) -> None:
        """What a run sends reaches its own peers only, and names no others."""
        known = self.sim.by_name.get(self._names.get(conn, ""))
        if not run or known is None:
            return
        # An address has one process, and a name may have had several.
        named = [member.addresses[0] for member in message.members] if isinstance(message, Record) else []
        for peer in (known, *(self.sim.by_name[address] for address in named)):
            if peer.run != run:
                what = type(message).__name__
                raise Violation(f"{peer.name} is of run {peer.run}, and run {run} has a {what} with or for it")

    def _watch(self, run: str, effect: Effect) -> None:
        """Pass what the master decides about members and syncs to the checkers at once."""
        book = self.sim.book(run or DEFAULT_RUN)
        syncs = book.syncs
        match effect:
            case SendMessage(conn, SyncPlan() as plan):
                syncs.planned(self._peer(conn).peer, plan)
            case SendMessage(conn, SyncDone() as done):
                syncs.done(self._peer(conn).peer, done)
            case SendMessage(conn, Record(members=members, epoch=epoch)):
                peer, ring = self._peer(conn), [member.peer for member in members]
                book.history.recorded(peer.peer, peer.group, epoch, ring)
                syncs.recorded(peer.group, ring)
            case Notify(PeerGone(peer, _, how)):
                syncs.gone(self.sim.scheduler.now, peer, how)
            case Notify(SyncBegun(sync=sync)):
                syncs.all_planned(sync)

    def _peer(self, conn: int) -> "SimPeer":
        return self.sim.by_name[self._names[conn]]

    def _search(self, run: str, group: int, question: MoonshotRequest) -> None:
        """The long search, as short as a test can afford."""
        found = solve(msgspec.structs.replace(question, budget=SEARCH_BUDGET))
        if found.solution is not None and not self.host.frozen:
            self._step(MoonshotFinished(group, found.solution, run))

    def find_rings(self, rng: Random) -> None:
        """A search finds a better ring for each group: the links of that ring turn out to be the fastest ones."""
        if self.is_over or self.host.frozen or not self.host.alive or self.runs.machine_of(DEFAULT_RUN) is None:
            return
        run, now = self.machine._run, self.sim.scheduler.now
        for group in sorted(run.groups.values(), key=lambda group: group.id):
            if len(group.ring) < 3:
                continue
            ring = rng.sample(group.ring, len(group.ring))
            for edge in permutations(group.ring, 2):
                run.links.measured(edge, 2e6 if edge in edges_of(ring) else 1e6, 100, now)
            found = Solution(tuple(ring), 2e6, 0.0, 0.0, 2e6, exact=False, kept=False, reason="found")
            self._step(MoonshotFinished(group.id, found, DEFAULT_RUN))

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

    def _target_name(self, conn: int) -> str:
        control = self._conns.get(conn)
        return f"{control.end.remote.name}#{conn}" if control else f"#{conn}"


def _event(conn: int, kind: FrameKind, body: bytes) -> Event:
    match kind:
        case FrameKind.MESSAGE:
            return MessageReceived(conn, decode_to_master(body))
        case FrameKind.HEARTBEAT:
            return HeartbeatReceived(conn, decode_heartbeat(body))
        case FrameKind.DONE:
            return DoneReceived(conn, decode_done(body))
        case FrameKind.EVIDENCE:
            raise RemoteProtocolError("evidence comes from the master only")
