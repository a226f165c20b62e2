"""The master's machine behind its real connections (`ClientProtocol`), in any state, under any message.

A script is a list of steps, each a list of a word and plain values: what is kept in the corpus means the same whatever
the generator becomes. Connections have deterministic nonces, so that a script can prove tokens and secrets.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from ringfold.errors import RemoteProtocolError
from ringfold.master.effects import (
    CloseConnection,
    Effect,
    Notify,
    RaiseFrameLimit,
    SendEvidence,
    SendHeartbeat,
    SendMessage,
    StartMoonshot,
    WriteJournal,
    WriteLinks,
)
from ringfold.master.events import ConnectionClosed, ConnectionOpened, Event, Tick
from ringfold.master.journal import Journal
from ringfold.master.journal import decode as decode_journal
from ringfold.master.journal import encode as encode_journal
from ringfold.master.machine import Master
from ringfold.master.scheduling import QUANTUM
from ringfold.master.server import ClientProtocol
from ringfold.master.settings import MasterSettings
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.wire import messages as m
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.frames import (
    MAX_FRAME_BYTES,
    Announced,
    Done,
    FrameKind,
    Heartbeat,
    decode_from_master,
    decode_to_master,
    done_frame,
    encode,
    evidence_frame,
    frame,
    heartbeat_frame,
    master_heartbeat,
    message_frame,
)
from ringfold.wire.probing import EdgeFit, NodeHello, ProbeCommand, RoundId, RoundReport
from ringfold.wire.proof import derive, prove
from tests.fuzz.values import Values, damaged

MS = 1_000_000
TOKEN, SECRET, NONCE = b"a token", b"run secret", b"n" * 32
PURPOSES: dict[type, str] = {
    m.Hello: "hello",
    m.Resume: "resume",
    m.StatusRequest: "status",
    NodeHello: "node",
    ProbeCommand: "probe",
}
MAX_EFFECTS = 20_000
Step = list[Any]


class MasterRun:
    """A master and the connections to it."""

    def __init__(self) -> None:
        self.now, self.fence, self.last_conn, self.last_heartbeat = 0, 1, 0, 0
        self.clients: dict[int, ClientProtocol] = {}
        self.received: dict[int, list[m.FromMaster]] = {}
        self.peers: dict[int, int] = {}
        self.heartbeats: dict[int, int] = {}
        self.evidence: Any = "auto"
        self.ballot = self.sequence = 0
        self.master = self._new()

    def _new(self, journal: Journal | None = None) -> Master:
        settings = MasterSettings(
            evidence=self.evidence,
            return_ms=1_000,
            rounds=RoundSettings(window_ms=600, is_on=True),
            max_unproven=8,
            measure_ms=500,
            stale_s=1,
        )
        return Master(settings, TOKEN, SECRET, self.fence, self.now, journal=journal, leader="here", keeps_journal=True)

    # What a `ClientProtocol` needs of its server

    def step(self, event: Event) -> None:
        effects = self.master.step(self.now, event)
        assert len(effects) <= MAX_EFFECTS, f"{len(effects)} effects of one event"
        for effect in effects:
            self._check(effect)
            match effect:
                case SendMessage(conn, message) if conn in self.received:
                    self.received[conn].append(message)
                    if isinstance(message, m.Welcome):
                        self.peers[conn] = message.peer
                case SendHeartbeat(_, number, _):
                    self.last_heartbeat = number
                case RaiseFrameLimit(conn) if conn in self.clients:
                    self.clients[conn].frames.limit = MAX_FRAME_BYTES
                case CloseConnection(conn):
                    self._forget(conn)
        self._look()

    def is_open(self, conn: int) -> bool:
        return conn in self.clients

    def on_frames(self, client: ClientProtocol) -> None:
        while client.has_frames:
            client.handle(QUANTUM)

    def _forget(self, conn: int) -> None:
        for table in (self.clients, self.received, self.peers, self.heartbeats):
            table.pop(conn, None)

    def _check(self, effect: Effect) -> None:
        """What the shell would do with it must be possible."""
        match effect:
            case SendMessage(_, message):
                raw = message_frame(message)
                assert len(raw) <= MAX_FRAME_BYTES, f"{type(message).__name__} of {len(raw)} bytes"
                decode_from_master(raw[5:])
            case SendEvidence(_, evidence):
                assert len(evidence_frame(evidence)) <= MAX_FRAME_BYTES
            case SendHeartbeat(_, number, echo):
                master_heartbeat(number, echo)
            case WriteJournal(journal):
                decode_journal(encode_journal(journal), "here")
            case Notify(notice):
                assert str(notice)
                assert notice.level
                assert type(notice).__name__ != "ProbingBroke", str(notice)
                msgspec.json.encode(notice)
            case StartMoonshot(_, question):
                msgspec.json.encode(question)
            case WriteLinks(raw):
                assert isinstance(raw, bytes)

    def _look(self) -> None:
        status = self.master.status(self.now)
        assert len(message_frame(status)) <= MAX_FRAME_BYTES
        self.master.waiting(self.now)

    # Steps

    def apply(self, step: Step) -> None:
        match step:
            case ["open"]:
                self.last_conn += 1
                client = ClientProtocol(self)  # type: ignore[arg-type]
                client.conn = self.last_conn
                self.clients[client.conn], self.received[client.conn] = client, []
                self.step(ConnectionOpened(client.conn, f"host:{client.conn}", nonce_of(client.conn)))
            case ["bytes", conn, text] if conn in self.clients:
                self.clients[conn].data_received(bytes.fromhex(text))
            case ["claim", conn, text] if conn in self.clients:
                self.clients[conn].data_received(frame(FrameKind.MESSAGE, self._proven(conn, bytes.fromhex(text))))
            case ["closed", conn] if conn in self.clients:
                self._forget(conn)
                self.step(ConnectionClosed(conn, "gone"))
            case ["tick", ms]:
                for _ in range(max(1, ms // 50)):
                    self.now += 50 * MS
                    self.step(Tick())
            case ["begin", evidence]:
                self.evidence = evidence
                self.master = self._new()
            case ["beat", ms, *stalled]:
                self._send_heartbeats(ms, stalled)
            case ["vote", kind, salt, *without]:
                self._vote(kind, salt, without)
            case ["done", salt]:
                self._done(salt)
            case ["edge", word, number]:
                self._edge(word, number)
            case ["honest"]:
                self._answer_all()
            case ["back", salt, text]:
                self._come_back(salt, bytes.fromhex(text))
            case ["takeover"]:
                journal = decode_journal(encode_journal(self.master.journal()), "here")
                for conn in list(self.clients):
                    self._forget(conn)
                self.fence += 1
                self.master = self._new(journal)

    def _come_back(self, salt: int, brought: bytes) -> None:
        """All members that are away resume, and send what they know."""
        for number, (peer, away) in enumerate(sorted(self.master._run.away.items())):
            if salt >> 4 and number == 0:
                continue  # one stays away
            self.apply(["open"])
            conn, epoch = self.last_conn, self.master._run.groups[away.group].epoch
            older = epoch - (salt & 1 and number % 2)
            where = away.group, "h", "n", ["10.0.0.1"], 9
            resume = m.Resume(VERSION, peer, self.fence - 1, older, *where, NONCE, b"", b"")
            self.apply(["claim", conn, encode(resume).hex()])
            if conn in self.clients:
                self.peers[conn] = peer
                self.clients[conn].data_received(frame(FrameKind.MESSAGE, brought))

    def _members(self) -> dict[int, Any]:
        """The connections of accepted peers, and their groups."""
        run = self.master._run
        standing = {conn: run.peers.get(peer) for conn, peer in self.peers.items()}
        return {
            conn: run.groups[peer.group]
            for conn, peer in standing.items()
            if peer is not None and peer.id in run.groups[peer.group].ring
        }

    def _say(self, conn: int, message: m.Message) -> None:
        if conn in self.clients:
            self.clients[conn].data_received(message_frame(message))

    def _send_heartbeats(self, ms: int, stalled: list[int]) -> None:
        """All send a heartbeat; with `ms`, members have been in an op for that long, and `stalled` ones could not send.
        With -1 in it, peers that are not members report the same."""
        members, run = self._members(), self.master._run
        if -1 in stalled:
            known = {conn: run.peers[peer].group for conn, peer in self.peers.items() if peer in run.peers}
            members = {conn: run.groups[group] for conn, group in known.items()}
        for conn in list(self.peers):
            self.heartbeats[conn] = self.heartbeats.get(conn, 0) + 1
            heartbeat = Heartbeat(self.heartbeats[conn], self.last_heartbeat)
            if ms and conn in members:
                still = ms if not stalled or conn in stalled else 0
                ops = [Announced(0, self.sequence, ms, 0, False)]
                heartbeat = Heartbeat(
                    heartbeat.number, heartbeat.echo, members[conn].epoch, still, still, 3, ops, 1, 5_000_000, still
                )
            if conn in self.clients:
                self.clients[conn].data_received(heartbeat_frame(heartbeat))

    def _vote(self, kind: m.VoteKind, salt: int, without: list[int]) -> None:
        self.ballot += 1
        for conn, group in self._members().items():
            if conn in without:
                continue
            offer = None
            if kind == "sync":
                root = bytes([salt & 1 and conn % 2]) * 8
                strategy: Any = ("enforce-popular", "enforce-popular", "send-only", "receive-only")[(salt >> 1) % 4]
                finished = group.finished.revision if group.finished is not None else 0
                offer = m.Offer(finished + (salt >> 3) % 3, strategy, "rf64", [m.KeyOffer("w", "f32", [2], root)])
            self._say(conn, m.Vote(self.ballot, kind, group.epoch, (salt >> 5) % 4, [(0, 1)], offer))

    def _done(self, salt: int) -> None:
        for conn, group in self._members().items():
            if conn not in self.peers:
                continue  # it was dropped for what another one has just sent
            rank = group.ring.index(self.peers[conn])
            descriptor = bytes([salt & 1 and conn % 2]) * 32
            done = Done(group.epoch, 0, self.sequence, rank, descriptor, 0, b"payload")
            if conn in self.clients:
                self.clients[conn].data_received(done_frame(done))
        self.sequence += 1

    def _edge(self, word: str, number: int) -> None:
        members = list(self._members().items())
        if not members:
            return
        conn, group = members[number % len(members)]
        ring, me = group.ring, self.peers[conn]
        after = ring[(ring.index(me) + 1) % len(ring)]
        if word == "lost":
            self._say(conn, m.LinkLost(group.epoch, me, after, "cut"))
        else:
            self._say(conn, m.AttachFailed(group.epoch, [m.EdgeFailure(me, after, "refused")]))

    def _proven(self, conn: int, raw: bytes) -> bytes:
        """The claim, with the proofs that it needs; what is none stays as it is."""
        try:
            claim: Any = decode_to_master(raw)
        except RemoteProtocolError:
            return raw
        nonces = (nonce_of(conn), NONCE)
        proofs = {"nonce": NONCE, "proof": prove(TOKEN, PURPOSES[type(claim)], *nonces)}
        if isinstance(claim, m.Resume):
            known = derive(SECRET, "member", claim.peer) if 0 <= claim.peer < 1 << 64 else b""
            proofs["member_proof"] = prove(known, "member", *nonces)
        return encode(msgspec.structs.replace(claim, **proofs))

    def _answer_all(self) -> None:
        """All peers answer the last Seal, Record, Resumed and RoundEnd that they got."""
        for conn, received in list(self.received.items()):
            for message in received:
                answer: m.Message | None = None
                match message:
                    case m.Seal(epoch):
                        answer = m.Sealed(epoch, [])
                    case m.Record():
                        answer = m.Attached(message.epoch)
                    case m.Resumed():
                        answer = m.Returned()
                    case m.Measure():
                        answer = m.LinkMeasured(message.test, message.other.peer, 1e6, 10)
                    case m.SyncPlan() if message.fetch:
                        answer = m.SyncReport(message.sync, "complete")
                    case m.RoundEnd() if hasattr(message, "round"):
                        answer = self._report(conn, message.round)
                if answer is not None and conn in self.clients:
                    self.clients[conn].data_received(message_frame(answer))
            if conn in self.received:
                self.received[conn] = [each for each in received if isinstance(each, m.Welcome | m.ProbeGraph)]

    def _report(self, conn: int, round: RoundId) -> RoundReport:
        graphs = [each for each in self.received.get(conn, []) if isinstance(each, m.ProbeGraph)]
        me = self.peers.get(conn, 0)
        out = graphs[-1].out if graphs else []
        plain = EdgeFit(
            me,
            0,
            t0_ns=self.now - 300 * MS,
            half_ns=300 * MS,
            beta_ns=5,
            sigma_ns=10.0,
            sigma_alpha=1e-9,
            low=(-50, -50, -50),
            high=(50, 50, 50),
            residual_ns=5.0,
            delay_min_ns=9_000,
            delay_p50_ns=9_500,
            delay_p99_ns=9_900,
            sent=90,
            pairs=90,
            estimator="hull",
        )
        fits = [msgspec.structs.replace(plain, dst=each.node) for each in out]
        return RoundReport(round, 1, self.now - 600 * MS, self.now, 7, fits, self.now)

    # What comes next

    def propose(self, rng: Random) -> Step:
        """A step that makes sense, or none at all, in the present state."""
        conns = list(self.clients)
        joined = list(self.peers)
        if self.master._run.away and rng.random() < 0.3:
            return [
                "back",
                rng.randrange(32),
                encode(m.Returned(ballot=self.ballot, installed=rng.random() < 0.5)).hex(),
            ]
        if not conns or rng.random() < 0.06:
            return ["open"]
        conn = rng.choice(joined) if joined and rng.random() < 0.7 else rng.choice(conns)
        values = Values(rng, self._hints(conn))
        absurd = rng.choice((0.0, 0.0, 0.05, 0.3))
        match rng.choices(range(16), (8, 24, 18, 6, 4, 14, 1, 1, 0.6, 10, 3, 1, 10, 4, 3, 3))[0]:
            case 12:
                kind = rng.choice(("update", "pending", "sync", "sync", "optimize", "optimize"))
                without = [conn] if rng.random() < 0.2 else []
                return ["vote", kind, rng.randrange(128) if rng.random() < 0.5 else 0, *without]
            case 13:
                return ["done", rng.choice((0, 0, 0, 1))]
            case 14:
                return ["edge", rng.choice(("lost", "failed")), rng.randrange(8)]
            case 15:
                return ["beat", rng.choice((150, 2_000, 9_000, 2**32 - 1)), *rng.choice(([], [conn], [-1], [-1, conn]))]
            case 0:
                group = rng.choice((0, 0, 0, 1))
                hello = m.Hello(VERSION, group, "h", f"n{conn}", ["10.0.0.1"], 9, NONCE, b"", rng.random() < 0.7)
                return ["claim", rng.choice(conns), encode(hello).hex()]
            case 1:
                return ["honest"]
            case 2:
                message = values.of(RoundReport if rng.random() < 0.15 else m.ToMaster, absurd=absurd)
                if type(message) in PURPOSES and rng.random() < 0.8:
                    return ["claim", conn, encode(message).hex()]
                return ["bytes", conn, message_frame(message).hex()]
            case 3:
                heartbeat = values.of(Heartbeat, absurd=absurd)
                return ["bytes", conn, _fixed(lambda: heartbeat_frame(heartbeat), rng, FrameKind.HEARTBEAT).hex()]
            case 4:
                done = values.of(Done, absurd=absurd)
                return ["bytes", conn, _fixed(lambda: done_frame(done), rng, FrameKind.DONE).hex()]
            case 5:
                return ["tick", rng.choice((50, 50, 100, 300, 700, 2_500))]
            case 6:
                return ["bytes", conn, damaged(rng, message_frame(values.of(m.ToMaster, absurd=absurd))).hex()]
            case 7:
                return ["closed", conn]
            case 8:
                return ["takeover"]
            case 9:
                return ["beat", 0]
            case 10 if self.master._run.away and rng.random() < 0.8:
                brought = values.of(m.Returned, absurd=absurd) if rng.random() < 0.5 else m.Returned()
                return ["back", rng.randrange(32), encode(brought).hex()]
            case 10:
                away = sorted(self.master._run.away)
                peer = rng.choice(away) if away else 1
                resume = m.Resume(VERSION, peer, self.fence - 1, 2, 0, "h", "n", ["10.0.0.1"], 9, NONCE, b"", b"")
                return ["claim", rng.choice(conns), encode(resume).hex()]
            case _:
                return ["bytes", conn, rng.randbytes(rng.randrange(60)).hex()]

    def _hints(self, conn: int) -> dict[str, list[Any]]:
        run = self.master._run
        me = self.peers.get(conn, 1)
        peer = run.peers.get(me)
        group = run.groups.get(peer.group if peer is not None else 0)
        epoch = group.epoch if group is not None else 0
        ids = list(run.peers) or [1]
        rounds = self.master._probing._rounds
        now = rounds.round
        return {
            "epoch": [epoch, epoch, epoch, max(0, epoch - 1)],
            "ballot": [1, 2, 3, 7],
            "key": ids,
            "peer": [me, *ids],
            "source": ids,
            "target": ids,
            "other": ids,
            "blame": ids,
            "src": [me],
            "dst": ids,
            "sync": [run.syncs, 1],
            "test": [run.tests, 1],
            "tag": [0, 0, 1],
            "sequence": [0, 1, *([now.sequence] if now is not None else [])],
            "fence": [self.fence, *([now.fence] if now is not None else [])],
            "round": [now] if now is not None else [],
            "rank": [group.ring.index(me)] if group is not None and me in group.ring else [0],
            "descriptor": [bytes(32), bytes(32), b"\1" * 32],
            "registrations": [0, run.registrations],
            "revision": [0, 1, 2],
            "group": [0, 0, 1],
            "version": [1],
            "port": [9],
            "paths": [1],
            "addresses": [["10.0.0.1"]],
            "name": ["n"],
            "host": ["h"],
            "label": ["a label"],
            "min_world": [0, 1, 2, 3],
            "echo": [0, self.last_heartbeat],
            "number": [1, 2, 1_000_001],
            "root": [bytes(8), b"\1" * 8],
            "offer": [None],
            "hash": ["rf64"],
            "nonce": [NONCE],
            "window": [1, 2],
            "t0_ns": [self.now],
            "begin_ns": [self.now - 600 * MS],
            "end_ns": [self.now],
            "half_ns": [300 * MS],
            "pairs": [90],
            "sent": [90],
            "lost": [0, 3],
            "listen_only": [False],
            "probes": [True, False],
        }


def _fixed(make: Callable[[], bytes], rng: Random, kind: FrameKind) -> bytes:
    """A fixed frame; where its values do not fit its layout, bytes of its kind."""
    try:
        return make()
    except Exception:
        return frame(kind, rng.randbytes(rng.randrange(90)))


def nonce_of(conn: int) -> bytes:
    return bytes([conn % 256]) * 32


def replayed(script: list[Step]) -> None:
    """Run a script from the beginning. Raises what a fault raises."""
    run = MasterRun()
    for step in script:
        run.apply(step)


def drawn(rng: Random) -> tuple[list[Step], BaseException | None]:
    """A fresh script, and what it raised."""
    run, script = MasterRun(), []
    prologue: list[Step] = [["begin", rng.choice(("auto", "master"))], ["open"], ["open"], ["open"]]
    for conn in (1, 2, 3):
        hello = m.Hello(VERSION, 0, "h", f"n{conn}", ["10.0.0.1"], 9, NONCE, b"", True)
        prologue.append(["claim", conn, encode(hello).hex()])
        prologue.append(["honest"])
    if rng.random() < 0.8:
        prologue.append(["vote", "update", 0])
        prologue += [["honest"], ["honest"]]
    try:
        for number in range(len(prologue) + rng.choice((15, 40, 80))):
            step = prologue[number] if number < len(prologue) else run.propose(rng)
            script.append(step)
            run.apply(step)
    except RemoteProtocolError as error:
        return script, AssertionError(f"RemoteProtocolError escaped: {error}")
    except Exception as error:
        return script, error
    return script, None
