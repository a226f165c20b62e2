"""The incidents of a run, in words, with what each of them cost. Pure.

The backbone are the epochs: whatever changes the members or the ring of a group makes a new one. So each change of
epochs is one incident, with all its causes, and its cost is what the members' ops show around it. What happened without
a new epoch (a rollback, a divergence, a refused call) is an incident of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ringfold.observe.summary.ops import Gap, OpTally
from ringfold.observe.summary.rare_events import EpochTally, History, MemberTally, RareEvent, stalled_in
from ringfold.observe.summary.results import Costs, Incident, IncidentKind
from ringfold.observe.summary.wording import duration_text, join_words, size_text, times
from ringfold.units import US
from ringfold.wire.base import Epoch, GroupId, PeerId
from ringfold.wire.events import LeaderChanged, StateSynced
from ringfold.wire.notices import (
    CallRefused,
    EdgeBad,
    MasterLost,
    PeerDiverged,
    PeerGone,
    PeersStalled,
    ProbingBroke,
    ResumeDelayed,
    RunBegun,
    RunEnded,
    StateRolledBack,
    divergence_error,
)

MAX_INCIDENTS = 1_000
"""Of a summary; above, the first ones of each kind are kept."""
PLANNED: frozenset[IncidentKind] = frozenset({"begun", "joined", "left", "ring", "note", "ended"})
_MAX_SPAN = 64
"""Epochs in a row in which a member committed nothing; more of them have no cost of their own."""


@dataclass(slots=True)
class _Costing:
    """Where the costs of epoch changes come from."""

    began_ns: int
    usual_gap_ns: float
    gaps: dict[tuple[GroupId, Epoch], Gap]
    """By the group and the epoch that was left."""
    fetched: dict[PeerId, int]
    fetched_ms: dict[PeerId, int]


class IncidentList:
    """All incidents, and their costs together."""

    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self.left_out = 0
        self.costs = Costs()

    def gather(self, events: list[RareEvent], history: History, ops: OpTally, began_ns: int) -> None:
        usual_gap_ns = ops.step_times.quantile(0.5) * US
        costing = _Costing(began_ns, usual_gap_ns, _by_left_epoch(ops.gaps), {}, {})
        for event in events:
            if isinstance(event.notice, StateSynced) and event.notice.received_bytes:
                sync = event.notice
                costing.fetched[event.peer] = costing.fetched.get(event.peer, 0) + sync.received_bytes
                costing.fetched_ms.setdefault(event.peer, sync.took_ms)
        found = [*_changes(events, history, costing), *_others(events, history, began_ns)]
        found.sort(key=lambda incident: incident.at_s)
        self.costs = _sum(found, costing, ops)
        if len(found) > MAX_INCIDENTS:
            # What broke is worth more than who joined.
            kept = sorted(found, key=lambda incident: (incident.kind in PLANNED, incident.at_s))[:MAX_INCIDENTS]
            self.left_out, found = len(found) - MAX_INCIDENTS, sorted(kept, key=lambda incident: incident.at_s)
        self.incidents = found


def _by_left_epoch(gaps: dict[tuple[GroupId, Epoch, Epoch], Gap]) -> dict[tuple[GroupId, Epoch], Gap]:
    found: dict[tuple[GroupId, Epoch], Gap] = {}
    for (group, old, new), gap in gaps.items():
        for epoch in range(old, min(new, old + _MAX_SPAN)):
            known = found.get((group, epoch))
            if known is None or gap.longest_ns > known.longest_ns:
                found[group, epoch] = gap
    return found


def _sum(found: list[Incident], costing: _Costing, ops: OpTally) -> Costs:
    """A pause that several incidents share counts once, with the first of them."""
    pauses: dict[int, tuple[float, bool]] = {}
    for incident in found:
        if incident.paused_s is not None:
            gap = id(costing.gaps[incident.group, incident.epoch - 1])
            before = pauses.get(gap, (0.0, True))
            pauses[gap] = (incident.paused_s, before[1] and incident.kind in PLANNED)
    return Costs(
        paused_s=sum(pause for pause, _ in pauses.values()) if ops.classes else None,
        longest_pause_s=max((pause for pause, _ in pauses.values()), default=None),
        planned_s=sum(pause for pause, is_planned in pauses.values() if is_planned) if ops.classes else None,
        aborted_ops=sum(incident.aborted_ops for incident in found),
        lost_steps=sum(incident.lost_steps for incident in found),
        repeated_steps=ops.repeated_steps,
        fetched_bytes=sum(costing.fetched.values()),
    )


# Changes of epochs


def _changes(events: list[RareEvent], history: History, costing: _Costing) -> Iterable[Incident]:
    stalls = stalled_in(events)
    leads = [event for event in events if isinstance(event.notice, LeaderChanged) and event.notice.leads]
    lost = [event for event in events if isinstance(event.notice, MasterLost)]
    last: dict[tuple[int, GroupId], EpochTally] = {}
    for epoch in sorted(history.changes, key=lambda epoch: (epoch.runs_ns, epoch.key)):
        previous = last.get(epoch.key[:2])
        last[epoch.key[:2]] = epoch
        if previous is None:
            yield _begun(epoch, history, costing)
            continue
        yield _change(previous, epoch, history, costing, _Context(stalls, leads, lost))


@dataclass(slots=True)
class _Context:
    stalls: dict[PeerId, PeersStalled]
    leads: list[RareEvent]
    masters_lost: list[RareEvent]


def _begun(epoch: EpochTally, history: History, costing: _Costing) -> Incident:
    names = [history.member(peer).label for peer in epoch.ring]
    group = f"Group {epoch.key.group}" if epoch.key.group else "The run"
    text = f"{group} began with {times(len(names), 'peer')}: {join_words(names)}."
    at_s = (epoch.runs_ns - costing.began_ns) / 1e9
    return Incident(at_s, "begun", text, epoch.key.group, epoch.key.epoch, list(epoch.ring))


def _change(
    previous: EpochTally, epoch: EpochTally, history: History, costing: _Costing, context: _Context
) -> Incident:
    left = [history.member(peer) for peer in previous.ring if peer not in epoch.ring]
    came = [history.member(peer) for peer in epoch.ring if peer not in previous.ring]
    failover = _failover(previous, epoch, context)
    began_ns = min([epoch.began_ns, *([failover[0]] if failover else [])])
    kind = _kind(left, came, failover is not None)
    sentences = [_why_gone(member, context) for member in left]
    if failover:
        sentences.append(failover[1])
    sentences += [_join_text(member, costing) for member in came]
    if not sentences:
        sentences.append(f"The ring changed: {epoch.reason}." if epoch.reason else "The ring changed.")
    gap = costing.gaps.get((epoch.key.group, epoch.key.epoch - 1))
    paused_s = next_s = from_s = None
    if gap is not None:
        pause_ns, end_ns = gap.longest_ns, gap.last_commit_ns
        if gap.before_end_ns > began_ns and gap.before_ns > pause_ns:
            pause_ns, end_ns = gap.before_ns, gap.before_end_ns
        paused_s = max(0.0, (pause_ns - costing.usual_gap_ns) / 1e9)
        next_s = max(0.0, (end_ns - began_ns) / 1e9)
        from_s = (end_ns - pause_ns - costing.began_ns) / 1e9
    sentences += _cost_text(epoch)
    return Incident(
        (began_ns - costing.began_ns) / 1e9,
        kind,
        " ".join(sentences),
        epoch.key.group,
        epoch.key.epoch,
        [member.peer for member in [*left, *came]],
        epoch.aborted,
        0,
        sum(costing.fetched.get(member.peer, 0) for member in came),
        paused_s,
        next_s,
        from_s,
    )


def _failover(previous: EpochTally, epoch: EpochTally, context: _Context) -> tuple[int, str] | None:
    """When the masters changed between these epochs, and how."""
    led = [event for event in context.leads if previous.runs_ns < event.at_ns <= epoch.runs_ns]
    if not led and not (previous.fence and epoch.fence > previous.fence):
        return None
    lost = [event.at_ns for event in context.masters_lost if previous.runs_ns < event.at_ns <= epoch.runs_ns]
    at_ns = min([*lost, *(event.at_ns for event in led)], default=epoch.began_ns)
    if not led:
        return at_ns, f"Another master took over (fence {epoch.fence})."
    notice = led[-1].notice
    assert isinstance(notice, LeaderChanged)
    why = f": {notice.reason}" if notice.reason else ""
    if lost:
        took = duration_text((led[-1].at_ns - min(lost)) / 1e9)
        return at_ns, f"The master was lost, and {notice.leader} led {took} later (fence {notice.fence}){why}."
    return at_ns, f"{notice.leader} took over as the master (fence {notice.fence}){why}."


def _kind(left: list[MemberTally], came: list[MemberTally], is_failover: bool) -> IncidentKind:
    ends = {member.end for member in left}
    if is_failover:
        return "failover"
    if ends & {"lost", "missing"}:
        return "lost"
    if "evicted" in ends:
        return "evicted"
    if came:
        return "joined"
    return "left" if left else "ring"


def _why_gone(member: MemberTally, context: _Context) -> str:
    label = _capital(member.label)
    stall = context.stalls.get(member.peer)
    match member.end:
        case "lost":
            return f"{label} was lost: {member.reason}."
        case "evicted":
            detail = ""
            if stall is not None:
                waited = duration_text(stall.waited_ms / 1e3)
                detail = (
                    f" ({times(len(stall.waiting), 'peer')} had waited {waited} for it in {stall.what}; {stall.limit})"
                )
            return f"{label} was evicted: {member.reason}{detail}."
        case "left":
            return f"{label} left."
        case _:
            return f"{label} is no longer in the ring; no record of a master says why."


def _join_text(member: MemberTally, costing: _Costing) -> str:
    text = f"{_capital(member.label)} joined"
    if member.was:
        text = f"{_capital(member.label)} joined again: the process that was peer {member.was}"
    if member.registered_ns and member.joined_ns > member.registered_ns:
        text += f", {duration_text((member.joined_ns - member.registered_ns) / 1e9)} after it had registered"
    if fetched := costing.fetched.get(member.peer):
        took = duration_text(costing.fetched_ms[member.peer] / 1e3)
        text += f", and received {size_text(fetched)} of shared state in {took}"
    return text + "."


def _cost_text(epoch: EpochTally) -> list[str]:
    sentences = []
    if epoch.aborted:
        rest = "was aborted and run again" if epoch.aborted == 1 else "were aborted and run again"
        sentences.append(f"{_capital(times(epoch.aborted, 'op'))} {rest}.")
    return sentences


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# What happened without a new epoch


def _others(events: list[RareEvent], history: History, began_ns: int) -> Iterable[Incident]:
    seen: set[tuple[object, ...]] = set()
    key: tuple[object, ...]
    for event in events:
        at_s = (event.at_ns - began_ns) / 1e9
        match event.notice:
            case StateRolledBack() as back:
                # Master and peers record it.
                if (key := ("rollback", back.group, back.rollback)) not in seen:
                    seen.add(key)
                    lost = max(0, back.rollback.lost - back.rollback.revision)
                    yield Incident(at_s, "rollback", f"{_capital(str(back))}.", back.group, lost_steps=lost)
            case PeerDiverged(group, divergence):
                if (key := ("divergence", group, divergence.peer, divergence.revision)) not in seen:
                    seen.add(key)
                    text = f"{_capital(str(divergence_error(divergence)))}."
                    yield Incident(at_s, "divergence", text, group, peers=[divergence.peer])
            case CallRefused(peers, text):
                if (key := ("refused", text)) not in seen:
                    seen.add(key)
                    yield Incident(at_s, "refused", f"A call was refused: {text}.", peers=peers)
            case EdgeBad(group, source, target):
                yield Incident(at_s, "ring", f"{_capital(str(event.notice))}.", group, peers=[source, target])
            case ResumeDelayed() | ProbingBroke() | RunBegun():
                group = event.notice.group if isinstance(event.notice, ResumeDelayed) else 0
                yield Incident(at_s, "note", f"{_capital(str(event.notice))}.", group)
            case RunEnded(_, how, revision):
                yield Incident(at_s, "ended", f"The run was {how} at revision {revision}: its last member was gone.")
            case PeerGone(peer, _, how) if how != "left" and not _was_member(history, peer):
                label = _capital(history.member(peer).label)
                text = f"{label} was {how} before it was a member: {event.notice.reason}."
                yield Incident(at_s, "lost" if how == "lost" else "evicted", text, peers=[peer])
            case _:
                pass


def _was_member(history: History, peer: PeerId) -> bool:
    member = history.members.get(peer)
    return member is not None and bool(member.joined_ns)
