"""Members that are alive but keep the others waiting, and when they are evicted for it.

A peer whose data loader hangs still sends heartbeats. All others wait for it, in an op or in a call, until
`op_timeout_s`. The watchdog evicts it earlier, by this rule:

* Only members in their own code can be at fault: in no op and no call, alive, and not announced as busy (`run.busy`). A
  member that waits, in whatever call, is not at fault.
* All others must wait, in this op or call. The timeout starts when the last of them has called, and when the absent
  members last made progress, or were busy.
* The absent members must be a strict minority of each group. If most members are slow, the step is slow, and none is at
  fault.
* A member's first three calls of a tag do not count, nor votes before its first three calls of any kind: programs
  compile and fill caches in them.
* A member that is in the op and sends nothing, while it receives, counts as absent (`silent_member`).

The stall timeout is a multiple of the usual duration of this call, at least `min_stall_ms` and never more than
`op_timeout_ms`; or what `stall_timeout_s` says. A call may be slow now and then: the second longest of the last calls
that took long enough to be observed counts.

A caller's own `op_timeout_s` is the second line. If the program did not choose that timeout for this call, the absent
members are evicted then, minority or not, and the call continues; it raises only if no member is at fault. All clocks
are this master's: a master that takes over starts them again, because it makes a new epoch.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ringfold.errors import RemoteProtocolError
from ringfold.master.calls import IncompleteCall, completion
from ringfold.master.epochs import Epochs
from ringfold.master.events import Ns
from ringfold.master.run import Group, Peer, Run
from ringfold.master.settings import MasterSettings
from ringfold.master.states import Membership
from ringfold.units import MS
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
    Sealed,
    Tag,
    Vote,
    VoteKind,
    VoteWithdrawn,
)
from ringfold.wire.notices import PeersStalled

ANNOUNCED_AFTER_MS = 100
"""Heartbeats announce an op when it is this old."""
FACTOR = 5
"""The stall timeout is the usual duration of the call times this."""
WARMUP_CALLS = 3
"""The first calls of a tag may take any time."""
MAX_DURATIONS = 16
"""How many durations are remembered per tag or kind."""
MAX_TAGS = 4_096
"""Tags whose durations are remembered."""

_KINDS: tuple[VoteKind, ...] = ("update", "pending", "optimize")
_ADVICE = (
    "Its program was in its own code all the time: a data loader or a device may hang. Announce long work with "
    "run.busy(up_to_s=...), or set stall_timeout_s at the master"
)
_SILENT_ADVICE = "It receives, and sends nothing: look at its device and at its network"
_SYNC_ADVICE = "Nothing of the state came to it any more: look at its network and at its memory"


class WaitKey(Struct, frozen=True, order=True):
    """Which wait: an op of a group, a call of the run (group -1) or of a group, or a sync that is decided."""

    kind: Literal["op", "call", "sync"]
    group: GroupId
    op: OpRef = OpRef(0, 0)
    vote: VoteKind = "update"

    @property
    def duration_key(self) -> tuple[str, GroupId, Tag, str]:
        """Waits with the same key have similar durations."""
        return self.kind, self.group, self.op.tag, self.vote


class AbsentMember(Struct, frozen=True):
    """A member that has not called: whether it is in its own code, how many such calls it has made, until when it is or
    was busy by its own announcement, and when it last made progress."""

    peer: PeerId
    is_idle: bool = True
    calls: int = WARMUP_CALLS
    busy_until_ns: Ns = 0
    last_progress_ns: Ns = 0
    group: GroupId = 0

    @property
    def since_ns(self) -> Ns:
        """Since when it has no excuse."""
        return max(self.last_progress_ns, self.busy_until_ns)


class Stall(Struct, frozen=True):
    """An op or call that members wait in: `since_ns` has those that wait, and `absent` those that have not called.

    `sizes` has the member count of each group that it concerns. With `excuse` no member is at fault."""

    key: WaitKey
    what: str
    since_ns: Mapping[PeerId, Ns]
    absent: Sequence[AbsentMember]
    sizes: Mapping[GroupId, int]
    excuse: str = ""
    is_silent: bool = False
    """The absent members are in the op, and send nothing."""

    @property
    def missing(self) -> list[PeerId]:
        return [each.peer for each in self.absent]

    @property
    def has_idle(self) -> bool:
        """Whether an absent member is in its own code."""
        return any(each.is_idle for each in self.absent)

    @property
    def is_minority(self) -> bool:
        """Whether the absent members are a strict minority of each of their groups."""
        late = Counter(each.group for each in self.absent)
        return all(2 * count < self.sizes[group] for group, count in late.items())

    @property
    def complete_since_ns(self) -> Ns:
        """Since when all others wait, and no absent member has an excuse."""
        return max(*self.since_ns.values(), *(each.since_ns for each in self.absent), 0)


class StallDecision(Struct, frozen=True):
    """The decision about a stall: when the absent members are evicted, or why they are not."""

    evict_at_ns: Ns | None
    why: str = ""


@dataclass(slots=True)
class OverdueOp:
    """An op whose caller timed out."""

    since_ns: Ns
    caller: PeerId
    message: OpTimeout
    was_excused: bool = False
    """An absent member had an excuse."""


def judge(now: Ns, stall: Stall, timeout: Ns | None) -> StallDecision:
    """The rule of the watchdog. `timeout` is None if it is off."""
    if stall.excuse:
        return StallDecision(None, stall.excuse)
    not_idle = [each.peer for each in stall.absent if not each.is_idle]
    if not_idle:
        return StallDecision(None, f"{list_peers(not_idle)} may be in a call, too")
    busy = busy_text(now, stall.absent)
    if busy:
        return StallDecision(None, busy)
    if timeout is None:
        return StallDecision(None, "off")
    if any(each.calls < WARMUP_CALLS for each in stall.absent):
        return StallDecision(None, "first calls")
    if not stall.is_minority:
        return StallDecision(None, "no minority")
    return StallDecision(stall.complete_since_ns + timeout)


def busy_text(now: Ns, absent: Iterable[AbsentMember]) -> str:
    """For how long an absent member is busy, as text; empty if none is."""
    longest = max((each.busy_until_ns for each in absent), default=0)
    return f"busy for another {format_seconds((longest - now) // MS)}" if longest > now else ""


def stall_timeout(settings: MasterSettings, usual: Ns) -> Ns | None:
    """How long a call with this usual duration may keep all others waiting; None: without limit."""
    chosen = settings.stall_timeout_ms
    if chosen == "off":
        return None
    timeout_ns = max(settings.min_stall_ms * MS, FACTOR * usual) if chosen == "auto" else chosen * MS
    return max(min(timeout_ns, settings.op_timeout_ms * MS), announced_after(settings))


def announced_after(settings: MasterSettings) -> Ns:
    """After this long the master knows that a member has started an op. No member is evicted sooner."""
    return (ANNOUNCED_AFTER_MS + 2 * settings.liveness.heartbeat_ms) * MS


class RecentDurations:
    """The durations of the last calls of a tag, or of a kind."""

    def __init__(self) -> None:
        self._durations: deque[Ns] = deque(maxlen=MAX_DURATIONS)

    def add(self, took: Ns) -> None:
        self._durations.append(took)

    @property
    def usual_ns(self) -> Ns:
        """The second longest: a single slow call is not usual."""
        return sorted(self._durations)[-2] if len(self._durations) > 1 else 0


@dataclass(slots=True)
class CallCounts:
    """How many ops of each tag the members of a group have made, as far as heartbeats and votes report it.

    Sequences count the calls of an epoch, the same for all its members. Unknown calls of earlier epochs are not
    counted, so that no member counts as warmed up too early.
    """

    epoch: int = 0
    _before: dict[Tag, int] = field(default_factory=dict)
    """Calls in earlier epochs."""
    _now: dict[Tag, int] = field(default_factory=dict)
    _joined_at: dict[PeerId, dict[Tag, int]] = field(default_factory=dict)

    def begin_epoch(self, epoch: int, members: Collection[PeerId]) -> None:
        """Start to count for this epoch, if it is a new one."""
        if epoch == self.epoch:
            return
        for tag, count in self._now.items():
            self._before[tag] = self._before.get(tag, 0) + count
        self.epoch, self._now = epoch, {}
        before = dict(list(self._before.items())[-MAX_TAGS:])
        self._joined_at = {peer: self._joined_at.get(peer, before) for peer in members}
        self._before = dict(before)

    def observe(self, tag: Tag, calls: int) -> None:
        """This many calls of this epoch have ended."""
        self._now[tag] = max(self._now.get(tag, 0), calls)

    def made(self, peer: PeerId, op: OpRef) -> int:
        """How many calls of the op's tag a member has made before this one."""
        joined = self._joined_at.get(peer, {}).get(op.tag, 0)
        return self._before.get(op.tag, 0) - joined + _calls_before(op)


def _calls_before(op: OpRef) -> int:
    """A simulation starts to count right before 2**32: those calls do not count."""
    return op.sequence if op.sequence < 1 << 31 else 0


def silent_member(ring: Sequence[PeerId], starved_ms: Mapping[PeerId, int], stuck_ms: Mapping[PeerId, int],
                  limit_ms: int) -> PeerId | None:  # fmt: skip
    """The member of a ring in an op that sends nothing while it receives: all others starve because of it.

    `stuck_ms`: for how long a member could not send its bytes; then the network is at fault, and not the member.
    """
    starving = {peer for peer in ring if starved_ms.get(peer, 0) >= limit_ms}
    quiet = [peer for peer in ring if peer not in starving]
    if len(ring) < 3 or len(quiet) != 1:
        return None
    [peer] = quiet
    is_fed = 2 * starved_ms.get(peer, 0) < limit_ms
    return peer if is_fed and not any(stuck_ms.get(each, 0) for each in ring) else None


def eviction_texts(stall: Stall, waited_ms: int, limit: str) -> tuple[str, str]:
    """Why the absent members are evicted, for the others and for their own programs. `limit` is the setting behind
    it."""
    did, advice = "did not come", _ADVICE
    if stall.is_silent:
        did, advice = "is in it and sends nothing", _SILENT_ADVICE
    elif stall.key.kind == "sync":
        did, advice = "got no more of the state", _SYNC_ADVICE
    how, why = f"waited {format_seconds(waited_ms)} for it", f"and it {did} ({limit})"
    return f"{stall.what} {how}, {why}", f"{list_peers(stall.since_ns)} {how} in {stall.what}, {why}. {advice}"


class Watchdog:
    """Checks all waits of a run on every tick, and evicts the members that stall them."""

    def __init__(self, run: Run, epochs: Epochs, fail: Callable[[Ns, Peer, OpTimeout], None]) -> None:
        """`fail` ends an op at its deadline, with an error for all members."""
        self._run, self._epochs, self._fail = run, epochs, fail
        self._settings = run.settings
        self._recent: dict[tuple[str, GroupId, Tag, str], RecentDurations] = {}
        self._counts: dict[GroupId, CallCounts] = {}
        self._open: dict[tuple[WaitKey, int], Ns] = {}
        """The waits at the last tick, each with its epoch, and how long they had lasted."""
        self._overdue: dict[tuple[WaitKey, int], OverdueOp] = {}
        """Ops whose callers timed out, and that wait for members with an excuse."""
        self._extended: dict[PeerId, int] = {}
        """The ballots of calls that timed out, and whose timeout was started again."""

    # The interface to the machine

    def tick(self, now: Ns) -> None:
        """Learn usual durations, and evict members whose timeout has passed."""
        if self._run.away:
            return
        stalls = list(self.stalls())
        self._learn(now, stalls)
        for stall in stalls:
            decision = self.judge(now, stall)
            if decision.evict_at_ns is not None and now >= decision.evict_at_ns:
                self._evict(now, stall, self._limit(stall))
                return  # an epoch changes, and everything else is checked again in the next one
        self._judge_overdue(now, stalls)

    def judge(self, now: Ns, stall: Stall) -> StallDecision:
        """The rule. A method, so that a simulation can plant a wrong one and must find it."""
        return judge(now, stall, self._timeout(stall.key))

    def decisions(self, now: Ns) -> dict[WaitKey, StallDecision]:
        """The decision about each wait, for the status."""
        return {} if self._run.away else {stall.key: self.judge(now, stall) for stall in self.stalls()}

    def count_calls(self, peer: Peer, message: Vote | Sealed) -> None:
        """Count the calls that a vote or a seal reports; at once, because the epoch may end before the next tick."""
        if self._run.is_current(peer, message.epoch):
            counts = self._counts_of(self._run.groups[peer.group])
            if isinstance(message, Vote):
                ended = [OpRef(tag, calls) for tag, calls in message.progress]
            else:
                ended = [sealed.op for sealed in message.ops]
            for op in ended:
                counts.observe(op.tag, _calls_before(op))

    def busy(self, now: Ns, peer: Peer, message: Busy) -> None:
        """A peer announces other work, or its end."""
        if not 0 <= message.ms <= MAX_BUSY_MS:
            raise RemoteProtocolError(f"it is busy for {message.ms} ms (at most {MAX_BUSY_MS})")
        peer.busy_until_ns = now + message.ms * MS

    def op_overdue(self, now: Ns, peer: Peer, message: OpTimeout) -> bool:
        """A caller timed out. False if it must raise, because its program chose this timeout."""
        if message.final or self._run.away or not self._run.is_current(peer, message.epoch):
            return False
        if len(message.descriptor) != DESCRIPTOR_BYTES:
            raise RemoteProtocolError(f"its op that timed out has a descriptor of {len(message.descriptor)} bytes")
        group = self._run.groups[peer.group]
        if group.change is not None:
            return True  # the op starts again in the next epoch, and so does its timeout
        # Others may have started it a moment ago: their next heartbeats will announce it.
        self._overdue.setdefault((WaitKey("op", group.id, message.op), group.epoch), OverdueOp(now, peer.id, message))
        return True

    def call_overdue(self, now: Ns, peer: Peer, message: VoteWithdrawn) -> bool:
        """The same for a call: the caller's timeout is started again."""
        ballot = peer.ballot
        if message.final or self._run.away or ballot is None or ballot.number != message.ballot:
            return False
        key = WaitKey("call", peer.group if ballot.kind == "sync" else -1, vote=ballot.kind)
        if not self._is_changing(key):  # else it is cast again in the next epoch, under other conditions
            stall = next((each for each in self.stalls() if each.key == key), None)
            if stall is None or stall.excuse:
                return False
            at_fault, is_busy = self._at_fault(now, stall, message.waited_ms), bool(busy_text(now, stall.absent))
            if at_fault:
                self._evict(now, replace(stall, absent=at_fault), _op_timeout(message.waited_ms))
            elif not is_busy and (not stall.has_idle or self._extended.get(peer.id) == message.ballot):
                return False
            elif not is_busy:
                self._extended[peer.id] = message.ballot  # a member that made progress a moment ago has one more chance
        self._run.send(peer, CallExtended(message.ballot))
        return True

    def _at_fault(self, now: Ns, stall: Stall, waited_ms: int) -> list[AbsentMember]:
        """The absent members to evict for a call that timed out: those without an excuse for long enough."""
        timeout = self._timeout(stall.key) or self._settings.op_timeout_ms * MS
        limit = max(min(timeout, max(0, waited_ms) * MS), announced_after(self._settings))
        return [each for each in stall.absent if each.is_idle and now >= each.since_ns + limit]

    # Observing

    def stalls(self) -> Iterator[Stall]:
        """All ops and calls that members wait in now, in groups whose epoch does not change."""
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
            for announced in self._run.announced(member):
                called = max(group.installed_ns, member.last_heartbeat_ns - announced.age_ms * MS)
                callers.setdefault(OpRef(announced.tag, announced.sequence), {})[member.id] = called
        counts, sizes = self._counts_of(group), {group.id: len(members)}
        for op, since in sorted(callers.items()):
            key, what = WaitKey("op", group.id, op), name_op(op)
            absent = [self._absent(each, group, counts.made(each.id, op)) for each in members if each.id not in since]
            if absent:
                yield Stall(key, what, since, absent, sizes)
            elif (silent := self._silent(group, members, key)) is not None:
                others = {peer: start for peer, start in since.items() if peer != silent}
                # It may have started a moment ago, while others have starved for long: its own time counts.
                late = AbsentMember(
                    silent, calls=counts.made(silent, op), last_progress_ns=since[silent], group=group.id
                )
                yield Stall(key, what, others, [late], sizes, is_silent=True)
            else:
                yield Stall(key, what, since, [], sizes, excuse="it runs")

    def _silent(self, group: Group, members: list[Peer], key: WaitKey) -> PeerId | None:
        timeout = self._timeout(key)
        if timeout is None:
            return None
        starved = {each.id: each.heartbeat.in_starved_ms for each in members}
        stuck = {each.id: each.heartbeat.out_stalled_ms + each.heartbeat.back_stalled_ms for each in members}
        return silent_member(group.ring, starved, stuck, timeout // MS)

    def _syncs(self, group: Group) -> Iterator[Stall]:
        sync = group.sync
        if sync is not None and sync.unfinished:
            moved = max(sync.since_ns, sync.last_progress_ns)
            since = dict.fromkeys(sorted(sync.ballots.keys() - sync.unfinished), moved)
            absent = [
                AbsentMember(
                    peer, busy_until_ns=self._run.peers[peer].busy_until_ns, last_progress_ns=moved, group=group.id
                )
                for peer in sorted(sync.unfinished)
            ]
            excuse = "" if since else "all of them fetch it"
            sizes = {group.id: len(sync.ballots)}
            yield Stall(WaitKey("sync", group.id), f"sync {sync.number}", since, absent, sizes, excuse)

    def _calls(self, kind: VoteKind, group: Group | None) -> Iterator[Stall]:
        run = self._run
        ballots = {peer.id: run.ballot(peer) for peer in run.accepted() if group is None or peer.group == group.id}
        since = {
            peer: ballot.called_ns for peer, ballot in ballots.items() if ballot is not None and ballot.kind == kind
        }
        if not since:
            return
        state = completion(run, kind, None if group is None else group.id)
        missing = [run.peers[peer] for peer in state.missing] if isinstance(state, IncompleteCall) else []
        absent = [self._absent(each, run.groups[each.group], each.calls + each.heartbeat.committed) for each in missing]
        waits_for_peers = not absent or (kind == "update" and bool(run.short_of_peers()))
        key = WaitKey("call", -1 if group is None else group.id, vote=kind)
        sizes = {each.id: len(run.live(each)) for each in run.groups.values()}
        yield Stall(key, CALL_NAMES[kind], since, absent, sizes, "it waits for more peers" if waits_for_peers else "")

    def _absent(self, peer: Peer, group: Group, calls: int) -> AbsentMember:
        return AbsentMember(
            peer.id,
            self._is_idle(peer, group),
            calls,
            peer.busy_until_ns,
            peer.step_progress.last_progress_ns,
            group.id,
        )

    def _is_idle(self, peer: Peer, group: Group) -> bool:
        """Whether a member is in its own code: alive, in no op and no call, by a heartbeat of this epoch."""
        run, is_member = self._run, peer.is_member and peer.membership is not Membership.LEAVING and not peer.suspected
        is_heard = peer.heartbeat.epoch == group.epoch and peer.last_heartbeat_ns > group.installed_ns
        if not is_member or not is_heard or run.announced(peer) or peer.ballot is not None or group.change is not None:
            return False
        calls = (group.sync, run.admission, run.optimisation)
        return not any(call is not None and peer.id in call.ballots for call in calls)

    # Learning

    def _learn(self, now: Ns, stalls: Sequence[Stall]) -> None:
        lasting: dict[tuple[WaitKey, int], Ns] = {}
        for stall in stalls:
            if stall.since_ns:
                lasting[stall.key, self._epoch_of(stall.key)] = now - min(stall.since_ns.values())
            if stall.key.kind == "op":
                self._counts_of(self._run.groups[stall.key.group]).observe(
                    stall.key.op.tag, _calls_before(stall.key.op)
                )
        for (key, epoch), took in self._open.items():
            # A wait that ended with its epoch has no duration of its own.
            if (key, epoch) not in lasting and epoch == self._epoch_of(key) and not self._is_changing(key):
                self._recent.setdefault(key.duration_key, RecentDurations()).add(took)
                while len(self._recent) > MAX_TAGS:
                    del self._recent[next(iter(self._recent))]
        self._open = lasting

    def _counts_of(self, group: Group) -> CallCounts:
        counts = self._counts.setdefault(group.id, CallCounts())
        counts.begin_epoch(group.epoch, group.ring)
        return counts

    def _epoch_of(self, key: WaitKey) -> int:
        return self._run.groups[key.group].epoch if key.group >= 0 else self._run.epochs

    def _is_changing(self, key: WaitKey) -> bool:
        groups = self._run.groups.values() if key.group < 0 else [self._run.groups[key.group]]
        return any(group.change is not None for group in groups)

    def _timeout(self, key: WaitKey) -> Ns | None:
        known = self._recent.get(key.duration_key)
        return stall_timeout(self._settings, 0 if known is None else known.usual_ns)

    # Evicting

    def _limit(self, stall: Stall) -> str:
        chosen, timeout = self._settings.stall_timeout_ms, self._timeout(stall.key)
        assert timeout is not None
        shown = f"stall_timeout_s {format_seconds(timeout // MS)}"
        return f"{shown}, by what it usually takes" if chosen == "auto" else shown

    def _evict(self, now: Ns, stall: Stall, limit: str) -> None:
        peers = [self._run.peers[peer] for peer in stall.missing]
        waited_ms = (now - min(stall.since_ns.values())) // MS
        group = peers[0].group if stall.key.group < 0 else stall.key.group
        late, waiting = [peer.member.name for peer in peers], sorted(stall.since_ns)
        self._run.notify(PeersStalled(group, stall.missing, late, waiting, stall.what, waited_ms, limit))
        reason, text = eviction_texts(stall, waited_ms, limit)
        for peer in peers:
            self._epochs.evict(now, peer, "stalled", reason, self._run.add_names(text))

    def _judge_overdue(self, now: Ns, stalls: Sequence[Stall]) -> None:
        """Ops whose callers timed out: absent members are evicted as soon as they have no excuse.

        If no member is at fault the op fails at its deadline; or one timeout later, if a member had an excuse."""
        by_key = {stall.key: stall for stall in stalls}
        for (key, epoch), overdue in list(self._overdue.items()):
            group, caller = self._run.groups[key.group], self._run.peers.get(overdue.caller)
            if epoch != group.epoch or group.change is not None or caller is None:
                del self._overdue[key, epoch]  # it starts again in another epoch, and so does its timeout
                continue
            announced_ns = overdue.since_ns + ANNOUNCED_AFTER_MS * MS
            if any(member.last_heartbeat_ns <= announced_ns for member in self._run.live(group)):
                continue
            stall = by_key.get(key)
            at_fault = [] if stall is None else self._at_fault(now, stall, overdue.message.waited_ms)
            if stall is not None and not at_fault:
                overdue.was_excused |= stall.has_idle
                extra_ns = self._settings.op_timeout_ms * MS if overdue.was_excused else 0
                if busy_text(now, stall.absent) or now < overdue.since_ns + extra_ns:
                    continue
            del self._overdue[key, epoch]
            if stall is not None and at_fault:
                self._evict(now, replace(stall, absent=at_fault), _op_timeout(overdue.message.waited_ms))
            elif stall is not None:
                self._fail(now, caller, overdue.message)
            if group.change is not None:
                return


def _op_timeout(waited_ms: int) -> str:
    return f"op_timeout_s {format_seconds(max(0, waited_ms))}"
