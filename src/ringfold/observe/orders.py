"""Orders that hold between events of different processes, whatever their clocks say. Pure.

They follow from the protocol. Nobody commits an op before the parts of all members are done, because the evidence says
so. Nobody receives a payload of an op before somebody has handed it out. No op ends before all have called it. An epoch
runs at a member after the master has sealed the one before, and is installed after it runs at all of them.

An *order* is a pair of instants, the first of which happened before the second. On a timeline that is right there is no
pair the other way round. `count` counts those on a given timeline: a check of an alignment. `tightest` finds those that
an alignment can be made of: of the orders of an op, few enough, and among them those that bind most.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from ringfold.observe.processes import Op, OpKey, Process
from ringfold.wire import notices
from ringfold.wire.events import OpEnded
from ringfold.wire.messages import Epoch, GroupId

Rule = Literal["part", "call", "payload", "epoch"]
RULES: Mapping[Rule, str] = {
    "part": "an op committed at a member before the part of another member was done",
    "call": "an op ended at a member before another member called it",
    "payload": "a payload arrived before any other member had handed one out",
    "epoch": "an epoch ran at a member before the one before was sealed, or was installed before it ran at all",
}

Timeline = Callable[[int, int], int]
"""(index of a process, its time) to the time of all."""


class Order(NamedTuple):
    """`before` of process `first` happened before `after` of process `then`."""

    rule: Rule
    first: int
    before: int
    then: int
    after: int


class Count(NamedTuple):
    """The impossible orders of one rule: how many of how many, and the worst one in nanoseconds."""

    rule: Rule
    impossible: int
    checked: int
    worst_ns: int


Ops = Iterable[Sequence[tuple[int, Op]]]


def count(processes: Sequence[Process], ops: Mapping[OpKey, Sequence[tuple[int, Op]]], time: Timeline) -> list[Count]:
    """How many orders are impossible on a timeline, by rule."""
    tallies, sizes = {rule: [0, 0, 0] for rule in RULES}, ring_sizes(processes)
    for key, members in ops.items():
        if len(members) > 1:
            ends = [(index, time(index, op.at)) for index, op in members]
            _tally(tallies["part"], _mapped(members, lambda op: op.local_ns, time), ends)
            _tally(tallies["call"], _mapped(members, lambda op: op.started_ns or op.called_ns, time), ends)
            if len(members) == sizes.get(key[:2]):
                _tally_payload(tallies["payload"], members, time)
    for order in epochs(processes):
        _note(tallies[order.rule], time(order.then, order.after) - time(order.first, order.before))
    return [Count(rule, *tallies[rule]) for rule in RULES]


def ring_sizes(processes: Sequence[Process]) -> dict[tuple[GroupId, Epoch], int]:
    """How many members each epoch had. Where one of them did not record an op, its payload may be what came first."""
    return {(ran.group, ran.epoch): len(ran.ring) for process in processes for _, _, ran in process.epochs}


def _mapped(
    members: Sequence[tuple[int, Op]], which: Callable[[OpEnded], int], time: Timeline
) -> list[tuple[int, int]]:
    return [(index, time(index, at)) for index, op in members if (at := which(op.ended))]


def _note(tally: list[int], margin: int) -> None:
    tally[1] += 1
    if margin < 0:
        tally[0] += 1
        tally[2] = max(tally[2], -margin)


def _tally(tally: list[int], firsts: list[tuple[int, int]], thens: list[tuple[int, int]]) -> None:
    """All pairs of different processes of one op, in less than all pairs: almost always none is impossible."""
    if not firsts:
        return
    times = sorted(at for _, at in firsts)
    own = dict(firsts)
    for index, end in thens:
        tally[1] += len(firsts) - (index in own)
        if times[-1] > end:
            mine = own.get(index, end)
            wrong = len(times) - bisect_left(times, end + 1) - (mine > end)
            tally[0] += wrong
            if wrong:
                tally[2] = max(tally[2], max(at for other, at in firsts if other != index) - end)


def _tally_payload(tally: list[int], members: Sequence[tuple[int, Op]], time: Timeline) -> None:
    sent = _mapped(members, lambda op: op.out_first_ns, time)
    if len(sent) < len(members):
        return
    for index, op in members:
        if op.ended.in_first_ns:
            earliest = min((at for other, at in sent if other != index), default=None)
            if earliest is not None:
                _note(tally, time(index, op.ended.in_first_ns) - earliest)


def part_of(ended: OpEnded) -> int:
    """When a member had done its part, as far as it is recorded: an op inside the agreement has only its call."""
    return ended.local_ns or ended.started_ns or ended.called_ns


def tightest(ops: Ops, time: Timeline, sizes: Mapping[tuple[GroupId, Epoch], int]) -> Iterator[Order]:
    """Orders that bind most on the present timeline: a few for each member of an op, instead of all pairs.

    Of the parts, the latest binds all ends, and of the ends the earliest binds all parts. Each member's end is bound by
    the part of the peer that it had waited for last: the shortest way that something took.
    """
    for members in ops:
        if len(members) < 2:
            continue
        parts = [(time(index, at), index, at) for index, op in members if (at := part_of(op.ended))]
        if parts:
            _, late, late_at = max(parts)
            _, soon, soon_at = min((time(index, op.at), index, op.at) for index, op in members)
            of_peer = {op.peer: (index, part_of(op.ended)) for index, op in members}
            for index, op in members:
                if index != late:
                    yield Order("part", late, late_at, index, op.at)
                if index != soon and (part := part_of(op.ended)):
                    yield Order("part", index, part, soon, soon_at)
                last, last_at = of_peer.get(op.ended.last_peer, (index, 0))
                if last_at and last not in (index, late):
                    yield Order("part", last, last_at, index, op.at)
        if len(members) == sizes.get(members[0][1].key[:2]) == 2:
            yield from _payloads_of_two(members)


def _payloads_of_two(members: Sequence[tuple[int, Op]]) -> Iterator[Order]:
    """With two members the payload came from the other one."""
    for (index, op), (other, sender) in (members, members[::-1]):
        if op.ended.in_first_ns and sender.ended.out_first_ns:
            yield Order("payload", other, sender.ended.out_first_ns, index, op.ended.in_first_ns)


def likely(ops: Ops, time: Timeline, sizes: Mapping[tuple[GroupId, Epoch], int]) -> Iterator[Order]:
    """Orders that need not hold: of each payload with the one that was handed out first on the present timeline.

    One of the other members has handed out a payload before, but nobody knows which one. With this choice the timeline
    changes least.
    """
    for members in ops:
        if len(members) < 3 or len(members) != sizes.get(members[0][1].key[:2]):
            continue
        sent = [(time(index, at), index, at) for index, op in members if (at := op.ended.out_first_ns)]
        if len(sent) < len(members):
            continue
        (_, first, first_at), (_, second, second_at) = sorted(sent)[:2]
        for index, op in members:
            if op.ended.in_first_ns:
                sender, sent_at = (second, second_at) if index == first else (first, first_at)
                yield Order("payload", sender, sent_at, index, op.ended.in_first_ns)


def epochs(processes: Sequence[Process]) -> Iterator[Order]:
    """The orders between the master that led and the members of its groups."""
    runs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, process in enumerate(processes):
        for at, _, ran in process.epochs:
            runs.setdefault((ran.group, ran.epoch), []).append((index, at))
    for master, process in enumerate(processes):
        sealed: dict[int, int] = {}
        for event in process.others:
            match event.notice:
                case notices.EpochSealing(group):
                    sealed[group] = event.stamp.at
                case notices.EpochInstalled(group, epoch):
                    since = sealed.pop(group, None)
                    for index, at in runs.get((group, epoch), ()):
                        if since is not None:
                            yield Order("epoch", master, since, index, at)
                        yield Order("epoch", index, at, master, event.stamp.at)
