"""Members that called different things at the same place: one side is wrong, and the others go on without it.

Whose call is the right one? Not the first, nor that of the most members: a newcomer may be wrong at once, and three
wrong newcomers must not evict two members that have trained for days. So only *incumbents* decide: members that had
committed an op, or finished a sync, before the newest admission; and those that have finished two syncs since, so that
they have trained with the others in between. If there are none, all members are equal and decide.

A dispute is decided when one side has more than half of the incumbents, or when all of them have called. On a tie the
side with the most members of all is right; if that is a tie, too, the side with the lowest id, which joined first.
Until then nobody fails: a member that has not called may still come, and its call may settle it. A dispute lives as
long as its epoch. If that ends for another reason, the ops begin again in the next one, and the dispute with them.

The same goes for members that wait in calls that can never meet (`meeting.py`): one in a sync, and two in an op.

A process that is restarted by itself would join, disturb and be evicted in a circle. So its name and host are refused
for a while, and each time for twice as long. A program that was mended is let in after a pause at the most.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from msgspec import Struct

from ringfold.errors import RemoteProtocolError
from ringfold.master.epochs import Epochs
from ringfold.master.events import Ns
from ringfold.master.evidence import Mismatch
from ringfold.master.meeting import Clash
from ringfold.master.run import Dispute, Group, Peer, Run
from ringfold.units import S
from ringfold.wire.descriptor import Descriptor, describe, fingerprint, place, step_of
from ringfold.wire.diagnostics import list_peers, name_op
from ringfold.wire.frames import DESCRIPTOR_BYTES
from ringfold.wire.messages import OpMismatch, OpRef, PeerId
from ringfold.wire.notices import CallRefused

SECOND = S
FIRST_PAUSE_S = 5
LONGEST_PAUSE_S = 320
FORGOTTEN_AFTER_S = 3_600
"""Who has done nothing wrong for so long begins with the first pause again."""
MAX_NAMES = 4_096

MAX_DISPUTES = 4_096
"""As many tags as a member may call in an epoch."""

_TIE = "as many {} on one side as on the other, and"

Call = int
"""What was called: the fingerprint of a descriptor."""


class Ruling(Struct, frozen=True):
    """Which call is right, and why; `wrong` are the members that called another one."""

    right: Call
    wrong: list[PeerId]
    why: str


def judge(calls: Mapping[PeerId, Call], members: Collection[PeerId], incumbents: Collection[PeerId]) -> Ruling | None:
    """Decide a dispute among `members`, of whom those in `calls` have called; None while it is open."""
    deciders = sorted(set(members) & set(incumbents)) or sorted(members)
    votes: dict[Call, list[PeerId]] = {}
    for peer in deciders:
        if peer in calls:
            votes.setdefault(calls[peer], []).append(peer)
    if len(set(calls.values())) < 2 or not votes:
        return None
    everybody = {call: sum(each == call for each in calls.values()) for call in votes}
    right = max(votes, key=lambda call: (len(votes[call]), everybody[call], -votes[call][0]))
    most, kind = len(votes[right]), "members that were here before the last newcomers" if incumbents else "members"
    if 2 * most <= len(deciders) and sum(map(len, votes.values())) < len(deciders):
        return None
    rivals = [call for call in votes if call != right and len(votes[call]) == most]
    if not rivals:
        why = f"{most} of {len(deciders)} {kind} called it"
    elif 2 * everybody[right] <= len(members) and len(calls) < len(members):
        return None
    elif all(everybody[call] < everybody[right] for call in rivals):
        why = f"{_TIE.format(kind)} {everybody[right]} of all {len(members)} members called it"
    else:
        why = f"{_TIE.format(kind)} peer {votes[right][0]} joined first"
    return Ruling(right, sorted(peer for peer, call in calls.items() if call != right), why)


@dataclass(slots=True)
class _Ban:
    pause_s: int
    until: Ns


class Bans:
    """By name and host."""

    def __init__(self) -> None:
        self._bans: dict[tuple[str, str], _Ban] = {}

    def evicted(self, now: Ns, name: str, host: str) -> int:
        """A peer was evicted for its call; for how many seconds it is refused."""
        self._forget(now)
        before = self._bans.pop((name, host), None)
        pause_s = FIRST_PAUSE_S if before is None else min(2 * before.pause_s, LONGEST_PAUSE_S)
        self._bans[name, host] = _Ban(pause_s, now + pause_s * SECOND)
        return pause_s

    def refusal(self, now: Ns, name: str, host: str) -> str | None:
        """Why a peer may not join now; None if it may."""
        ban = self._bans.get((name, host))
        if ban is None or now >= ban.until:
            return None
        left_s = -((now - ban.until) // SECOND)
        return (
            f"{name} on {host} was evicted a moment ago for a call that the others did not make: "
            f"fix the program, and join in {left_s} s"
        )

    def _forget(self, now: Ns) -> None:
        old = [key for key, ban in self._bans.items() if now - ban.until >= FORGOTTEN_AFTER_S * SECOND]
        for key in old or list(self._bans)[: len(self._bans) - MAX_NAMES]:
            del self._bans[key]


class Disputes:
    """The disputes of all groups, and who is refused after one."""

    def __init__(self, run: Run, epochs: Epochs) -> None:
        self._run, self._epochs = run, epochs
        self.bans = Bans()

    def told(self, now: Ns, peer: Peer, message: OpMismatch) -> None:
        """A member has noticed that a neighbour called something else."""
        group = self._run.groups[peer.group]
        mine, theirs = message.mine, message.theirs
        is_whole = len(mine) == len(theirs) == DESCRIPTOR_BYTES
        if message.other not in group.ring or not is_whole or mine == theirs:
            raise RemoteProtocolError(f"its mismatch with peer {message.other} makes no sense")
        if group.change is None or group.change.phase == "attaching":  # ops begin before the last one is attached
            # A member speaks for itself alone: what its neighbour called, the neighbour says.
            dispute = self._open(now, group, message.op, mine, theirs)
            dispute.calls[peer.id] = fingerprint(mine)

    def seen(self, now: Ns, peer: Peer, op: OpRef, descriptor: bytes, mismatch: Mismatch) -> None:
        """Two members have said Done of different things, both to the master."""
        dispute = self._open(now, self._run.groups[peer.group], op, descriptor, mismatch.first_descriptor)
        dispute.calls[peer.id] = fingerprint(descriptor)
        dispute.calls[mismatch.first] = fingerprint(mismatch.first_descriptor)

    def _open(self, now: Ns, group: Group, op: OpRef, *descriptors: bytes) -> Dispute:
        dispute = group.disputes.setdefault(op, Dispute(now))
        dispute.descriptors.update({fingerprint(each): each for each in descriptors})
        # Each member calls one thing, and tells of one neighbour.
        if len(group.disputes) > MAX_DISPUTES or len(dispute.descriptors) > 2 * len(group.ring):
            raise RemoteProtocolError("it tells of more mismatches than there can be")
        return dispute

    def settle(self, now: Ns) -> None:
        """Evict the wrong side of each dispute that can be decided."""
        for _, group in sorted(self._run.groups.items()):
            for op, dispute in sorted(group.disputes.items()):
                if group.change is not None:
                    break  # ruled a moment ago: the other disputes come up again in the next epoch, if they do
                self._look(group, op, dispute)
                ruling = self._judge(group, dispute)
                if ruling is not None:
                    self._evict(now, ruling, sides(op, dispute))

    def _look(self, group: Group, op: OpRef, dispute: Dispute) -> None:
        """Heartbeats name the ops that take long, with what was called; so do Dones, where they go to the master."""
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

    def clash(self, now: Ns, clash: Clash) -> None:
        """Members wait in calls that can never meet. Undecided, it comes up again as long as it lasts."""
        groups = [group for group in self._run.groups.values() if clash.group in (None, group.id)]
        if all(group.change is None for group in groups):
            members = [peer for group in groups for peer in group.ring]
            ruling = judge(clash.calls, members, [peer for group in groups for peer in group.incumbents])
            if ruling is not None:
                self._evict(now, ruling, f"{clash.sides}: these calls can never meet")

    def _evict(self, now: Ns, ruling: Ruling, both: str) -> None:
        self._run.tell(CallRefused(ruling.wrong, f"{both} ({ruling.why})"))
        for peer in [self._run.peers[each] for each in ruling.wrong if each in self._run.peers]:
            pause_s = self.bans.evicted(now, peer.member.name, peer.member.host)
            told = (
                f"{both} ({ruling.why}). All peers must make the same calls in "
                f"the same order: fix the program, then join again, in {pause_s} s at the earliest"
            )
            self._epochs.evict_for_call(now, peer, "it called something else than the others", self._run.named(told))


def sides(op: OpRef, dispute: Dispute) -> str:
    """Who called what, for people."""
    by_call: dict[Call, list[PeerId]] = {}
    for peer, call in sorted(dispute.calls.items()):
        by_call.setdefault(call, []).append(peer)
    callers = {call: list_peers(peers) for call, peers in by_call.items()}
    # What a neighbour was heard to call, and has not said itself yet.
    callers |= dict.fromkeys(dispute.descriptors.keys() - callers.keys(), "another peer")
    known = [Descriptor.unpack(each) for each in dispute.descriptors.values()]
    # Two that differ only in where they stand differ by a call that one of them left out, or made twice.
    is_same = len({each._replace(step=0, call=0) for each in known}) == 1 and len(known) == len(callers)
    where = place if len({each.call for each in known}) > 1 else step_of
    said = []
    for call, who in callers.items():
        descriptor = dispute.descriptors.get(call, b"")
        if not descriptor:
            said.append(f"{who} called something else")
        elif is_same:
            said.append(f"{who} {'are' if len(by_call.get(call, ())) > 1 else 'is'} at {where(descriptor)}")
        else:
            said.append(f"{who} called {describe(descriptor)}")
    return f"{name_op(op)}: {', but '.join(said[:2])}{''.join(f', {each}' for each in said[2:])}"
