"""Alive is not the same as working: members that others wait for, and when they are evicted for it.

A peer whose data loader hangs keeps its heartbeat. Everybody else waits for it, in an op or in a call, until
`op_timeout_s`. The watchdog evicts it earlier, by this rule:

* Only members in their own code can be at fault: in no op and no call, alive, and not busy by their own word
  (`run.busy`). A member that waits, in whatever, is not.
* All others must wait, in this op or call. The clock starts when the last of them has come, and when those who have not
  come last got on with anything, or were busy.
* Those who have not come must be a strict minority of each group. Where most are slow, the step is slow, and nobody is
  at fault.
* A member's first three calls of a tag do not count, nor votes before its first three calls of any kind: programs
  compile and fill caches in them.
* A member that is in the op and sends nothing, while it receives, is as good as absent (`silent_member`).

The stall timeout is a multiple of what this call usually takes, at least `min_stall_ms` and never more than
`op_timeout_ms`; or what `stall_timeout_s` says. A call that is slow now and then may be so: what counts is the second
longest of the last calls that took long enough to be seen.

A caller's own `op_timeout_s` is the second line. A call that did not ask for a timeout of its own evicts those who are
absent then, minority or not, and goes on; it raises only if nobody is at fault. All clocks are of this master: one that
takes over starts them again, because it makes a new epoch.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ringfold.errors import RemoteProtocolError
from ringfold.master.calls import Wait, completion
from ringfold.master.epochs import Epochs
from ringfold.master.events import Ns
from ringfold.master.liveness import MS
from ringfold.master.run import Group, Peer, Run, Standing
from ringfold.master.settings import MasterSettings
from ringfold.wire.diagnostics import CALL_NAMES, format_seconds, list_peers, name_op
from ringfold.wire.frames import DESCRIPTOR_BYTES
from ringfold.wire.messages import (
    MAX_BUSY_MS,
    Busy,
    CallExtended,
    GroupId,
    OpRef,
    OpTimeout,
    PeerId,
    Tag,
    VoteKind,
    VoteWithdrawn,
)
from ringfold.wire.notices import PeersStalled

ANNOUNCED_AFTER_MS = 100
"""Heartbeats name an op when it is as old as this."""
FACTOR = 5
"""The stall timeout is so many times what the call usually takes."""
NOT_COUNTED = 3
"""Calls of a tag that a member may take as long over as it likes."""
REMEMBERED = 16
"""Of the last calls of a tag or kind."""
MAX_USUAL = 4_096
"""Tags whose durations are remembered."""

_KINDS: tuple[VoteKind, ...] = ("update", "pending", "optimize")
_ADVICE = (
    "Its program was in its own code all the time: a data loader or a device may hang. Announce long work with "
    "run.busy(up_to_s=...), or set stall_timeout_s at the master"
)
_SILENT_ADVICE = "It receives, and sends nothing: look at its device and at its network"
_SYNC_ADVICE = "Nothing of the state came to it any more: look at its network and at its memory"


class Key(Struct, frozen=True, order=True):
    """Which wait: an op of a group, a call of the run (group -1) or of a group, or a sync that is decided."""

    kind: Literal["op", "call", "sync"]
    group: GroupId
    op: OpRef = OpRef(0, 0)
    vote: VoteKind = "update"

    @property
    def usual(self) -> tuple[str, GroupId, Tag, str]:
        """Whose durations are alike."""
        return self.kind, self.group, self.op.tag, self.vote


class Absent(Struct, frozen=True):
    """A member that has not come: whether it is in its own code, how many such calls it has made, until when it is or
    was busy by its own word, and when it last got on with anything."""

    peer: PeerId
    is_idle: bool = True
    calls: int = NOT_COUNTED
    busy_until: Ns = 0
    moved: Ns = 0
    group: GroupId = 0

    @property
    def since(self) -> Ns:
        """Since when it has no excuse."""
        return max(self.moved, self.busy_until)


class Stall(Struct, frozen=True):
    """Something that members wait in: `since` has those who wait, and `absent` those who have not come.

    `sizes` has the members of each group that it concerns. With `excuse` nobody is at fault, whatever happens."""

    key: Key
    what: str
    since: Mapping[PeerId, Ns]
    absent: Sequence[Absent]
    sizes: Mapping[GroupId, int]
    excuse: str = ""
    is_silent: bool = False
    """The absent are in the op, and send nothing."""

    @property
    def missing(self) -> list[PeerId]:
        return [each.peer for each in self.absent]

    @property
    def has_idle(self) -> bool:
        """Whether somebody who is absent is in its own code."""
        return any(each.is_idle for each in self.absent)

    @property
    def is_minority(self) -> bool:
        """Whether those who are absent are a strict minority of each of their groups."""
        late = Counter(each.group for each in self.absent)
        return all(2 * count < self.sizes[group] for group, count in late.items())

    @property
    def whole_since(self) -> Ns:
        """Since when all others wait, and nobody who is absent has an excuse."""
        return max(*self.since.values(), *(each.since for each in self.absent), 0)


class Judgement(Struct, frozen=True):
    """What comes of a stall: when those who are absent are evicted, or why they are not."""

    evict_at: Ns | None
    why: str = ""


@dataclass(slots=True)
class Overdue:
    """An op whose caller's time is over."""

    since: Ns
    caller: PeerId
    message: OpTimeout
    was_excused: bool = False
    """Somebody who was absent had an excuse."""


def judge(now: Ns, stall: Stall, timeout: Ns | None) -> Judgement:
    """The rule of the watchdog. `timeout` is None where it is off."""
    if stall.excuse:
        return Judgement(None, stall.excuse)
    not_idle = [each.peer for each in stall.absent if not each.is_idle]
    if not_idle:
        return Judgement(None, f"{list_peers(not_idle)} may be in a call, too")
    busy = busy_text(now, stall.absent)
    if busy:
        return Judgement(None, busy)
    if timeout is None:
        return Judgement(None, "off")
    if any(each.calls < NOT_COUNTED for each in stall.absent):
        return Judgement(None, "first calls")
    if not stall.is_minority:
        return Judgement(None, "no minority")
    return Judgement(stall.whole_since + timeout)


def busy_text(now: Ns, absent: Iterable[Absent]) -> str:
    """Who of the absent is busy, for how long; empty if nobody is."""
    longest = max((each.busy_until for each in absent), default=0)
    return f"busy for another {format_seconds((longest - now) // MS)}" if longest > now else ""


def stall_timeout(settings: MasterSettings, usual: Ns) -> Ns | None:
    """How long a call may keep all others waiting that usually takes so long; None: as long as it likes."""
    chosen = settings.stall_timeout_ms
    if chosen == "off":
        return None
    wanted = max(settings.min_stall_ms * MS, FACTOR * usual) if chosen == "auto" else chosen * MS
    return max(min(wanted, settings.op_timeout_ms * MS), seen_after(settings))


def seen_after(settings: MasterSettings) -> Ns:
    """After so long it is known here that a member has come to an op. Nobody is evicted sooner."""
    return (ANNOUNCED_AFTER_MS + 2 * settings.liveness.heartbeat_ms) * MS


class Usual:
    """How long the calls of a tag, or of a kind, took lately."""

    def __init__(self) -> None:
        self._took: deque[Ns] = deque(maxlen=REMEMBERED)

    def add(self, took: Ns) -> None:
        self._took.append(took)

    @property
    def longest(self) -> Ns:
        """Except for one: a single slow call is not usual."""
        return sorted(self._took)[-2] if len(self._took) > 1 else 0


@dataclass(slots=True)
class CallCounts:
    """How many ops of each tag the members of a group have made, as far as heartbeats and votes tell.

    Sequences count the calls of an epoch, for all its members alike. What is not known of earlier epochs is not
    counted, so that nobody is taken for more experienced than it is.
    """

    epoch: int = 0
    _before: dict[Tag, int] = field(default_factory=dict)
    """In earlier epochs."""
    _now: dict[Tag, int] = field(default_factory=dict)
    _joined_at: dict[PeerId, dict[Tag, int]] = field(default_factory=dict)

    def look(self, epoch: int, members: Collection[PeerId]) -> None:
        """The group's newest epoch is this one."""
        if epoch == self.epoch:
            return
        for tag, count in self._now.items():
            self._before[tag] = self._before.get(tag, 0) + count
        self.epoch, self._now = epoch, {}
        before = dict(list(self._before.items())[-MAX_USUAL:])
        self._joined_at = {peer: self._joined_at.get(peer, before) for peer in members}
        self._before = dict(before)

    def seen(self, tag: Tag, calls: int) -> None:
        """So many calls of this epoch have ended."""
        self._now[tag] = max(self._now.get(tag, 0), calls)

    def made(self, peer: PeerId, op: OpRef) -> int:
        """How many calls of the op's tag a member has made before this one."""
        joined = self._joined_at.get(peer, {}).get(op.tag, 0)
        return self._before.get(op.tag, 0) - joined + _calls_before(op)


def _calls_before(op: OpRef) -> int:
    """A simulation begins to count right before 2**32: those calls do not count."""
    return op.sequence if op.sequence < 1 << 31 else 0


def silent_member(ring: Sequence[PeerId], starved_ms: Mapping[PeerId, int], stuck_ms: Mapping[PeerId, int],
                  limit_ms: int) -> PeerId | None:  # fmt: skip
    """Who of a ring in an op sends nothing, while it receives: all others starve, and its next peer because of it.

    `stuck_ms`: for how long a member could not send what it has; one whose network is at fault is no silent one.
    """
    starving = {peer for peer in ring if starved_ms.get(peer, 0) >= limit_ms}
    quiet = [peer for peer in ring if peer not in starving]
    if len(ring) < 3 or len(quiet) != 1:
        return None
    [peer] = quiet
    is_fed = 2 * starved_ms.get(peer, 0) < limit_ms
    return peer if is_fed and not any(stuck_ms.get(each, 0) for each in ring) else None


def eviction(stall: Stall, waited_ms: int, limit: str) -> tuple[str, str]:
    """Why the absent are evicted, for the others and for their own programs. `limit` is the setting that says so."""
    did, advice = "did not come", _ADVICE
    if stall.is_silent:
        did, advice = "is in it and sends nothing", _SILENT_ADVICE
    elif stall.key.kind == "sync":
        did, advice = "got no more of the state", _SYNC_ADVICE
    how, why = f"waited {format_seconds(waited_ms)} for it", f"and it {did} ({limit})"
    return f"{stall.what} {how}, {why}", f"{list_peers(stall.since)} {how} in {stall.what}, {why}. {advice}"


class Watchdog:
    """Looks at all waits of a run on every tick, and evicts who stalls them."""

    def __init__(self, run: Run, epochs: Epochs, fail: Callable[[Ns, Peer, OpTimeout], None]) -> None:
        """`fail` lets an op end at its deadline, with an error for all members."""
        self._run, self._epochs, self._fail = run, epochs, fail
        self._settings = run.settings
        self._usual: dict[tuple[str, GroupId, Tag, str], Usual] = {}
        self._counts: dict[GroupId, CallCounts] = {}
        self._open: dict[tuple[Key, int], Ns] = {}
        """The waits of the last look, each with its epoch, and for how long they had lasted."""
        self._overdue: dict[tuple[Key, int], Overdue] = {}
        """Ops whose callers' time is over, and that wait for members with an excuse."""
        self._extended: dict[PeerId, int] = {}
        """The ballots of calls whose time was over, and that wait as long again."""

    # What the machine calls

    def tick(self, now: Ns) -> None:
        """Learn what is usual, and evict who is due."""
        if self._run.away:
            return
        stalls = list(self.stalls())
        self._learn(now, stalls)
        for stall in stalls:
            judgement = self.judge(now, stall)
            if judgement.evict_at is not None and now >= judgement.evict_at:
                self._evict(now, stall, self._limit(stall))
                return  # an epoch changes, and everything else is looked at again in the next one
        self._judge_overdue(now, stalls)

    def judge(self, now: Ns, stall: Stall) -> Judgement:
        """The rule. A method, so that a simulation can plant a wrong one and must find it."""
        return judge(now, stall, self._timeout(stall.key))

    def judgements(self, now: Ns) -> dict[Key, Judgement]:
        """What comes of each wait, for people."""
        return {} if self._run.away else {stall.key: self.judge(now, stall) for stall in self.stalls()}

    def busy(self, now: Ns, peer: Peer, message: Busy) -> None:
        """A peer says that it works on something else, or no longer."""
        if not 0 <= message.ms <= MAX_BUSY_MS:
            raise RemoteProtocolError(f"it is busy for {message.ms} ms (at most {MAX_BUSY_MS})")
        peer.busy_until = now + message.ms * MS

    def op_overdue(self, now: Ns, peer: Peer, message: OpTimeout) -> bool:
        """A caller's time is over. False if it must raise, because it asked for that."""
        if message.final or self._run.away or not self._run.is_current(peer, message.epoch):
            return False
        if len(message.descriptor) != DESCRIPTOR_BYTES:
            raise RemoteProtocolError(f"its op that timed out has a descriptor of {len(message.descriptor)} bytes")
        group = self._run.groups[peer.group]
        if group.change is not None:
            return True  # the op begins again in the next epoch, and its time with it
        # Others may have come to it a moment ago: their next heartbeats say so.
        self._overdue.setdefault((Key("op", group.id, message.op), group.epoch), Overdue(now, peer.id, message))
        return True

    def call_overdue(self, now: Ns, peer: Peer, message: VoteWithdrawn) -> bool:
        """The same of a call. Its caller is told that it goes on."""
        ballot = peer.ballot
        if message.final or self._run.away or ballot is None or ballot.number != message.ballot:
            return False
        key = Key("call", peer.group if ballot.kind == "sync" else -1, vote=ballot.kind)
        if not self._is_changing(key):  # else it is cast again in the next epoch, and everything looks different
            stall = next((each for each in self.stalls() if each.key == key), None)
            if stall is None or stall.excuse:
                return False
            guilty, is_busy = self._guilty(now, stall, message.waited_ms), bool(busy_text(now, stall.absent))
            if guilty:
                self._evict(now, replace(stall, absent=guilty), _op_timeout(message.waited_ms))
            elif not is_busy and (not stall.has_idle or self._extended.get(peer.id) == message.ballot):
                return False
            elif not is_busy:
                self._extended[peer.id] = message.ballot  # who got on a moment ago has one more chance
        self._run.send(peer, CallExtended(message.ballot))
        return True

    def _guilty(self, now: Ns, stall: Stall, waited_ms: int) -> list[Absent]:
        """Who of the absent is to be evicted for a call whose time is over: who has long been without an excuse."""
        timeout = self._timeout(stall.key) or self._settings.op_timeout_ms * MS
        limit = max(min(timeout, max(0, waited_ms) * MS), seen_after(self._settings))
        return [each for each in stall.absent if each.is_idle and now >= each.since + limit]

    # Looking

    def stalls(self) -> Iterator[Stall]:
        """Everything that members wait in now, in groups whose epoch does not change."""
        voted = {(peer.ballot.kind, peer.group) for peer in self._run.peers.values() if peer.ballot is not None}
        for _, group in sorted(self._run.groups.items()):
            if group.change is None and group.ring:
                yield from self._ops(group)
                yield from self._syncs(group)
                if ("sync", group.id) in voted:
                    yield from self._calls("sync", group)
        if voted and all(group.change is None for group in self._run.groups.values()):
            for kind in _KINDS:
                if any(kind == each for each, _ in voted):
                    yield from self._calls(kind, None)

    def _ops(self, group: Group) -> Iterator[Stall]:
        members, callers = self._run.live(group), dict[OpRef, dict[PeerId, Ns]]()
        for member in members:
            for told in self._run.announced(member):
                called = max(group.installed, member.beat_at - told.age_ms * MS)
                callers.setdefault(OpRef(told.tag, told.sequence), {})[member.id] = called
        counts, sizes = self._counts_of(group), {group.id: len(members)}
        for op, since in sorted(callers.items()):
            key, what = Key("op", group.id, op), name_op(op)
            absent = [self._absent(each, group, counts.made(each.id, op)) for each in members if each.id not in since]
            if absent:
                yield Stall(key, what, since, absent, sizes)
            elif (silent := self._silent(group, members, key)) is not None:
                others = {peer: start for peer, start in since.items() if peer != silent}
                # It may have come this moment, to others that have starved for long: its own time counts.
                late = Absent(silent, calls=counts.made(silent, op), moved=since[silent], group=group.id)
                yield Stall(key, what, others, [late], sizes, is_silent=True)
            else:
                yield Stall(key, what, since, [], sizes, excuse="it runs")

    def _silent(self, group: Group, members: list[Peer], key: Key) -> PeerId | None:
        timeout = self._timeout(key)
        if timeout is None:
            return None
        starved = {each.id: each.beat.in_starved_ms for each in members}
        stuck = {each.id: each.beat.out_stalled_ms + each.beat.back_stalled_ms for each in members}
        return silent_member(group.ring, starved, stuck, timeout // MS)

    def _syncs(self, group: Group) -> Iterator[Stall]:
        sync = group.sync
        if sync is not None and sync.unfinished:
            moved = max(sync.since, sync.moved)
            since = dict.fromkeys(sorted(sync.ballots.keys() - sync.unfinished), moved)
            absent = [
                Absent(peer, busy_until=self._run.peers[peer].busy_until, moved=moved, group=group.id)
                for peer in sorted(sync.unfinished)
            ]
            excuse = "" if since else "all of them fetch it"
            sizes = {group.id: len(sync.ballots)}
            yield Stall(Key("sync", group.id), f"sync {sync.number}", since, absent, sizes, excuse)

    def _calls(self, kind: VoteKind, group: Group | None) -> Iterator[Stall]:
        run = self._run
        ballots = {peer.id: run.ballot(peer) for peer in run.accepted() if group is None or peer.group == group.id}
        since = {peer: ballot.asked for peer, ballot in ballots.items() if ballot is not None and ballot.kind == kind}
        if not since:
            return
        state = completion(run, kind, None if group is None else group.id)
        missing = [run.peers[peer] for peer in state.missing] if isinstance(state, Wait) else []
        absent = [self._absent(each, run.groups[each.group], each.calls + each.beat.committed) for each in missing]
        waits_for_peers = not absent or (kind == "update" and bool(run.short_of_peers()))
        key = Key("call", -1 if group is None else group.id, vote=kind)
        sizes = {each.id: len(run.live(each)) for each in run.groups.values()}
        yield Stall(key, CALL_NAMES[kind], since, absent, sizes, "it waits for more peers" if waits_for_peers else "")

    def _absent(self, peer: Peer, group: Group, calls: int) -> Absent:
        return Absent(peer.id, self._is_idle(peer, group), calls, peer.busy_until, peer.pace.moved, group.id)

    def _is_idle(self, peer: Peer, group: Group) -> bool:
        """Whether a member is in its own code: alive, and in no op and no call, by a heartbeat of this epoch."""
        run, is_member = self._run, peer.standing is Standing.ACCEPTED and not peer.leaving and not peer.suspected
        is_heard = peer.beat.epoch == group.epoch and peer.beat_at > group.installed
        if not is_member or not is_heard or run.announced(peer) or peer.ballot is not None or group.change is not None:
            return False
        calls = (group.sync, run.admission, run.optimisation)
        return not any(call is not None and peer.id in call.ballots for call in calls)

    # Learning

    def _learn(self, now: Ns, stalls: Sequence[Stall]) -> None:
        for group in self._run.groups.values():
            self._look_at_votes(group)
        lasting: dict[tuple[Key, int], Ns] = {}
        for stall in stalls:
            if stall.since:
                lasting[stall.key, self._epoch_of(stall.key)] = now - min(stall.since.values())
            if stall.key.kind == "op":
                self._counts_of(self._run.groups[stall.key.group]).seen(stall.key.op.tag, _calls_before(stall.key.op))
        for (key, epoch), took in self._open.items():
            # What an epoch's end has cut off came to no end of its own.
            if (key, epoch) not in lasting and epoch == self._epoch_of(key) and not self._is_changing(key):
                self._usual.setdefault(key.usual, Usual()).add(took)
                while len(self._usual) > MAX_USUAL:
                    del self._usual[next(iter(self._usual))]
        self._open = lasting

    def _look_at_votes(self, group: Group) -> None:
        counts = self._counts_of(group)
        for peer in self._run.live(group):
            if peer.ballot is not None and peer.ballot.epoch == group.epoch:
                for tag, calls in peer.ballot.progress.items():
                    counts.seen(tag, calls if calls < 1 << 31 else 0)

    def _counts_of(self, group: Group) -> CallCounts:
        counts = self._counts.setdefault(group.id, CallCounts())
        counts.look(group.epoch, group.ring)
        return counts

    def _epoch_of(self, key: Key) -> int:
        return self._run.groups[key.group].epoch if key.group >= 0 else self._run.epochs

    def _is_changing(self, key: Key) -> bool:
        groups = self._run.groups.values() if key.group < 0 else [self._run.groups[key.group]]
        return any(group.change is not None for group in groups)

    def _timeout(self, key: Key) -> Ns | None:
        known = self._usual.get(key.usual)
        return stall_timeout(self._settings, 0 if known is None else known.longest)

    # Evicting

    def _limit(self, stall: Stall) -> str:
        chosen, timeout = self._settings.stall_timeout_ms, self._timeout(stall.key)
        assert timeout is not None
        shown = f"stall_timeout_s {format_seconds(timeout // MS)}"
        return f"{shown}, by what it usually takes" if chosen == "auto" else shown

    def _evict(self, now: Ns, stall: Stall, limit: str) -> None:
        peers = [self._run.peers[peer] for peer in stall.missing]
        waited_ms = (now - min(stall.since.values())) // MS
        group = peers[0].group if stall.key.group < 0 else stall.key.group
        late, waiting = [peer.member.name for peer in peers], sorted(stall.since)
        self._run.tell(PeersStalled(group, stall.missing, late, waiting, stall.what, waited_ms, limit))
        reason, told = eviction(stall, waited_ms, limit)
        for peer in peers:
            self._epochs.evict(now, peer, reason, self._run.named(told))

    def _judge_overdue(self, now: Ns, stalls: Sequence[Stall]) -> None:
        """Ops whose callers' time is over: who is absent is evicted as soon as it has no excuse.

        If nobody is at fault the op ends at its deadline; as long again later, if somebody had an excuse."""
        by_key = {stall.key: stall for stall in stalls}
        for (key, epoch), overdue in list(self._overdue.items()):
            group, caller = self._run.groups[key.group], self._run.peers.get(overdue.caller)
            if epoch != group.epoch or group.change is not None or caller is None:
                del self._overdue[key, epoch]  # it begins again in another epoch, and its time with it
                continue
            told = overdue.since + ANNOUNCED_AFTER_MS * MS
            if any(member.beat_at <= told for member in self._run.live(group)):
                continue
            stall = by_key.get(key)
            guilty = [] if stall is None else self._guilty(now, stall, overdue.message.waited_ms)
            if stall is not None and not guilty:
                overdue.was_excused |= stall.has_idle
                patience = self._settings.op_timeout_ms * MS if overdue.was_excused else 0
                if busy_text(now, stall.absent) or now < overdue.since + patience:
                    continue
            del self._overdue[key, epoch]
            if stall is not None and guilty:
                self._evict(now, replace(stall, absent=guilty), _op_timeout(overdue.message.waited_ms))
            elif stall is not None:
                self._fail(now, caller, overdue.message)
            if group.change is not None:
                return


def _op_timeout(waited_ms: int) -> str:
    return f"op_timeout_s {format_seconds(max(0, waited_ms))}"
