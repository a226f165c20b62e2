"""The verdict rule: what was returned at any survivor is committed, and what a survivor did not finish is not."""

from hypothesis import given
from hypothesis import strategies as st

from ringfold.master.verdicts import Cause, broken_edge, decide, explain, lost, summary
from ringfold.wire.messages import OpRef, OpState, Reason, SealedOp

OP = OpRef(0, 3)
DEATH = lost(9, "was lost: its connection closed")


def sealed(
    state: OpState, registrations: int = 4, payloads: list[bytes] | None = None, op: OpRef = OP
) -> list[SealedOp]:
    return [SealedOp(op, state, registrations, payloads)]


def test_an_op_done_by_every_survivor_commits() -> None:
    (verdict,) = decide({1: sealed("done", 4), 2: sealed("done", 6)}, [DEATH])
    assert verdict.commit
    assert verdict.registrations == 6
    assert verdict.reason is None


def test_an_op_that_a_survivor_has_not_finished_aborts_and_names_the_dead() -> None:
    (verdict,) = decide({1: sealed("done"), 2: sealed("unfinished")}, [DEATH])
    assert not verdict.commit
    assert verdict.reason == Reason("lost", "peer 9 was lost: its connection closed", [9])


def test_an_op_that_a_survivor_does_not_list_aborts() -> None:
    (verdict,) = decide({1: sealed("done"), 2: []}, [DEATH])
    assert not verdict.commit


def test_the_count_of_a_peer_that_committed_is_that_of_all() -> None:
    """The one that returned has returned from `are_peers_pending` already; the others must answer the same."""
    (verdict,) = decide({1: sealed("done", 9), 2: sealed("committed", 5)}, [DEATH])
    assert (verdict.commit, verdict.registrations) == (True, 5)


def test_a_small_op_commits_with_the_payloads_of_the_survivor_that_has_them() -> None:
    (verdict,) = decide({1: sealed("unfinished"), 2: sealed("committed", 5, [b"x", b"y"]), 3: []}, [DEATH])
    assert (verdict.commit, verdict.payloads, verdict.registrations) == (True, [b"x", b"y"], 5)


def test_payloads_that_no_peer_needs_are_not_sent() -> None:
    (verdict,) = decide({1: sealed("committed", 5, [b"x"]), 2: sealed("committed", 5, [b"x"])}, [DEATH])
    assert (verdict.commit, verdict.payloads) == (True, None)


def test_a_small_op_whose_result_died_with_its_holder_aborts() -> None:
    (verdict,) = decide({1: sealed("unfinished"), 3: sealed("unfinished")}, [DEATH])
    assert not verdict.commit


def test_only_the_guilty_op_carries_the_fault() -> None:
    fault = Reason("usage", "different calls", [1, 2])
    other = OpRef(1, 0)
    seals = {1: sealed("unfinished") + sealed("unfinished", op=other), 2: []}
    guilty, innocent = decide(seals, [Cause(fault, OP)])
    assert guilty.reason == fault
    assert innocent.reason is not None
    assert innocent.reason.kind == "edge", "another op's fault can be retried"


def test_the_first_fault_of_an_op_is_its_reason_unless_it_commits() -> None:
    first, second = Reason("deadline", "waited"), Reason("usage", "mismatch")
    (aborted,) = decide({1: sealed("unfinished")}, [Cause(first, OP), Cause(second, OP)])
    assert aborted.reason == first
    (committed,) = decide({1: sealed("committed"), 2: sealed("done")}, [Cause(first, OP)])
    assert committed.commit


def test_a_death_explains_more_than_an_edge_and_many_causes_are_cut_short() -> None:
    edge = broken_edge(1, 2, "reset")
    assert explain([edge, DEATH]).peers == [9]
    assert explain([edge]).kind == "edge"
    assert explain([Cause(Reason("cancelled", "gave up", [4]))]).kind == "cancelled"
    assert summary([lost(peer, "left") for peer in range(5)]) == "peer 0 left; peer 1 left; peer 2 left; and 2 more"
    assert summary([DEATH, DEATH]) == DEATH.reason.text


STATES: list[OpState] = ["unfinished", "done", "committed"]


@given(
    members=st.integers(1, 6),
    done=st.sets(st.integers(0, 5)),
    evidence=st.sets(st.integers(0, 5)),
    dead=st.sets(st.integers(0, 5)),
    small=st.booleans(),
)
def test_what_any_survivor_returned_is_committed_and_nothing_unfinished_is(
    members: int, done: set[int], evidence: set[int], dead: set[int], small: bool
) -> None:
    """Play an op as the peers do: evidence reaches a peer only after Done of every member; then some die."""
    done &= set(range(members))
    complete = len(done) == members
    returned = evidence & set(range(members)) if complete else set()
    seals: dict[int, list[SealedOp]] = {}
    for peer in set(range(members)) - dead:
        payloads = [b"p"] * members if small and peer in returned else None
        finished: OpState = "done" if peer in done and not small else "unfinished"
        seals[peer] = sealed("committed" if peer in returned else finished, 1, payloads)
    for verdict in decide(seals, [DEATH]):
        alive_returned = returned & set(seals)
        if alive_returned:
            assert verdict.commit
        if verdict.commit and small and set(seals) - returned:
            assert verdict.payloads == [b"p"] * members, "all can be given the result"
        if verdict.commit and not small:
            assert set(seals) <= done, "all survivors have the result"
        if not verdict.commit:
            assert not alive_returned
            assert verdict.reason is not None


@given(
    st.dictionaries(
        st.integers(1, 5), st.lists(st.tuples(st.integers(0, 2), st.sampled_from(STATES)), unique_by=lambda x: x[0])
    )
)
def test_every_named_op_gets_exactly_one_verdict_in_order(seals: dict[int, list[tuple[int, OpState]]]) -> None:
    listed = {peer: [SealedOp(OpRef(0, seq), state, 1) for seq, state in ops] for peer, ops in seals.items()}
    verdicts = decide(listed, [DEATH])
    assert [v.op.sequence for v in verdicts] == sorted({seq for ops in seals.values() for seq, _ in ops})
