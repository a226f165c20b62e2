"""The journal: what a later master needs, when it is written, and which effects wait for it. Pure.

*Content.* A `Journal` is everything that a later master needs to continue the run, at one instant: the fence, the
secret that all other secrets derive from, the counters whose numbers must never be used twice, and for each group its
newest record (whole, with its verdicts: a member that never received it needs them) and its last finished sync. Ops and
votes are not in it: the peers remember those themselves, and send them to the next master (`recovery.py`).

It is written whole, and each write replaces the last one. So a write depends on no other write, a later one covers all
before it, and one compare-and-set is enough to stop a deposed leader: it no longer knows what it would replace.

A *closed* journal is that of a run that was ended on purpose. It keeps the fence and how the run ended, nothing else.

*When it is written.* Not every place that changes something has to remember it: after each step `JournalPolicy`
compares `change_marker` with the last one. If it differs, all effects of the step wait for the write. An eviction
changes the marker although the journal does not mention it: a peer accepts it for good, so a deposed leader must not
send it, and a write is the only way to know. A run that is ended on purpose closes its journal first, and then notifies
its peers.

*Which effects wait.* Effects leave the `Outbox` in order, over all steps. A `WriteJournal` holds back everything after
it until its journal is written. During a write more may queue up, and the next write takes the newest journal for all
of them. Evidence does not wait: it is a fact about an epoch whose record was written and sent long before, and ops must
not wait for the disk. Heartbeats do not wait either, or a slow disk would look like a dead master to the peers, and
like silent peers to the master. Only a peer's first message, after which it expects heartbeats, is sent before them.

Link figures (`Links`) are written separately and lazily: nothing waits for them, and a run without them measures again.
"""

import math
from collections import deque
from collections.abc import Iterable
from functools import partial

import msgspec
from msgspec import Struct, field

from ringfold.errors import RemoteProtocolError, StoreError
from ringfold.master.effects import (
    CloseConnection,
    Effect,
    SendEvidence,
    SendHeartbeat,
    SendMessage,
    WriteJournal,
    WriteLinks,
)
from ringfold.master.events import Conn, Ns, StopRequested
from ringfold.master.lifecycle import Life, restored, stopped
from ringfold.master.run import Admission, AwayMember, EpochChange, Run
from ringfold.master.states import EpochPhase
from ringfold.master.verdicts import Cause
from ringfold.state.election import FinishedSync
from ringfold.topology.links import LinkBandwidth, Source
from ringfold.units import MS
from ringfold.wire.decoding import decode as decode_bytes
from ringfold.wire.messages import (
    CallFailed,
    Divergence,
    Epoch,
    GroupId,
    Lineage,
    PeerId,
    Reason,
    Record,
    Refused,
    Resumed,
    Rollback,
    Welcome,
)

FORMAT = 1
NO_JOURNAL = "it holds no journal of a master: "
MASTER_CHANGED = Cause(Reason("edge", "the master changed"), kind="master")
NEVER = 1 << 62
LINKS_EVERY_NS = 30_000 * MS
MAX_LINKS = 8_192
"""The newest ones: all links of 90 peers, in a third of a megabyte."""


class FinishedEntry(Struct, frozen=True):
    """The last finished sync of a group."""

    sync: int
    revision: int
    ballots: dict[PeerId, int]
    """The participants, and their ballots."""
    roots: bytes
    failures: dict[PeerId, CallFailed] = field(default_factory=dict)
    """The peers that were out of it before its end, and what was sent to them."""
    diverged: list[Divergence] = field(default_factory=list)
    """The peers that should have had its state before."""
    names: list[str] = field(default_factory=list)
    """The names by which participants are recognised after a restart."""
    rollback: Rollback | None = None
    """Where it continued from, if not from the revision before."""


class GroupEntry(Struct, frozen=True):
    """A group. An empty one has no record, and keeps its epoch number."""

    group: GroupId
    epoch: Epoch
    record: Record | None
    finished: FinishedEntry | None
    incumbents: list[PeerId] = field(default_factory=list)
    lineage: Lineage | None = None
    """The lineage of its state. Journals of older versions have none."""
    orphaned_sync: int = 0
    """The finished sync's number, if its state was lost with the last member of the run."""


class AdmissionEntry(Struct, frozen=True):
    """An update whose newcomers are in a record already, and whose voters do not have the result yet."""

    ballots: dict[PeerId, int]
    groups: list[GroupId]


class Journal(Struct, frozen=True):
    """The whole journal. `leader` is the address of the master that wrote it, for people."""

    fence: int
    secret: bytes
    registrations: int = 0
    epochs: int = 0
    syncs: int = 0
    tests: int = 0
    groups: list[GroupEntry] = field(default_factory=list)
    admission: AdmissionEntry | None = None
    leader: str = ""
    rounds: int = 0
    probing: bool | None = None
    is_closed: bool = False
    life: Life = Life()
    is_forgotten: bool = False
    """Never written: the run is to be forgotten, and its key is deleted."""
    format: int = FORMAT
    calls: int = 0

    @property
    def members(self) -> int:
        """How many peers are in the newest records."""
        return sum(len(group.record.members) for group in self.groups if group.record is not None)


class LinkEntry(Struct, frozen=True, array_like=True):
    """A directed link. An entry has an age, because the clocks of two masters cannot be compared."""

    source: PeerId
    target: PeerId
    bytes_per_s: float
    delay_us: int | None
    age_ms: int
    how: Source


class Links(Struct, frozen=True):
    """The known link figures, the oldest first."""

    entries: list[LinkEntry]
    format: int = FORMAT


class _Format(Struct):
    format: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Journal)
_formats = msgspec.msgpack.Decoder(_Format)
_links = msgspec.msgpack.Decoder(Links)


def encode(journal: Journal) -> bytes:
    return _encoder.encode(journal)


def decode(raw: bytes, where: str) -> Journal:
    """Decode a journal; StoreError if these bytes are not one, or one of another version."""
    error = partial(StoreError, where)
    kind = decode_bytes(_formats.decode, raw, error, NO_JOURNAL).format
    if kind != FORMAT:
        what = f"its journal has format {kind}, and this version of Ringfold reads {FORMAT}"
        raise StoreError(where, f"{what}: use the version that wrote it, or another journal for another run")
    return decode_bytes(_decoder.decode, raw, error, NO_JOURNAL)


ChangeMarker = tuple[object, ...]


def change_marker(run: Run) -> ChangeMarker:
    """The facts that must be written before anything about them is sent. If the marker is unchanged, nothing is
    written."""
    groups = [
        (group.id, group.epoch, bool(group.ring), group.finished_sync, group.finished is None)
        for group in run.groups.values()
    ]
    counters = run.registrations, run.epochs, run.syncs, run.tests, run.rounds, run.evictions
    return *counters, run.probing, run.life, *groups


def make_journal(run: Run, fence: int, secret: bytes, leader: str) -> Journal:
    """The journal of a run as it is now."""
    groups = []
    for _, group in sorted(run.groups.items()):
        last = group.finished
        finished = None
        if last is not None:
            outcome = group.finished_ballots, last.roots, group.finished_failures, group.finished_diverged
            history = list(last.names), group.finished_rollback
            finished = FinishedEntry(group.finished_sync, last.revision, *outcome, *history)
        record, incumbents = group.record if group.ring else None, sorted(group.incumbents)
        past = incumbents, group.lineage, group.orphaned_sync
        groups.append(GroupEntry(group.id, group.epoch, record, finished, *past))
    going = run.admission
    # Before its first record no peer has been admitted: the votes are cast and decided again.
    begun = going is not None and any(run.groups[group].epoch > going.epochs[group] for group in going.groups)
    admission = AdmissionEntry(dict(going.ballots), sorted(going.groups)) if going is not None and begun else None
    counters = run.registrations, run.epochs, run.syncs, run.tests
    probing = run.rounds, run.probing
    return Journal(fence, secret, *counters, groups, admission, leader, *probing, life=run.life, calls=run.calls)


def closed_journal(fence: int, leader: str, life: Life | None = None) -> Journal:
    """The journal of a run that was ended on purpose."""
    return Journal(fence, b"", leader=leader, is_closed=True, life=life or Life())


def forgotten_journal(fence: int) -> Journal:
    """The order to forget a run: nothing of it is written."""
    return Journal(fence, b"", is_forgotten=True)


def restore(run: Run, journal: Journal, now: Ns) -> None:
    """Fill an empty run. All members are away, and every group seals its newest epoch."""
    run.registrations, run.epochs = journal.registrations, journal.epochs
    run.syncs, run.tests = journal.syncs, journal.tests
    run.rounds, run.probing, run.calls = journal.rounds, journal.probing, journal.calls
    run.life, run.revision = journal.life, journal.life.revision
    for entry in journal.groups:
        group = run.group(entry.group)
        group.epoch, last = entry.epoch, entry.finished
        group.incumbents, group.lineage = set(entry.incumbents), entry.lineage
        group.orphaned_sync = entry.orphaned_sync
        if last is not None:
            group.finished_sync, group.finished_ballots = last.sync, last.ballots
            group.finished_failures, group.finished_diverged = last.failures, last.diverged
            group.diverged, group.divergences = list(last.diverged), len(last.diverged)
            group.finished_rollback = last.rollback
            group.finished = FinishedSync(last.revision, frozenset(last.ballots), last.roots, tuple(last.names))
        record = group.record = entry.record
        if record is None:
            continue
        group.ring, group.dialers = [member.peer for member in record.members], list(record.dialers)
        run.calls = max(run.calls, record.call)
        group.evidence = record.evidence
        group.change = EpochChange(since_ns=now, deadline_ns=NEVER, causes=[MASTER_CHANGED])
        group.enter(EpochPhase.SEALING)
        for member in record.members:
            run.away[member.peer] = AwayMember(group.id, member)
            run.remember_name(member)
    if journal.admission is not None:
        groups = set(journal.admission.groups)
        run.admission = Admission(now, dict(journal.admission.ballots), groups, dict.fromkeys(groups, -1))
    restored(run)
    run.return_deadline_ns = now + run.settings.return_ms * MS


def encode_links(run: Run, now: Ns) -> bytes:
    """The link figures that are known now, encoded."""
    known = list(run.links.entries())[-MAX_LINKS:]
    return _encoder.encode(
        Links(
            [
                LinkEntry(*edge, entry.bytes_per_s, entry.delay_us, max(0, (now - entry.at_ns) // MS), entry.source)
                for edge, entry in known
            ]
        )
    )


def restore_links(run: Run, raw: bytes, now: Ns) -> None:
    """Restore link figures between members. Invalid ones are ignored."""
    try:
        links = decode_bytes(_links.decode, raw)
    except RemoteProtocolError:
        return
    for link in links.entries if links.format == FORMAT else ():
        edge = (link.source, link.target)
        if link.source != link.target and {*edge} <= run.away.keys() and 0 < link.bytes_per_s < math.inf:
            run.links.restore(edge, LinkBandwidth(link.bytes_per_s, link.delay_us, now - link.age_ms * MS, link.how))


class JournalPolicy:
    """When a run's journal is written. If it is not `is_on`, nothing is written, and the run ends with its master."""

    def __init__(self, run: Run, fence: int, secret: bytes, leader: str, *, is_on: bool) -> None:
        self._run, self._fence, self._secret, self._leader = run, fence, secret, leader
        self.is_on = is_on
        self._marker = change_marker(run)
        self._newest_link: Ns | None = None
        self._links_due: Ns = 0

    def journal(self) -> Journal:
        """All that a later master needs to continue from here."""
        return make_journal(self._run, self._fence, self._secret, self._leader)

    def settle(self, out: list[Effect]) -> None:
        """Put the write of the journal ahead of a step's effects, if there is something to write."""
        if self.is_on and (changed := change_marker(self._run)) != self._marker:
            self._marker = changed
            out.insert(0, WriteJournal(self.journal()))

    def tick(self, now: Ns) -> None:
        """Write the link figures, if there are new ones."""
        if not self.is_on or now < self._links_due or not len(self._run.links):
            return
        newest = self._run.links.newest_ns
        if newest != self._newest_link:
            self._newest_link, self._links_due = newest, now + LINKS_EVERY_NS
            self._run.out.append(WriteLinks(encode_links(self._run, now)))

    def stop(self, event: StopRequested) -> list[Effect]:
        """The last effects of a run that is ended on purpose."""
        journal = closed_journal(self._fence, self._leader, stopped(self._run))
        first: list[Effect] = [WriteJournal(journal)] if self.is_on else []
        last: list[Effect] = []
        for connection in self._run.connections.values():
            if connection.peer is not None:
                last.append(SendMessage(connection.id, Refused(event.reason)))
            last.append(CloseConnection(connection.id, event.reason))
        return first + last


class Outbox:
    """The effects that wait. `put` and `written` return those that may be executed now."""

    def __init__(self) -> None:
        self._waiting: deque[Effect] = deque()
        self._covered = 0
        """How many of the waiting journals the write in progress covers."""

    def put(self, effects: Iterable[Effect]) -> list[Effect]:
        """Add the effects of the next step."""
        urgent: list[Effect] = []
        for effect in effects:
            (urgent if self._is_urgent(effect) else self._waiting).append(effect)
        return urgent + self._release() if not self._covered else urgent

    def _is_urgent(self, effect: Effect) -> bool:
        if isinstance(effect, SendHeartbeat):
            return not any(isinstance(each, SendMessage) and _is_greeting(each, effect.conn) for each in self._waiting)
        return isinstance(effect, SendEvidence)

    def begin(self) -> Journal | None:
        """The journal to write now; None if there is none, or a write is in progress."""
        if self._covered or not self._waiting:
            return None
        journals = [effect.journal for effect in self._waiting if isinstance(effect, WriteJournal)]
        self._covered = len(journals)
        return journals[-1]

    def covered(self) -> list[Effect]:
        """The effects that the write in progress will release, as far as they wait already."""
        left = self._covered
        found: list[Effect] = []
        for effect in self._waiting:
            if isinstance(effect, WriteJournal):
                if not left:
                    break
                left -= 1
            else:
                found.append(effect)
        return found

    def waiting(self) -> list[Effect]:
        """All effects that were not executed yet."""
        return list(self._waiting)

    def written(self) -> list[Effect]:
        """The write is complete."""
        assert self._covered, "nothing was being written"
        return self._release()

    def _release(self) -> list[Effect]:
        free: list[Effect] = []
        while self._waiting:
            if isinstance(self._waiting[0], WriteJournal):
                if not self._covered:
                    break
                self._covered -= 1
                self._waiting.popleft()
            else:
                free.append(self._waiting.popleft())
        return free


def _is_greeting(send: SendMessage, conn: Conn) -> bool:
    return send.conn == conn and isinstance(send.message, Welcome | Resumed)
