"""Connecting the ring of an epoch: which lanes this peer needs, dials, waits for, keeps and closes. Pure.

In an epoch with n > 1 members a peer has two links: *outgoing* to the next member and *incoming* from the previous one,
with one lane or several each. A lane is named by (outgoing, neighbour, number); with two members both links lead to the
same peer, so the direction belongs to the name. The record says which end dials an edge (NAT, firewalls).

A peer that lists several addresses as paths declares: these are my interfaces, each on a network of its own. Path i
leads from address i of one end to address i of the other, so every host lists its addresses in the same order. If one
end has fewer, its addresses serve several paths in turn. A link has `lanes` lanes per path; lane k is on path k modulo
the number of paths.

A link with several lanes is *shared*: they stand in for each other, and the engine resends what was lost with one of
them. Such a link is up when one of its lanes is, after a short wait for the others. Missing lanes are dialled again and
again and may connect while the epoch runs. The link is lost with its last lane.

A record begins an attachment. Lanes of the last epoch that are still right are kept. The handshake of a lane:

    dialler                                  acceptor
       |  <---------------- Challenge(nonce)     |     pending: unproven, few, and not for long
       |  LaneHello(epoch, edge, proof) ------>  |     parked while its epoch is not known here yet
       |  <---------------- LaneWelcome(proof)   |     a lane at the acceptor
       |  a lane at the dialler                  |

A neighbour that lost its end of a lane dials a new one, and the stale one is closed here. On a link with one lane that
is safe only until this peer has installed the epoch: afterwards frames may have been sent on the stale lane, so the
link is reported lost instead, and the next epoch connects it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ringfold.errors import RemoteProtocolError
from ringfold.peer.effects import CloseConn, Dial, Effect, Promote, Resume, SendMessage, Tell
from ringfold.peer.settings import MS, PeerTimings
from ringfold.wire import frames
from ringfold.wire.decoding import checked
from ringfold.wire.events import ConnectionDropped, LaneLost
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    EdgeFailure,
    Handshake,
    LaneHello,
    LaneWelcome,
    Member,
    PeerId,
    Record,
    Refused,
    VisitHello,
)
from ringfold.wire.proof import link_key, prove, proven

Link = tuple[bool, PeerId]
"""outgoing, neighbour"""
LaneKey = tuple[bool, PeerId, int]
"""outgoing, neighbour, number"""


@dataclass(frozen=True, slots=True)
class Way:
    """How to reach the other end of a lane: the addresses to try, and where to come from ("": from anywhere)."""

    path: int
    paths: int
    targets: tuple[str, ...]
    port: int
    source: str = ""


def paths_between(one: Member, other: Member) -> int:
    return max(one.paths, other.paths)


def needed_lanes(record: Record, me: PeerId) -> Iterator[tuple[LaneKey, bool]]:
    """Each lane that `me` has in the ring of `record`, and whether it dials it."""
    ring = record.members
    if len(ring) < 2:
        return
    rank = next(rank for rank, member in enumerate(ring) if member.peer == me)
    before, after = rank - 1, (rank + 1) % len(ring)
    for number in range(record.lanes * paths_between(ring[rank], ring[after])):
        yield (True, ring[after].peer, number), record.dialers[rank] == me
    for number in range(record.lanes * paths_between(ring[rank], ring[before])):
        yield (False, ring[before].peer, number), record.dialers[before] == me


def way_of(record: Record, me: PeerId, lane: LaneKey) -> Way:
    """The way of a lane from here. On a link with one path, lane i begins at the neighbour's address i."""
    here = next(member for member in record.members if member.peer == me)
    there = next(member for member in record.members if member.peer == lane[1])
    paths = paths_between(here, there)
    if paths == 1:
        first = lane[2] % max(1, len(there.addresses))
        return Way(0, 1, (*there.addresses[first:], *there.addresses[:first]), there.port)
    path = lane[2] % paths
    target, source = there.addresses[path % there.paths], here.addresses[path % here.paths]
    return Way(path, paths, (target,), there.port, source if here.paths > 1 else "")


@dataclass(slots=True)
class _Dialling:
    """One lane that this peer dials: where it stands, and which address is next."""

    lane: LaneKey
    way: Way
    key: int
    address: int
    give_up_ns: int
    stage: Literal["dialling", "challenge", "welcome", "pause", "failed"] = "dialling"
    tries: int = 0
    conn: int | None = None
    retry_ns: int | None = None
    nonce: bytes = b""
    challenge: bytes = b""
    reason: str = ""


@dataclass(slots=True)
class _Guest:
    """A connection to the data port that has proven nothing yet."""

    remote: str
    nonce: bytes
    until_ns: int
    parked: LaneHello | VisitHello | None = None
    round_trip_ns: int = 0
    """From the challenge to the hello."""


@dataclass(slots=True)
class LostLink:
    """A link of the installed epoch that has to be reported to the master."""

    outgoing: bool
    peer: PeerId
    reason: str


@dataclass(slots=True)
class Turn:
    """What a step of the lanes wants: effects, and links that are lost."""

    effects: list[Effect] = field(default_factory=list)
    lost: list[LostLink] = field(default_factory=list)
    visitor: int | None = None
    """A guest that wants to visit this peer: `visitors` knows it."""


class Lanes:
    """All connections of a peer except the one to the master."""

    def __init__(self, timings: PeerTimings, token: bytes = b"") -> None:
        self.me: PeerId = 0
        self._token, self._key = token, b""
        self.record: Record | None = None
        self.attaching = False
        self._timings = timings
        self._needed: dict[LaneKey, bool] = {}  # -> whether this peer dials it
        self._there: dict[LaneKey, int] = {}
        self._dials: dict[LaneKey, _Dialling] = {}
        self._guests: dict[int, _Guest] = {}  # in order of arrival
        self._attach_by_ns = self._patient_until_ns = 0
        self._last_key = 0

    # The life of an attachment

    def begin(self, now_ns: int, record: Record) -> Turn:
        """A new record: keep what is right, close what is not, dial what is missing, look at who was early."""
        turn = Turn(self.stop("a new epoch was recorded"))
        self.record, self.attaching = record, True
        self._key = link_key(self._token, record.secret)
        self._attach_by_ns = now_ns + self._timings.attach_ms * MS
        self._patient_until_ns = now_ns + self._timings.path_patience_ms * MS
        before = Counter(lane[:2] for lane in self._needed)
        self._needed = dict(needed_lanes(record, self.me))
        same = {link for link, count in Counter(lane[:2] for lane in self._needed).items() if before[link] == count}
        for lane, conn in sorted(self._there.items()):
            if lane not in self._needed or lane[:2] not in same:
                turn.effects.append(CloseConn(conn, f"not a lane of epoch {record.epoch}"))
                del self._there[lane]
        for lane, is_mine in sorted(self._needed.items()):
            if is_mine and lane not in self._there:
                turn.effects += self._start_dial(now_ns, lane)
        for conn, guest in list(self._guests.items()):
            if isinstance(guest.parked, LaneHello):
                self._judge(turn, conn, guest, guest.parked)
        return turn

    def stop(self, reason: str) -> list[Effect]:
        """No attachment any more; lanes and guests stay."""
        self.attaching = False
        closing: list[Effect] = [CloseConn(dial.conn, reason) for dial in self._dials.values() if dial.conn is not None]
        self._dials.clear()
        return closing

    def installed(self, now_ns: int) -> list[Effect]:
        """The engine runs the epoch: from here on a lost link is the master's business, a lost lane not."""
        assert self.complete(now_ns)
        self.attaching = False
        effects: list[Effect] = []
        for lane, is_mine in sorted(self._needed.items()):
            dial = self._dials.get(lane)
            if is_mine and lane not in self._there and (dial is None or dial.stage == "failed"):
                effects += self._start_dial(now_ns, lane)
        return effects

    def end(self, reason: str) -> list[Effect]:
        """Close everything."""
        effects = self.stop(reason)
        effects += [CloseConn(conn, reason) for conn in (*self._there.values(), *self._guests)]
        self._there.clear()
        self._guests.clear()
        return effects

    def complete(self, now_ns: int) -> bool:
        """Whether every link is there: with all its lanes, or with some after a little patience for the others."""
        if self._needed.keys() <= self._there.keys():
            return True
        return now_ns >= self._patient_until_ns and not self._missing_links()

    def _missing_links(self) -> set[Link]:
        return {lane[:2] for lane in self._needed} - {lane[:2] for lane in self._there}

    def hopeless(self, now_ns: int) -> list[EdgeFailure]:
        """All edges that cannot be had, once nothing else is left to wait for; empty until then."""
        links = self._missing_links()
        if not self.attaching or not links:
            return []
        missing = sorted(lane for lane in self._needed if lane[:2] in links)
        over = now_ns >= self._attach_by_ns
        if not over and not all(lane in self._dials and self._dials[lane].stage == "failed" for lane in missing):
            return []
        why: dict[Link, str] = {}
        for lane in missing:
            dial = self._dials.get(lane)
            reason = "nobody brought the lane" if dial is None else dial.reason or "no answer"
            why.setdefault(lane[:2], reason)
        return [EdgeFailure(*self.ends(link), reason) for link, reason in why.items()]

    def ends(self, link: Link) -> tuple[PeerId, PeerId]:
        """Source and target of a link, in ring direction."""
        outgoing, neighbour = link
        return (self.me, neighbour) if outgoing else (neighbour, self.me)

    def next_deadline_ns(self) -> int | None:
        times = [guest.until_ns for guest in self._guests.values()]
        times += [dial.retry_ns for dial in self._dials.values() if dial.retry_ns is not None]
        if self.attaching:
            times += [self._attach_by_ns] if self._missing_links() else [self._patient_until_ns]
        return min(times, default=None)

    # What the engine reports

    def dialled(self, key: int, conn: int) -> list[Effect]:
        dial = self._by_key(key)
        if dial is None:
            return [CloseConn(conn, "no longer wanted")]
        dial.conn = conn
        return []

    def dial_failed(self, now_ns: int, key: int, reason: str) -> list[Effect]:
        dial = self._by_key(key)
        return [] if dial is None else self._try_again(now_ns, dial, reason)

    def opened(self, conn: int, nonce: bytes) -> None:
        dial = self._by_conn(conn)
        if dial is not None:
            dial.stage, dial.nonce = "challenge", nonce

    def accepted(self, now_ns: int, conn: int, remote: str, nonce: bytes) -> list[Effect]:
        effects: list[Effect] = []
        if len(self._guests) >= self._timings.unproven_most:
            # Who has said nothing goes before who waits for its epoch.
            oldest = min(self._guests, key=lambda guest: self._guests[guest].parked is not None)
            effects += self._drop_guest(oldest, "too many connections that have proven nothing")
        self._guests[conn] = _Guest(remote, nonce, now_ns + self._timings.handshake_ms * MS)
        effects.append(SendMessage(conn, Challenge(nonce, PROTOCOL_VERSION, PROTOCOL_VERSION)))
        return effects

    def message(self, now_ns: int, conn: int, body: bytes) -> Turn:
        turn = Turn()
        dial, guest = self._by_conn(conn), self._guests.get(conn)
        if dial is None and guest is None:
            return turn
        try:
            said = frames.decode_handshake(body)
        except RemoteProtocolError as error:
            if guest is not None:
                turn.effects += self._drop_guest(conn, str(error))
            elif dial is not None:
                turn.effects += [CloseConn(conn, str(error)), *self._try_again(now_ns, dial, str(error))]
            return turn
        if dial is not None:
            turn.effects += self._dialler_hears(now_ns, conn, dial, said)
        elif guest is not None:
            if isinstance(said, LaneHello) and guest.parked is None:
                self._judge(turn, conn, guest, said)
            elif isinstance(said, VisitHello) and guest.parked is None:
                guest.parked, turn.visitor = said, conn
                guest.round_trip_ns = now_ns - (guest.until_ns - self._timings.handshake_ms * MS)
            else:
                turn.effects += self._drop_guest(conn, f"it said {type(said).__name__} out of turn")
        return turn

    def closed(self, now_ns: int, conn: int, reason: str) -> Turn:
        turn = Turn()
        if (guest := self._guests.pop(conn, None)) is not None:
            turn.effects.append(Tell(ConnectionDropped(guest.remote, reason)))
        elif (dial := self._by_conn(conn)) is not None:
            turn.effects += self._try_again(now_ns, dial, reason)
        elif (lane := next((lane for lane, there in self._there.items() if there == conn), None)) is not None:
            del self._there[lane]
            if self._is_there(lane[:2]):
                turn.effects.append(Tell(LaneLost(lane[1], lane[0], lane[2], reason)))
                turn.effects += self._start_dial(now_ns, lane, pause=True) if self._needed.get(lane) else []
            else:
                self._lose_link(now_ns, turn, lane[:2], reason)
        return turn

    def link_lost(self, now_ns: int, link: Link, still_there: tuple[int, ...], reason: str) -> Turn:
        """The engine closed a link. What was connected since the engine wrote its report is not meant by it."""
        turn = Turn()
        gone = [lane for lane, conn in self._there.items() if lane[:2] == link and conn not in still_there]
        for lane in gone:
            del self._there[lane]
        if gone:
            self._lose_link(now_ns, turn, link, reason)
        return turn

    def tick(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for conn, guest in list(self._guests.items()):
            if now_ns >= guest.until_ns:
                effects += self._drop_guest(conn, _waited_in_vain(guest.parked))
        for dial in list(self._dials.values()):
            if dial.retry_ns is not None and now_ns >= dial.retry_ns:
                effects += self._redial(dial)
        return effects

    # Dialling

    def _start_dial(self, now_ns: int, lane: LaneKey, *, pause: bool = False) -> list[Effect]:
        assert self.record is not None
        way = way_of(self.record, self.me, lane)
        give_up_ns = min(now_ns + self._timings.connect_ms * MS, self._attach_by_ns)
        self._dials[lane] = dial = _Dialling(lane, way, 0, 0, give_up_ns)
        if not way.targets:
            dial.stage, dial.reason = "failed", "the neighbour has no address"
            return []
        if pause:
            dial.stage, dial.retry_ns = "pause", now_ns + self._timings.redial_ms * MS
            return []
        return self._redial(dial)

    def _redial(self, dial: _Dialling) -> list[Effect]:
        self._last_key += 1
        dial.key, dial.stage, dial.conn, dial.retry_ns = self._last_key, "dialling", None, None
        timeout_ms = max(1, self._timings.connect_ms // len(dial.way.targets))
        return [Dial(dial.key, dial.way.targets[dial.address], dial.way.port, timeout_ms, dial.way.source)]

    def _try_again(self, now_ns: int, dial: _Dialling, reason: str) -> list[Effect]:
        """The next address at once; after the last one a pause; at the end of the time no more.

        While other lanes of the link are there, there is no end: the pauses grow instead.
        """
        targets, timings = dial.way.targets, self._timings
        dial.reason, dial.conn, dial.retry_ns = f"{targets[dial.address]}:{dial.way.port}: {reason}", None, None
        late = now_ns >= dial.give_up_ns
        if late and not self._is_there(dial.lane[:2]):
            dial.stage = "failed"
            return []
        dial.tries += 1
        dial.address = (dial.address + 1) % len(targets)
        rounds, more = divmod(dial.tries, len(targets))
        if more:
            return self._redial(dial)
        pause_ms = timings.redial_ms
        if late:
            pause_ms = min(timings.redial_ms << min(rounds, 16), timings.path_redial_most_ms)
        dial.stage, dial.retry_ns = "pause", now_ns + pause_ms * MS
        return []

    def _dialler_hears(self, now_ns: int, conn: int, dial: _Dialling, said: Handshake) -> list[Effect]:
        assert self.record is not None
        match said:
            case Challenge(nonce=challenge) if dial.stage == "challenge":
                dial.stage, dial.challenge = "welcome", challenge
                return [SendMessage(conn, self._hello(dial)), Resume(conn)]
            case LaneWelcome(proof=proof) if dial.stage == "welcome":
                if proven(self._key, proof, "lane_welcome", dial.nonce, dial.challenge):
                    del self._dials[dial.lane]
                    return self._take(conn, dial.lane)
                reason = "it does not know the epoch's secret"
            case Refused(reason=words):
                reason = f"refused: {words}"
            case _:
                reason = f"it said {type(said).__name__} out of turn"
        return [CloseConn(conn, reason), *self._try_again(now_ns, dial, reason)]

    def _hello(self, dial: _Dialling) -> LaneHello:
        assert self.record is not None
        source, target = self.ends(dial.lane[:2])
        claim = (self.record.epoch, source, target, dial.lane[2])
        proof = prove(self._key, "lane", dial.challenge, dial.nonce, *_as_parts(claim))
        return LaneHello(PROTOCOL_VERSION, *claim, dial.nonce, proof)

    # Guests

    def _judge(self, turn: Turn, conn: int, guest: _Guest, hello: LaneHello) -> None:
        """Take the lane, park the guest, or send it away."""
        record = self.record
        if record is None or hello.epoch > record.epoch:
            guest.parked = hello
            return
        lane = self._lane_of(hello)
        try:
            fault = checked(self._fault_of, guest, hello, lane)
        except RemoteProtocolError as error:
            fault = str(error)
        if fault is not None:
            turn.effects += [SendMessage(conn, Refused(fault)), *self._drop_guest(conn, fault)]
            return
        stale = self._there.get(lane)
        if not self.attaching and not (self._shares(lane[:2]) and self._is_there(lane[:2])):
            # This peer is attached, the neighbour is not: what went down the old lane since is lost.
            reason = f"peer {lane[1]} connects again, so it has lost the link"
            turn.effects.append(SendMessage(conn, Refused(f"epoch {hello.epoch} is not being attached here any more")))
            turn.effects += self._close_guest(conn, reason)
            if stale is not None:
                turn.effects += self._close_link(lane[:2], reason)
                turn.lost.append(LostLink(*lane[:2], reason))
            return
        del self._guests[conn]
        welcome = LaneWelcome(prove(self._key, "lane_welcome", hello.nonce, guest.nonce))
        taking = [SendMessage(conn, welcome), *self._take(conn, lane)]
        closing = [] if stale is None else [CloseConn(stale, "the neighbour brought a newer connection")]
        # What was on a shared link's stale lane goes over to the others: then the new one must be there.
        turn.effects += [*taking, *closing] if self._shares(lane[:2]) else [*closing, *taking]

    def _lane_of(self, hello: LaneHello) -> LaneKey:
        outgoing = hello.source == self.me
        return outgoing, hello.target if outgoing else hello.source, hello.lane

    def _fault_of(self, guest: _Guest, hello: LaneHello, lane: LaneKey) -> str | None:
        """Why this hello is wrong. Only who proves the secret learns more than that it does not."""
        record = self.record
        assert record is not None
        if hello.version != PROTOCOL_VERSION:
            return f"protocol version {hello.version}, but this peer speaks {PROTOCOL_VERSION}"
        if hello.epoch < record.epoch:
            return f"epoch {hello.epoch} is over"
        claim = (hello.epoch, hello.source, hello.target, hello.lane)
        if min(claim) < 0 or max(claim) >= 1 << 63:
            return "numbers out of range"
        if not proven(self._key, hello.proof, "lane", guest.nonce, hello.nonce, *_as_parts(claim)):
            return "it does not know the epoch's secret"
        if self.me not in (hello.source, hello.target) or lane not in self._needed:
            return f"{hello.source} -> {hello.target}, lane {hello.lane}, is not a lane of this peer"
        if self._needed[lane]:
            return f"lane {hello.lane} of {hello.source} -> {hello.target} is dialled by peer {self.me}"
        return None

    def _drop_guest(self, conn: int, reason: str) -> list[Effect]:
        remote = self._guests[conn].remote
        return [*self._close_guest(conn, reason), Tell(ConnectionDropped(remote, reason))]

    def _close_guest(self, conn: int, reason: str) -> list[Effect]:
        del self._guests[conn]
        return [CloseConn(conn, reason)]

    # Guests that want to visit

    def visitors(self) -> list[tuple[int, bytes, VisitHello, int]]:
        """The guests that wait to be let in for a visit: connection, challenge, what they said, and the round trip."""
        waiting = [(conn, guest.nonce, guest.parked, guest.round_trip_ns) for conn, guest in self._guests.items()]
        return [(conn, nonce, hello, trip) for conn, nonce, hello, trip in waiting if isinstance(hello, VisitHello)]

    def let_in(self, conn: int) -> None:
        """The guest is a visitor now; its connection is no longer looked after here."""
        del self._guests[conn]

    def turn_away(self, conn: int, reason: str) -> list[Effect]:
        return [SendMessage(conn, Refused(reason)), *self._drop_guest(conn, reason)]

    # Links

    def _lose_link(self, now_ns: int, turn: Turn, link: Link, reason: str) -> None:
        """A link broke. During an attachment it is dialled again, or waited for; afterwards it is reported."""
        turn.effects += self._close_link(link, reason)
        if not self.attaching:
            turn.lost.append(LostLink(*link, reason))
            return
        for lane, is_mine in sorted(self._needed.items()):
            if lane[:2] == link and is_mine and lane not in self._dials:
                turn.effects += self._start_dial(now_ns, lane)

    def _close_link(self, link: Link, reason: str) -> list[Effect]:
        closing = sorted(lane for lane in self._there if lane[:2] == link)
        return [CloseConn(self._there.pop(lane), reason) for lane in closing]

    def _take(self, conn: int, lane: LaneKey) -> list[Effect]:
        """The connection is this lane from now on."""
        assert self.record is not None
        self._there[lane] = conn
        if not self._shares(lane[:2]):
            return [Promote(conn, *lane)]
        way = way_of(self.record, self.me, lane)
        return [Promote(conn, *lane, True, way.path, way.paths, self.record.epoch)]

    def _shares(self, link: Link) -> bool:
        return sum(lane[:2] == link for lane in self._needed) > 1

    def _is_there(self, link: Link) -> bool:
        return any(lane[:2] == link for lane in self._there)

    def _by_key(self, key: int) -> _Dialling | None:
        return next((dial for dial in self._dials.values() if dial.key == key), None)

    def _by_conn(self, conn: int) -> _Dialling | None:
        return next((dial for dial in self._dials.values() if dial.conn == conn), None)


def _waited_in_vain(parked: LaneHello | VisitHello | None) -> str:
    match parked:
        case LaneHello():
            return "its epoch did not come"
        case VisitHello(purpose=purpose, number=number):
            return f"the master did not announce {purpose} {number} here"
        case None:
            return "no handshake in time"


def _as_parts(claim: tuple[int, int, int, int]) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(8, "little") for number in claim)
