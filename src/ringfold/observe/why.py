"""Who made steps slow, and why: a peer's program, a peer's host, or a link. Pure.

In a synchronous step everybody waits for the slowest, so all steps look alike from outside. What differs is who waits:
the straggler waits least. For each op of a step, a member's wait is the time from its call to the end; ends are within
a hop of each other, so waits compare arrivals without comparing clocks. A member that came later than the others did,
because it had spent more time since its last op than they, was slow by itself. The first part of a step, up to the
first wait, says how: CPU time is the model, time in the run queue of a core is the host, and time without either is
waiting for something else, such as a data loader, a disk or a device.

If all have come and the op takes long, a link may be the reason. How ops are scheduled does not matter for this: a
segment on a slow link takes long from its first byte to its last, and no other segment does, whatever it waits for.
Each member records that for the source with which it took longest. A link is compared with the other links of the same
op: what all links have is no link's fault. A slow link of a member whose host is busy is the host's, if the host can
explain as much. The other direction of a slow link is slow, too, because acknowledgements wait in the queue of this
one; only the slower direction is named.

One slow step is no pattern: on a shared machine everybody is late now and then. A *finding* needs a culprit that is
slow in most steps, or one that costs much, often, and several times as much as anybody else. Otherwise nobody is
blamed.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, NamedTuple

from msgspec import Struct

from ringfold.observe.processes import Op, OpKey, Process, StepRun, by_key
from ringfold.wire.base import PeerId

Cause = Literal["compute", "host", "link"]
Kind = Literal["model", "loader", "between ops", "busy core", "slow link"]

MIN_PART, MIN_NS = 0.15, 2_000_000
"""A step is slow if somebody cost it so large a part of a usual step, and so long."""
PERSISTENT_PART = 0.6
"""A culprit of so many of the steps is a finding."""
RECURRING_STEPS, RECURRING_PART, RECURRING_LEAD = 8, 0.08, 4.0
"""Or one of so many steps that cost so large a part of the time, and so many times as much as the next one."""
WARM_UP_STEPS = 3
"""Programs compile, load and fill caches in them."""
BUSY_PART = 0.25
"""Part of its computing time that a thread waits for a core, from which on its host counts as busy."""
BUSY_STEPS = 10
"""So many steps before and after decide whether it is."""
BUSY_EXPLAINS = 3
"""In an op a thread needs its core several times, so it may lose several times as much as while it computes."""
LINK_LEAD = 3.0
"""A slow link is so much slower than the median of the others."""
MANY_LINKS_PART = 0.7
"""If no single one of a peer's slow links costs so large a part of what they all cost, all of them are slow."""
_MIN_MEMBERS = 2
MAX_SLOW_STEPS = 20


class Culprit(NamedTuple):
    """What is blamed: a peer, or for a link its source and its target (0: all of its links in that direction)."""

    cause: Cause
    peer: PeerId
    target: PeerId = 0

    def __str__(self) -> str:
        if self.cause != "link":
            return f"peer {self.peer}"
        if not self.target:
            return f"the links from peer {self.peer}"
        return (
            f"the link from peer {self.peer} to peer {self.target}" if self.peer else f"the links to peer {self.target}"
        )


class Finding(Struct, frozen=True):
    """Somebody who made the run slow. Times are sums over the steps that it made slow."""

    cause: Cause
    kind: Kind
    peer: PeerId
    target: PeerId
    name: str
    """Who, with the name of its process."""
    steps: int
    of_steps: int
    lost_ms: float
    lost_part: float
    """Of the time of all steps."""
    evidence: list[str]


class SlowStep(Struct, frozen=True):
    """A step that somebody made slow, or that was slow for no reason that is recorded (no cause)."""

    step: int
    took_ms: float
    usual_ms: float
    lost_ms: float
    cause: Cause | None
    culprit: str
    evidence: str


class Diagnosis(Struct, frozen=True):
    """What slowed a run."""

    steps: int
    usual_step_ms: float
    slow_steps: int
    findings: list[Finding]
    slowest: list[SlowStep]
    verdict: str


@dataclass(slots=True)
class _Charge:
    """What one culprit cost one step."""

    culprit: Culprit
    lost: int
    kind: Kind
    evidence: str
    parts: Mapping[Kind, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Step:
    """One step of all members: peer -> its own part."""

    number: int
    runs: dict[PeerId, tuple[int, StepRun]] = field(default_factory=dict)
    ops: list[list[tuple[int, Op]]] = field(default_factory=list)

    @property
    def took(self) -> int:
        return int(median(run.at - run.ended.began_ns for _, run in self.runs.values()))


def diagnose(processes: Sequence[Process], steps: tuple[int, int] | None = None) -> Diagnosis:
    """Find out who made the steps of a run slow."""
    every = _steps(processes, steps)
    if not every:
        return Diagnosis(0, 0.0, 0, [], [], "inconclusive: no step of two or more peers is recorded")
    usual = int(median(step.took for step in every))
    charges: list[tuple[_Step, list[_Charge]]] = []
    before: _Step | None = None
    for step, busy in zip(every, _busy_peers(every), strict=True):
        found = _late(step, before) + _links(step, busy)
        charges.append((step, sorted(_merged(found), key=lambda charge: -charge.lost)))
        before = step
    least = max(MIN_NS, int(MIN_PART * median(_without(step, each) for step, each in charges)))
    findings = _findings(charges, usual, least, processes)
    slow = [(step, each) for step, each in charges if (each and each[0].lost >= least) or step.took > 2 * usual]
    slowest = sorted(slow, key=lambda pair: -(pair[1][0].lost if pair[1] else pair[0].took - usual))[:MAX_SLOW_STEPS]
    return Diagnosis(
        len(every),
        usual / 1e6,
        len(slow),
        findings,
        [_slow_step(step, each, usual, least) for step, each in slowest],
        _verdict(findings, len(slow), len(every)),
    )


def _verdict(findings: list[Finding], slow: int, steps: int) -> str:
    if findings:
        return "; ".join(f"{each.name}: {_what(each)}" for each in findings)
    if not slow:
        return f"nobody is blamed: no step of {steps} was slow because of a peer or a link"
    return f"nobody is blamed: {slow} of {steps} steps were slow, and nobody recurs among the reasons"


def _what(finding: Finding) -> str:
    texts: Mapping[Kind, str] = {
        "model": "compute, CPU time of its program (the model, or slower cores)",
        "loader": "compute, its program waits without CPU (a data loader, a disk or a device)",
        "between ops": "compute, its program between or after the ops of a step",
        "busy core": "its host, other processes have its core",
        "slow link": "slow link",
    }
    return f"{texts[finding.kind]}, in {finding.steps} of {finding.of_steps} steps, {finding.lost_part:.0%} of the time"


def _slow_step(step: _Step, charges: list[_Charge], usual: int, least: int) -> SlowStep:
    took = step.took / 1e6
    if not charges or charges[0].lost < least:
        lost = (step.took - usual) / 1e6
        return SlowStep(step.number, took, usual / 1e6, lost, None, "inconclusive", "nobody and no link stands out")
    charge = charges[0]
    return SlowStep(
        step.number,
        took,
        usual / 1e6,
        charge.lost / 1e6,
        charge.culprit.cause,
        str(charge.culprit),
        charge.evidence,
    )


# The steps


def _steps(processes: Sequence[Process], window: tuple[int, int] | None) -> list[_Step]:
    """The steps of two or more members with their ops, in order, without the first ones of the run."""
    found: dict[int, _Step] = {}
    for index, process in enumerate(processes):
        for run in process.steps:
            found.setdefault(run.ended.step, _Step(run.ended.step)).runs[run.peer] = (index, run)
    of_key: Mapping[OpKey, list[tuple[int, Op]]] = by_key(processes)
    for members in of_key.values():
        numbers = {op.ended.step for _, op in members}
        if len(members) >= _MIN_MEMBERS and len(numbers) == 1 and (number := numbers.pop()) in found:
            found[number].ops.append(members)
    first = min(found, default=0) + WARM_UP_STEPS
    steps = [found[number] for number in sorted(found) if number >= first]
    if window is not None:
        steps = [step for step in steps if window[0] <= step.number <= window[1]]
    for step in steps:
        step.ops.sort(key=lambda members: median(op.ended.called_ns for _, op in members[:1]))
    return [step for step in steps if len(step.runs) >= _MIN_MEMBERS and step.ops]


def _others(values: Mapping[PeerId, int], peer: PeerId) -> int:
    """The median of the others'."""
    return int(median(value for other, value in values.items() if other != peer))


# Late by itself


def _head(run: StepRun) -> int:
    ended = run.ended
    return (ended.waited_ns or run.at) - ended.began_ns


def _without(step: _Step, charges: list[_Charge]) -> int:
    """What a step would have taken without its slowest member and its slowest link, to measure other costs by."""
    peers = [charge.lost for charge in charges if charge.culprit.cause != "link"]
    links = [charge.lost for charge in charges if charge.culprit.cause == "link"]
    return max(step.took // 8, step.took - max(peers, default=0) - max(links, default=0))


def _busy_peers(steps: Sequence[_Step]) -> list[dict[PeerId, int]]:
    """By step, the members whose hosts are busy in most of the steps around it, and what that costs them."""
    excess = [{peer: _queued_more(run, step) for peer, (_, run) in step.runs.items()} for step in steps]
    heads = [{peer: _head(run) for peer, (_, run) in step.runs.items()} for step in steps]
    found = []
    for number, step in enumerate(steps):
        near = range(max(0, number - BUSY_STEPS), min(len(steps), number + BUSY_STEPS + 1))
        busy = {}
        for peer in step.runs:
            usual = int(median(excess[each].get(peer, 0) for each in near))
            if usual >= BUSY_PART * median(heads[each].get(peer, 0) for each in near):
                busy[peer] = max(usual, excess[number].get(peer, 0))
        found.append(busy)
    return found


def _queued_more(run: StepRun, step: _Step) -> int:
    """For how long its thread had no core before it first waited, beyond what the others had."""
    cpus = {peer: each.ended.cpu_ns for peer, (_, each) in step.runs.items()}
    queues = {peer: each.ended.queued_ns for peer, (_, each) in step.runs.items()}
    return max(0, run.ended.queued_ns - _expected_queue(run.peer, cpus, queues))


def _expected_queue(peer: PeerId, cpus: Mapping[PeerId, int], queues: Mapping[PeerId, int]) -> int:
    """How long a member would wait for a core on a host like the others': the more it computes, the longer."""
    rates = {other: queues[other] * 1_000 // max(1, cpus[other]) for other in cpus}
    return max(_others(queues, peer), cpus[peer] * _others(rates, peer) // 1_000)


def _late(step: _Step, before: _Step | None) -> list[_Charge]:
    """The members that came later than the others, because they spent more time in their own code."""
    lost: dict[PeerId, int] = defaultdict(int)
    for number, members in enumerate(step.ops):
        waits = {op.peer: op.at - op.ended.called_ns for _, op in members}
        spent = {op.peer: _spent(op, number, step, before) for _, op in members}
        for peer, wait in waits.items():
            later = _others(waits, peer) - wait
            longer = spent[peer] - _others(spent, peer)
            lost[peer] += max(0, min(later, longer))
    return [_late_charge(peer, cost, step) for peer, cost in lost.items() if cost > 0 and peer in step.runs]


def _spent(op: Op, number: int, step: _Step, before: _Step | None) -> int:
    """The time in the program's own code before it called this op: since its last op, or since the step began."""
    called = op.ended.called_ns
    mine = [each for members in step.ops[:number] for _, each in members if each.peer == op.peer]
    # An op that still runs when the next one is called was not waited for: then its call is where the time begins.
    since = [each.at if each.at <= called else each.ended.called_ns for each in mine]
    if since:
        return called - max(since)
    if op.peer not in step.runs:
        return 0
    return called - step.runs[op.peer][1].ended.began_ns + _after_ops(op.peer, before)


def _after_ops(peer: PeerId, step: _Step | None) -> int:
    """What a member did after the last op of a step."""
    if step is None or peer not in step.runs:
        return 0
    ends = [op.at for members in step.ops for _, op in members if op.peer == peer]
    return step.runs[peer][1].at - max(ends) if ends else 0


def _late_charge(peer: PeerId, lost: int, step: _Step) -> _Charge:
    """Why it was late, by what it did before it first waited."""
    heads = {other: _head(run) for other, (_, run) in step.runs.items()}
    cpus = {other: run.ended.cpu_ns for other, (_, run) in step.runs.items()}
    queues = {other: run.ended.queued_ns for other, (_, run) in step.runs.items()}
    head = max(0, min(lost, heads[peer] - _others(heads, peer)))
    queued = min(head, max(0, queues[peer] - _expected_queue(peer, cpus, queues)))
    cpu = min(head - queued, max(0, cpus[peer] - _others(cpus, peer)))
    parts: dict[Kind, int] = {
        "busy core": queued,
        "model": cpu,
        "loader": head - queued - cpu,
        "between ops": lost - head,
    }
    kind = max(parts, key=lambda name: parts[name])
    cause: Cause = "host" if kind == "busy core" else "compute"
    text = f"{lost / 1e6:.1f} ms later than the others"
    if kind == "between ops":
        return _Charge(Culprit(cause, peer), lost, kind, f"{text}, after or between the ops of the step", parts)
    evidence = (
        f"{text}: CPU {cpus[peer] / 1e6:.1f} ms (others {_others(cpus, peer) / 1e6:.1f}), without a core "
        f"{queues[peer] / 1e6:.1f} ms (others {_others(queues, peer) / 1e6:.1f}), in all {heads[peer] / 1e6:.1f} ms "
        f"(others {_others(heads, peer) / 1e6:.1f})"
    )
    return _Charge(Culprit(cause, peer), lost, kind, evidence, parts)


# Links


def _links(step: _Step, busy: Mapping[PeerId, int]) -> list[_Charge]:
    """The links on which segments took much longer to arrive than on the other links of an op."""
    found = []
    for members in step.ops:
        # The last to come waits only for the transfer.
        took = min(op.at - op.ended.called_ns for _, op in members)
        arriving = {op.peer: (op.ended.arriving_ns, op.ended.arriving_from) for _, op in members}
        for target, (score, source) in arriving.items():
            # Of those that receive from the same source, all may be slow for the same reason.
            others = [value for peer, (value, other) in arriving.items() if peer != target and other != source]
            if not source or not others or score < LINK_LEAD * (usual := int(median(others))):
                continue
            lost = min(took, score - usual)
            text = (
                f"segments from peer {source} to peer {target} were arriving for {score / 1e6:.1f} ms "
                f"(on other links {usual / 1e6:.1f})"
            )
            found.append(_link_charge(source, target, lost, text, busy))
    return found


def _link_charge(source: PeerId, target: PeerId, lost: int, text: str, busy: Mapping[PeerId, int]) -> _Charge:
    host = max((source, target), key=lambda peer: busy.get(peer, 0))
    if busy.get(host, 0) * BUSY_EXPLAINS >= lost:
        evidence = f"{text}, and the host of peer {host} is busy"
        return _Charge(Culprit("host", host), lost, "busy core", evidence, {"busy core": lost})
    return _Charge(Culprit("link", source, target), lost, "slow link", text, {"slow link": lost})


# Charges and findings


def _merged(charges: list[_Charge]) -> list[_Charge]:
    """One charge for each culprit of a step."""
    found: dict[Culprit, _Charge] = {}
    for charge in charges:
        known = found.get(charge.culprit)
        if known is None:
            found[charge.culprit] = charge
            continue
        known.parts = Counter(known.parts) + Counter(charge.parts)
        if charge.lost > known.lost:
            known.evidence, known.kind = charge.evidence, charge.kind
        known.lost += charge.lost
    return list(found.values())


def _findings(
    charges: list[tuple[_Step, list[_Charge]]], usual: int, least: int, processes: Sequence[Process]
) -> list[Finding]:
    """The culprits that recur, the costliest first."""
    of_subject: dict[Subject, list[_Charge]] = defaultdict(list)
    for _, each in charges:
        of_step: dict[Subject, list[_Charge]] = defaultdict(list)
        for charge in each:
            # A peer's host and its program are one subject: which of the two it is, all of its steps decide.
            what = "link" if charge.culprit.cause == "link" else "peer"
            of_step[what, charge.culprit.peer, charge.culprit.target].append(charge)
        for subject, same in of_step.items():
            if (lost := sum(charge.lost for charge in same)) >= least:
                parts: Counter[Kind] = Counter()
                for charge in same:
                    parts.update(charge.parts)
                of_subject[subject].append(_Charge(same[0].culprit, lost, same[0].kind, same[0].evidence, parts))
    whole = sum(step.took for step, _ in charges)
    of_subject = _joined_links(of_subject)
    totals = {subject: sum(charge.lost for charge in each) for subject, each in of_subject.items()}
    names = {peer: process.begun.name for process in processes for peer in process.peers}
    found = []
    for subject, each in sorted(of_subject.items(), key=lambda pair: -totals[pair[0]]):
        next_one = max((total for other, total in totals.items() if other != subject), default=0)
        is_persistent = len(each) >= max(3, PERSISTENT_PART * len(charges))
        is_recurring = (
            len(each) >= RECURRING_STEPS
            and totals[subject] >= RECURRING_PART * whole
            and totals[subject] >= RECURRING_LEAD * next_one
        )
        is_echo = subject[0] == "link" and totals.get(("link", subject[2], subject[1]), 0) > totals[subject]
        if (is_persistent or is_recurring) and not is_echo:
            found.append(_finding(each, totals[subject], whole, len(charges), names))
    return found


Subject = tuple[str, PeerId, PeerId]


def _joined_links(of_subject: Mapping[Subject, list[_Charge]]) -> dict[Subject, list[_Charge]]:
    """Several slow links from one peer, or to one, become one subject: 0 stands for all at the other end."""
    found = {subject: each for subject, each in of_subject.items() if subject[0] != "link"}
    links = {subject: each for subject, each in of_subject.items() if subject[0] == "link"}
    while links:
        costs = {subject: sum(charge.lost for charge in each) for subject, each in links.items()}
        worst = max(costs, key=lambda subject: costs[subject])
        for end in (1, 2):
            same = [subject for subject in links if subject[end] == worst[end]]
            whole = sum(costs[subject] for subject in same)
            if len(same) > 1 and costs[worst] < MANY_LINKS_PART * whole:
                key = ("link", worst[1], 0) if end == 1 else ("link", 0, worst[2])
                joined = [charge for subject in same for charge in links.pop(subject)]
                culprit = Culprit("link", key[1], key[2])
                found[key] = [replace(charge, culprit=culprit) for charge in joined]
                break
        else:
            found[worst] = links.pop(worst)
    return found


def _finding(each: list[_Charge], total: int, whole: int, steps: int, names: Mapping[PeerId, str]) -> Finding:
    parts: Counter[Kind] = Counter()
    for charge in each:
        parts.update(charge.parts)
    kind = max(parts, key=lambda name: parts[name])
    cause: Cause = "link" if kind == "slow link" else "host" if kind == "busy core" else "compute"
    culprit = each[0].culprit._replace(cause=cause)
    known = ", ".join(names[peer] for peer in (culprit.peer, culprit.target) if peer in names)
    typical = sorted(each, key=lambda charge: charge.lost)[len(each) // 2]
    evidence = [f"in the typical step: {typical.evidence}"]
    if cause != "link":
        evidence.append(", ".join(f"{name} {value / total:.0%}" for name, value in sorted(parts.items()) if value > 0))
    return Finding(
        cause,
        kind,
        culprit.peer,
        culprit.target,
        f"{culprit} ({known})",
        len(each),
        steps,
        total / 1e6,
        total / max(1, whole),
        evidence,
    )
