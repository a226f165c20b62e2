"""Lineages: what is in whose past, and from whose checkpoint a run continues when all peers were lost."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_state_election import failed, finished, offer, plan

from ringfold.state.ancestry import branch_of, is_abandoned, is_past, new_lineage
from ringfold.state.election import ElectedState, ElectionResult, NoWinner, elect
from ringfold.wire.messages import MAX_ANCESTORS, Branch, Lineage, Offer

OLD = Lineage("run", "old")
NEW = new_lineage("run", "new", OLD, 140)
"""The run went back from 150 to 140."""


def test_a_lineages_past_is_its_own_up_to_what_is_finished() -> None:
    assert is_past(Branch("old", 100), OLD, newest=100)
    assert not is_past(Branch("old", 101), OLD, newest=100)
    assert is_past(Branch("old", 101), OLD)


def test_of_an_ancestor_the_revisions_up_to_the_branch_are_past() -> None:
    assert is_past(Branch("old", 140), NEW, newest=145)
    assert not is_past(Branch("old", 150), NEW, newest=200)
    assert not is_past(Branch("other", 10), NEW)


def test_what_comes_after_the_branch_is_abandoned() -> None:
    assert is_abandoned(Branch("old", 141), NEW)
    assert not is_abandoned(Branch("old", 140), NEW)
    assert not is_abandoned(Branch("other", 500), NEW), "nothing is known of it"


def test_a_branch_from_an_earlier_revision_leaves_less_of_all_before_it() -> None:
    third = new_lineage("run", "third", NEW, 90)
    assert third.ancestors == [Branch("new", 90), Branch("old", 90)]


def test_the_oldest_ancestors_are_forgotten() -> None:
    lineage = OLD
    for number in range(MAX_ANCESTORS + 5):
        lineage = new_lineage("run", str(number), lineage, number)
    assert len(lineage.ancestors) == MAX_ANCESTORS
    assert not is_past(Branch("old", 0), lineage)


@given(st.lists(st.integers(0, 20), max_size=8))
def test_nothing_is_both_past_and_abandoned(branches: list[int]) -> None:
    lineage = Lineage("run", "0")
    for number, revision in enumerate(branches):
        lineage = new_lineage("run", str(number + 1), lineage, revision)
    for old in range(len(branches) + 1):
        for revision in range(22):
            branch = Branch(str(old), revision)
            assert is_past(branch, lineage) != is_abandoned(branch, lineage)


# Resume


def saved(revision: int, lineage: Lineage | None, content: str = "a", **more: object) -> Offer:
    """A checkpoint that is loaded and unchanged."""
    made = structs.replace(offer(revision, content, stepped=True), lineage=lineage, is_loaded=True)
    return structs.replace(made, **more)


def resumed(decision: ElectionResult) -> ElectedState:
    result = plan(decision)
    assert result.resumes
    assert result.rollback
    return result


def test_the_newest_checkpoint_of_the_lineage_wins() -> None:
    offers = {5: offer(0, "z"), 6: saved(100, OLD), 7: saved(80, OLD, "b")}
    result = resumed(elect(offers, finished(120, {1, 2}, "lost"), OLD))
    assert (result.revision, result.winner, result.holders) == (100, 6, [6])
    assert set(result.fetch) == {5, 7}


def test_an_abandoned_checkpoint_does_not_win_over_an_older_one_of_the_runs_history() -> None:
    offers = {5: saved(150, OLD, "x"), 6: saved(140, NEW)}
    assert resumed(elect(offers, finished(160, {1}, "lost"), NEW)).revision == 140


def test_the_most_popular_content_at_that_revision_wins_then_the_lowest_number() -> None:
    offers = {5: saved(100, OLD, "x"), 6: saved(100, OLD), 7: saved(100, OLD)}
    assert resumed(elect(offers, finished(120, {1}, "lost"), OLD)).winner == 6


def test_a_state_that_is_no_checkpoint_is_not_eligible() -> None:
    changed = structs.replace(saved(100, OLD), is_loaded=False)
    assert failed(elect({5: changed}, finished(120, {1}, "lost"), OLD))[5].kind == "state_lost"


@pytest.mark.parametrize("lineage", [None, Lineage("other run", "other")], ids=["no lineage", "another run"])
def test_a_checkpoint_of_another_history_only_receives(lineage: Lineage | None) -> None:
    foreign = saved(110, lineage, "x")
    assert resumed(elect({5: foreign, 6: saved(100, OLD)}, finished(120, {1}, "lost"), OLD)).winner == 6
    reason = failed(elect({5: foreign}, finished(120, {1}, "lost"), OLD))[5]
    assert reason.kind == "state_lost"
    assert ("of another run: other run" in reason.text) == (lineage is not None)


def test_a_checkpoint_newer_than_the_last_sync_is_not_eligible() -> None:
    """It was saved by a peer that left, and not compared with any other."""
    reason = failed(elect({5: saved(121, OLD)}, finished(120, {1}, "lost"), OLD))[5]
    assert reason.kind == "state_lost"
    assert "revision 121 on peer 5, newer than what all had" in reason.text


def test_the_last_revision_with_other_content_is_not_eligible() -> None:
    offers = {5: saved(120, OLD, "x"), 6: saved(100, OLD)}
    assert resumed(elect(offers, finished(120, {1}, "lost"), OLD)).revision == 100


def test_exactly_the_last_revision_is_no_rollback() -> None:
    result = plan(elect({5: saved(120, OLD), 6: saved(100, OLD, "b")}, finished(120, {1}), OLD))
    assert (result.revision, result.rollback, result.resumes) == (120, False, False)


def test_a_participant_that_is_here_decides_and_nothing_is_resumed() -> None:
    offers = {1: offer(121, "new", stepped=True), 6: saved(100, OLD)}
    result = plan(elect(offers, finished(120, {1}), OLD))
    assert (result.revision, result.resumes) == (121, False)


def test_a_torn_participant_with_a_checkpoint_resumes() -> None:
    offers = {1: offer(121, torn=True, stepped=True), 6: saved(100, OLD)}
    assert resumed(elect(offers, finished(120, {1}), OLD)).revision == 100


def test_a_newer_checkpoint_that_is_not_loaded_is_requested() -> None:
    lists = saved(150, OLD, "x", checkpoints=[Branch("old", 150), Branch("old", 135)])
    reasons = failed(elect({5: lists, 6: saved(130, OLD)}, finished(160, {1}, "lost"), NEW))
    assert {reason.checkpoint for reason in reasons.values()} == {Branch("old", 135)}
    assert {reason.kind for reason in reasons.values()} == {"state_lost"}


def test_what_is_loaded_is_not_requested_again() -> None:
    lists = saved(135, OLD, checkpoints=[Branch("old", 150), Branch("old", 135)])
    assert resumed(elect({5: lists}, finished(160, {1}, "lost"), NEW)).revision == 135


def test_if_all_agree_the_run_continues_from_the_runs_history_first_and_then_from_anything() -> None:
    abandoned = saved(150, OLD, "x", rollback=True)
    both = {5: abandoned, 6: saved(140, NEW, rollback=True)}
    assert resumed(elect(both, finished(160, {1}, "lost"), NEW)).revision == 140
    alone = plan(elect({5: abandoned}, finished(160, {1}, "lost"), NEW))
    assert (alone.revision, alone.rollback, alone.resumes) == (150, True, False)


def test_without_a_known_lineage_only_exactly_the_last_revision_will_do() -> None:
    """A journal of the version before."""
    assert failed(elect({5: saved(100, OLD)}, finished(120, {1}, "lost"), None))[5].kind == "state_lost"
    assert plan(elect({5: offer(120)}, finished(120, {1}), None)).revision == 120


def test_the_error_explains_what_to_do() -> None:
    text = failed(elect({5: offer(0)}, finished(534, {1}, "lost"), OLD))[5].text
    for words in (
        "revision 534 of the shared state is lost",
        "revision 0 on peer 5",
        "steps(state, checkpoint=DIR)",
        "start all peers with rollback=True",
        "join with another run name",
    ):
        assert words in text


# Nothing is finished: a new master without a journal, or all peers left


def test_of_two_lineages_of_a_former_run_the_one_that_contains_the_other_wins() -> None:
    offers = {5: saved(150, OLD, "x"), 6: saved(145, NEW)}
    assert plan(elect(offers, None)).revision == 145


def test_of_two_lineages_that_know_nothing_of_each_other_the_highest_revision_wins() -> None:
    offers = {5: saved(150, Lineage("one", "x"), "x"), 6: saved(145, Lineage("two", "y"))}
    assert plan(elect(offers, None)).revision == 150


def test_when_all_have_left_the_runs_own_history_comes_first() -> None:
    offers = {5: saved(150, OLD, "x"), 6: saved(700, Lineage("other", "y"), "y"), 7: saved(141, NEW)}
    assert plan(elect(offers, None, NEW)).revision == 141


def test_when_all_have_left_another_run_may_begin_with_its_own_checkpoints() -> None:
    offers = {6: saved(700, Lineage("other", "y"), "y"), 7: offer(0)}
    assert plan(elect(offers, None, NEW)).revision == 700


def test_when_all_have_left_an_abandoned_checkpoint_is_not_taken_for_the_run() -> None:
    reasons = failed(elect({5: saved(150, OLD, "x")}, None, NEW))
    assert reasons[5].kind == "state_lost"
    assert "of an abandoned branch" in reasons[5].text
    assert plan(elect({5: saved(150, OLD, "x", rollback=True)}, None, NEW)).revision == 150


def test_when_all_have_left_an_eligible_checkpoint_that_is_not_loaded_is_requested() -> None:
    lists = saved(150, OLD, "x", checkpoints=[Branch("old", 150), Branch("old", 140)])
    reasons = failed(elect({5: lists, 6: saved(130, OLD)}, None, NEW))
    assert reasons[5].checkpoint == Branch("old", 140)


# Whatever is offered

LINEAGES = [
    None,
    OLD,
    NEW,
    new_lineage("run", "third", NEW, 143),
    Lineage("other", "x"),
    new_lineage("run", "twin", OLD, 120),
]


@st.composite
def offered(draw: st.DrawFn) -> Offer:
    lineage, revision = draw(st.sampled_from(LINEAGES)), draw(st.integers(100, 160))
    listed = draw(st.lists(st.builds(Branch, st.sampled_from(["old", "new", "third", "x"]), st.integers(100, 160))))
    made = saved(revision, lineage, draw(st.sampled_from("abc")), checkpoints=listed, torn=draw(st.booleans()))
    return structs.replace(made, is_loaded=draw(st.booleans()))


@given(st.dictionaries(st.integers(5, 9), offered(), min_size=1), st.sampled_from(LINEAGES[1:4]))
def test_a_run_resumes_only_from_its_own_past_and_requests_only_that(
    offers: dict[int, Offer], present: Lineage
) -> None:
    decision = elect(offers, replace(finished(150, {1}, "lost")), present)
    if isinstance(decision, NoWinner):
        wanted = {reason.checkpoint for reason in decision.reasons.values()} - {None}
        assert all(branch is not None and is_past(branch, present, 150) for branch in wanted)
        return
    winner = offers[decision.winner]
    assert winner.lineage is not None
    assert winner.is_loaded
    assert is_past(branch_of(winner.lineage, winner.revision), present, 150)
    listed = [each for one in offers.values() for each in one.checkpoints if is_past(each, present, 150)]
    assert all(each.revision <= decision.revision for each in listed)
