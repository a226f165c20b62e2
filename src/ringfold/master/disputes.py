"""Members that called different things at the same place: one side is wrong, and is evicted.

Which call is right? Neither the first, nor that of the most members: a newcomer may be wrong at once, and three wrong
newcomers must not evict two members that have trained for days. So only *incumbents* decide: members that had committed
an op, or finished a sync, before the newest admission, and those that have finished two syncs since (they have trained
with the others in between). If there are none, all members decide.

A dispute is decided when one side has more than half of the incumbents, or when all of them have called. On a tie the
side with the most members is right; if that is a tie, too, the side with the lowest id, which joined first. Until then
no call fails: a member that has not called may still call, and decide it. A dispute lasts as long as its epoch. If the
epoch ends for another reason, the ops start again in the next one, and so does the dispute.

Members can also wait in *conflicting calls*, which can never complete together: two in different run-wide calls; two of
one group, one in a sync and one in another call; one in a call and one in an op that needs it. The same rule decides
between them. A member in its own code, or in an op under another tag, is no conflict: it may still call, and the op
timeout handles it. Nor is a peer whose update waits for more members: no other group waits for it. A conflict counts
only after a while, because a heartbeat is a little old: the op may have ended since.

A process that is restarted automatically would join, fail and be evicted in a loop. So its name and host are refused
for a pause, which doubles each time. A program that was fixed waits for one pause at most.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from ringfold.errors import RemoteProtocolError
from ringfold.master.epochs import Epochs
from ringfold.master.events import Ns
from ringfold.master.run import Dispute, Group, Peer, Run
from ringfold.master.states import EpochPhase
from ringfold.master.verdicts import Mismatch
from ringfold.units import S
from ringfold.wire.descriptor import Descriptor, describe, fingerprint, place, step_of
from ringfold.wire.diagnostics import CALL_NAMES, list_peers, name_op
from ringfold.wire.frames import DESCRIPTOR_BYTES
from ringfold.wire.messages import GroupId, OpMismatch, OpRef, PeerId, Tag, VoteKind, is_before
from ringfold.wire.notices import CallRefused

FIRST_PAUSE_S = 5
MAX_PAUSE_S = 320
FORGOTTEN_AFTER_S = 3_600
"""After this long without an eviction, the pause is FIRST_PAUSE_S again."""
MAX_NAMES = 4_096

MAX_DISPUTES = 4_096
"""As many tags as a member may use in an epoch."""

_TIE = "as many {} on one side as on the other, and"

Call = int
"""What was called: the fingerprint of a descriptor."""


_NUMBER: dict[VoteKind, int] = {kind: number for number, kind in enumerate(CALL_NAMES, 1)}
_OP = 0


class Caller(Struct, frozen=True):
    """A peer that waits in a call since `since_ns`, and how many ops it had committed by then.

    `is_short_of_peers`: it waits for members that its group does not have yet.
    """

    peer: PeerId
    group: GroupId
    kind: VoteKind
    since_ns: Ns
    progress: Mapping[Tag, int]
    is_short_of_peers: bool = False


class Working(Struct, frozen=True):
    """A peer that was in `op` from `since_ns` until its last heartbeat at `seen_ns`, at least."""

    peer: PeerId
    group: GroupId
    op: OpRef
    since_ns: Ns
    seen_ns: Ns


class CallConflict(Struct, frozen=True):
    """Members in calls that can never complete together. `calls` has a number for each call, `sides` is the same as
    text.

    `group` is None if it concerns the whole run.
    """

    calls: dict[PeerId, int]
    sides: str
    group: GroupId | None = None


class Ruling(Struct, frozen=True):
    """Which call is right, and why; `wrong` are the members that called another one."""

    right: Call
    wrong: list[PeerId]
    why: str


def judge(calls: Mapping[PeerId, Call], members: Collection[PeerId], incumbents: Collection[PeerId]) -> Ruling | None:
    """Decide a dispute among `members`, of which those in `calls` have called; None while it is open."""
    deciders = sorted(set(members) & set(incumbents)) or sorted(members)
    votes: dict[Call, list[PeerId]] = {}
    for peer in deciders:
        if peer in calls:
            votes.setdefault(calls[peer], []).append(peer)
    if len(set(calls.values())) < 2 or not votes:
        return None
    supporters = {call: sum(each == call for each in calls.values()) for call in votes}
    right = max(votes, key=lambda call: (len(votes[call]), supporters[call], -votes[call][0]))
    most, kind = len(votes[right]), "members that were here before the last newcomers" if incumbents else "members"
    if 2 * most <= len(deciders) and sum(map(len, votes.values())) < len(deciders):
        return None
    rivals = [call for call in votes if call != right and len(votes[call]) == most]
    if not rivals:
        why = f"{most} of {len(deciders)} {kind} called it"
    elif 2 * supporters[right] <= len(members) and len(calls) < len(members):
        return None
    elif all(supporters[call] < supporters[right] for call in rivals):
        why = f"{_TIE.format(kind)} {supporters[right]} of all {len(members)} members called it"
    else:
        why = f"{_TIE.format(kind)} peer {votes[right][0]} joined first"
    return Ruling(right, sorted(peer for peer, call in calls.items() if call != right), why)


@dataclass(slots=True)
class _Ban:
    pause_s: int
    until_ns: Ns


class Bans:
    """Peers that are refused for a while, by name and host."""

    def __init__(self) -> None:
        self._bans: dict[tuple[str, str], _Ban] = {}

    def add(self, now: Ns, name: str, host: str) -> int:
        """A peer was evicted for its call. Returns for how many seconds it is refused."""
        self._forget(now)
        before = self._bans.pop((name, host), None)
        pause_s = FIRST_PAUSE_S if before is None else min(2 * before.pause_s, MAX_PAUSE_S)
        self._bans[name, host] = _Ban(pause_s, now + pause_s * S)
        return pause_s

    def refusal(self, now: Ns, name: str, host: str) -> str | None:
        """Why a peer may not join now; None if it may."""
        ban = self._bans.get((name, host))
        if ban is None or now >= ban.until_ns:
            return None
        left_s = -((now - ban.until_ns) // S)
        return (
            f"{name} on {host} was evicted a moment ago for a call that the others did not make: "
            f"fix the program, and join in {left_s} s"
        )

    def _forget(self, now: Ns) -> None:
        old = [key for key, ban in self._bans.items() if now - ban.until_ns >= FORGOTTEN_AFTER_S * S]
        for key in old or list(self._bans)[: len(self._bans) - MAX_NAMES]:
            del self._bans[key]


class Disputes:
    """The disputes of all groups, and the peers that are refused after one."""

    def __init__(self, run: Run, epochs: Epochs) -> None:
        self._run, self._epochs = run, epochs
        self.bans = Bans()

    def add_report(self, now: Ns, peer: Peer, message: OpMismatch) -> None:
        """A member reports that a neighbour called something else."""
        group = self._run.groups[peer.group]
        mine, theirs = message.mine, message.theirs
        is_whole = len(mine) == len(theirs) == DESCRIPTOR_BYTES
        if message.other not in group.ring or not is_whole or mine == theirs:
            raise RemoteProtocolError(f"its mismatch with peer {message.other} makes no sense")
        if group.phase is not EpochPhase.SEALING:  # ops begin before the last member is attached
            # A report counts for its sender alone: the neighbour reports what the neighbour called.
            dispute = self._open(now, group, message.op, mine, theirs)
            dispute.calls[peer.id] = fingerprint(mine)

    def add_dones(self, now: Ns, peer: Peer, op: OpRef, descriptor: bytes, mismatch: Mismatch) -> None:
        """Two members have sent Done with different descriptors to the master."""
        dispute = self._open(now, self._run.groups[peer.group], op, descriptor, mismatch.first_descriptor)
        dispute.calls[peer.id] = fingerprint(descriptor)
        dispute.calls[mismatch.first] = fingerprint(mismatch.first_descriptor)

    def _open(self, now: Ns, group: Group, op: OpRef, *descriptors: bytes) -> Dispute:
        dispute = group.disputes.setdefault(op, Dispute(now))
        dispute.descriptors.update({fingerprint(each): each for each in descriptors})
        # Each member calls one thing, and reports one neighbour.
        if len(group.disputes) > MAX_DISPUTES or len(dispute.descriptors) > 2 * len(group.ring):
            raise RemoteProtocolError("it reports more mismatches than there can be")
        return dispute

    def settle(self, now: Ns) -> None:
        """Evict the wrong side of each dispute that can be decided."""
        for _, group in sorted(self._run.groups.items()):
            for op, dispute in sorted(group.disputes.items()):
                if group.change is not None:
                    break  # decided just now: the other disputes start again in the next epoch, if they do
                self._collect_calls(group, op, dispute)
                ruling = self._judge(group, dispute)
                if ruling is not None:
                    self._evict(now, ruling, sides(op, dispute))

    def _collect_calls(self, group: Group, op: OpRef, dispute: Dispute) -> None:
        """Heartbeats announce the ops that take long, with what was called; so do Dones, if they go to the master."""
        if group.collector is not None:
            descriptor, callers = group.collector.callers(op.tag, op.sequence)
            dispute.calls.update(dict.fromkeys(callers, fingerprint(descriptor)))
        for member in self._run.live(group):
            for announced in self._run.announced(member):
                if (announced.tag, announced.sequence) == (op.tag, op.sequence):
                    dispute.calls[member.id] = announced.fingerprint

    def _judge(self, group: Group, dispute: Dispute) -> Ruling | None:
        """The rule. A method, so that a simulation can plant a wrong one and must find it."""
        return judge(dispute.calls, group.ring, group.incumbents)

    def add_conflict(self, now: Ns, conflict: CallConflict) -> None:
        """Members wait in conflicting calls. If it is undecided, the next tick reports it again."""
        groups = [group for group in self._run.groups.values() if conflict.group in (None, group.id)]
        if all(group.change is None for group in groups):
            members = [peer for group in groups for peer in group.ring]
            ruling = judge(conflict.calls, members, [peer for group in groups for peer in group.incumbents])
            if ruling is not None:
                self._evict(now, ruling, f"{conflict.sides}: these calls can never meet")

    def _evict(self, now: Ns, ruling: Ruling, both: str) -> None:
        self._run.notify(CallRefused(ruling.wrong, f"{both} ({ruling.why})"))
        for peer in [self._run.peers[each] for each in ruling.wrong if each in self._run.peers]:
            pause_s = self.bans.add(now, peer.member.name, peer.member.host)
            text = (
                f"{both} ({ruling.why}). All peers must make the same calls in "
                f"the same order: fix the program, then join again, in {pause_s} s at the earliest"
            )
            self._epochs.evict_for_call(
                now, peer, "it called something else than the others", self._run.add_names(text)
            )


def sides(op: OpRef, dispute: Dispute) -> str:
    """Which members called what, as text."""
    by_call: dict[Call, list[PeerId]] = {}
    for peer, call in sorted(dispute.calls.items()):
        by_call.setdefault(call, []).append(peer)
    callers = {call: list_peers(peers) for call, peers in by_call.items()}
    # What a neighbour called by another's report, and has not reported itself yet.
    callers |= dict.fromkeys(dispute.descriptors.keys() - callers.keys(), "another peer")
    known = [Descriptor.unpack(each) for each in dispute.descriptors.values()]
    # Two that differ only in where they stand differ by a call that one of them left out, or made twice.
    is_same = len({each._replace(step=0, call=0) for each in known}) == 1 and len(known) == len(callers)
    where = place if len({each.call for each in known}) > 1 else step_of
    parts = []
    for call, peers in callers.items():
        descriptor = dispute.descriptors.get(call, b"")
        if not descriptor:
            parts.append(f"{peers} called something else")
        elif is_same:
            parts.append(f"{peers} {'are' if len(by_call.get(call, ())) > 1 else 'is'} at {where(descriptor)}")
        else:
            parts.append(f"{peers} called {describe(descriptor)}")
    return f"{name_op(op)}: {', but '.join(parts[:2])}{''.join(f', {each}' for each in parts[2:])}"


def find_conflicting_calls(now: Ns, callers: Sequence[Caller], grace_ns: Ns) -> CallConflict | None:
    """Peers that wait in different calls for long enough: in one group, or in the run."""
    for group in sorted({each.group for each in callers}):
        conflict = _different_calls(now, [each for each in callers if each.group == group], grace_ns, group)
        if conflict is not None:
            return conflict
    of_the_run = [caller for caller in callers if caller.kind != "sync" and not caller.is_short_of_peers]
    return _different_calls(now, of_the_run, grace_ns)


def _different_calls(
    now: Ns, callers: Sequence[Caller], grace_ns: Ns, group: GroupId | None = None
) -> CallConflict | None:
    if len({caller.kind for caller in callers if now - caller.since_ns >= grace_ns}) < 2:
        return None
    return CallConflict(
        {caller.peer: _NUMBER[caller.kind] for caller in callers}, ", but ".join(_sides(callers)), group
    )


def find_conflicting_ops(callers: Sequence[Caller], working: Sequence[Working], grace_ns: Ns) -> list[CallConflict]:
    """Peers that wait in a call while members of their group are in an op that these have not started."""
    conflicts = []
    for group, op in sorted({(work.group, work.op) for work in working}):
        inside = [work for work in working if (work.group, work.op) == (group, op)]
        workers = {work.peer for work in inside}
        outside = [
            caller
            for caller in callers
            if caller.group == group
            and caller.peer not in workers
            and not (op.tag in caller.progress and is_before(op.sequence, caller.progress[op.tag]))
        ]
        if any(work.seen_ns - max(caller.since_ns, work.since_ns) >= grace_ns for caller in outside for work in inside):
            sides = [f"{list_peers(workers)} {_wait(workers)} in {name_op(op)}", *_sides(outside)]
            calls = dict.fromkeys(sorted(workers), _OP) | {caller.peer: _NUMBER[caller.kind] for caller in outside}
            conflicts.append(CallConflict(calls, ", but ".join(sides), group))
    return conflicts


def _sides(callers: Sequence[Caller]) -> list[str]:
    by_kind: dict[VoteKind, list[PeerId]] = {}
    for caller in callers:
        by_kind.setdefault(caller.kind, []).append(caller.peer)
    sides = sorted(by_kind.items(), key=lambda side: min(side[1]))
    return [f"{list_peers(peers)} {_wait(peers)} in {CALL_NAMES[kind]}" for kind, peers in sides]


def _wait(peers: Collection[PeerId]) -> str:
    return "waits" if len(peers) == 1 else "wait"
