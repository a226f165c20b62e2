"""Dialogues with the master machine, as text.

Each `*.txt` here is one dialogue. A line at the margin is an event; the indented lines below it are the effects that
the machine answered with. The test plays the events and compares. After a change of behaviour, run

    RINGFOLD_REWRITE=1 pytest tests/transcripts

and review the difference. The words of the dialogue:

    settings evidence=master        for the master; first line only
    join a b [group=1]              each opens a connection and says Hello; ids follow from the order of joining
    open a                          opens a connection, says nothing
    a garbage TEXT                  the connection sent what is not of this protocol
    a closed                        the connection is gone
    a vote KIND BALLOT epoch=1 [min=2] [progress=0:3]
    a vote sync BALLOT epoch=1 rev=5 w=CONTENT [strategy=send-only] [shape=4] [torn=yes] [stepped=yes] [rollback=yes]
    a report SYNC OUTCOME [PEER] [TEXT]
    a withdraw BALLOT MS [final=no]
    a sealed EPOCH [0/3=done:2 0/4=committed:2:x,y]     op=state:registrations:payloads
    a attached EPOCH
    a failed EPOCH 1->2 REASON
    a lost EPOCH 1->2 REASON
    a mismatch EPOCH 0/3 OTHER      calls all_reduce where the other calls barrier; or the other way round,
                                    with "barrier" behind it
    a timeout EPOCH 0/3 MS [final=no]
    a busy MS
    a evict PEER [REASON]           a client that evicts a peer (after `open a`)
    a cancelled EPOCH 0/3
    a measured OTHER MBIT [rtt=US] [settled=no]     of the newest test between the two
    a unmeasured OTHER REASON
    a leave
    a done EPOCH 0/3 rank=0 [payload=x] [kind=4]
    a works EPOCH 0/3 [stalled=MS] [starved=MS] [rate=BYTES]    what its next heartbeats tell; `a rests` ends it,
                                    and `a idles EPOCH`: it is in its own code, in this epoch
    node a b [listen=yes] [last=1.7]    each opens a connection and says NodeHello: it only probes
    a reports 1.1 [windows=no]      its window of a round: every clock is right, and all edges are alike
    a alarms 1.1 NS                 its first edge strays by so much
    a probe ACTION [label=x]        a client that sends a probe command (after `open a`)
    guardian g of=a                 a opens a connection for its guardian, `g`; `g died`: the guardian saw a die
    journal                         the master keeps one; first line, or after `settings`
    takeover                        this master is gone, and another one has read its journal
    a resumes [epoch=2] [ballot=1] [answer=BALLOT:PEER:BALLOT,...]     comes back, and brings along what it knows
    found 1 3 2 4 [group=0]         the moonshot search has found this ring
    end REASON                      a client ends the run
    freeze a / thaw a               stops and resumes its heartbeats
    pause MS                        the master itself does not run
    wait MS                         time passes: ticks, and heartbeats of all peers that are not frozen
    waiting / status / links        what the master waits for; phase and state of each peer, phase of each group; what
                                    is known of links
    waiting evictions               the same, with the times at which missing peers are evicted

Several peers may speak one after the other: `a,b attached 2`. Heartbeats of the master are not shown.
"""

import difflib
import os
from dataclasses import replace
from pathlib import Path

import pytest

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
from ringfold.master.events import (
    ConnectionClosed,
    ConnectionOpened,
    DoneReceived,
    Event,
    HeartbeatReceived,
    MalformedReceived,
    MessageReceived,
    MoonshotFinished,
    StopRequested,
    Tick,
)
from ringfold.master.journal import Journal, decode, encode
from ringfold.master.machine import Master
from ringfold.master.settings import MasterSettings
from ringfold.probe.rounds.events import FromRoundMaster
from ringfold.topology.solve import Solution
from ringfold.wire import messages as m
from ringfold.wire import probing as p
from ringfold.wire.descriptor import Descriptor, fingerprint
from ringfold.wire.frames import Announced, Done, Heartbeat
from ringfold.wire.proof import NONCE_BYTES, derive, prove

MS = 1_000_000
TOKEN = b"a token"
SECRET = b"run secret"
HERE = Path(__file__).parent
ALL_REDUCE = Descriptor(0, 10, arrays=1, elements=8, nbytes=32).pack()
CALLED = Descriptor(0, 10, retry=1, arrays=1, elements=1, nbytes=4).pack()
"""What all peers call by default."""
REWRITE = os.environ.get("RINGFOLD_REWRITE") == "1"


class Actor:
    """A peer in a transcript: its connection, and what its heartbeats report."""

    def __init__(self, conn: int) -> None:
        self.conn = conn
        self.nonce = conn.to_bytes(NONCE_BYTES, "little")
        self.frozen = False
        self.joined = False
        self.heartbeats = 0
        self.echo = 0
        self.report = Heartbeat(0, 0)
        self.working_since = 0
        self.peer = 0
        self.node = 0
        self.probed: list[int] = []
        self.windows = 0


class Dialogue:
    """Plays the lines of one transcript."""

    def __init__(self) -> None:
        self.settings = MasterSettings()
        self.now = 0
        self.actors: dict[str, Actor] = {}
        self._master: Master | None = None
        self.keeps_journal = False
        self.journal: Journal | None = None
        self.lines: list[str] = []
        self.tests: dict[tuple[int, int], int] = {}

    @property
    def master(self) -> Master:
        if self._master is None:
            self._master = Master(self.settings, TOKEN, SECRET, started_ns=0, keeps_journal=self.keeps_journal)
        return self._master

    def play(self, line: str) -> list[str]:
        self.lines = []
        head, *words = line.split()
        named = dict(word.split("=", 1) for word in words if "=" in word and "/" not in word.split("=")[0])
        plain = [word for word in words if not ("=" in word and "/" not in word.split("=")[0])]
        if hasattr(self, f"do_{head}"):
            getattr(self, f"do_{head}")(plain, named)
        else:
            for name in head.split(","):
                getattr(self, f"say_{plain[0]}")(self.actors[name], plain[1:], named)
        return self.lines

    # The stage

    def do_settings(self, _: list[str], named: dict[str, str]) -> None:
        given = {key: int(value) if value.isdigit() else value for key, value in named.items()}
        self.settings = replace(self.settings, **given)  # type: ignore[arg-type]

    def do_journal(self, _: list[str], __: dict[str, str]) -> None:
        self.keeps_journal = True

    def do_takeover(self, _: list[str], __: dict[str, str]) -> None:
        assert self.journal is not None
        fence = self.journal.fence + 1
        journal = decode(encode(self.journal), "here")
        self._master = Master(
            self.settings, TOKEN, b"", fence, started_ns=self.now, journal=journal, keeps_journal=True
        )
        for actor in self.actors.values():
            actor.joined, actor.echo = False, 0

    def do_found(self, words: list[str], named: dict[str, str]) -> None:
        ring = tuple(map(int, words))
        solution = Solution(ring, 1.0, 1.0, 0.0, 1.0, exact=False, kept=False, reason="found")
        self.step(MoonshotFinished(int(named.get("group", 0)), solution))

    def do_end(self, words: list[str], _: dict[str, str]) -> None:
        self.step(StopRequested(" ".join(words)))

    def do_open(self, names: list[str], _: dict[str, str]) -> None:
        for name in names:
            actor = self.actors[name] = Actor(len(self.actors) + 1)
            self.step(ConnectionOpened(actor.conn, f"host-{name}:9", actor.nonce))

    def do_join(self, names: list[str], named: dict[str, str]) -> None:
        for name in names:
            if name not in self.actors:
                self.do_open([name], {})
            actor = self.actors[name]
            actor.joined = True
            token = named.get("token", TOKEN.decode()).encode()
            proof = prove(token, "hello", actor.nonce, b"n" * NONCE_BYTES)
            version, group = int(named.get("version", m.PROTOCOL_VERSION)), int(named.get("group", 0))
            self.receive(
                actor, m.Hello(version, group, f"host-{name}", name, ["10.0.0.1"], 9, b"n" * NONCE_BYTES, proof)
            )

    def do_node(self, names: list[str], named: dict[str, str]) -> None:
        for name in names:
            self.do_open([name], {})
            actor = self.actors[name]
            proof = prove(TOKEN, "node", actor.nonce, b"n" * NONCE_BYTES)
            last, listens = _round(named.get("last", "0.0")), named.get("listen") == "yes"
            facts = (f"host-{name}", name, ["10.0.0.1"], 9, listens, last)
            self.receive(actor, p.NodeHello(m.PROTOCOL_VERSION, *facts, b"n" * NONCE_BYTES, proof))

    def do_guardian(self, names: list[str], named: dict[str, str]) -> None:
        [name], owner = names, self.actors[named["of"]]
        self.do_open([name], {})
        nonces = self.actors[name].nonce, b"n" * NONCE_BYTES
        proofs = prove(TOKEN, "guardian", *nonces), prove(owner.nonce + nonces[1], "guarded", *nonces)
        self.receive(self.actors[name], m.GuardianHello(m.PROTOCOL_VERSION, owner.peer, nonces[1], *proofs))

    def do_freeze(self, names: list[str], _: dict[str, str]) -> None:
        for name in names:
            self.actors[name].frozen = True

    def do_thaw(self, names: list[str], _: dict[str, str]) -> None:
        for name in names:
            self.actors[name].frozen = False

    def do_pause(self, words: list[str], _: dict[str, str]) -> None:
        self.now += int(words[0]) * MS

    def do_wait(self, words: list[str], _: dict[str, str]) -> None:
        end = self.now + int(words[0]) * MS
        while self.now < end:
            self.now = min(end, (self.now // (50 * MS) + 1) * 50 * MS)
            if self.now % (250 * MS) == 0:
                self.send_heartbeats()
            self.step(Tick(), stamp=True)

    def do_waiting(self, words: list[str], _: dict[str, str]) -> None:
        for wait in self.master.waiting(self.now):
            eviction = f", eviction: {wait.eviction}" if words == ["evictions"] else ""
            self.lines.append(f"{wait.what} | {wait.waiting} for {wait.missing} since {wait.since_ms} ms{eviction}")

    def do_status(self, _: list[str], __: dict[str, str]) -> None:
        status = self.master.status(self.now)
        for peer in status.peers:
            words = f"{peer.phase} {peer.state}{' suspected' * peer.suspected} {'; '.join(peer.ops)}"
            self.lines.append(f"peer {peer.peer} {words}".rstrip())
        for group in status.groups:
            bad = f" bad {group.bad_edges}" if group.bad_edges else ""
            self.lines.append(f"group {group.group} epoch {group.epoch} {group.phase} ring {group.ring}{bad}")

    def do_links(self, _: list[str], __: dict[str, str]) -> None:
        for link in sorted(self.master.status(self.now).links, key=lambda link: (link.source, link.target)):
            delay = "no delay" if link.delay_us is None else f"{link.delay_us} us"
            facts = f"{link.bytes_per_s / 125_000:g} Mbit/s, {delay}, {link.by} {link.age_ms} ms ago"
            self.lines.append(f"{link.source} -> {link.target}: {facts}")

    def send_heartbeats(self) -> None:
        for actor in self.actors.values():
            if actor.joined and not actor.frozen:
                actor.heartbeats += 1
                age_ms = (self.now - actor.working_since) // MS
                ops = [Announced(op.tag, op.sequence, age_ms, op.fingerprint, op.done) for op in actor.report.ops]
                report = actor.report
                heartbeat = Heartbeat(
                    actor.heartbeats,
                    actor.echo,
                    report.epoch,
                    report.out_stalled_ms,
                    report.in_starved_ms,
                    ops=ops,
                    out_rate=report.out_rate,
                    back_stalled_ms=report.back_stalled_ms,
                )
                self.step(HeartbeatReceived(actor.conn, heartbeat), stamp=True)

    # The lines of a peer

    def say_garbage(self, actor: Actor, words: list[str], _: dict[str, str]) -> None:
        self.step(MalformedReceived(actor.conn, " ".join(words)))

    def say_closed(self, actor: Actor, _: list[str], __: dict[str, str]) -> None:
        actor.frozen = True
        self.step(ConnectionClosed(actor.conn, ""))

    def say_resumes(self, actor: Actor, _: list[str], named: dict[str, str]) -> None:
        """On a connection of its own, under the id that it was welcomed with."""
        name = self.actor(actor.conn)[0]
        again = Actor(max(other.conn for other in self.actors.values()) + 1)
        again.peer, again.joined = actor.peer, True
        self.actors[name] = again
        self.step(ConnectionOpened(again.conn, f"host-{name}:9", again.nonce))
        nonces = again.nonce, b"n" * NONCE_BYTES
        proofs = prove(TOKEN, "resume", *nonces), prove(derive(SECRET, "member", again.peer), "member", *nonces)
        facts = (0, f"host-{name}", name, ["10.0.0.1"], 9, nonces[1], *proofs)
        fence = self.master.fence - 1
        self.receive(again, m.Resume(m.PROTOCOL_VERSION, again.peer, fence, int(named.get("epoch", 2)), *facts))
        answers: list[m.CallDone | m.CallFailed] = []
        if "answer" in named:
            mine, _, rest = named["answer"].partition(":")
            voters = {int(peer): int(ballot) for peer, ballot in (pair.split(":") for pair in rest.split(","))}
            answers.append(m.CallDone(int(mine), False, m.World(2, 1, 2), 2, voters))
        self.receive(again, m.Returned(answers, int(named.get("ballot", 0)), installed=True))

    def say_vote(self, actor: Actor, words: list[str], named: dict[str, str]) -> None:
        progress = [(int(tag), int(count)) for tag, count in [p.split(":") for p in named.get("progress", "").split()]]
        kind = words[0]
        assert kind in ("update", "pending", "sync", "optimize")
        offer = _offer(named) if kind == "sync" else None
        vote = m.Vote(int(words[1]), kind, int(named["epoch"]), int(named.get("min", 0)), progress, offer)  # type: ignore[arg-type]
        self.receive(actor, vote)

    def say_report(self, actor: Actor, words: list[str], _: dict[str, str]) -> None:
        sync, outcome, *rest = words
        blame = [int(word) for word in rest if word.isdigit()]
        text = " ".join(word for word in rest if not word.isdigit())
        assert outcome in ("complete", "changed", "stuck", "corrupt", "progress")
        self.receive(actor, m.SyncReport(int(sync), outcome, text, blame))  # type: ignore[arg-type]

    def say_withdraw(self, actor: Actor, words: list[str], named: dict[str, str]) -> None:
        self.receive(actor, m.VoteWithdrawn(int(words[0]), int(words[1]), named.get("final") != "no"))

    def say_busy(self, actor: Actor, words: list[str], _: dict[str, str]) -> None:
        self.receive(actor, m.Busy(int(words[0])))

    def say_evict(self, actor: Actor, words: list[str], _: dict[str, str]) -> None:
        proof = prove(TOKEN, "evict", actor.nonce, b"n" * NONCE_BYTES)
        reason = " ".join(words[1:])
        self.receive(actor, m.EvictRequest(m.PROTOCOL_VERSION, words[0], reason, "ada on x", b"n" * NONCE_BYTES, proof))

    def say_sealed(self, actor: Actor, words: list[str], _: dict[str, str]) -> None:
        ops = []
        for word in words[1:]:
            op, what = word.split("=")
            state, registrations, *payloads = what.split(":")
            assert state in ("unfinished", "done", "committed")
            whole = [each.encode() for each in payloads[0].split(",")] if payloads else None
            ops.append(m.SealedOp(_op(op), state, int(registrations), whole, CALLED))  # type: ignore[arg-type]
        self.receive(actor, m.Sealed(int(words[0]), ops))

    def say_attached(self, actor: Actor, words: list[str], _: dict[str, str]) -> None:
        self.receive(actor, m.Attached(int(words[0])))

    def say_failed(self, actor: Actor, words: list[str], _: dict[str, str]) -> None:
        self.receive(actor, m.AttachFailed(int(words[0]), [m.EdgeFailure(*_edge(words[1]), " ".join(words[2:]))]))

    def say_lost(self, actor: Actor, words: list[str], _: dict[str, str]) -> None:
        self.receive(actor, m.LinkLost(int(words[0]), *_edge(words[1]), " ".join(words[2:])))

    def say_mismatch(self, actor: Actor, words: list[str], _: dict[str, str]) -> None:
        mine, theirs = ALL_REDUCE, Descriptor(4).pack()
        if "barrier" in words:
            mine, theirs = theirs, mine
        self.receive(actor, m.OpMismatch(int(words[0]), _op(words[1]), int(words[2]), mine, theirs))

    def say_timeout(self, actor: Actor, words: list[str], named: dict[str, str]) -> None:
        final = named.get("final") != "no"
        self.receive(actor, m.OpTimeout(int(words[0]), _op(words[1]), int(words[2]), CALLED, final))

    def say_cancelled(self, actor: Actor, words: list[str], _: dict[str, str]) -> None:
        self.receive(actor, m.OpCancelled(int(words[0]), _op(words[1])))

    def say_measured(self, actor: Actor, words: list[str], named: dict[str, str]) -> None:
        other, rate = int(words[0]), float(words[1]) * 125_000
        settled, round_trip_us = named.get("settled") != "no", int(named.get("rtt", 0))
        self.receive(actor, m.LinkMeasured(self.tests[actor.conn, other], other, rate, round_trip_us, settled))

    def say_unmeasured(self, actor: Actor, words: list[str], _: dict[str, str]) -> None:
        other = int(words[0])
        self.receive(actor, m.LinkMeasured(self.tests[actor.conn, other], other, failed=" ".join(words[1:])))

    def say_reports(self, actor: Actor, words: list[str], named: dict[str, str]) -> None:
        actor.windows += 1
        half = 2_000 * MS
        line = {"t0_ns": self.now - half, "half_ns": half, "sigma_ns": 5.0, "sigma_alpha": 1e-9}
        counts = {"delay_min_ns": 500, "delay_p50_ns": 700, "delay_p99_ns": 900, "sent": 1_000, "pairs": 1_000}
        bounds = {"low": (-300, -300, -300), "high": (300, 300, 300)}
        probed = [] if named.get("windows") == "no" else actor.probed
        edges = [p.EdgeFit(actor.node, dst, **line, **counts, **bounds) for dst in probed]  # type: ignore[arg-type]
        report = p.RoundReport(_round(words[0]), actor.windows, self.now - 2 * half, self.now, 0, edges, self.now)
        self.receive(actor, report)

    def say_alarms(self, actor: Actor, words: list[str], _: dict[str, str]) -> None:
        self.receive(actor, p.RoundAlarm(_round(words[0]), actor.node, actor.probed[0], int(words[1]), self.now))

    def say_probe(self, actor: Actor, words: list[str], named: dict[str, str]) -> None:
        proof = prove(TOKEN, "probe", actor.nonce, b"n" * NONCE_BYTES)
        action, label = words[0], named.get("label", "")
        assert action in ("start", "stop", "round", "show")
        self.receive(actor, p.ProbeCommand(m.PROTOCOL_VERSION, action, label, b"n" * NONCE_BYTES, proof))  # type: ignore[arg-type]

    def say_died(self, actor: Actor, _: list[str], __: dict[str, str]) -> None:
        self.receive(actor, m.PeerDied())

    def say_leave(self, actor: Actor, _: list[str], __: dict[str, str]) -> None:
        self.receive(actor, m.Leave())

    def say_done(self, actor: Actor, words: list[str], named: dict[str, str]) -> None:
        op = _op(words[1])
        descriptor = Descriptor(int(named.get("kind", 0)), 10, arrays=1, elements=1, nbytes=4).pack()
        payload, count = named.get("payload", "").encode(), int(named.get("count", 0))
        done = Done(int(words[0]), op.tag, op.sequence, int(named["rank"]), descriptor, count, payload)
        self.step(DoneReceived(actor.conn, done))

    def say_works(self, actor: Actor, words: list[str], named: dict[str, str]) -> None:
        op = _op(words[1])
        stalled, starved = int(named.get("stalled", 0)), int(named.get("starved", 0))
        called = fingerprint(ALL_REDUCE) if named.get("called") == "all_reduce" else 0
        announced = Announced(op.tag, op.sequence, 0, called, named.get("done") == "yes")
        rate, back = int(named.get("rate", 0)), int(named.get("back", 0))
        actor.report = Heartbeat(0, 0, int(words[0]), stalled, starved, 0, [announced], 0, rate, back)
        actor.working_since = self.now

    def say_rests(self, actor: Actor, _: list[str], __: dict[str, str]) -> None:
        actor.report = Heartbeat(0, 0)

    def say_idles(self, actor: Actor, words: list[str], __: dict[str, str]) -> None:
        actor.report = Heartbeat(0, 0, int(words[0]))

    def receive(self, actor: Actor, message: m.ToMaster) -> None:
        self.step(MessageReceived(actor.conn, message))

    # What the machine answers

    def step(self, event: Event, *, stamp: bool = False) -> None:
        before = f"{self.now // MS} ms: " if stamp else ""
        last_sent: m.FromMaster | None = None
        for effect in self.master.step(self.now, event):
            if isinstance(effect, SendHeartbeat):
                self.actor(effect.conn)[1].echo = effect.number
            elif (
                isinstance(effect, SendMessage)
                and last_sent is not None
                and _message(effect.message) == _message(last_sent)
            ):
                names, rest = self.lines[-1].split(" <- ", 1)
                self.lines[-1] = f"{names} {self.actor(effect.conn)[0]} <- {rest}"
            else:
                last_sent = effect.message if isinstance(effect, SendMessage) else None
                if isinstance(effect, SendMessage):
                    self.learn(effect)
                self.lines.append(before + self.shown(effect))

    def learn(self, sent: SendMessage) -> None:
        """What a later line needs of the master's messages."""
        actor = self.actor(sent.conn)[1]
        match sent.message:
            case m.Measure(test=test, other=other):
                self.tests[sent.conn, other.peer] = test
            case m.Welcome(peer=peer):
                actor.peer = peer
            case p.NodeWelcome(node):
                actor.node = node
            case p.ProbeGraph(out=out):
                actor.probed = [other.node for other in out]

    def actor(self, conn: int) -> tuple[str, Actor]:
        return next((name, actor) for name, actor in self.actors.items() if actor.conn == conn)

    def shown(self, effect: Effect) -> str:
        match effect:
            case SendMessage(conn, message):
                return f"{self.actor(conn)[0]} <- {_message(message)}"
            case SendEvidence(conns, evidence):
                names = " ".join(self.actor(conn)[0] for conn in conns)
                payloads = " ".join(payload.decode() for payload in evidence.payloads)
                op = f"{evidence.tag}/{evidence.sequence} registrations {evidence.registrations}"
                return f"{names} <- evidence {evidence.epoch} op {op} [{payloads.strip()}]"
            case CloseConnection(conn, _):
                self.actor(conn)[1].joined = False
                return f"{self.actor(conn)[0]} is closed"
            case RaiseFrameLimit(conn):
                return f"{self.actor(conn)[0]} is trusted"
            case Notify(notice):
                return f"* {notice}"
            case WriteJournal(journal):
                self.journal = journal
                return "the journal is closed" if journal.is_closed else "the journal is written"
            case WriteLinks():
                return "links are written down"
            case StartMoonshot(group, question):
                return f"a moonshot search for group {group} of {question.members}"
            case SendHeartbeat():
                raise AssertionError("heartbeats are not shown")


def _op(text: str) -> m.OpRef:
    tag, sequence = text.split("/")
    return m.OpRef(int(tag), int(sequence))


def _round(text: str) -> p.RoundId:
    fence, sequence = text.split(".")
    return p.RoundId(int(fence), int(sequence))


def _offer(named: dict[str, str]) -> m.Offer:
    """A state with one key, whose root is its content."""
    key = m.KeyOffer("w", "float32", [int(named.get("shape", 4))], named["w"].ljust(8).encode())
    flags = {flag: named.get(flag) == "yes" for flag in ("torn", "stepped", "rollback")}
    return m.Offer(int(named["rev"]), named.get("strategy", "enforce-popular"), "rf64", [key], **flags)  # type: ignore[arg-type]


def _edge(text: str) -> tuple[int, int]:
    source, target = text.split("->")
    return int(source), int(target)


def _message(message: m.FromMaster) -> str:
    match message:
        case m.Challenge():
            return f"challenge, versions {message.oldest} to {message.newest}"
        case m.Welcome():
            return f"welcome peer {message.peer}"
        case m.Resumed():
            return f"resumed, fence {message.fence}"
        case m.GuardianWelcome():
            return "guardian welcome"
        case m.Record():
            ring = [member.peer for member in message.members]
            swapped = [f"{dialer}" for dialer, source in zip(message.dialers, ring, strict=False) if dialer != source]
            facts = [f"record {message.epoch} ring {ring}", f"after {message.previous}: {message.reason}"]
            facts += [
                f"{name} {value}"
                for name, value in (("newcomers", message.newcomers), ("dialled back by", swapped))
                if value
            ]
            facts += [f"evidence by {message.evidence}", f"registrations {message.registrations}"]
            facts += ["pending"] * message.pending
            facts += [_verdict(verdict) for verdict in message.verdicts]
            return " | ".join(facts)
        case m.Installed():
            return f"installed {message.epoch} {_world(message.world)}"
        case m.CallDone():
            return f"call {message.ballot} done, pending {message.pending} {_world(message.world)}"
        case m.CallFailed():
            return f"call {message.ballot} failed: {_reason(message.reason)}"
        case m.SyncPlan():
            who = f"from {[each.peer for each in message.holders]} to {[each.peer for each in message.receivers]}"
            fetch = f" | fetch {[(key, root.decode().strip()) for key, root in message.fetch]}" if message.fetch else ""
            return f"sync {message.sync} for call {message.ballot}: revision {message.revision} {who}{fetch}"
        case m.CallExtended():
            return f"call {message.ballot} goes on"
        case m.EvictResponse():
            return f"{'done' if message.done else 'refused'}: {message.text}"
        case m.SyncExtended():
            return f"call {message.ballot}: the sync goes on"
        case m.SyncDone():
            return f"sync {message.sync} done for call {message.ballot}: revision {message.revision}"
        case m.Seal():
            return f"seal {message.epoch}: {message.reason}"
        case m.Registrations():
            return f"registrations {message.count}"
        case m.Refused() | m.Evicted():
            return f"{type(message).__name__.lower()}: {message.reason}"
        case m.Left():
            return "left"
        case m.Measure():
            how = "dials" if message.dials else "is dialled"
            return f"measure test {message.test} with {message.other.peer}, {how}, at most {message.most_ms} ms"
        case m.SyncPlan() | m.SyncDone():
            raise AssertionError("no dialogue syncs")
        case m.Status():
            return "status"
        case p.NodeWelcome() | p.ProbeAnswer():
            return _of_probing(message)
        case p.ProbeGraph() | p.RoundStart() | p.RoundEnd() | p.RoundClock() | p.ProbeHalt():
            return _of_probing(message)


def _of_probing(message: p.NodeWelcome | p.ProbeAnswer | FromRoundMaster) -> str:
    match message:
        case p.NodeWelcome():
            return f"welcome node {message.node}"
        case p.ProbeGraph():
            probes, answers = ([other.node for other in others] for others in (message.out, message.into))
            return f"graph {message.number} of {message.kind} rounds: probes {probes}, answers {answers}"
        case p.RoundStart():
            cadence, named = message.cadence, f" {message.label!r}" if message.label else ""
            how = f"window {cadence.window_ms} ms, pause {cadence.pause_us} us, alone after {message.deadline_ms} ms"
            return f"round {message.round}{named} starts: {how}"
        case p.RoundClock():
            return f"clock by round {message.round}"
        case p.RoundEnd():
            named = f" {message.label!r}" if message.label else ""
            return f"round {message.round}{named} ends, alone after {message.deadline_ms} ms"
        case p.ProbeHalt():
            return f"halt at round {message.round}: {message.reason}"
        case p.ProbeAnswer():
            about = f", round {message.summary.round} {message.summary.label!r}" if message.summary else ""
            return f"{'done' if message.done else 'refused'}: {message.text}; on {message.is_on}{about}"


def _verdict(verdict: m.Verdict) -> str:
    op = f"{verdict.op.tag}/{verdict.op.sequence}"
    if verdict.commit:
        payloads = f" [{' '.join(each.decode() for each in verdict.payloads)}]" if verdict.payloads else ""
        return f"{op} commits, registrations {verdict.registrations}{payloads}"
    assert verdict.reason is not None
    return f"{op} aborts, {_reason(verdict.reason)}"


def _reason(reason: m.Reason) -> str:
    return f"{reason.kind} {reason.peers} {reason.text!r}"


def _world(world: m.World) -> str:
    return f"(peers {world.peers}, groups {world.groups}, largest {world.largest_group})"


def replay(text: str) -> str:
    """The transcript with the answers that the machine gives now."""
    dialogue = Dialogue()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [f"  {answer}" for answer in dialogue.play(line)]
    return "\n".join(lines) + "\n"


_TRANSCRIPTS = sorted(HERE.glob("*.txt"))


@pytest.mark.parametrize("path", _TRANSCRIPTS, ids=[path.stem for path in _TRANSCRIPTS])
def test_the_master_responds_as_written(path: Path) -> None:
    written = path.read_text()
    played = replay(written)
    if REWRITE:
        path.write_text(played)
        return
    difference = "\n".join(
        difflib.unified_diff(written.splitlines(), played.splitlines(), "written", "played", lineterm="")
    )
    assert not difference, f"{path.name} differs (RINGFOLD_REWRITE=1 rewrites it):\n{difference}"


def test_a_transcript_with_a_wrong_line_fails() -> None:
    """The comparison itself must be able to fail."""
    text = "join a\n  a <- welcome peer 7\n"
    assert replay(text) != text
