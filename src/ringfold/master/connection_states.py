"""What `ringfold status` shows of peers and ops, in the names that users of PCCL know. Pure.

Each peer has a *phase* and a *connection state*, and each op has a state. None of them is stored: they are derived
here, and nowhere else, from the master's own states (`states.py`), from votes, and from what heartbeats announce.

    phase   PEER_REGISTERED until a vote admits the peer, then PEER_ACCEPTED
    state   the first line that holds:

    DISTRIBUTE_SHARED_STATE             it takes part in a sync that is decided
    OPTIMIZE_TOPOLOGY                   links are measured for an optimisation that it waits in
    CONNECTING_TO_PEERS                 its group's epoch changes, and the new one has newcomers
    VOTE_NO_NEW_PEERS_ESTABLISH_P2P_CONNECTIONS
                                        its group's epoch changes without newcomers: a better ring, a death, a bad edge
    OPTIMIZE_TOPOLOGY                   its group keeps its ring, and another group's better ring is installed
    VOTE_ACCEPT_NEW_PEERS               it waits in `update_topology`
    VOTE_OPTIMIZE_TOPOLOGY              it waits in `optimize_topology`
    VOTE_SYNC_SHARED_STATE              it waits in `sync_shared_state`
    COLLECTIVE_COMMUNICATIONS_RUNNING   its heartbeats announce ops
    OPTIMIZE_TOPOLOGY_FAILED            one of its links could not be measured, less than a minute ago
    IDLE                                none of these

    op      VOTE_INITIATE_COLLECTIVE_COMMS while some members have announced it, PERFORM_COLLECTIVE_COMMS when all have,
            VOTE_COMPLETE_COLLECTIVE_COMMS when some are done

No peer votes before an op, or before its lanes are re-made: where the names say so, the peers wait for each other.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from ringfold.master.run import Peer, Run
from ringfold.master.states import EpochPhase, Membership, OptimisationStage
from ringfold.wire.frames import Announced
from ringfold.wire.messages import VoteKind


class ConnectionPhase(StrEnum):
    """Whether a peer belongs to the run."""

    PEER_REGISTERED = "PEER_REGISTERED"
    PEER_ACCEPTED = "PEER_ACCEPTED"


class ConnectionState(StrEnum):
    """What a peer does, or waits for."""

    IDLE = "IDLE"
    VOTE_ACCEPT_NEW_PEERS = "VOTE_ACCEPT_NEW_PEERS"
    CONNECTING_TO_PEERS = "CONNECTING_TO_PEERS"
    VOTE_NO_NEW_PEERS_ESTABLISH_P2P_CONNECTIONS = "VOTE_NO_NEW_PEERS_ESTABLISH_P2P_CONNECTIONS"
    VOTE_OPTIMIZE_TOPOLOGY = "VOTE_OPTIMIZE_TOPOLOGY"
    OPTIMIZE_TOPOLOGY = "OPTIMIZE_TOPOLOGY"
    OPTIMIZE_TOPOLOGY_FAILED = "OPTIMIZE_TOPOLOGY_FAILED"
    VOTE_SYNC_SHARED_STATE = "VOTE_SYNC_SHARED_STATE"
    DISTRIBUTE_SHARED_STATE = "DISTRIBUTE_SHARED_STATE"
    COLLECTIVE_COMMUNICATIONS_RUNNING = "COLLECTIVE_COMMUNICATIONS_RUNNING"


class CollectiveState(StrEnum):
    """How far the members of a group are with an op."""

    VOTE_INITIATE_COLLECTIVE_COMMS = "VOTE_INITIATE_COLLECTIVE_COMMS"
    PERFORM_COLLECTIVE_COMMS = "PERFORM_COLLECTIVE_COMMS"
    VOTE_COMPLETE_COLLECTIVE_COMMS = "VOTE_COMPLETE_COLLECTIVE_COMMS"


_VOTING: dict[VoteKind, ConnectionState] = {
    "update": ConnectionState.VOTE_ACCEPT_NEW_PEERS,
    "sync": ConnectionState.VOTE_SYNC_SHARED_STATE,
    "optimize": ConnectionState.VOTE_OPTIMIZE_TOPOLOGY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """All that a peer's phase and state depend on."""

    membership: Membership
    change: EpochPhase = EpochPhase.IDLE
    """The phase of its group's epoch change."""
    has_newcomers: bool = False
    """Whether the epoch that the change leads to has newcomers."""
    is_syncing: bool = False
    optimisation: OptimisationStage | None = None
    """The stage of the optimisation that it waits in, if it does."""
    vote: VoteKind | None = None
    """The call that it waits in, as far as votes show."""
    has_ops: bool = False
    is_unmeasured: bool = False
    """Whether one of its links could not be measured a short while ago."""


def phase_of(facts: PeerFacts) -> ConnectionPhase:
    is_registered = facts.membership is Membership.REGISTERED
    return ConnectionPhase.PEER_REGISTERED if is_registered else ConnectionPhase.PEER_ACCEPTED


def state_of(facts: PeerFacts) -> ConnectionState:
    """See the table at the head of this file."""
    if facts.membership is Membership.REGISTERED:
        return ConnectionState.IDLE
    if facts.membership is Membership.ADMITTED:
        return ConnectionState.CONNECTING_TO_PEERS
    if facts.is_syncing:
        return ConnectionState.DISTRIBUTE_SHARED_STATE
    if facts.optimisation is OptimisationStage.MEASURING:
        return ConnectionState.OPTIMIZE_TOPOLOGY
    if facts.change is not EpochPhase.IDLE:
        if facts.has_newcomers:
            return ConnectionState.CONNECTING_TO_PEERS
        return ConnectionState.VOTE_NO_NEW_PEERS_ESTABLISH_P2P_CONNECTIONS
    if facts.optimisation is OptimisationStage.INSTALLING:
        return ConnectionState.OPTIMIZE_TOPOLOGY
    if facts.vote in _VOTING:
        return _VOTING[facts.vote]
    if facts.has_ops:
        return ConnectionState.COLLECTIVE_COMMUNICATIONS_RUNNING
    return ConnectionState.OPTIMIZE_TOPOLOGY_FAILED if facts.is_unmeasured else ConnectionState.IDLE


def op_state_of(announced: Collection[Announced], members: int) -> CollectiveState:
    """The state of an op that these members have announced, of so many in the group."""
    if any(op.done for op in announced):
        return CollectiveState.VOTE_COMPLETE_COLLECTIVE_COMMS
    if len(announced) >= members:
        return CollectiveState.PERFORM_COLLECTIVE_COMMS
    return CollectiveState.VOTE_INITIATE_COLLECTIVE_COMMS


def facts_of(run: Run, peer: Peer) -> PeerFacts:
    """The facts about one peer of a run."""
    group, going, admission = run.groups[peer.group], run.optimisation, run.admission
    ballot, change = run.ballot(peer), group.change
    vote: VoteKind | None = None if ballot is None else ballot.kind
    if admission is not None and peer.id in admission.ballots:
        vote = "update"
    return PeerFacts(
        membership=peer.membership,
        change=group.phase,
        has_newcomers=change is not None and bool(change.admitted or change.newcomers),
        is_syncing=group.sync is not None and peer.id in group.sync.ballots,
        optimisation=going.stage if going is not None and peer.id in going.ballots else None,
        vote=vote,
        has_ops=bool(run.announced(peer)),
        is_unmeasured=peer.id in run.unmeasured,
    )
