"""Calls that can never meet.

Two peers that wait in different run-wide calls wait for each other for ever; so do two of one group of which one is in
a sync and the other in another call, and one in a call and one in an op that needs it. These are faults of the program,
and both sides are told within a second. Peers in user code, or in ops under other tags, are no such case: they may
still come, and are left to the deadline. Nor is a peer whose update waits for more members: nobody outside its group
waits for it.

A situation counts only when it has lasted for a while, because a peer's heartbeat is a little old: between two beats
its op may have ended.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from ringfold.master.events import Ns
from ringfold.master.words import CALL, named, names
from ringfold.wire.frames import Announced
from ringfold.wire.messages import GroupId, OpRef, PeerId, Reason, Tag, VoteKind, is_before

_SAME_ORDER = "all peers must make the same calls in the same order"


class Caller(Struct, frozen=True):
    """A peer that waits in a call since `since`, and how many ops it had committed by then.

    Who `is_short_of_peers` waits for members that its group does not have yet.
    """

    peer: PeerId
    group: GroupId
    kind: VoteKind
    since: Ns
    progress: Mapping[Tag, int]
    is_short_of_peers: bool = False


class Working(Struct, frozen=True):
    """A peer that was in `op` from `since` until its last heartbeat at `seen`, at least."""

    peer: PeerId
    group: GroupId
    op: OpRef
    since: Ns
    seen: Ns


class Clash(Struct, frozen=True):
    """`callers` must be told `reason`; if `op` is given, it must be aborted too, in `group`."""

    callers: list[PeerId]
    reason: Reason
    group: GroupId = 0
    op: OpRef | None = None


def clashing_calls(now: Ns, callers: Sequence[Caller], patience: Ns) -> Clash | None:
    """Peers that wait in different calls, for long enough: in one group, or in different calls of the run."""
    groups = [[caller for caller in callers if caller.group == group] for group in {each.group for each in callers}]
    of_the_run = [caller for caller in callers if caller.kind != "sync" and not caller.is_short_of_peers]
    for together in (*sorted(groups, key=lambda group: group[0].group), of_the_run):
        clash = _different_calls(now, together, patience)
        if clash is not None:
            return clash
    return None


def _different_calls(now: Ns, callers: Sequence[Caller], patience: Ns) -> Clash | None:
    by_kind: dict[VoteKind, list[PeerId]] = {}
    for caller in callers:
        if now - caller.since >= patience:
            by_kind.setdefault(caller.kind, []).append(caller.peer)
    if len(by_kind) < 2:
        return None
    sides = [f"{names(peers)} {_wait(peers)} in {CALL[kind]}" for kind, peers in sorted(by_kind.items(), key=_first)]
    # Callers that came a moment ago are stuck as well: those whom they wait for will be gone from their calls.
    everybody = sorted(caller.peer for caller in callers)
    text = f"{', '.join(sides)}: these calls can never meet; {_SAME_ORDER}"
    return Clash(everybody, Reason("usage", text, everybody))


def clashing_ops(callers: Sequence[Caller], working: Sequence[Working], patience: Ns) -> list[Clash]:
    """Peers that wait in a call while a member of their group is in an op that they have not come to."""
    clashes = []
    for work in working:
        needed = [
            caller
            for caller in callers
            if caller.group == work.group
            and caller.peer != work.peer
            and not is_before(work.op.sequence, caller.progress.get(work.op.tag, 0))
            and work.seen - max(caller.since, work.since) >= patience
        ]
        if needed:
            first, peers = needed[0], [caller.peer for caller in needed]
            text = (
                f"{names(peers)} {_wait(peers)} in {CALL[first.kind]}, peer {work.peer} in {named(work.op)}, "
                f"which needs {names(peers)}; {_SAME_ORDER}"
            )
            clashes.append(Clash(peers, Reason("usage", text, sorted([*peers, work.peer])), work.group, work.op))
    return clashes


def absent_from(op: OpRef, others: Mapping[PeerId, Sequence[Announced]]) -> list[PeerId]:
    """Who has not come to an op that timed out, by what each announced last; everybody, if all of them have come."""
    absent = [
        peer
        for peer, announced in sorted(others.items())
        if all((each.tag, each.sequence) != (op.tag, op.sequence) for each in announced)
    ]
    return absent or sorted(others)


def _wait(peers: Sequence[PeerId]) -> str:
    return "waits" if len(peers) == 1 else "wait"


def _first(side: tuple[VoteKind, list[PeerId]]) -> PeerId:
    return side[1][0]
