"""The peer's machine in any state, under any message on any of its connections.

The driver stands for the shell, the engine and the master of a peer: it answers dials, seals and handshakes, and knows
the secrets that a script may prove. Steps are plain lists, as in `master.py`.
"""

from random import Random
from typing import Any, get_args

import msgspec
import numpy as np

from ringfold.errors import RingfoldError
from ringfold.peer.effects import (
    CallFinished,
    CloseConn,
    Dial,
    Effect,
    Ended,
    ExpectBlocks,
    FailAll,
    Fill,
    Install,
    Joined,
    MakeBulk,
    MakeControl,
    Notify,
    Promote,
    SealEngine,
    SendBlocks,
    SendMessage,
    SetRegistrations,
    Settle,
    WriteBlocks,
)
from ringfold.peer.events import (
    Accepted,
    BlocksChanged,
    BlocksReceived,
    BlocksWritten,
    CallGivenUp,
    CallJoin,
    CallLeave,
    CallVote,
    Closed,
    DialFailed,
    Dialled,
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
    Tick,
)
from ringfold.peer.machine import PeerMachine
from ringfold.peer.outcome import error_of
from ringfold.peer.settings import Identity, PeerTimings
from ringfold.peer.states import ControlState
from ringfold.state.shared import SharedState
from ringfold.state.snapshot import Snapshot
from ringfold.wire import messages as m
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.frames import MAX_FRAME_BYTES, encode
from ringfold.wire.messages import BlocksWanted, BulkMessage, Hashes, HashesWanted, Have, Reason
from ringfold.wire.proof import prove
from tests.fuzz.values import Values, damaged

MS = 1_000_000
TOKEN, SECRET, MEMBER_SECRET = b"a token", b"epoch secret", b"member secret"
MASTER_NONCE = b"m" * 32
ME = 2
U16, U32, U63, U64 = 1 << 16, 1 << 32, 1 << 63, 1 << 64
MAX_TICKS = 200
"""How many ticks in a row may come at one instant: more means a machine that never waits."""
Step = list[Any]
ENDING = {m.Challenge, m.Refused, m.Welcome, m.Resumed, m.Evicted, m.Left, m.Status, m.NodeWelcome, m.ProbeAnswer}
NOT_ENDING = sorted(set(get_args(m.FromMaster)) - ENDING, key=lambda kind: kind.__name__)
"""The messages of a master to a peer that stays a member."""


def nonce_of(conn: int) -> bytes:
    return bytes([conn % 256]) * 32


class PeerRun:
    """A peer, its connections, and what its master has sent."""

    def __init__(self) -> None:
        identity = Identity(group=0, host="h", name="n", addresses=("10.0.0.2",), port=48149, token=TOKEN, probes=True)
        self.machine = PeerMachine(identity, PeerTimings())
        self.now, self.last_conn, self.epoch, self.ballot, self.fence = 0, 0, 0, 0, 1
        self.conns: dict[int, str] = {}
        """What each connection is at the engine: dialled, opened, accepted, control, lane, bulk."""
        self.hellos: dict[int, m.Message] = {}
        """The last message that the peer sent on it."""
        self.expected: dict[int, list[tuple[int, int]]] = {}
        self.counted: dict[int, tuple[int, int]] = {}
        self.others = [1, 3, 4]
        self.arrays = {"a": np.zeros(64, np.uint8), "b": np.ones(5, np.float32)}
        self.other_arrays = {"a": np.ones(64, np.uint8), "b": np.zeros(5, np.float32)}
        """What the others have."""

    # The shell and the engine

    def step(self, event: Event) -> None:
        for effect in self.machine.step(self.now, event):
            self._check(effect)
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Dial(key, host, port, timeout_ms, _):
                # As the engine does: a host that is no IP literal, or an invalid port, is refused at once.
                if not host.replace(".", "").isdigit() or not 0 < port < U16 or not 0 < timeout_ms < 1 << 31:
                    self.step(DialFailed(key, "no address"))
                    return
                self.last_conn += 1
                self.conns[self.last_conn] = "dialled"
                self.step(Dialled(key, self.last_conn))
            case CloseConn(conn, _):
                self.conns.pop(conn, None)
            case SendMessage(conn, message):
                self.hellos[conn] = message
            case SealEngine(epoch):
                self.step(EngineSealed(epoch, ()))
            case MakeControl(conn):
                self.conns[conn] = "control"
            case Promote(conn):
                self.conns[conn] = "lane"
            case MakeBulk(conn):
                self.conns[conn] = "bulk"
            case ExpectBlocks(conn, batch, blocks):
                self.expected.setdefault(conn, []).append((batch, len(blocks)))
            case WriteBlocks(conn, batch, bad):
                self.step(BlocksWritten(conn, batch, bad))
            case Install(epoch):
                self.epoch = epoch
                self.step(EngineInstalled(epoch))

    def _check(self, effect: Effect) -> None:
        """What the engine and the program can take. The ranges are those of the native calls."""
        match effect:
            case SendMessage(_, message):
                assert len(encode(message)) <= MAX_FRAME_BYTES
            case MakeControl(_, heartbeat_ms, dead_after_ms):
                assert 0 < heartbeat_ms < U32
                assert 0 < dead_after_ms < U32
            case Promote(_, _, peer, lane, _, path, paths, epoch):
                assert 0 <= peer < U63
                assert 0 <= lane < U16
                assert 0 <= path < paths < U16
                assert 0 <= epoch < U32
            case SetRegistrations(count):
                assert 0 <= count < U64
            case SealEngine(epoch):
                assert 0 <= epoch < U32
            case Settle(epoch, verdicts, reason):
                assert 0 <= epoch < U32
                msgspec.msgpack.encode(reason)
                for verdict in verdicts:
                    assert 0 <= verdict.op.tag < U64
                    assert 0 <= verdict.op.sequence < U32
                    assert 0 <= verdict.registrations < U64
            case Install():
                assert 0 < effect.epoch < U32
                assert 0 <= effect.rank < len(effect.members) < U16
                assert all(0 < member < U63 for member in effect.members)
                assert 0 <= effect.small_bytes < U32
                assert 0 < effect.segment_bytes < U32
                assert 0 < effect.peers_here < U32
            case Fill(_, _, sample_ns):
                assert 0 <= sample_ns < U63
            case ExpectBlocks(_, batch, blocks) if blocks:
                assert 0 <= batch < U64
            case SendBlocks(_, blocks):
                sizes = [array.nbytes for array in self.arrays.values()]
                assert all(block.offset + block.nbytes <= sizes[block.key] for block in blocks)
            case CallFinished(_, Reason() as reason):
                assert isinstance(error_of(reason, "a call", 1, 2), RingfoldError)
            case Ended(error):
                assert error is None or str(error)
            case Notify(notice):
                assert str(notice)
            case FailAll(reason):
                msgspec.msgpack.encode(reason)
            case Joined():
                pass

    # Steps

    def apply(self, step: Step) -> None:
        match step:
            case ["join"]:
                if self.machine._control.state is ControlState.IDLE and not self.machine._control.masters:
                    self.step(CallJoin((("10.0.0.1", 48148), ("10.0.0.9", 48148)), self.now + 20_000 * MS))
            case ["open", conn] if self.conns.get(conn) == "dialled":
                self.conns[conn] = "opened"
                self.step(Opened(conn, nonce_of(conn)))
            case ["accept"]:
                self.last_conn += 1
                self.conns[self.last_conn] = "accepted"
                self.step(Accepted(self.last_conn, "a client", nonce_of(self.last_conn)))
            case ["body", conn, text] if self.conns.get(conn, "lane") not in ("lane", "dialled"):
                self.step(MessageReceived(conn, bytes.fromhex(text)))
            case ["closed", conn] if conn in self.conns:
                del self.conns[conn]
                self.step(Closed(conn, "gone"))
            case ["tick", ms]:
                self._advance_time(ms * MS)
            case ["vote", kind]:
                self._vote(kind)
            case ["give_up", ballot]:
                self.step(CallGivenUp(ballot))
            case ["leave"]:
                self.step(CallLeave())
            case ["op", word]:
                self._op(word)
            case ["link", peer, outgoing]:
                self.step(LinkLost(peer, outgoing, "cut"))
            case ["blocks", conn, bad]:
                self._blocks(conn, bad)
            case ["sample", conn, received, *repeats] if self.conns.get(conn) == "bulk":
                for _ in range((repeats or [1])[0]):  # the engine's counts only grow
                    at, count = self.counted.get(conn, (0, 0))
                    self.counted[conn] = at, count = at + 25 * MS, count + received
                    self.step(Sampled(conn, at, at, count))
            case ["silent"]:
                if self.machine._control.conn is not None:
                    self.step(Silent(self.machine._control.conn, 99_999))
            case ["master", word, *facts]:
                self._master(word, facts)
            case ["neighbour", conn, word]:
                self._neighbour(conn, word)

    def _advance_time(self, ns: int) -> None:
        """Tick when it is due, as the session does."""
        until, at, ticks = self.now + ns, -1, 0
        while (due := self.machine.next_deadline_ns()) is not None and due <= until:
            self.now = max(self.now, due)
            ticks = ticks + 1 if self.now == at else 0
            at = self.now
            assert ticks < MAX_TICKS, f"the next deadline is {due} again and again, and it is {self.now}"
            self.step(Tick())
        self.now = until
        self.step(Tick())

    def _vote(self, kind: m.VoteKind) -> None:
        if self.machine._calls._waiting or self.machine.ended:
            return
        self.ballot += 1
        offer = manifest = None
        if kind == "sync":
            manifest = Snapshot.take(SharedState(**self.arrays, revision=self.ballot)).manifest  # type: ignore[arg-type]
            offer = manifest.offer("enforce-popular")
        self.step(CallVote(self.ballot, kind, 0, self.now + 3_000 * MS, (), offer, manifest))

    def _op(self, word: str) -> None:
        match word:
            case "mismatch":
                self.step(OpMismatched(1, self.machine.engine_epoch, 0, 0, bytes(48), b"\1" * 48))
            case "timeout":
                self.step(OpTimedOut(self.machine.engine_epoch, 0, 0, 9, bytes(48)))
            case _:
                self.step(OpCancelled(self.machine.engine_epoch, 0, 0))

    def _blocks(self, conn: int, bad: list[int]) -> None:
        """The engine has a batch, or found that what it was to send has changed."""
        if self.expected.get(conn):
            batch, count = self.expected[conn].pop(0)
            self.step(BlocksReceived(conn, batch, tuple(sorted({each % count for each in bad})) if count else ()))
        elif bad:
            self.step(BlocksChanged(conn, tuple(bad)))

    # A master and neighbours that follow the protocol

    def _receive(self, conn: int | None, message: m.Message) -> None:
        if conn is not None and self.conns.get(conn) in ("opened", "control", "accepted", "bulk"):
            self.step(MessageReceived(conn, encode(message)))

    def _member(self, peer: int) -> m.Member:
        return m.Member(peer, f"n{peer}", "h", [f"10.0.0.{peer}"], 48149)

    def record(self, epoch: int, ring: list[int], lanes: int = 1) -> m.Record:
        return m.Record(
            group=0,
            epoch=epoch,
            fence=self.fence,
            previous=self.epoch,
            reason="a script",
            members=[self._member(peer) for peer in ring],
            dialers=list(ring) if len(ring) > 1 else [],
            newcomers=[ring[0]],
            secret=SECRET,
            evidence="ring",
            small_bytes=16_384,
            segment_bytes=65_536,
            lanes=lanes,
            registrations=3,
            pending=False,
            verdicts=[],
            world=m.World(len(ring), 1, len(ring)),
        )

    def _master(self, word: str, facts: list[Any]) -> None:
        control = self.machine._control
        conn = control.conn
        epoch = 0 if self.machine.record is None else self.machine.record.epoch
        match word:
            case "challenge":
                self._receive(conn, m.Challenge(MASTER_NONCE, VERSION, VERSION))
            case "welcome" if conn is not None:
                proof = prove(TOKEN, "welcome", nonce_of(conn), MASTER_NONCE)
                secret = MEMBER_SECRET if facts and facts[0] else b""
                self._receive(conn, m.Welcome(ME, self.fence, proof, m.Liveness(), secret))
            case "resumed" if conn is not None:
                self.fence += 1
                bound = (MASTER_NONCE, nonce_of(conn), self.fence.to_bytes(8, "little"))
                proof = prove(TOKEN, "resumed", *bound, prove(MEMBER_SECRET, "resumed", *bound))
                self._receive(conn, m.Resumed(self.fence, proof, m.Liveness()))
            case "record":
                ring, lanes = facts
                self._receive(conn, self.record(epoch + 1, ring, lanes))
            case "installed":
                self._receive(conn, m.Installed(epoch, m.World(2, 1, 2)))
            case "seal":
                self._receive(conn, m.Seal(epoch, "a script"))
            case "plan":
                won = Snapshot.take(SharedState(**self.other_arrays)).manifest
                fetch = [(key, won.keys[key].root) for key in facts]
                others = [self._member(peer) for peer in self.others[:2]]
                receivers = [self._member(ME), self._member(4)]
                plan = m.SyncPlan(self.ballot, self.ballot, 5, SECRET, others, receivers, fetch, {ME: self.ballot})
                self._receive(conn, plan)
            case "measure":
                self._receive(conn, m.Measure(facts[0], self._member(1), bool(facts[1]), SECRET, 2_000))
            case "done":
                answers: list[m.Message] = [
                    m.CallDone(self.ballot, False, m.World(2, 1, 2), 3, {ME: self.ballot}),
                    m.SyncDone(self.ballot, self.ballot, 5),
                    m.CallFailed(self.ballot, Reason("deadline", "late", [1], 5)),
                    m.SyncExtended(self.ballot),
                ]
                self._receive(conn, answers[facts[0] % len(answers)])

    def _neighbour(self, conn: int, word: str) -> None:
        """The other end of a lane or bulk session follows the protocol."""
        hello = self.hellos.get(conn)
        match word:
            case "challenge":
                self._receive(conn, m.Challenge(MASTER_NONCE, VERSION, VERSION))
            case "welcome" if isinstance(hello, m.LaneHello):
                self._receive(conn, m.LaneWelcome(prove(SECRET, "lane_welcome", hello.nonce, MASTER_NONCE)))
            case "welcome" if isinstance(hello, m.BulkHello):
                self._receive(conn, m.BulkWelcome(prove(SECRET, "visit_welcome", hello.nonce, MASTER_NONCE)))
            case "lane" if self.machine.record is not None:
                ring = [member.peer for member in self.machine.record.members]
                before = ring[ring.index(ME) - 1] if ME in ring else 1
                claim = (self.machine.record.epoch, before, ME, 0)
                parts = [number.to_bytes(8, "little") for number in claim]
                proof = prove(SECRET, "lane", nonce_of(conn), bytes(32), *parts)
                self._receive(conn, m.LaneHello(VERSION, *claim, bytes(32), proof))
            case "visit":
                purpose, number = next(iter(self.machine._sessions._expected), ("state", self.ballot))
                claimed = (number, 1 if purpose == "measure" else 4, ME)
                parts = [purpose.encode(), *(each.to_bytes(8, "little") for each in claimed)]
                proof = prove(SECRET, "visit", nonce_of(conn), bytes(32), *parts)
                self._receive(conn, m.BulkHello(VERSION, purpose, *claimed, bytes(32), proof))

    # What comes next

    def propose(self, rng: Random) -> Step:
        conns = list(self.conns) or [0]
        conn = rng.choice(conns)
        if rng.random() < 0.35 and self.machine._control.conn is not None:
            conn = self.machine._control.conn
        dialled = [each for each, kind in self.conns.items() if kind == "dialled"]
        if dialled and rng.random() < 0.5:
            return ["open", rng.choice(dialled)]
        bulk = [each for each, kind in self.conns.items() if kind == "bulk"]
        if bulk and rng.random() < 0.5:
            return self._next_in_bulk(rng, rng.choice(bulk))
        in_handshake = [each for each, kind in self.conns.items() if kind in ("opened", "accepted")]
        if in_handshake and rng.random() < 0.4:
            conn = rng.choice(in_handshake)
            words = ("lane", "visit", "visit") if self.conns[conn] == "accepted" else ("challenge", "welcome")
            return ["neighbour", conn, rng.choice(words)]
        choice = rng.choices(range(16), (20, 4, 6, 6, 1, 2, 0.3, 2, 2, 4, 3, 0.5, 24, 8, 2, 1))[0]
        if self.conns.get(conn) == "control" and choice in (5, 13, 14, 15) and rng.random() < 0.95:
            choice = 12  # most scripts end when the master breaks the protocol
        match choice:
            case 0:
                values = Values(rng, self._hints())
                kind: Any = rng.choice((m.FromMaster, m.Handshake, BulkMessage))
                if self.conns.get(conn) == "control" and rng.random() < 0.95:
                    kind = rng.choice(NOT_ENDING)
                elif self.conns.get(conn) == "bulk":
                    kind = BulkMessage
                raw = encode(values.of(kind, absurd=rng.choice((0.0, 0.05, 0.3))))
                is_damaged = rng.random() < (0.01 if self.conns.get(conn) == "control" else 0.1)
                return ["body", conn, (damaged(rng, raw) if is_damaged else raw).hex()]
            case 1:
                return ["accept"]
            case 2:
                return ["tick", rng.choice((1, 50, 300, 1_000, 5_000, 31_000))]
            case 3:
                return ["vote", rng.choice(("update", "pending", "sync", "sync", "optimize"))]
            case 4:
                return ["join"]
            case 5:
                return ["closed", conn]
            case 6:
                return ["leave"] if rng.random() < 0.2 else ["give_up", self.ballot]
            case 7:
                return ["op", rng.choice(("mismatch", "timeout", "cancelled"))]
            case 8:
                return ["link", rng.choice(self.others), rng.random() < 0.5]
            case 9:
                return ["blocks", conn, [rng.randrange(4) for _ in range(rng.choice((0, 0, 1, 2)))]]
            case 10:
                return ["sample", conn, rng.choice((0, 10**6, 10**9, 2**63))]
            case 11:
                return ["silent"]
            case 12:
                return self._valid_step(rng)
            case 13:
                return ["neighbour", conn, rng.choice(("challenge", "welcome", "lane", "visit"))]
            case 14:
                return ["body", conn, encode(self._any_bulk_message(rng)).hex()]
            case _:
                return ["body", conn, rng.randbytes(rng.randrange(60)).hex()]

    def _valid_step(self, rng: Random) -> Step:
        state = self.machine._control.state
        if state is ControlState.CHALLENGE:
            return ["master", "challenge"]
        if state is ControlState.WELCOME:
            is_back = self.machine._control.ticket is not None
            return ["master", "resumed"] if is_back else ["master", "welcome", rng.random() < 0.8]
        ring = rng.choice(([ME], [1, ME], [ME, 1], [1, ME, 3], [4, 3, ME, 1]))
        waiting = [call.call.kind for call in self.machine._calls._waiting.values() if not call.is_planned]
        if "sync" in waiting and rng.random() < 0.7:
            return ["master", "plan", *rng.choice(([0], [0, 1], []))]
        if "optimize" in waiting and rng.random() < 0.7:
            return ["master", "measure", rng.choice((1, 2, self.ballot)), rng.choice((0, 1))]
        if not self.machine.is_running or rng.random() < 0.3:
            return rng.choice((["master", "installed"], ["master", "record", ring, rng.choice((1, 1, 2))]))
        if not waiting and rng.random() < 0.6:
            return ["vote", rng.choice(("update", "pending", "sync", "sync", "sync", "optimize", "optimize"))]
        plain: list[Step] = [
            ["master", "record", ring, rng.choice((1, 1, 2))],
            ["master", "installed"],
            ["master", "installed"],
            ["master", "seal"],
            ["master", "plan", *rng.choice(([0], [0, 1], []))],
            ["master", "measure", rng.choice((1, 2, self.ballot)), rng.choice((0, 1))],
            ["master", "done", rng.randrange(4)],
        ]
        return rng.choice(plain)

    def _next_in_bulk(self, rng: Random, conn: int) -> Step:
        """What the other end of an open bulk session does next: mostly, what it was requested to send."""
        session, last = self.machine._sessions.open.get(conn), self.hellos.get(conn)
        if session is None or rng.random() < 0.1:
            return ["body", conn, encode(self._any_bulk_message(rng)).hex()]
        if session.task[0] == "measure":
            rate = encode(msgspec.convert({"type": "rate", "bytes_per_s": 1e6}, BulkMessage))
            samples = ["sample", conn, rng.choice((10**5, 10**6, 10**7)), rng.randrange(1, 40)]
            return samples if rng.random() < 0.8 else ["body", conn, rate.hex()]
        if self.expected.get(conn) and rng.random() < 0.7:
            return ["blocks", conn, [rng.randrange(4) for _ in range(rng.choice((0, 0, 0, 1, 2)))]]
        if isinstance(last, HashesWanted) and rng.random() < 0.8:
            lists = [(key, self._hashes(key)) for key in last.keys]
            return ["body", conn, encode(Hashes(lists)).hex()]
        wanted: list[m.Message] = [
            HashesWanted([0]),
            HashesWanted([0, 1]),
            BlocksWanted([(0, 0)]),
            BlocksWanted([(0, 0), (1, 0)]),
            BlocksWanted([(1, rng.choice((0, 1, 2**63 - 1, -1)))]),
        ]
        given: list[m.Message] = [Have([(0, 0, 1)]), Have([]), Have([(1, 0, 1)]), Hashes([(0, self._hashes(0))])]
        return ["body", conn, encode(rng.choice(given if session.is_dialler else wanted)).hex()]

    def _any_bulk_message(self, rng: Random) -> m.Message:
        """Any message of a bulk session, in order or not."""
        choices: list[Any] = [
            {"type": "hashes_wanted", "keys": [0, 1]},
            {"type": "hashes", "lists": [[0, bytes(8)]]},
            {"type": "hashes", "lists": [[0, self._hashes(0)], [1, self._hashes(1)]]},
            {"type": "blocks_wanted", "blocks": [[0, 0]]},
            {"type": "have", "ranges": [[0, 0, 1]]},
            {"type": "have", "ranges": []},
            {"type": "rate", "bytes_per_s": 1e6},
        ]
        return msgspec.convert(rng.choice(choices), BulkMessage)

    def _hashes(self, key: int) -> bytes:
        return Snapshot.take(SharedState(**self.other_arrays)).manifest.hashes[key]

    def _hints(self) -> dict[str, list[Any]]:
        epoch = 0 if self.machine.record is None else self.machine.record.epoch
        return {
            "epoch": [epoch, epoch, epoch + 1],
            "previous": [self.epoch],
            "fence": [self.fence],
            "ballot": [self.ballot, self.ballot, 0],
            "sync": [self.ballot],
            "number": [self.ballot],
            "test": [1, 2],
            "peer": [ME, 1, 3, 4],
            "node": [ME, 1, 3],
            "key": [ME, 1, 3],
            "source": [ME, 1, 3],
            "target": [ME, 1, 3],
            "peers": [1, 3],
            "dialers": [ME, 1, 3],
            "newcomers": [ME, 1],
            "addresses": [["10.0.0.1"], ["10.0.0.3"]],
            "address": ["10.0.0.1"],
            "host": ["h"],
            "name": ["n"],
            "port": [48149],
            "version": [1],
            "secret": [SECRET],
            "nonce": [MASTER_NONCE],
            "lane": [0, 1],
            "lanes": [1, 2],
            "paths": [1],
            "small_bytes": [16_384],
            "segment_bytes": [65_536],
            "registrations": [0, 3],
            "most_ms": [1_000],
            "heartbeat_ms": [250],
            "evict_after_ms": [5_000],
            "tag": [0],
            "sequence": [0],
            "fetch": [0, 1, bytes(8)],
            "keys": [0, 1],
            "blocks": [0, 1],
            "ranges": [0, 1],
        }


def replayed(script: list[Step]) -> None:
    """Run a script from the beginning. Raises what a fault raises."""
    run = PeerRun()
    for step in script:
        run.apply(step)


def drawn(rng: Random) -> tuple[list[Step], BaseException | None]:
    """A fresh script, and what it raised."""
    run, script = PeerRun(), []
    prologue: list[Step] = [["join"]]
    if rng.random() < 0.9:
        prologue += [["open", 1], ["master", "challenge"], ["master", "welcome", rng.random() < 0.8]]
        ring = rng.choice(([ME], [ME], [1, ME], [1, ME, 3]))
        prologue += [["master", "record", ring, 1], ["master", "installed"]]
    try:
        for number in range(len(prologue) + rng.choice((15, 40, 90))):
            step = prologue[number] if number < len(prologue) else run.propose(rng)
            script.append(step)
            run.apply(step)
            if run.machine.ended and rng.random() < 0.3:
                break
    except Exception as error:
        return script, error
    return script, None
