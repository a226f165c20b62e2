"""What `ringfold status` shows of a peer and of an op, state by state."""

from dataclasses import replace

import pytest

from ringfold.master.connection_states import (
    CollectiveState,
    ConnectionPhase,
    ConnectionState,
    PeerFacts,
    op_state_of,
    phase_of,
    state_of,
)
from ringfold.master.states import EpochPhase, Membership, OptimisationStage
from ringfold.wire.frames import Announced

MEMBER = PeerFacts(membership=Membership.MEMBER)
NAMES = {
    "IDLE",
    "VOTE_ACCEPT_NEW_PEERS",
    "CONNECTING_TO_PEERS",
    "VOTE_NO_NEW_PEERS_ESTABLISH_P2P_CONNECTIONS",
    "VOTE_OPTIMIZE_TOPOLOGY",
    "OPTIMIZE_TOPOLOGY",
    "OPTIMIZE_TOPOLOGY_FAILED",
    "VOTE_SYNC_SHARED_STATE",
    "DISTRIBUTE_SHARED_STATE",
    "COLLECTIVE_COMMUNICATIONS_RUNNING",
}
STATES: list[tuple[PeerFacts, str]] = [
    (MEMBER, "IDLE"),
    (replace(MEMBER, vote="pending"), "IDLE"),
    (replace(MEMBER, vote="update"), "VOTE_ACCEPT_NEW_PEERS"),
    (replace(MEMBER, vote="sync"), "VOTE_SYNC_SHARED_STATE"),
    (replace(MEMBER, vote="optimize"), "VOTE_OPTIMIZE_TOPOLOGY"),
    (PeerFacts(membership=Membership.ADMITTED), "CONNECTING_TO_PEERS"),
    (replace(MEMBER, change=EpochPhase.SEALING, has_newcomers=True), "CONNECTING_TO_PEERS"),
    (replace(MEMBER, change=EpochPhase.ATTACHING, has_newcomers=True, vote="update"), "CONNECTING_TO_PEERS"),
    (replace(MEMBER, change=EpochPhase.SEALING), "VOTE_NO_NEW_PEERS_ESTABLISH_P2P_CONNECTIONS"),
    (replace(MEMBER, change=EpochPhase.ATTACHING, vote="update"), "VOTE_NO_NEW_PEERS_ESTABLISH_P2P_CONNECTIONS"),
    (replace(MEMBER, optimisation=OptimisationStage.MEASURING), "OPTIMIZE_TOPOLOGY"),
    (replace(MEMBER, optimisation=OptimisationStage.MEASURING, change=EpochPhase.SEALING), "OPTIMIZE_TOPOLOGY"),
    (
        replace(MEMBER, optimisation=OptimisationStage.INSTALLING, change=EpochPhase.ATTACHING),
        "VOTE_NO_NEW_PEERS_ESTABLISH_P2P_CONNECTIONS",
    ),
    (replace(MEMBER, optimisation=OptimisationStage.INSTALLING), "OPTIMIZE_TOPOLOGY"),
    (replace(MEMBER, is_unmeasured=True), "OPTIMIZE_TOPOLOGY_FAILED"),
    (replace(MEMBER, is_unmeasured=True, vote="optimize"), "VOTE_OPTIMIZE_TOPOLOGY"),
    (replace(MEMBER, is_syncing=True), "DISTRIBUTE_SHARED_STATE"),
    (replace(MEMBER, is_syncing=True, change=EpochPhase.SEALING), "DISTRIBUTE_SHARED_STATE"),
    (replace(MEMBER, has_ops=True), "COLLECTIVE_COMMUNICATIONS_RUNNING"),
    (replace(MEMBER, has_ops=True, is_unmeasured=True), "COLLECTIVE_COMMUNICATIONS_RUNNING"),
    (replace(MEMBER, has_ops=True, change=EpochPhase.SEALING), "VOTE_NO_NEW_PEERS_ESTABLISH_P2P_CONNECTIONS"),
    (PeerFacts(membership=Membership.LEAVING), "IDLE"),
    (
        PeerFacts(membership=Membership.RESUMING, change=EpochPhase.SEALING),
        "VOTE_NO_NEW_PEERS_ESTABLISH_P2P_CONNECTIONS",
    ),
]


@pytest.mark.parametrize(("facts", "state"), STATES)
def test_a_peer_is_shown_in_one_state(facts: PeerFacts, state: str) -> None:
    assert state_of(facts) == state


def test_the_table_has_every_state_and_there_are_no_others() -> None:
    assert {state for _, state in STATES} == NAMES == set(ConnectionState)


@pytest.mark.parametrize("membership", [each for each in Membership if each is not Membership.GONE])
def test_a_peer_is_accepted_from_the_vote_that_admits_it(membership: Membership) -> None:
    is_registered = membership is Membership.REGISTERED
    phase = phase_of(PeerFacts(membership=membership))
    assert phase == ("PEER_REGISTERED" if is_registered else "PEER_ACCEPTED")
    assert len(ConnectionPhase) == 2


def test_a_registered_peer_is_idle_whatever_its_group_does() -> None:
    facts = PeerFacts(membership=Membership.REGISTERED, change=EpochPhase.SEALING, has_newcomers=True, is_syncing=True)
    assert state_of(facts) is ConnectionState.IDLE


@pytest.mark.parametrize(
    ("done", "members", "state"),
    [
        ([False], 2, "VOTE_INITIATE_COLLECTIVE_COMMS"),
        ([False, False], 2, "PERFORM_COLLECTIVE_COMMS"),
        ([False, True], 2, "VOTE_COMPLETE_COLLECTIVE_COMMS"),
        ([True], 2, "VOTE_COMPLETE_COLLECTIVE_COMMS"),
        ([False], 1, "PERFORM_COLLECTIVE_COMMS"),
    ],
)
def test_an_op_is_shown_by_what_its_members_announce(done: list[bool], members: int, state: str) -> None:
    announced = [Announced(0, 3, 1_200, 7, each) for each in done]
    assert op_state_of(announced, members) == state
    assert state in set(CollectiveState)
