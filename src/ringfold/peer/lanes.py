"""Connecting the ring of an epoch: which lanes this peer needs, dials, waits for, keeps and closes. Pure.

In an epoch with n > 1 members a peer has two links: *outgoing* to the next member and *incoming* from the previous one,
with one lane or several each. A lane is named by (outgoing, neighbour, number); with two members both links lead to the
same peer, so the direction belongs to the name. The record says which end dials an edge (NAT, firewalls).

A peer that lists several addresses as paths declares: these are my interfaces, each on a network of its own. Path i
leads from address i of one end to address i of the other, so every host lists its addresses in the same order. If one
end has fewer, its addresses serve several paths in turn. Ops are cut into slices, one for each *channel*, and each
channel has lanes of its own: `lanes` per path. Of c channels, lane k belongs to channel k modulo c; the lanes of a
channel take the paths in turn.

Members that are no neighbours have *direct* lanes. Where ops are reduced host by host, those that the plan needs belong
to the attachment like the lanes of the ring. All others are optional: they carry Done, and the segments of short ops
once all members have all of theirs. They are dialled a moment after the epoch is installed, and that one is missing
costs nothing but hops. But one that breaks ends the epoch, because frames may have been lost on it.

The lanes of a link in one channel are a *bundle*. A bundle of several lanes is *shared*: they stand in for each other,
and the engine resends what was lost with one of them. A link is up when every bundle has a lane, after a short wait for
the others. Missing lanes are dialled again and again and may connect while the epoch runs. The link is lost with the
last lane of one of its bundles.

A record begins an attachment. Lanes of the last epoch that are still right are kept. The handshake of a lane
(`acceptor.py` accepts inbound connections; the states of the dialler are in `states.py`):

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
from dataclasses import dataclass, field, replace

from ringfold.errors import RemoteProtocolError
from ringfold.peer.effects import CloseConn, Dial, Effect, Notify, Promote, ResumeReading, SendMessage
from ringfold.peer.settings import MS, PeerTimings
from ringfold.peer.states import DIAL_TRANSITIONS, DialInput, DialState, next_state
from ringfold.wire import frames
from ringfold.wire.decoding import checked
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
)
from ringfold.wire.notices import LaneLost
from ringfold.wire.proof import link_key, prove, proven

Link = tuple[bool, PeerId]
"""outgoing, neighbour"""
LaneKey = tuple[bool, PeerId, int]
"""outgoing, neighbour, number"""
FIRST_DIRECT = 1 << 20
"""The number of the first direct lane, that of channel 0; the lower id is the source of such a lane."""
Bundle = tuple[bool, PeerId, int]
"""outgoing, neighbour, channel"""


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach the other end of a lane: the addresses to try, and the source address ("": any)."""

    path: int
    paths: int
    targets: tuple[str, ...]
    port: int
    source: str = ""
    here: str = ""
    """The neighbour's name on this host, for a lane in shared memory."""


def paths_between(one: Member, other: Member) -> int:
    return max(one.paths, other.paths)


def needed_lanes(record: Record, me: PeerId) -> Iterator[tuple[LaneKey, bool]]:
    """Each lane that `me` has in the ring of `record`, and whether `me` dials it."""
    ring = record.members
    if len(ring) < 2:
        return
    rank = next(rank for rank, member in enumerate(ring) if member.peer == me)
    before, after = rank - 1, (rank + 1) % len(ring)
    per_path = record.channels * record.lanes
    for number in range(per_path * paths_between(ring[rank], ring[after])):
        yield (True, ring[after].peer, number), record.dialers[rank] == me
    for number in range(per_path * paths_between(ring[rank], ring[before])):
        yield (False, ring[before].peer, number), record.dialers[before] == me

    for peer in sorted(_hierarchical_peers(record, rank) - {ring[before].peer, ring[after].peer}):
        for channel in range(record.channels):
            yield (me < peer, peer, FIRST_DIRECT + channel), me > peer


def optional_lanes(record: Record, me: PeerId) -> Iterator[tuple[LaneKey, bool]]:
    """Each direct lane that `me` may have in the epoch of `record`, and whether `me` dials it."""
    if not record.direct:
        return
    ring = [member.peer for member in record.members]
    rank = ring.index(me)
    near = {me, ring[rank - 1], ring[(rank + 1) % len(ring)]}
    for peer in sorted(set(ring) - near):
        for channel in range(record.channels):
            yield (me < peer, peer, FIRST_DIRECT + channel), me > peer


def _hierarchical_peers(record: Record, rank: int) -> set[PeerId]:
    """The members that a rank exchanges segments with when ops are reduced host by host."""
    if record.hosts < 2:
        return set()
    size = len(record.members) // record.hosts
    host, place = divmod(rank, size)
    inside = {host * size + (place + step) % size for step in (1, size - 1)}
    across = {(host + step) % record.hosts * size + place for step in (1, record.hosts - 1)}
    return {record.members[other].peer for other in inside | across}


def route_of(record: Record, me: PeerId, lane: LaneKey) -> Route:
    """The route of a lane from here. With one path, lane i of a channel begins at the neighbour's address i."""
    here = next(member for member in record.members if member.peer == me)
    there = next(member for member in record.members if member.peer == lane[1])
    paths = paths_between(here, there)
    if lane[2] >= FIRST_DIRECT:
        shares = bool(here.here) and here.host == there.host
        return Route(0, 1, tuple(there.addresses), there.port, here=there.here if shares else "")
    if paths == 1:
        first = lane[2] // record.channels % max(1, len(there.addresses))
        # Lanes that stand in for each other are all of one kind.
        shares = bool(here.here) and here.host == there.host and record.lanes == 1
        targets = (*there.addresses[first:], *there.addresses[:first])
        return Route(0, 1, targets, there.port, here=there.here if shares else "")
    path = lane[2] // record.channels % paths
    target = there.addresses[path % there.paths]
    source = here.addresses[path % here.paths] if here.paths > 1 else ""
    return Route(path, paths, (target,), there.port, source)


LOCAL_SHARE = 4
"""What part of the time for a dial a peer of this host has to answer."""


@dataclass(slots=True)
class LaneDial:
    """One lane that this peer dials: its state, and which address is next."""

    lane: LaneKey
    route: Route
    deadline_ns: int
    key: int = 0
    address: int = 0
    state: DialState = DialState.PAUSED
    attempts: int = 0
    conn: int | None = None
    retry_ns: int | None = None
    nonce: bytes = b""
    challenge: bytes = b""
    reason: str = ""

    def enter(self, given: DialInput) -> None:
        self.state = next_state(DIAL_TRANSITIONS, self.state, given)


@dataclass(slots=True)
class LostLink:
    """A link of the installed epoch that has to be reported to the master."""

    outgoing: bool
    peer: PeerId
    reason: str


@dataclass(slots=True)
class LaneUpdate:
    """The result of one input to the lanes: effects, and links that are lost."""

    effects: list[Effect] = field(default_factory=list)
    lost: list[LostLink] = field(default_factory=list)

    def add(self, more: "LaneUpdate") -> None:
        self.effects += more.effects
        self.lost += more.lost


class Lanes:
    """The lanes of the present epoch, connected or being dialled."""

    def __init__(self, timings: PeerTimings, token: bytes = b"") -> None:
        self.me: PeerId = 0
        self._token = token
        self._key = b""
        self.record: Record | None = None
        self.attaching = False
        self._timings = timings
        self._channels = 1
        self._needed: dict[LaneKey, bool] = {}  # -> whether this peer dials it
        self._optional: dict[LaneKey, bool] = {}  # the same of direct lanes that the epoch can do without
        self._connected: dict[LaneKey, int] = {}
        self._dials: dict[LaneKey, LaneDial] = {}
        self._attach_deadline_ns = 0
        self._path_deadline_ns = 0  # until then an attachment waits for the other lanes of links that are up
        self._last_key = 0

    # The life of an attachment

    def begin(self, now_ns: int, record: Record) -> LaneUpdate:
        """A new record: keep the lanes that are right, close those that are not, dial those that are missing.

        A link of which some channels have no lane begins again. Its other end may have had all of them, until this one
        stopped dialling: if each kept its rest, they would close each other's lanes, epoch after epoch.
        """
        unfinished = self._missing_links()
        update = LaneUpdate(self.stop("a new epoch was recorded"))
        self.record = record
        self.attaching = True
        self._key = link_key(self._token, record.secret)
        self._attach_deadline_ns = now_ns + self._timings.attach_ms * MS
        self._path_deadline_ns = now_ns + self._timings.path_patience_ms * MS
        before = Counter(lane[:2] for lane in self._needed)
        if record.channels != self._channels:
            before.clear()  # every lane has another place
        self._channels = record.channels
        self._needed = dict(needed_lanes(record, self.me))
        counts = Counter(lane[:2] for lane in self._needed)
        same = {link for link, count in counts.items() if before[link] == count and link not in unfinished}
        self._optional = {
            lane: is_mine for lane, is_mine in optional_lanes(record, self.me) if lane not in self._needed
        }
        for lane, conn in sorted(self._connected.items()):
            if lane not in self._optional and (lane not in self._needed or lane[:2] not in same):
                update.effects.append(CloseConn(conn, f"not a lane of epoch {record.epoch}"))
                del self._connected[lane]
        for lane, is_mine in sorted(self._needed.items()):
            if is_mine and lane not in self._connected:
                update.effects += self._start_dial(now_ns, lane)
        return update

    def stop(self, reason: str) -> list[Effect]:
        """End the attachment; connected lanes stay."""
        self.attaching = False
        closing: list[Effect] = [CloseConn(dial.conn, reason) for dial in self._dials.values() if dial.conn is not None]
        self._dials.clear()
        return closing

    def installed(self, now_ns: int) -> list[Effect]:
        """The engine runs the epoch. From here on a lost link is reported to the master, a lost lane is redialled."""
        assert self.is_complete(now_ns)
        self.attaching = False
        effects: list[Effect] = []
        for lane, is_mine in sorted(self._needed.items()):
            dial = self._dials.get(lane)
            if is_mine and lane not in self._connected and (dial is None or dial.state is DialState.FAILED):
                effects += self._start_dial(now_ns, lane)
        for lane, is_mine in sorted(self._optional.items()):
            if is_mine and lane not in self._connected:
                effects += self._start_dial(now_ns, lane, pause_ms=self._timings.direct_pause_ms)
        return effects

    def conns_to_next(self) -> set[int]:
        """The connections that are lanes to the next member of the ring."""
        assert self.record is not None
        ring = [member.peer for member in self.record.members]
        link = (True, ring[(ring.index(self.me) + 1) % len(ring)])
        return {conn for lane, conn in self._connected.items() if lane[:2] == link}

    def end(self, reason: str) -> list[Effect]:
        """Close everything."""
        effects = self.stop(reason)
        effects += [CloseConn(conn, reason) for conn in self._connected.values()]
        self._connected.clear()
        return effects

    def is_complete(self, now_ns: int) -> bool:
        """Whether every link is up: with all its lanes, or with some after a short wait for the others."""
        if self._needed.keys() <= self._connected.keys():
            return True
        return now_ns >= self._path_deadline_ns and not self._missing_links()

    def _missing_links(self) -> set[Link]:
        needed, connected = ({self._bundle(lane) for lane in lanes} for lanes in (self._needed, self._connected))
        return {bundle[:2] for bundle in needed - connected}

    def _bundle(self, lane: LaneKey) -> Bundle:
        return *lane[:2], lane[2] % FIRST_DIRECT % self._channels

    def failed_edges(self, now_ns: int) -> list[EdgeFailure]:
        """All edges that cannot be connected, once nothing else is left to wait for; empty until then."""
        links = self._missing_links()
        if not self.attaching or not links:
            return []
        missing = sorted(lane for lane in self._needed if lane[:2] in links)
        if now_ns < self._attach_deadline_ns and not all(self._has_failed(lane) for lane in missing):
            return []
        why: dict[Link, str] = {}
        for lane in missing:
            dial = self._dials.get(lane)
            reason = "the neighbour did not connect" if dial is None else dial.reason or "no response"
            why.setdefault(lane[:2], reason)
        return [EdgeFailure(*self.ends(link), reason) for link, reason in why.items()]

    def _has_failed(self, lane: LaneKey) -> bool:
        return lane in self._dials and self._dials[lane].state is DialState.FAILED

    def direct_link(self, peer: PeerId) -> Link:
        """The link of the direct lanes to a member."""
        return self.me < peer, peer

    def ends(self, link: Link) -> tuple[PeerId, PeerId]:
        """Source and target of a link, in ring direction."""
        outgoing, neighbour = link
        return (self.me, neighbour) if outgoing else (neighbour, self.me)

    def next_deadline_ns(self) -> int | None:
        times = [dial.retry_ns for dial in self._dials.values() if dial.retry_ns is not None]
        if self.attaching:
            times.append(self._attach_deadline_ns if self._missing_links() else self._path_deadline_ns)
        return min(times, default=None)

    # Reports of the engine

    def dialled(self, key: int, conn: int) -> list[Effect]:
        dial = self._by_key(key)
        if dial is None:
            return [CloseConn(conn, "no longer needed")]
        dial.conn = conn
        return []

    def dial_failed(self, now_ns: int, key: int, reason: str) -> list[Effect]:
        dial = self._by_key(key)
        return [] if dial is None else self._retry(now_ns, dial, reason)

    def opened(self, conn: int, nonce: bytes) -> None:
        dial = self._by_conn(conn)
        if dial is not None:
            dial.enter(DialInput.OPENED)
            dial.nonce = nonce

    def message(self, now_ns: int, conn: int, body: bytes) -> list[Effect]:
        """A message of the handshake on a connection that this peer dialled."""
        dial = self._by_conn(conn)
        if dial is None:
            return []
        try:
            message = frames.decode_handshake(body)
        except RemoteProtocolError as error:
            return [CloseConn(conn, str(error)), *self._retry(now_ns, dial, str(error))]
        return self._handshake(now_ns, conn, dial, message)

    def closed(self, now_ns: int, conn: int, reason: str) -> LaneUpdate:
        update = LaneUpdate()
        if (dial := self._by_conn(conn)) is not None:
            update.effects += self._retry(now_ns, dial, reason)
        elif (lane := next((lane for lane, each in self._connected.items() if each == conn), None)) is not None:
            del self._connected[lane]
            if self._is_up(self._bundle(lane)):
                update.effects.append(Notify(LaneLost(lane[1], lane[0], lane[2], reason)))
                if self._needed.get(lane):
                    update.effects += self._start_dial(now_ns, lane, pause_ms=self._timings.redial_ms)
            else:
                self._lose_link(now_ns, update, lane[:2], reason)
        return update

    def link_lost(
        self, now_ns: int, link: Link, live_conns: tuple[int, ...], reason: str, *, direct: bool = False
    ) -> LaneUpdate:
        """The engine closed a link. Lanes that were connected after the engine wrote its report stay.

        So do those of the other kind: who was no neighbour in the last epoch may be one in this.
        """
        update = LaneUpdate()
        lost = {lane for lane in self._connected if lane[:2] == link and (lane[2] >= FIRST_DIRECT) == direct}
        gone = [lane for lane in lost if self._connected[lane] not in live_conns]
        for lane in gone:
            del self._connected[lane]
        if gone:
            self._lose_link(now_ns, update, link, reason)
        return update

    def tick(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for dial in list(self._dials.values()):
            if dial.retry_ns is not None and now_ns >= dial.retry_ns:
                effects += self._dial(dial)
        return effects

    # Dialling

    def _start_dial(self, now_ns: int, lane: LaneKey, *, pause_ms: int = 0) -> list[Effect]:
        assert self.record is not None
        route = route_of(self.record, self.me, lane)
        deadline_ns = now_ns + (pause_ms + self._timings.connect_ms) * MS
        if lane in self._needed:
            deadline_ns = min(deadline_ns, self._attach_deadline_ns)
        self._dials[lane] = dial = LaneDial(lane, route, deadline_ns)
        if not route.targets:
            dial.enter(DialInput.GIVE_UP)
            dial.reason = "the neighbour has no address"
            return []
        if pause_ms:
            dial.retry_ns = now_ns + pause_ms * MS
            return []
        return self._dial(dial)

    def _dial(self, dial: LaneDial) -> list[Effect]:
        dial.enter(DialInput.DIAL)
        self._last_key += 1
        dial.key = self._last_key
        dial.conn = None
        dial.retry_ns = None
        route, target = dial.route, dial.route.targets[dial.address]
        # A peer of this host answers at once, or there is time left for TCP.
        timeout_ms = max(1, self._timings.connect_ms // (LOCAL_SHARE if route.here else len(route.targets)))
        little = dial.lane in self._optional
        return [Dial(dial.key, target, route.port, timeout_ms, route.source, route.here, little)]

    def _retry(self, now_ns: int, dial: LaneDial, reason: str) -> list[Effect]:
        """Dial the next address at once; after the last one pause; after the deadline give up.

        While other lanes of the link are up, there is no deadline: the pauses grow instead.
        """
        targets, timings = dial.route.targets, self._timings
        dial.reason = f"{targets[dial.address]}:{dial.route.port}: {reason}"
        dial.conn = None
        dial.retry_ns = None
        if dial.route.here:  # whatever was wrong there, TCP comes next
            dial.route = replace(dial.route, here="")
            return self._dial(dial)
        late = now_ns >= dial.deadline_ns
        if late and not self._is_up(self._bundle(dial.lane)):
            dial.enter(DialInput.GIVE_UP)
            return []
        dial.attempts += 1
        dial.address = (dial.address + 1) % len(targets)
        rounds, more = divmod(dial.attempts, len(targets))
        if more:
            return self._dial(dial)
        pause_ms = timings.redial_ms
        if late:
            pause_ms = min(timings.redial_ms << min(rounds, 16), timings.path_redial_most_ms)
        dial.enter(DialInput.PAUSE)
        dial.retry_ns = now_ns + pause_ms * MS
        return []

    def _handshake(self, now_ns: int, conn: int, dial: LaneDial, message: Handshake) -> list[Effect]:
        match message:
            case Challenge(nonce=challenge) if dial.state is DialState.CHALLENGE:
                dial.enter(DialInput.HELLO_SENT)
                dial.challenge = challenge
                return [SendMessage(conn, self._hello(dial)), ResumeReading(conn)]
            case LaneWelcome(proof=proof) if dial.state is DialState.WELCOME:
                if proven(self._key, proof, "lane_welcome", dial.nonce, dial.challenge):
                    del self._dials[dial.lane]
                    return self._add_lane(conn, dial.lane)
                reason = "it does not know the epoch's secret"
            case Refused(reason=text):
                reason = f"refused: {text}"
            case _:
                reason = f"it sent {type(message).__name__} out of turn"
        return [CloseConn(conn, reason), *self._retry(now_ns, dial, reason)]

    def _hello(self, dial: LaneDial) -> LaneHello:
        assert self.record is not None
        source, target = self.ends(dial.lane[:2])
        claim = (self.record.epoch, source, target, dial.lane[2])
        proof = prove(self._key, "lane", dial.challenge, dial.nonce, *_as_parts(claim))
        return LaneHello(PROTOCOL_VERSION, *claim, dial.nonce, proof)

    # Lanes that a neighbour dials

    def accept(self, conn: int, nonce: bytes, hello: LaneHello) -> LaneUpdate | str | None:
        """Decide about an inbound connection. An update: it is taken, or closed. Text: refuse it for this reason.

        None: its epoch is not recorded here yet.
        """
        record = self.record
        if record is None or hello.epoch > record.epoch:
            return None
        lane = self._lane_of(hello)
        try:
            fault = checked(self._fault_of, nonce, hello, lane)
        except RemoteProtocolError as error:
            fault = str(error)
        if fault is not None:
            return fault
        stale = self._connected.get(lane)
        bundle = self._bundle(lane)
        is_welcome = self.attaching or (lane in self._optional and stale is None)
        if not is_welcome and not (self._is_shared(bundle) and self._is_up(bundle)):
            # This peer is attached, and the neighbour is not: frames that were sent on the old lane since are lost.
            reason = f"peer {lane[1]} connects again, so it has lost the link"
            refusal = Refused(f"epoch {hello.epoch} is not being attached here any more")
            update = LaneUpdate([SendMessage(conn, refusal), CloseConn(conn, reason)])
            if stale is not None:
                update.effects += self._close_link(lane[:2], reason)
                update.lost.append(LostLink(*lane[:2], reason))
            return update
        welcome = LaneWelcome(prove(self._key, "lane_welcome", hello.nonce, nonce))
        taking = [SendMessage(conn, welcome), *self._add_lane(conn, lane)]
        closing: list[Effect] = []
        if stale is not None:
            closing.append(CloseConn(stale, "the neighbour has opened a newer connection"))
        # Frames of a shared bundle's stale lane move to the other lanes: the new one must be up before.
        return LaneUpdate([*taking, *closing] if self._is_shared(bundle) else [*closing, *taking])

    def _lane_of(self, hello: LaneHello) -> LaneKey:
        outgoing = hello.source == self.me
        return outgoing, hello.target if outgoing else hello.source, hello.lane

    def _fault_of(self, nonce: bytes, hello: LaneHello, lane: LaneKey) -> str | None:
        """Why this hello is wrong. Without the secret a client learns nothing but that its proof is wrong."""
        record = self.record
        assert record is not None
        if hello.version != PROTOCOL_VERSION:
            return f"protocol version {hello.version}, but this peer speaks {PROTOCOL_VERSION}"
        if hello.epoch < record.epoch:
            return f"epoch {hello.epoch} is over"
        claim = (hello.epoch, hello.source, hello.target, hello.lane)
        if min(claim) < 0 or max(claim) >= 1 << 63:
            return "numbers out of range"
        if not proven(self._key, hello.proof, "lane", nonce, hello.nonce, *_as_parts(claim)):
            return "it does not know the epoch's secret"
        is_mine = self._needed.get(lane, self._optional.get(lane))
        if self.me not in (hello.source, hello.target) or is_mine is None:
            return f"{hello.source} -> {hello.target}, lane {hello.lane}, is not a lane of this peer"
        if is_mine:
            return f"lane {hello.lane} of {hello.source} -> {hello.target} is dialled by peer {self.me}"
        return None

    # Links

    def _lose_link(self, now_ns: int, update: LaneUpdate, link: Link, reason: str) -> None:
        """A link broke. During an attachment it is connected again; afterwards it is reported."""
        update.effects += self._close_link(link, reason)
        if not self.attaching:
            update.lost.append(LostLink(*link, reason))
            return
        for lane, is_mine in sorted(self._needed.items()):
            if lane[:2] == link and is_mine and lane not in self._dials:
                update.effects += self._start_dial(now_ns, lane)

    def _close_link(self, link: Link, reason: str) -> list[Effect]:
        closing = sorted(lane for lane in self._connected if lane[:2] == link)
        return [CloseConn(self._connected.pop(lane), reason) for lane in closing]

    def _add_lane(self, conn: int, lane: LaneKey) -> list[Effect]:
        """The connection is this lane from now on."""
        assert self.record is not None
        self._connected[lane] = conn
        bundle = self._bundle(lane)
        if lane[2] >= FIRST_DIRECT:
            return [Promote(conn, *lane, epoch=self.record.epoch, channel=bundle[2], direct=True)]
        if not self._is_shared(bundle):
            return [Promote(conn, *lane, channel=bundle[2])]
        route = route_of(self.record, self.me, lane)
        return [Promote(conn, *lane, True, route.path, route.paths, self.record.epoch, bundle[2])]

    def _is_shared(self, bundle: Bundle) -> bool:
        return sum(self._bundle(lane) == bundle for lane in self._needed) > 1

    def _is_up(self, bundle: Bundle) -> bool:
        return any(self._bundle(lane) == bundle for lane in self._connected)

    def _by_key(self, key: int) -> LaneDial | None:
        return next((dial for dial in self._dials.values() if dial.key == key), None)

    def _by_conn(self, conn: int) -> LaneDial | None:
        return next((dial for dial in self._dials.values() if dial.conn == conn), None)


def _as_parts(claim: tuple[int, int, int, int]) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(8, "little") for number in claim)
