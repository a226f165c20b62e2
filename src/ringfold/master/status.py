"""The run as people see it: `ringfold status`, with the classic phase names, and what is waited for.

The classic names map to few states. A peer is PEER_REGISTERED until a vote lets it in, PEER_ACCEPTED until its first
epoch is recorded, CONNECTING_TO_PEERS while its group's epoch changes, VOTE_ACCEPT_NEW_PEERS while it waits in
`update_topology`, COLLECTIVE_COMMUNICATIONS_RUNNING while its heartbeats name ops, else IDLE. An op is VOTE_INITIATE
while some members have come to it, PERFORM when all have, VOTE_COMPLETE when some are done.
"""

from collections.abc import Iterator

from ringfold.master.calls import Wait, completion
from ringfold.master.epochs import Epochs
from ringfold.master.events import Ns
from ringfold.master.liveness import MS, silent_ms
from ringfold.master.run import Group, Peer, Run, Standing
from ringfold.master.verdicts import summary
from ringfold.master.words import CALL, named, seconds
from ringfold.wire.frames import Announced
from ringfold.wire.messages import GroupStatus, OpRef, PeerId, PeerStatus, Status, VoteKind, Waiting

_KINDS: tuple[VoteKind, ...] = ("update", "pending")


def render_status(run: Run, epochs: Epochs, now: Ns, fence: int, uptime_ms: int) -> Status:
    return Status(
        fence=fence,
        uptime_ms=uptime_ms,
        registrations=run.registrations,
        epochs=run.epochs,
        world=run.world(),
        peers=[_peer(run, now, peer) for peer in run.peers.values()],
        groups=[_group(group) for _, group in sorted(run.groups.items()) if group.ring or group.change],
        waiting=render_waiting(run, epochs, now),
    )


def render_waiting(run: Run, epochs: Epochs, now: Ns) -> list[Waiting]:
    """Changes first, because everything else waits for them; then calls, newcomers, and ops."""
    return [*_changes(run, epochs, now), *_calls(run, now), *_newcomers(run, now), *_ops(run, now)]


def _peer(run: Run, now: Ns, peer: Peer) -> PeerStatus:
    phases = _op_phases(run, run.groups[peer.group])
    return PeerStatus(
        peer=peer.id,
        name=peer.member.name,
        host=peer.member.host,
        group=peer.group,
        phase=_phase(run, peer),
        addresses=peer.member.addresses,
        port=peer.member.port,
        silent_ms=silent_ms(now, peer.heard, peer.echoed),
        suspected=peer.suspected,
        committed_ops=peer.beat.committed,
        ops=[
            f"tag {op.tag} seq {op.sequence}: {phases[op.tag, op.sequence]} ({seconds(op.age_ms)})"
            for op in run.announced(peer)
        ],
    )


def _phase(run: Run, peer: Peer) -> str:
    if peer.standing is Standing.REGISTERED:
        return "PEER_REGISTERED"
    if peer.standing is Standing.ADMITTED:
        return "PEER_ACCEPTED"
    if run.groups[peer.group].change is not None:
        return "CONNECTING_TO_PEERS"
    ballot = run.ballot(peer)
    if (ballot is not None and ballot.kind == "update") or (run.admission and peer.id in run.admission.ballots):
        return "VOTE_ACCEPT_NEW_PEERS"
    return "COLLECTIVE_COMMUNICATIONS_RUNNING" if run.announced(peer) else "IDLE"


def _op_phases(run: Run, group: Group) -> dict[tuple[int, int], str]:
    """Where each op stands, from what all members announce."""
    seen: dict[tuple[int, int], list[Announced]] = {}
    members = run.live(group)
    for member in members:
        for op in run.announced(member):
            seen.setdefault((op.tag, op.sequence), []).append(op)
    return {
        key: "VOTE_COMPLETE"
        if any(op.done for op in ops)
        else "PERFORM"
        if len(ops) >= len(members)
        else "VOTE_INITIATE"
        for key, ops in seen.items()
    }


def _group(group: Group) -> GroupStatus:
    return GroupStatus(
        group=group.id,
        epoch=group.epoch,
        phase=group.change.phase if group.change is not None else "idle",
        ring=list(group.ring),
        evidence=group.evidence,
        bad_edges=group.edges.bad_pairs(),
    )


def _changes(run: Run, epochs: Epochs, now: Ns) -> Iterator[Waiting]:
    for _, group in sorted(run.groups.items()):
        change = group.change
        if change is None:
            continue
        missing = epochs.missing(group)
        waiting = sorted({peer.id for peer in run.live(group)} - set(missing) | change.admitted)
        why = f" ({summary(change.causes)})" if change.causes else ""
        what = f"group {group.id}: epoch {group.epoch} is {change.phase}{why}"
        yield Waiting(what, waiting, missing, (now - change.since) // MS)


def _calls(run: Run, now: Ns) -> Iterator[Waiting]:
    for kind in _KINDS:
        voters = [peer for peer in run.accepted() if peer.ballot is not None and peer.ballot.kind == kind]
        state = completion(run, kind)
        if voters and isinstance(state, Wait):
            since = min(peer.ballot.asked for peer in voters if peer.ballot is not None)
            what = f"{CALL[kind]}: {state.why}"
            yield Waiting(what, [peer.id for peer in voters], state.missing, (now - since) // MS)


def _newcomers(run: Run, now: Ns) -> Iterator[Waiting]:
    newcomers = run.registered()
    state = completion(run, "update")
    if newcomers and isinstance(state, Wait):
        since = min(peer.registered for peer in newcomers)
        what = "to be accepted, by update_topology of all accepted peers"
        yield Waiting(what, [peer.id for peer in newcomers], state.missing, (now - since) // MS)


def _ops(run: Run, now: Ns) -> Iterator[Waiting]:
    """Ops that some members have not come to. How long is a matter of the oldest call."""
    for _, group in sorted(run.groups.items()):
        callers: dict[OpRef, dict[PeerId, int]] = {}
        for member in run.live(group):
            for op in run.announced(member):
                age_ms = op.age_ms + max(0, now - member.beat_at) // MS
                callers.setdefault(OpRef(op.tag, op.sequence), {})[member.id] = age_ms
        for called, ages in sorted(callers.items()):
            absent = sorted(set(group.ring) & set(run.peers) - set(ages))
            if absent:
                yield Waiting(f"group {group.id}: {named(called)}", sorted(ages), absent, max(ages.values()))
