"""Calls that can never meet.

Two peers that wait in different run-wide calls wait for each other for ever; so do two of one group of which one is in
a sync and the other in another call, and one in a call and one in an op that needs it. One side is wrong: this file
finds the sides, and `disputes.py` decides between them. Peers in user code, or in ops under other tags, are no such
case: they may still come, and are left to the deadline. Nor is a peer whose update waits for more members: nobody
outside its group waits for it.

A situation counts only when it has lasted for a while, because a peer's heartbeat is a little old: between two beats
its op may have ended.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from ringfold.master.events import Ns
from ringfold.wire.diagnostics import CALL_NAMES, list_peers, name_op
from ringfold.wire.frames import Announced
from ringfold.wire.messages import GroupId, OpRef, PeerId, Tag, VoteKind, is_before

_NUMBER: dict[VoteKind, int] = {kind: number for number, kind in enumerate(CALL_NAMES, 1)}
_OP = 0


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
    """`calls` are what the members wait in, each call under a number; `sides` says the same in words.

    `group` is None if it is about the whole run.
    """

    calls: dict[PeerId, int]
    sides: str
    group: GroupId | None = None


def clashing_calls(now: Ns, callers: Sequence[Caller], patience: Ns) -> Clash | None:
    """Peers that wait in different calls, for long enough: in one group, or in different calls of the run."""
    for group in sorted({each.group for each in callers}):
        clash = _different_calls(now, [each for each in callers if each.group == group], patience, group)
        if clash is not None:
            return clash
    of_the_run = [caller for caller in callers if caller.kind != "sync" and not caller.is_short_of_peers]
    return _different_calls(now, of_the_run, patience)


def _different_calls(now: Ns, callers: Sequence[Caller], patience: Ns, group: GroupId | None = None) -> Clash | None:
    if len({caller.kind for caller in callers if now - caller.since >= patience}) < 2:
        return None
    return Clash({caller.peer: _NUMBER[caller.kind] for caller in callers}, ", but ".join(_sides(callers)), group)


def clashing_ops(callers: Sequence[Caller], working: Sequence[Working], patience: Ns) -> list[Clash]:
    """Peers that wait in a call while members of their group are in an op that they have not come to."""
    clashes = []
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
        if any(work.seen - max(caller.since, work.since) >= patience for caller in outside for work in inside):
            sides = [f"{list_peers(workers)} {_wait(workers)} in {name_op(op)}", *_sides(outside)]
            calls = dict.fromkeys(sorted(workers), _OP) | {caller.peer: _NUMBER[caller.kind] for caller in outside}
            clashes.append(Clash(calls, ", but ".join(sides), group))
    return clashes


def _sides(callers: Sequence[Caller]) -> list[str]:
    by_kind: dict[VoteKind, list[PeerId]] = {}
    for caller in callers:
        by_kind.setdefault(caller.kind, []).append(caller.peer)
    sides = sorted(by_kind.items(), key=lambda side: min(side[1]))
    return [f"{list_peers(peers)} {_wait(peers)} in {CALL_NAMES[kind]}" for kind, peers in sides]


def absent_from(op: OpRef, others: Mapping[PeerId, Sequence[Announced]]) -> list[PeerId]:
    """Who has not come to an op that timed out, by what each announced last; everybody, if all of them have come."""
    absent = [
        peer
        for peer, announced in sorted(others.items())
        if all((each.tag, each.sequence) != (op.tag, op.sequence) for each in announced)
    ]
    return absent or sorted(others)


def _wait(peers: Collection[PeerId]) -> str:
    return "waits" if len(peers) == 1 else "wait"
