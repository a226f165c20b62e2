"""A peer's part in a sync, from the master's plan to its end. Pure.

Everybody who takes part serves: a holder gives what it has, a receiver what it has got so far. A receiver visits
holders and a few fellow receivers, and asks them for hashes and blocks as `state/fetch.py` decides. Blocks go from
memory to memory: the engine writes them where they belong and checks their hashes, so what is decided here is only who
asks whom for what.

    receiver                                     holder
       |  HashesWanted(keys) ------------------>   |
       |  <------------------------ Hashes(lists)  |     must give the roots of the plan
       |  BlocksWanted(blocks) ---------------->   |     a few MiB at a time, from each source
       |  <-------------------------- the blocks   |     hashed before they leave, and when they have come
       |  Have(ranges) to whoever visits it        |

A peer whose own state changes while it serves finds out by those hashes, and reports itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ringfold.errors import RemoteProtocolError
from ringfold.peer.effects import Block, Effect, ExpectBlocks, SendBlocks, SendMessage
from ringfold.peer.events import BlocksChanged, BlocksReceived
from ringfold.peer.settings import MS
from ringfold.peer.side_channels import BulkSessions, SessionFailed, SessionOpened, TaskId
from ringfold.state import fetch_effects
from ringfold.state.array_memory import block_range
from ringfold.state.fetch import Fetch
from ringfold.state.hashing import Bytes, block_hash, digest_bytes
from ringfold.state.manifest import Snapshot
from ringfold.state.serve import BlockRefusal, BlockServer, Piece, wanted_of
from ringfold.wire import frames
from ringfold.wire.decoding import checked
from ringfold.wire.messages import Divergence, HashKind, Member, Message, PeerId, Refused, SyncPlan, SyncReport
from ringfold.wire.visiting import BlocksWanted, Hashes, HashesWanted, Have

MAX_HOLDERS = 8
"""How many holders a receiver visits at a time: more would not be faster, and many receivers would ask them all."""
MAX_RELAY_RECEIVERS = 3
"""How many other receivers it visits: what goes around between them, the holders need not send twice."""

MAX_CONNECT_ATTEMPTS = 4
"""How often a source is visited whose connection breaks or cannot be made: it may be the only one with the rest."""
SOURCE_TIMEOUT_NS = 30_000 * MS
"""A source that owes something and sends nothing for so long is visited anew, and its blocks are asked elsewhere."""
PROGRESS_REPORT_INTERVAL_NS = 5_000 * MS
"""How often a receiver tells the master that it makes progress."""
RECONNECT_PAUSE_MS = 250
"""Before it is visited again; longer each time."""


@dataclass(frozen=True, slots=True)
class PendingBlock:
    """Where a block that was asked for arrives: in the array itself, or in host memory on its way to a device."""

    key: int
    block: int
    memory: Bytes
    expected: bytes


@dataclass(slots=True)
class _Sync:
    """The sync in progress."""

    plan: SyncPlan
    task: TaskId
    snapshot: Snapshot
    shelf: BlockServer
    fetch: Fetch | None
    hosts: list[Member] = field(default_factory=list)
    """Whom to visit when somebody whom this peer visits is gone."""
    visiting: set[PeerId] = field(default_factory=set)
    failed_visits: dict[PeerId, int] = field(default_factory=dict)
    sources: dict[PeerId, int] = field(default_factory=dict)
    """The open visits that this peer made: peer -> connection."""
    heard: dict[PeerId, int] = field(default_factory=dict)
    """When each of them last sent something, or was last asked."""
    told_ns: int = 0
    """When the master last heard that this peer makes progress."""
    landings: dict[int, list[PendingBlock]] = field(default_factory=dict)
    """By batch: what was asked for and is not here yet."""
    sent_to: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Per visitor what was sent to it last, to name what has changed."""
    reported: bool = False
    """Whether the fetch has come to its end here."""
    changed: bool = False

    def holders(self) -> set[PeerId]:
        return {member.peer for member in self.plan.holders}


class Syncing:
    """The sync that this peer takes part in, if there is one."""

    def __init__(self, visits: BulkSessions, say: Callable[[Message], list[Effect]]) -> None:
        self._visits = visits
        self._say = say
        self._sync: _Sync | None = None
        self.tx_bytes = self.rx_bytes = 0
        self.written_to: Snapshot | None = None
        """Into whose memory blocks of another state were asked for, until the program has seen the end of that."""

    @property
    def ballot(self) -> int | None:
        """The call that the sync in progress answers."""
        return None if self._sync is None else self._sync.plan.ballot

    @property
    def diverged(self) -> tuple[Divergence, ...]:
        """The members that have diverged, by the plan of the sync in progress."""
        return () if self._sync is None else tuple(self._sync.plan.diverged)

    def moved(self, ballot: int) -> tuple[int, int]:
        """The bytes sent and received for the sync of this call; none, if its plan never came."""
        return (self.tx_bytes, self.rx_bytes) if self.ballot == ballot else (0, 0)

    def begin(self, now_ns: int, me: PeerId, plan: SyncPlan, snapshot: Snapshot) -> list[Effect]:
        """The plan is here: serve, and fetch what is missing. `RemoteProtocolError` if it makes no sense here."""
        receivers = [member.peer for member in plan.receivers]
        if self._sync is not None:
            raise RemoteProtocolError(f"it plans sync {plan.sync} during sync {self._sync.plan.sync}")
        if plan.fetch and me not in receivers:
            raise RemoteProtocolError(f"in sync {plan.sync} peer {me} fetches, but is no receiver")
        wanted = wanted_of(snapshot, plan.fetch)
        self.tx_bytes = self.rx_bytes = 0
        task: TaskId = ("state", plan.sync)
        self._visits.expect(task, plan.secret, receivers)
        if not plan.fetch:
            self._sync = _Sync(plan, task, snapshot, BlockServer(snapshot), None)
            return []
        turn = receivers.index(me)
        holders = [member.peer for member in plan.holders]
        fellows = [peer for peer in receivers if peer != me]
        place = turn, len(receivers)
        fetching = Fetch(wanted, snapshot.hash, holders, fellows, place, snapshot.block_bytes)
        sync = self._sync = _Sync(plan, task, snapshot, BlockServer(snapshot, fetching), fetching)
        sync.hosts, sync.told_ns = list(_hosts(plan, me, turn)), now_ns
        return [*self._carry_out(now_ns, sync, fetching.start()), *self._set_out(now_ns, sync)]

    def _set_out(self, now_ns: int, sync: _Sync) -> list[Effect]:
        """Visit as many as is worth it. Where no holder can help, everybody who may have something."""
        assert sync.fetch is not None
        holders = sync.holders()
        effects: list[Effect] = []
        while sync.hosts and not sync.reported:
            near = sum(peer in holders for peer in sync.visiting)
            waiting = [host for host in sync.hosts if host.peer in holders]
            if waiting and near < MAX_HOLDERS:
                host = waiting[0]
            elif len(sync.hosts) > len(waiting) and (
                sync.fetch.at_end or len(sync.visiting) - near < MAX_RELAY_RECEIVERS
            ):
                host = next(host for host in sync.hosts if host.peer not in holders)
            else:
                break
            sync.hosts.remove(host)
            sync.visiting.add(host.peer)
            more, failed = self._visits.dial(now_ns, sync.task, host)
            effects += more
            for failure in failed:
                effects += self._lose(now_ns, sync, failure.peer, failure.reason)
        return effects

    def end(self, reason: str) -> list[Effect]:
        """The sync is over here, one way or the other."""
        sync, self._sync = self._sync, None
        return [] if sync is None else self._visits.stop(sync.task, reason)

    def members(self, now_ns: int, peers: set[PeerId]) -> list[Effect]:
        """The group has changed: a source that is no member any more may be frozen, and is not waited for."""
        sync = self._sync
        if sync is None or sync.fetch is None:
            return []
        effects: list[Effect] = []
        sync.hosts = [host for host in sync.hosts if host.peer in peers]
        gone = {member.peer for member in (*sync.plan.holders, *sync.plan.receivers)} - peers
        for peer in sorted(gone):
            effects += self._lose(now_ns, sync, peer, "it is out of the run")
        return effects

    def next_deadline_ns(self) -> int | None:
        """When a source that owes something has been silent for too long."""
        return min((heard + SOURCE_TIMEOUT_NS for _, heard in self._owing()), default=None)

    def tick(self, now_ns: int) -> list[Effect]:
        """Nothing waits for ever: a source that lives but does not send is as good as gone."""
        effects: list[Effect] = []
        for peer, heard in self._owing():
            sync = self._sync
            if sync is not None and peer in sync.sources and now_ns - heard >= SOURCE_TIMEOUT_NS:
                conn, reason = sync.sources[peer], f"nothing came from it for {SOURCE_TIMEOUT_NS // MS} ms"
                effects += self._visits.drop(conn, reason)
                effects += self.session_failed(now_ns, SessionFailed(sync.task, peer, conn, True, reason))
        return effects

    def _owing(self) -> list[tuple[PeerId, int]]:
        sync = self._sync
        if sync is None or sync.fetch is None:
            return []
        return [(peer, sync.heard[peer]) for peer in sorted(sync.sources) if sync.fetch.owes(peer)]

    # BulkSessions

    def session_opened(self, now_ns: int, visit: SessionOpened) -> list[Effect]:
        """A visit is open: this peer's to a source, or another receiver's to this peer."""
        sync = self._sync
        if sync is None or visit.task != sync.task:
            return self._visits.drop(visit.conn, "the sync is over")
        if not visit.is_dialler:
            return [SendMessage(visit.conn, Have(ranges)) for ranges in self._greeting(sync)]
        assert sync.fetch is not None
        sync.sources[visit.peer] = visit.conn
        sync.heard[visit.peer] = now_ns
        return self._carry_out(now_ns, sync, sync.fetch.source_ready(visit.peer))

    def _greeting(self, sync: _Sync) -> list[list[fetch_effects.BlockRange]]:
        return [] if sync.fetch is None else sync.shelf.greeting()

    def session_failed(self, now_ns: int, failed: SessionFailed) -> list[Effect]:
        """A visit could not be made, or its connection is gone."""
        sync = self._sync
        if sync is None or failed.task != sync.task:
            return []
        if failed.is_dialler:
            times = sync.failed_visits[failed.peer] = sync.failed_visits.get(failed.peer, 0) + 1
            if failed.is_refused or sync.reported or times >= MAX_CONNECT_ATTEMPTS:
                return self._lose(now_ns, sync, failed.peer, failed.reason)
            return self._visit_again(now_ns, sync, failed.peer, times)
        sync.sent_to.pop(failed.conn or 0, None)
        return []

    def _visit_again(self, now_ns: int, sync: _Sync, peer: PeerId, times: int) -> list[Effect]:
        """A source may still be there, although its connection is not; what it owed is asked elsewhere meanwhile."""
        assert sync.fetch is not None
        sync.sources.pop(peer, None)
        host = next(member for member in (*sync.plan.holders, *sync.plan.receivers) if member.peer == peer)
        setting_out, _ = self._visits.dial(now_ns, sync.task, host, times * RECONNECT_PAUSE_MS)
        return setting_out + self._carry_out(now_ns, sync, sync.fetch.source_away(peer))

    def _lose(self, now_ns: int, sync: _Sync, peer: PeerId, reason: str) -> list[Effect]:
        """A source is gone; its connection is closed before its blocks are asked elsewhere."""
        assert sync.fetch is not None
        conn = sync.sources.pop(peer, None)
        sync.visiting.discard(peer)
        closing = self._visits.cancel_dial(sync.task, peer, reason)
        closing += [] if conn is None else self._visits.drop(conn, reason)
        going_on = self._carry_out(now_ns, sync, sync.fetch.source_lost(peer))
        return closing + going_on + self._set_out(now_ns, sync)

    def message(self, now_ns: int, conn: int, body: bytes) -> list[Effect]:
        """What somebody says on an open visit."""
        sync, visit = self._sync, self._visits.open[conn]
        if sync is None or visit.task != sync.task:
            return self._visits.drop(conn, "the sync is over")
        try:
            said = frames.decode_on_visit(body)
            if visit.is_dialler:
                return self._source_says(now_ns, sync, visit.peer, said)
            return self._visitor_says(sync, conn, said)
        except RemoteProtocolError as error:
            if visit.is_dialler:
                return self._lose(now_ns, sync, visit.peer, str(error))
            return self._visits.drop(conn, str(error))

    def _source_says(self, now_ns: int, sync: _Sync, peer: PeerId, said: Message) -> list[Effect]:
        assert sync.fetch is not None
        sync.heard[peer] = now_ns
        match said:
            case Hashes(lists=lists):
                return self._carry_out(now_ns, sync, sync.fetch.hashes(peer, lists))
            case Have(ranges=ranges):
                return self._carry_out(now_ns, sync, sync.fetch.have(peer, ranges))
            case Refused(reason=reason):
                return self._lose(now_ns, sync, peer, f"refused: {reason}")
            case _:
                raise RemoteProtocolError(f"it said {type(said).__name__} out of turn")

    def _visitor_says(self, sync: _Sync, conn: int, said: Message) -> list[Effect]:
        match said:
            case HashesWanted(keys=keys):
                lists = checked(sync.shelf.hashes_for, keys)
                return [SendMessage(conn, Refused(lists.text) if isinstance(lists, BlockRefusal) else Hashes(lists))]
            case BlocksWanted(blocks=wanted):
                pieces = checked(sync.shelf.blocks_for, wanted)
                if isinstance(pieces, BlockRefusal):
                    return [SendMessage(conn, Refused(pieces.text))]
                sync.sent_to[conn] = wanted
                changed = _changed(pieces, sync.snapshot.hash)
                if changed:
                    return self.changed(BlocksChanged(conn, changed))
                self.tx_bytes += sum(piece.length for piece in pieces)
                return [SendBlocks(conn, tuple(_raw(piece, sync.snapshot.hash) for piece in pieces))]
            case _:
                raise RemoteProtocolError(f"it said {type(said).__name__} out of turn")

    # Blocks

    def received(self, now_ns: int, event: BlocksReceived) -> list[Effect]:
        """A batch is in memory."""
        sync, visit = self._sync, self._visits.open.get(event.conn)
        landings = None if sync is None else sync.landings.pop(event.batch, None)
        if sync is None or visit is None or sync.fetch is None or landings is None:
            return []
        telling: list[Effect] = []
        sync.heard[visit.peer] = now_ns
        if now_ns - sync.told_ns >= PROGRESS_REPORT_INTERVAL_NS:
            sync.told_ns = now_ns
            telling = self._say(SyncReport(sync.plan.sync, "progress"))
        bad = set(event.bad)
        for place, landing in enumerate(landings):
            self.rx_bytes += landing.memory.size
            if sync.snapshot.hash != "rf64" and block_hash(landing.memory, sync.snapshot.hash) != landing.expected:
                bad.add(place)
            if place not in bad:
                memory = sync.snapshot.memories[landing.key]
                memory.write(landing.block * sync.snapshot.block_bytes, landing.memory)
        return telling + self._carry_out(now_ns, sync, sync.fetch.blocks(visit.peer, event.batch, sorted(bad)))

    def changed(self, event: BlocksChanged) -> list[Effect]:
        """This peer's own state is not what it was when the sync began. It serves no more."""
        sync = self._sync
        if sync is None:
            return []
        wanted = sync.sent_to.get(event.conn, [])
        names = sorted({sync.snapshot.keys[wanted[place][0]].name for place in event.places if place < len(wanted)})
        text = f"{', '.join(map(repr, names))} {'was' if len(names) == 1 else 'were'} written to"
        # Also after it was complete: from then on it counts as a holder.
        telling = [] if sync.changed else self._say(SyncReport(sync.plan.sync, "changed", text))
        sync.reported = sync.changed = True
        return [*telling, *self._visits.stop(sync.task, "its state changed during the sync")]

    # What the fetch decides

    def _carry_out(self, now_ns: int, sync: _Sync, wanted: list[fetch_effects.FetchEffect]) -> list[Effect]:
        effects: list[Effect] = []
        number = sync.plan.sync
        for wish in wanted:
            match wish:
                case fetch_effects.RequestHashes(peer, keys):
                    sync.heard[peer] = now_ns
                    effects.append(SendMessage(sync.sources[peer], HashesWanted(keys)))
                case fetch_effects.RequestBlocks(peer, batch, blocks):
                    sync.heard[peer] = now_ns
                    effects += self._ask_blocks(sync, sync.sources[peer], batch, blocks)
                case fetch_effects.AnnounceBlocks(ranges):
                    effects += [SendMessage(conn, Have(ranges)) for conn in self._visitors(sync)]
                    if not ranges and not isinstance(
                        wanted[-1], fetch_effects.FetchComplete | fetch_effects.FetchStuck
                    ):
                        effects += self._set_out(now_ns, sync)
                case fetch_effects.CorruptBlock(peer, key, block):
                    what = "the list of hashes" if block is None else f"block {block}"
                    text = f"{what} of {sync.snapshot.keys[key].name!r} does not have its hash"
                    effects += self._say(SyncReport(number, "corrupt", text, [peer]))
                case fetch_effects.DropSource(peer, text):
                    gone = sync.sources.pop(peer, None)
                    sync.visiting.discard(peer)
                    effects += [] if gone is None else self._visits.drop(gone, text)
                    effects += self._set_out(now_ns, sync)
                case fetch_effects.FetchComplete():
                    effects += self._report(sync, SyncReport(number, "complete", received_bytes=self.rx_bytes))
                case fetch_effects.FetchStuck(text, blame):
                    effects += self._report(sync, SyncReport(number, "stuck", text, blame))
        return effects

    def _ask_blocks(self, sync: _Sync, conn: int, batch: int, blocks: list[tuple[int, int]]) -> list[Effect]:
        landings = list(_landings(sync, blocks))
        sync.landings[batch] = landings
        self.written_to = sync.snapshot
        is_rf64 = sync.snapshot.hash == "rf64"
        targets: list[Block] = [
            (each.memory, 0, each.memory.size, int.from_bytes(each.expected, "little") if is_rf64 else None)
            for each in landings
        ]
        return [ExpectBlocks(conn, batch, tuple(targets)), SendMessage(conn, BlocksWanted(blocks))]

    def _visitors(self, sync: _Sync) -> list[int]:
        visits = self._visits.open.items()
        return [conn for conn, visit in visits if visit.task == sync.task and not visit.is_dialler]

    def _report(self, sync: _Sync, report: SyncReport) -> list[Effect]:
        """How the fetch has ended, said once."""
        if sync.reported:
            return []
        sync.reported = True
        return self._say(report)


def _landings(sync: _Sync, blocks: list[tuple[int, int]]) -> Iterator[PendingBlock]:
    assert sync.fetch is not None
    digest = digest_bytes(sync.snapshot.hash)
    for key, block in blocks:
        memory, hashes = sync.snapshot.memories[key], sync.fetch.hashes_of(key)
        assert hashes is not None, "a block is asked for only when its hash is known"
        expected = hashes[block * digest : (block + 1) * digest]
        first, last = block_range(block, memory.nbytes, sync.snapshot.block_bytes)
        yield PendingBlock(key, block, memory.landing(first, last), expected)


def _changed(pieces: list[Piece], kind: HashKind) -> tuple[int, ...]:
    """Which pieces are not what they were. For rf64 the engine looks itself, right before it sends."""
    if kind == "rf64":
        return ()
    content = [piece.memory[piece.offset : piece.offset + piece.length] for piece in pieces]
    return tuple(place for place, piece in enumerate(pieces) if block_hash(content[place], kind) != piece.expected)


def _raw(piece: Piece, kind: HashKind) -> Block:
    expected = int.from_bytes(piece.expected, "little") if kind == "rf64" else None
    return piece.memory, piece.offset, piece.length, expected


def _hosts(plan: SyncPlan, me: PeerId, turn: int) -> Iterator[Member]:
    """Whom to visit, in this order: holders, and the fellow receivers that come next, each beginning at another one."""
    start = turn % max(1, len(plan.holders))
    yield from (*plan.holders[start:], *plan.holders[:start])
    yield from (*plan.receivers[turn + 1 :], *plan.receivers[:turn])
