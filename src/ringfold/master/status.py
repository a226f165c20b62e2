"""The run for `ringfold status`, and what peers wait for. `connection_states.py` has the names of phases and states."""

from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec.structs import replace

from ringfold.master.calls import IncompleteCall, completion
from ringfold.master.connection_states import CollectiveState, facts_of, op_state_of, phase_of, state_of
from ringfold.master.disputes import sides
from ringfold.master.epochs import Epochs
from ringfold.master.events import Ns
from ringfold.master.liveness import silent_ms
from ringfold.master.run import Group, Peer, Run
from ringfold.master.stalls import StallDecision, WaitKey, Watchdog
from ringfold.master.syncs import left_ms
from ringfold.master.topology import waits_for
from ringfold.master.verdicts import summary
from ringfold.topology.links import LinkBandwidth
from ringfold.topology.ring import Edge, edges_of
from ringfold.units import MS
from ringfold.wire.diagnostics import CALL_NAMES, format_seconds, list_peers, name_op
from ringfold.wire.frames import Announced
from ringfold.wire.messages import GroupId, OpRef, PeerId, VoteKind
from ringfold.wire.status import CollectiveStatus, GroupStatus, LinkStatus, PeerStatus, RingLink, Status, Waiting

MAX_LINKS_SHOWN = 4_096
"""All links of 64 peers."""
_RUN_WIDE: tuple[VoteKind, ...] = ("update", "pending", "optimize")


def render_status(
    run: Run, waiting: list[Waiting], links: list[LinkStatus], now: Ns, fence: int, uptime_ms: int, leader: str = ""
) -> Status:
    states = {number: _op_states(run, group) for number, group in run.groups.items()}
    return Status(
        fence=fence,
        uptime_ms=uptime_ms,
        registrations=run.registrations,
        epochs=run.epochs,
        world=run.world(),
        peers=[_peer(run, now, peer, states[peer.group]) for peer in run.peers.values()],
        groups=[_group(group) for _, group in sorted(run.groups.items()) if group.ring or group.change],
        waiting=waiting,
        links=links,
        known_links=len(run.links),
        leader=leader,
        run=run.name,
    )


def render_waiting(run: Run, epochs: Epochs, watchdog: Watchdog, now: Ns) -> list[Waiting]:
    """Epoch changes first, because everything else waits for them; then syncs, calls, newcomers, and ops.

    After a change of masters, everything waits for the members that are still away.
    """
    decisions = watchdog.decisions(now)
    calls = [*_calls(run, now, decisions), *_newcomers(run, now)]
    syncs = [*_syncs(run, now, decisions), *_resumes(run, now), *_optimisation(run, epochs, now)]
    return [*_changes(run, epochs, now), *_disputes(run, now), *syncs, *calls, *_ops(run, now, decisions)]


def _with_eviction(waiting: Waiting, now: Ns, decision: StallDecision | None) -> Waiting:
    if decision is None or not waiting.missing:
        return waiting
    left_ms = None if decision.evict_at_ns is None else max(0, decision.evict_at_ns - now) // MS
    text = decision.why if left_ms is None else f"in {format_seconds(left_ms)}"
    return replace(waiting, eviction=text, evict_in_ms=left_ms)


def _peer(run: Run, now: Ns, peer: Peer, states: Mapping[tuple[int, int], CollectiveState]) -> PeerStatus:
    facts = facts_of(run, peer)
    ops = [CollectiveStatus(op.tag, op.sequence, states[op.tag, op.sequence], op.age_ms) for op in run.announced(peer)]
    return PeerStatus(
        peer=peer.id,
        name=peer.member.name,
        host=peer.member.host,
        group=peer.group,
        phase=phase_of(facts),
        addresses=peer.member.addresses,
        port=peer.member.port,
        silent_ms=silent_ms(now, peer.last_received_ns, peer.last_echo_ns),
        suspected=peer.suspected,
        committed_ops=peer.heartbeat.committed,
        ops=[f"tag {op.tag} seq {op.sequence}: {op.state} ({format_seconds(op.age_ms)})" for op in ops],
        state=state_of(facts),
        op_states=ops,
        totals=peer.heartbeat.totals,
        progress=peer.progress,
        progress_ms=max(0, now - peer.progress_ns) // MS,
    )


def _op_states(run: Run, group: Group) -> dict[tuple[int, int], CollectiveState]:
    """The state of each op, from what all members announce."""
    seen: dict[tuple[int, int], list[Announced]] = {}
    members = run.live(group)
    for member in members:
        for op in run.announced(member):
            seen.setdefault((op.tag, op.sequence), []).append(op)
    return {key: op_state_of(ops, len(members)) for key, ops in seen.items()}


def _group(group: Group) -> GroupStatus:
    return GroupStatus(
        group=group.id,
        epoch=group.epoch,
        phase=group.phase.value,
        ring=list(group.ring),
        evidence=group.evidence,
        bad_edges=group.edges.bad_pairs(),
        diverged=list(group.diverged),
        divergences=group.divergences,
        ring_links=[_ring_link(group, *edge) for edge in edges_of(group.ring)],
        channels=1 if group.record is None else group.record.channels,
    )


def _ring_link(group: Group, source: PeerId, target: PeerId) -> RingLink:
    count = group.lanes.get(source)
    if count is None or not count.lanes:
        return RingLink(source, target, "unknown")
    some: Literal["mixed", "tcp"] = "mixed" if count.in_memory else "tcp"
    transport = "shm" if count.in_memory == count.lanes else some
    return RingLink(source, target, transport, count.lanes, count.in_memory)


def _changes(run: Run, epochs: Epochs, now: Ns) -> Iterator[Waiting]:
    for _, group in sorted(run.groups.items()):
        change = group.change
        if change is None:
            continue
        missing = epochs.missing(group)
        waiting = sorted({peer.id for peer in run.live(group)} - set(missing) | change.admitted)
        why = f" ({summary(change.causes)})" if change.causes else ""
        what = f"group {group.id}: epoch {group.epoch} is {group.phase.value}{why}"
        yield Waiting(what, waiting, missing, (now - change.since_ns) // MS)


def _disputes(run: Run, now: Ns) -> Iterator[Waiting]:
    """Members called different things; the calls of the others will decide which are wrong."""
    for _, group in sorted(run.groups.items()):
        for op, dispute in sorted(group.disputes.items()):
            late = sorted(set(group.ring) - dispute.calls.keys())
            what = f"group {group.id}: different calls: {sides(op, dispute)}"
            yield Waiting(what, sorted(dispute.calls), late, (now - dispute.since_ns) // MS)


def _syncs(run: Run, now: Ns, decisions: Mapping[WaitKey, StallDecision]) -> Iterator[Waiting]:
    for _, group in sorted(run.groups.items()):
        sync = group.sync
        if sync is not None:
            holders = list_peers(sorted(sync.holders))
            what = f"group {group.id}: sync {sync.number} of revision {sync.plan.revision} from {holders}"
            waiting = Waiting(what, sorted(sync.ballots), sorted(sync.unfinished), (now - sync.since_ns) // MS)
            yield _with_eviction(waiting, now, decisions.get(WaitKey("sync", group.id)))


def _resumes(run: Run, now: Ns) -> Iterator[Waiting]:
    """Groups whose state is lost, and that wait for peers that may have the newest checkpoint."""
    for _, group in sorted(run.groups.items()):
        waiting, last = group.resume, group.finished
        if waiting is not None and last is not None:
            missing = ", ".join(map(repr, waiting.missing))
            until = f"for another {format_seconds(left_ms(run, now, waiting))} (resume_wait_s)"
            what = (
                f"group {group.id}: revision {last.revision} is lost; before a checkpoint is taken, {missing} may come"
            )
            yield Waiting(f"{what}: {until}", sorted(waiting.ballots), [], (now - waiting.since_ns) // MS)


def _optimisation(run: Run, epochs: Epochs, now: Ns) -> Iterator[Waiting]:
    going = run.optimisation
    if going is None:
        return
    pairs = ", ".join(f"{a} - {b}" for a, b in sorted(test.pair for test in going.tests.values()))
    rounds = going.begun + len(going.rounds)
    stage = f"round {going.begun} of {rounds} measures {pairs}" if pairs else "better rings are installed"
    late = waits_for(run, epochs, going)
    yield Waiting(f"optimize_topology: {stage}", sorted(going.ballots), late, (now - going.since_ns) // MS)


def ring_links(run: Run, now: Ns) -> list[LinkStatus]:
    """What is known of the links of all rings."""
    links = []
    for _, group in sorted(run.groups.items()):
        for edge in edges_of(group.ring):
            entry, probed = run.links.get(*edge), run.delays.get(edge)
            if entry is not None:
                links.append(_link(run, now, edge, entry))
            elif probed is not None:
                age_ms = max(0, now - probed.at_ns) // MS
                links.append(LinkStatus(*edge, 0.0, probed.delay_us, age_ms, "probed", probed.loss))
    return links


def _link(run: Run, now: Ns, edge: Edge, entry: LinkBandwidth) -> LinkStatus:
    age_ms, probed = max(0, now - entry.at_ns) // MS, run.delays.get(edge)
    delay_us = entry.delay_us if probed is None else probed.delay_us
    loss = None if probed is None else probed.loss
    return LinkStatus(*edge, entry.bytes_per_s, delay_us, age_ms, entry.source, loss)


def all_links(run: Run, now: Ns) -> list[LinkStatus]:
    """What is known of all links, the newest first."""
    newest = sorted(run.links.entries(), key=lambda item: (-item[1].at_ns, item[0]))[:MAX_LINKS_SHOWN]
    links = [_link(run, now, edge, entry) for edge, entry in newest]
    for (a, b), probed in run.delays.pairs().items():
        age_ms = max(0, now - probed.at_ns) // MS
        unrated = [edge for edge in ((a, b), (b, a)) if run.links.get(*edge) is None]
        links += [LinkStatus(*edge, 0.0, probed.delay_us, age_ms, "probed", probed.loss) for edge in unrated]
    return links[:MAX_LINKS_SHOWN]


def _calls(run: Run, now: Ns, decisions: Mapping[WaitKey, StallDecision]) -> Iterator[Waiting]:
    calls: list[tuple[VoteKind, GroupId | None]] = [(kind, None) for kind in _RUN_WIDE]
    calls += [("sync", group) for group in sorted(run.groups)]
    for kind, group in calls:
        ballots = {
            peer.id: peer.ballot
            for peer in run.accepted()
            if peer.ballot is not None and peer.ballot.kind == kind and group in (None, peer.group)
        }
        state = completion(run, kind, group)
        if ballots and isinstance(state, IncompleteCall):
            since = min(ballot.called_ns for ballot in ballots.values())
            where = "" if group is None else f"group {group}: "
            waiting = Waiting(
                f"{where}{CALL_NAMES[kind]}: {state.why}", list(ballots), state.missing, (now - since) // MS
            )
            key = WaitKey("call", -1 if group is None else group, vote=kind)
            yield _with_eviction(waiting, now, decisions.get(key))


def _newcomers(run: Run, now: Ns) -> Iterator[Waiting]:
    newcomers = run.registered()
    state = completion(run, "update")
    if newcomers and isinstance(state, IncompleteCall):
        since = min(peer.registered_ns for peer in newcomers)
        what = "to be accepted, by update_topology of all accepted peers"
        yield Waiting(what, [peer.id for peer in newcomers], state.missing, (now - since) // MS)


def _ops(run: Run, now: Ns, decisions: Mapping[WaitKey, StallDecision]) -> Iterator[Waiting]:
    """Ops that some members have not started. The oldest call says for how long."""
    for _, group in sorted(run.groups.items()):
        callers: dict[OpRef, dict[PeerId, int]] = {}
        for member in run.live(group):
            for op in run.announced(member):
                age_ms = op.age_ms + max(0, now - member.last_heartbeat_ns) // MS
                callers.setdefault(OpRef(op.tag, op.sequence), {})[member.id] = age_ms
        for called, ages in sorted(callers.items()):
            absent = sorted(set(group.ring) & set(run.peers) - set(ages))
            if absent:
                waiting = Waiting(f"group {group.id}: {name_op(called)}", sorted(ages), absent, max(ages.values()))
                yield _with_eviction(waiting, now, decisions.get(WaitKey("op", group.id, called)))
