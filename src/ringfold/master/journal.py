"""What a master must not forget: the journal, as types and as bytes. Pure.

A *journal* is everything that a later master needs to go on with the run, at one instant: the fence, the secret that
all other secrets derive from, the counters whose numbers must never come twice, and for each group its newest record
(whole, with its verdicts: a member that never got it needs them) and what its last sync finished. Ops are not in it,
nor are votes: the peers remember those themselves, and bring them along (`returning.py`).

It is written whole, and each write replaces the last one. So a write needs no other writes to make sense, a later one
makes up for all before it, and one compare-and-set is enough to refuse a leader that is deposed: it no longer knows
what it would replace.

*When* it is written is not left to each place that changes something. After each step the machine looks at `mark`: if
it is another one than before, the whole step's effects wait for the journal to be written. An eviction changes the mark
although the journal says nothing of it: a peer believes it for good, so that a leader that is deposed must not say it,
and a write is the only way to know.

A *closed* journal is that of a run that was ended on purpose. Nothing but its fence, and how it ended, outlives it.

What is known about links is kept apart from all this, and lazily (`Links`): nobody waits for it, and a run without it
only measures again.
"""

import math
from functools import partial

import msgspec
from msgspec import Struct, field

from ringfold.errors import RemoteProtocolError, StoreError
from ringfold.master.events import Ns
from ringfold.master.life import Life, restored
from ringfold.master.liveness import MS
from ringfold.master.run import Admission, Away, Change, Run
from ringfold.master.verdicts import Cause
from ringfold.state.election import FinishedSync
from ringfold.topology.links import LinkBandwidth, Source
from ringfold.wire.decoding import decode as decode_bytes
from ringfold.wire.messages import CallFailed, Divergence, Epoch, GroupId, Lineage, PeerId, Reason, Record, Rollback

FORMAT = 1
NO_JOURNAL = "it holds no journal of a master: "
MASTER_CHANGED = Cause(Reason("edge", "the master changed"))
NEVER = 1 << 62
MAX_LINKS = 8_192
"""The newest ones are kept: all of 90 peers, in a third of a megabyte."""


class FinishedEntry(Struct, frozen=True):
    """The last sync that a group finished."""

    sync: int
    revision: int
    ballots: dict[PeerId, int]
    """Who took part, and in which call."""
    roots: bytes
    failures: dict[PeerId, CallFailed] = field(default_factory=dict)
    """Who was out of it before its end, and what it was told."""
    diverged: list[Divergence] = field(default_factory=list)
    """Who should have had its state before, and had not."""
    names: list[str] = field(default_factory=list)
    """By which participants are known again after a restart."""
    rollback: Rollback | None = None
    """From where it went on, if not from the revision before."""


class GroupEntry(Struct, frozen=True):
    """A group. One that is empty has no record, and keeps its number of epochs."""

    group: GroupId
    epoch: Epoch
    record: Record | None
    finished: FinishedEntry | None
    incumbents: list[PeerId] = field(default_factory=list)
    lineage: Lineage | None = None
    """The history of its state. Journals of older versions name none."""
    orphaned_sync: int = 0
    """The finished sync's number, if its state was lost with the last member of the run."""


class AdmissionEntry(Struct, frozen=True):
    """An update whose newcomers are in a record already: its voters have yet to be answered."""

    ballots: dict[PeerId, int]
    groups: list[GroupId]


class Journal(Struct, frozen=True):
    """All of it. `leader` says who wrote it, for people."""

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
    """Never written: the run is to be forgotten, and its key with it."""
    format: int = FORMAT

    @property
    def members(self) -> int:
        """How many peers are in the newest records."""
        return sum(len(group.record.members) for group in self.groups if group.record is not None)


class LinkEntry(Struct, frozen=True, array_like=True):
    """A directed link. Masters' clocks are not compared: an entry has an age."""

    source: PeerId
    target: PeerId
    bytes_per_s: float
    delay_us: int | None
    age_ms: int
    how: Source


class Links(Struct, frozen=True):
    """What is known about links, the oldest news first."""

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
    """The journal that these bytes are; StoreError if they are none, or one of another version."""
    error = partial(StoreError, where)
    kind = decode_bytes(_formats.decode, raw, error, NO_JOURNAL).format
    if kind != FORMAT:
        what = f"its journal has format {kind}, and this version of Ringfold reads {FORMAT}"
        raise StoreError(where, f"{what}: use the version that wrote it, or another journal for another run")
    return decode_bytes(_decoder.decode, raw, error, NO_JOURNAL)


Mark = tuple[object, ...]


def mark(run: Run) -> Mark:
    """What must be written before anything is said of it; equal marks mean that nothing is to be written."""
    groups = [
        (group.id, group.epoch, bool(group.ring), group.finished_sync, group.finished is None)
        for group in run.groups.values()
    ]
    counters = run.registrations, run.epochs, run.syncs, run.tests, run.rounds, run.evictions
    return *counters, run.probing, run.life, *groups


def journal_of(run: Run, fence: int, secret: bytes, leader: str) -> Journal:
    """The journal of a run as it stands."""
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
    # Before its first record nobody has been admitted: the votes are cast again, and the vote is decided anew.
    begun = going is not None and any(run.groups[group].epoch > going.epochs[group] for group in going.groups)
    admission = AdmissionEntry(dict(going.ballots), sorted(going.groups)) if going is not None and begun else None
    counters = run.registrations, run.epochs, run.syncs, run.tests
    probing = run.rounds, run.probing
    return Journal(fence, secret, *counters, groups, admission, leader, *probing, life=run.life)


def closed(fence: int, leader: str, life: Life | None = None) -> Journal:
    """The journal of a run that was ended on purpose."""
    return Journal(fence, b"", leader=leader, is_closed=True, life=life or Life())


def forgotten(fence: int) -> Journal:
    """What is to be written of a run that is forgotten: nothing."""
    return Journal(fence, b"", is_forgotten=True)


def restore(run: Run, journal: Journal, now: Ns) -> None:
    """Fill an empty run. All members are away, and every group is about to seal its newest epoch."""
    run.registrations, run.epochs = journal.registrations, journal.epochs
    run.syncs, run.tests = journal.syncs, journal.tests
    run.rounds, run.probing = journal.rounds, journal.probing
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
        group.evidence = record.evidence
        group.change = Change(since=now, deadline=NEVER, causes=[MASTER_CHANGED])
        for member in record.members:
            run.away[member.peer] = Away(group.id, member)
            run.remember_name(member)
    if journal.admission is not None:
        groups = set(journal.admission.groups)
        run.admission = Admission(now, dict(journal.admission.ballots), groups, dict.fromkeys(groups, -1))
    run.is_inhabited = any(group.ring for group in run.groups.values())
    restored(run)
    run.return_by = now + run.settings.return_ms * MS


def links_of(run: Run, now: Ns) -> bytes:
    """What is known about links by now."""
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
    """What was known about links between members. Of anything that makes no sense, nothing was known."""
    try:
        links = decode_bytes(_links.decode, raw)
    except RemoteProtocolError:
        return
    for link in links.entries if links.format == FORMAT else ():
        edge = (link.source, link.target)
        if link.source != link.target and {*edge} <= run.away.keys() and 0 < link.bytes_per_s < math.inf:
            run.links.restore(edge, LinkBandwidth(link.bytes_per_s, link.delay_us, now - link.age_ms * MS, link.how))
