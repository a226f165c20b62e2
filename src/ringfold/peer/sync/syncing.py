"""A peer's part in a sync, from the master's plan to its end. Pure.

Every peer that takes part serves: a holder sends what it has, a receiver what it has received so far. A receiver opens
bulk sessions to holders and to a few other receivers, and requests hashes and blocks as `state/fetch.py` decides.
Blocks go from memory to memory: the shell reads, verifies and writes them (`transfer.py`), and this file decides only
which peer requests which blocks from which source.

    receiver                                     source (a holder, or another receiver)
       |  HashesWanted(keys) ------------------>   |
       |  <------------------------ Hashes(lists)  |     must have the roots of the plan
       |  BlocksWanted(blocks) ---------------->   |     a few MiB at a time, from each source
       |  <-------------------------- the blocks   |     verified before they are sent, and after they have arrived
       |  Have(ranges) to its own receivers        |

Of one batch, a receiver's effects and events are:

    ExpectBlocks, SendMessage(BlocksWanted)  ->  BlocksReceived  ->  WriteBlocks  ->  BlocksWritten

and a source's are SendBlocks, and BlocksChanged if a block no longer has its hash. So a peer whose own state changes
while it serves finds out by the hashes, and reports itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ringfold.errors import RemoteProtocolError
from ringfold.peer.effects import Effect, ExpectBlocks, SendBlocks, SendMessage, WriteBlocks
from ringfold.peer.events import BlocksChanged, BlocksReceived, BlocksWritten
from ringfold.peer.settings import MS
from ringfold.peer.side_channels import BulkSessions, SessionFailed, SessionOpened, TaskId
from ringfold.state.blocks import BlockRef
from ringfold.state.fetch import Fetch
from ringfold.state.fetch_effects import (
    AnnounceBlocks,
    CorruptBlock,
    DropSource,
    FetchComplete,
    FetchEffect,
    FetchStuck,
    RequestBlocks,
    RequestHashes,
)
from ringfold.state.manifest import StateManifest
from ringfold.state.serve import BlockRefusal, BlockServer, wanted_of
from ringfold.wire import frames
from ringfold.wire.decoding import checked
from ringfold.wire.messages import (
    BlocksWanted,
    Divergence,
    Hashes,
    HashesWanted,
    Have,
    Member,
    Message,
    PeerId,
    Refused,
    SyncPlan,
    SyncReport,
)

MAX_HOLDERS = 8
"""The holders that a receiver has sessions with at a time: more would not be faster, and would load all holders."""
MAX_RELAY_RECEIVERS = 3
"""The other receivers that it has sessions with: what they relay, the holders need not send twice."""
MAX_CONNECT_ATTEMPTS = 4
"""How often a source is connected to whose connection breaks or fails: it may be the only one with the rest."""
SOURCE_TIMEOUT_NS = 30_000 * MS
"""A source that owes something and sends nothing for so long is reconnected to; its blocks are requested elsewhere."""
PROGRESS_REPORT_INTERVAL_NS = 5_000 * MS
"""How often a receiver reports to the master that it makes progress."""
RECONNECT_PAUSE_MS = 250
"""The pause before the first reconnection to a source; each further one is longer by as much."""


@dataclass(slots=True)
class _Sync:
    """The sync in progress."""

    plan: SyncPlan
    task: TaskId
    manifest: StateManifest
    server: BlockServer
    fetch: Fetch | None
    unused: list[Member] = field(default_factory=list)
    """Further sources, in the order in which this peer connects to them."""
    connected: set[PeerId] = field(default_factory=set)
    """The sources that this peer has a session with, or connects to."""
    failures: dict[PeerId, int] = field(default_factory=dict)
    """How many sessions with a source have failed."""
    sources: dict[PeerId, int] = field(default_factory=dict)
    """The open sessions with sources: peer -> connection."""
    last_active_ns: dict[PeerId, int] = field(default_factory=dict)
    """When each source last sent something, or was last sent a request."""
    last_progress_report_ns: int = 0
    requested: dict[int, tuple[BlockRef, ...]] = field(default_factory=dict)
    """By batch: the blocks that were requested and have not arrived."""
    writing: set[int] = field(default_factory=set)
    """The batches that have arrived, and that the shell verifies and writes."""
    sent_to: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By connection the blocks of the last request that was served on it, to name what has changed."""
    reported: bool = False
    """Whether the end of the fetch was reported."""
    changed: bool = False
    """Whether this peer's own state has changed since the sync began."""

    def holders(self) -> set[PeerId]:
        return {member.peer for member in self.plan.holders}


class Syncing:
    """The sync that this peer takes part in, if there is one."""

    def __init__(self, sessions: BulkSessions, send_to_master: Callable[[Message], list[Effect]]) -> None:
        self._sessions = sessions
        self._send_to_master = send_to_master
        self._sync: _Sync | None = None
        self.tx_bytes = self.rx_bytes = 0
        self.written_to: StateManifest | None = None
        """The state into which blocks of another one were requested, until the program has seen that sync end."""

    @property
    def ballot(self) -> int | None:
        """The call that the sync in progress belongs to."""
        return None if self._sync is None else self._sync.plan.ballot

    @property
    def diverged(self) -> tuple[Divergence, ...]:
        """The members that have diverged, by the plan of the sync in progress."""
        return () if self._sync is None else tuple(self._sync.plan.diverged)

    def moved(self, ballot: int) -> tuple[int, int]:
        """The bytes sent and received for the sync of this call; none if its plan was never received."""
        return (self.tx_bytes, self.rx_bytes) if self.ballot == ballot else (0, 0)

    def begin(self, now_ns: int, me: PeerId, plan: SyncPlan, manifest: StateManifest) -> list[Effect]:
        """The plan was received: serve, and fetch what is missing. `RemoteProtocolError` if the plan makes no sense."""
        receivers = [member.peer for member in plan.receivers]
        if self._sync is not None:
            raise RemoteProtocolError(f"it plans sync {plan.sync} during sync {self._sync.plan.sync}")
        if plan.fetch and me not in receivers:
            raise RemoteProtocolError(f"in sync {plan.sync} peer {me} fetches, but is no receiver")
        wanted = wanted_of(manifest, plan.fetch)
        self.tx_bytes = self.rx_bytes = 0
        task: TaskId = ("state", plan.sync)
        self._sessions.expect(task, plan.secret, receivers)
        if not plan.fetch:
            self._sync = _Sync(plan, task, manifest, BlockServer(manifest), None)
            return []
        turn = receivers.index(me)
        holders = [member.peer for member in plan.holders]
        relays = [peer for peer in receivers if peer != me]
        place = turn, len(receivers)
        fetching = Fetch(wanted, manifest.hash, holders, relays, place, manifest.block_bytes)
        sync = self._sync = _Sync(plan, task, manifest, BlockServer(manifest, fetching), fetching)
        sync.unused = list(_sources_in_order(plan, turn))
        sync.last_progress_report_ns = now_ns
        return [*self._carry_out(now_ns, sync, fetching.start()), *self._connect(now_ns, sync)]

    def _connect(self, now_ns: int, sync: _Sync) -> list[Effect]:
        """Connect to as many sources as is useful; to all that may have something, if no holder can help."""
        assert sync.fetch is not None
        holders = sync.holders()
        effects: list[Effect] = []
        while sync.unused and not sync.reported:
            holders_connected = sum(peer in holders for peer in sync.connected)
            relays_connected = len(sync.connected) - holders_connected
            unused_holders = [source for source in sync.unused if source.peer in holders]
            if unused_holders and holders_connected < MAX_HOLDERS:
                source = unused_holders[0]
            elif len(sync.unused) > len(unused_holders) and (
                sync.fetch.at_end or relays_connected < MAX_RELAY_RECEIVERS
            ):
                source = next(each for each in sync.unused if each.peer not in holders)
            else:
                break
            sync.unused.remove(source)
            sync.connected.add(source.peer)
            more, failed = self._sessions.dial(now_ns, sync.task, source)
            effects += more
            for failure in failed:
                effects += self._lose(now_ns, sync, failure.peer, failure.reason)
        return effects

    def end(self, reason: str) -> list[Effect]:
        """The sync is over here, whatever its outcome."""
        sync, self._sync = self._sync, None
        return [] if sync is None else self._sessions.stop(sync.task, reason)

    def members(self, now_ns: int, peers: set[PeerId]) -> list[Effect]:
        """The group has changed: a source that is not a member any more may be frozen, and is not waited for."""
        sync = self._sync
        if sync is None or sync.fetch is None:
            return []
        effects: list[Effect] = []
        sync.unused = [source for source in sync.unused if source.peer in peers]
        gone = {member.peer for member in (*sync.plan.holders, *sync.plan.receivers)} - peers
        for peer in sorted(gone):
            effects += self._lose(now_ns, sync, peer, "it is out of the run")
        return effects

    def next_deadline_ns(self) -> int | None:
        """When the next source that owes something has been silent for too long."""
        return min((active_ns + SOURCE_TIMEOUT_NS for _, active_ns in self._owing()), default=None)

    def tick(self, now_ns: int) -> list[Effect]:
        """A source that is alive but sends nothing is treated as lost."""
        effects: list[Effect] = []
        for peer, active_ns in self._owing():
            sync = self._sync
            if sync is not None and peer in sync.sources and now_ns - active_ns >= SOURCE_TIMEOUT_NS:
                conn, reason = sync.sources[peer], f"nothing came from it for {SOURCE_TIMEOUT_NS // MS} ms"
                effects += self._sessions.drop(conn, reason)
                effects += self.session_failed(now_ns, SessionFailed(sync.task, peer, conn, True, reason))
        return effects

    def _owing(self) -> list[tuple[PeerId, int]]:
        """The sources that owe something, each with the time at which it was last active."""
        sync = self._sync
        if sync is None or sync.fetch is None:
            return []
        return [(peer, sync.last_active_ns[peer]) for peer in sorted(sync.sources) if sync.fetch.owes(peer)]

    # Bulk sessions

    def session_opened(self, now_ns: int, session: SessionOpened) -> list[Effect]:
        """A session is open: this peer's to a source, or another receiver's to this peer."""
        sync = self._sync
        if sync is None or session.task != sync.task:
            return self._sessions.drop(session.conn, "the sync is over")
        if not session.is_dialler:
            announced = [] if sync.fetch is None else sync.server.announcements()
            return [SendMessage(session.conn, Have(ranges)) for ranges in announced]
        assert sync.fetch is not None
        sync.sources[session.peer] = session.conn
        sync.last_active_ns[session.peer] = now_ns
        return self._carry_out(now_ns, sync, sync.fetch.source_ready(session.peer))

    def session_failed(self, now_ns: int, failed: SessionFailed) -> list[Effect]:
        """A session could not be opened, or its connection is lost."""
        sync = self._sync
        if sync is None or failed.task != sync.task:
            return []
        if failed.is_dialler:
            times = sync.failures[failed.peer] = sync.failures.get(failed.peer, 0) + 1
            if failed.is_refused or sync.reported or times >= MAX_CONNECT_ATTEMPTS:
                return self._lose(now_ns, sync, failed.peer, failed.reason)
            return self._reconnect(now_ns, sync, failed.peer, times)
        sync.sent_to.pop(failed.conn or 0, None)
        return []

    def _reconnect(self, now_ns: int, sync: _Sync, peer: PeerId, times: int) -> list[Effect]:
        """The connection to a source is lost, but it may be alive. What it owed is requested elsewhere meanwhile."""
        assert sync.fetch is not None
        sync.sources.pop(peer, None)
        source = next(member for member in (*sync.plan.holders, *sync.plan.receivers) if member.peer == peer)
        dialling, _ = self._sessions.dial(now_ns, sync.task, source, times * RECONNECT_PAUSE_MS)
        return dialling + self._carry_out(now_ns, sync, sync.fetch.source_away(peer))

    def _lose(self, now_ns: int, sync: _Sync, peer: PeerId, reason: str) -> list[Effect]:
        """A source is lost. Its connection is closed before its blocks are requested elsewhere."""
        assert sync.fetch is not None
        conn = sync.sources.pop(peer, None)
        sync.connected.discard(peer)
        closing = self._sessions.cancel_dial(sync.task, peer, reason)
        closing += [] if conn is None else self._sessions.drop(conn, reason)
        going_on = self._carry_out(now_ns, sync, sync.fetch.source_lost(peer))
        return closing + going_on + self._connect(now_ns, sync)

    def message(self, now_ns: int, conn: int, body: bytes) -> list[Effect]:
        """A message was received on an open session."""
        sync, session = self._sync, self._sessions.open[conn]
        if sync is None or session.task != sync.task:
            return self._sessions.drop(conn, "the sync is over")
        try:
            received = frames.decode_bulk(body)
            if session.is_dialler:
                return self._from_source(now_ns, sync, session.peer, received)
            return self._from_receiver(sync, conn, received)
        except RemoteProtocolError as error:
            if session.is_dialler:
                return self._lose(now_ns, sync, session.peer, str(error))
            return self._sessions.drop(conn, str(error))

    def _from_source(self, now_ns: int, sync: _Sync, peer: PeerId, received: Message) -> list[Effect]:
        assert sync.fetch is not None
        sync.last_active_ns[peer] = now_ns
        match received:
            case Hashes(lists=lists):
                return self._carry_out(now_ns, sync, sync.fetch.hashes(peer, lists))
            case Have(ranges=ranges):
                return self._carry_out(now_ns, sync, sync.fetch.have(peer, ranges))
            case Refused(reason=reason):
                return self._lose(now_ns, sync, peer, f"refused: {reason}")
            case _:
                raise RemoteProtocolError(f"it sent {type(received).__name__} out of turn")

    def _from_receiver(self, sync: _Sync, conn: int, received: Message) -> list[Effect]:
        match received:
            case HashesWanted(keys=keys):
                lists = checked(sync.server.hashes_for, keys)
                return [SendMessage(conn, Refused(lists.text) if isinstance(lists, BlockRefusal) else Hashes(lists))]
            case BlocksWanted(blocks=wanted):
                blocks = checked(sync.server.blocks_for, wanted)
                if isinstance(blocks, BlockRefusal):
                    return [SendMessage(conn, Refused(blocks.text))]
                sync.sent_to[conn] = wanted
                self.tx_bytes += sum(block.nbytes for block in blocks)
                return [SendBlocks(conn, tuple(blocks))]
            case _:
                raise RemoteProtocolError(f"it sent {type(received).__name__} out of turn")

    # Blocks

    def received(self, now_ns: int, event: BlocksReceived) -> list[Effect]:
        """A batch has arrived: it is to be verified and written."""
        sync, session = self._sync, self._sessions.open.get(event.conn)
        blocks = None if sync is None else sync.requested.pop(event.batch, None)
        if sync is None or session is None or blocks is None:
            return []
        reporting: list[Effect] = []
        sync.last_active_ns[session.peer] = now_ns
        if now_ns - sync.last_progress_report_ns >= PROGRESS_REPORT_INTERVAL_NS:
            sync.last_progress_report_ns = now_ns
            reporting = self._send_to_master(SyncReport(sync.plan.sync, "progress"))
        self.rx_bytes += sum(block.nbytes for block in blocks)
        sync.writing.add(event.batch)
        return [*reporting, WriteBlocks(event.conn, event.batch, event.bad)]

    def written(self, now_ns: int, event: BlocksWritten) -> list[Effect]:
        """A batch is verified and in its arrays. A source that was lost meanwhile no longer counts: what it owed was
        requested elsewhere, and is written again with the same content.
        """
        sync, session = self._sync, self._sessions.open.get(event.conn)
        if sync is None or event.batch not in sync.writing:
            return []
        sync.writing.remove(event.batch)
        if session is None or sync.fetch is None:
            return []
        return self._carry_out(now_ns, sync, sync.fetch.blocks(session.peer, event.batch, event.bad))

    def changed(self, event: BlocksChanged) -> list[Effect]:
        """This peer's own state has changed since the sync began. It stops serving."""
        sync = self._sync
        if sync is None or event.conn not in sync.sent_to:
            return []
        wanted = sync.sent_to[event.conn]
        names = sorted({sync.manifest.keys[wanted[place][0]].name for place in event.places if place < len(wanted)})
        text = f"{', '.join(map(repr, names))} {'was' if len(names) == 1 else 'were'} written to"
        # Also after its fetch was complete: from then on it counts as a holder.
        reporting = [] if sync.changed else self._send_to_master(SyncReport(sync.plan.sync, "changed", text))
        sync.reported = sync.changed = True
        return [*reporting, *self._sessions.stop(sync.task, "its state changed during the sync")]

    # What the fetch decides

    def _carry_out(self, now_ns: int, sync: _Sync, decided: list[FetchEffect]) -> list[Effect]:
        effects: list[Effect] = []
        number = sync.plan.sync
        for effect in decided:
            match effect:
                case RequestHashes(peer, keys):
                    sync.last_active_ns[peer] = now_ns
                    effects.append(SendMessage(sync.sources[peer], HashesWanted(keys)))
                case RequestBlocks(peer, batch, blocks):
                    sync.last_active_ns[peer] = now_ns
                    effects += self._request_blocks(sync, sync.sources[peer], batch, blocks)
                case AnnounceBlocks(ranges):
                    effects += [SendMessage(conn, Have(ranges)) for conn in self._receiver_conns(sync)]
                    if not ranges and not isinstance(decided[-1], FetchComplete | FetchStuck):
                        effects += self._connect(now_ns, sync)
                case CorruptBlock(peer, key, block):
                    what = "the list of hashes" if block is None else f"block {block}"
                    text = f"{what} of {sync.manifest.keys[key].name!r} does not have its hash"
                    effects += self._send_to_master(SyncReport(number, "corrupt", text, [peer]))
                case DropSource(peer, text):
                    gone = sync.sources.pop(peer, None)
                    sync.connected.discard(peer)
                    effects += [] if gone is None else self._sessions.drop(gone, text)
                    effects += self._connect(now_ns, sync)
                case FetchComplete():
                    effects += self._report(sync, SyncReport(number, "complete", received_bytes=self.rx_bytes))
                case FetchStuck(text, blame):
                    effects += self._report(sync, SyncReport(number, "stuck", text, blame))
        return effects

    def _request_blocks(self, sync: _Sync, conn: int, batch: int, blocks: list[tuple[int, int]]) -> list[Effect]:
        assert sync.fetch is not None
        refs = tuple(sync.fetch.block_ref(key, block) for key, block in blocks)
        sync.requested[batch] = refs
        self.written_to = sync.manifest
        return [ExpectBlocks(conn, batch, refs), SendMessage(conn, BlocksWanted(blocks))]

    def _receiver_conns(self, sync: _Sync) -> list[int]:
        """The connections on which other receivers fetch from this peer."""
        sessions = self._sessions.open.items()
        return [conn for conn, session in sessions if session.task == sync.task and not session.is_dialler]

    def _report(self, sync: _Sync, report: SyncReport) -> list[Effect]:
        """Report how the fetch has ended, once."""
        if sync.reported:
            return []
        sync.reported = True
        return self._send_to_master(report)


def _sources_in_order(plan: SyncPlan, turn: int) -> Iterator[Member]:
    """All sources: the holders, then the other receivers. Each receiver (`turn`) begins with another one."""
    start = turn % max(1, len(plan.holders))
    yield from (*plan.holders[start:], *plan.holders[:start])
    yield from (*plan.receivers[turn + 1 :], *plan.receivers[:turn])
