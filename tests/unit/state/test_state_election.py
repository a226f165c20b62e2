"""Whose state wins: each rule by itself, then what must hold whatever is offered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfold.state.election import DivergedPeer, ElectedState, ElectionResult, FinishedSync, NoWinner, diverged, elect
from ringfold.state.manifest import digest_of
from ringfold.wire.messages import KeyOffer, Offer, Reason, SyncStrategy


def key(
    name: str, content: str, dtype: str = "float32", shape: tuple[int, ...] = (4,), differs: bool = False
) -> KeyOffer:
    assert len(content) <= 8
    return KeyOffer(name, dtype, list(shape), content.encode().ljust(8, b"."), differs)


def offer(
    revision: int,
    content: str = "a",
    strategy: SyncStrategy = "enforce-popular",
    *,
    torn: bool = False,
    stepped: bool = False,
    rollback: bool = False,
    keys: list[KeyOffer] | None = None,
) -> Offer:
    return Offer(revision, strategy, "rf64", keys or [key("model", content)], torn, stepped, rollback)


def finished(revision: int, participants: set[int], content: str = "a") -> FinishedSync:
    return FinishedSync(revision, frozenset(participants), digest_of(offer(revision, content)))


def plan(decision: ElectionResult) -> ElectedState:
    assert isinstance(decision, ElectedState), decision
    return decision


def failed(decision: ElectionResult) -> dict[int, Reason]:
    assert isinstance(decision, NoWinner), decision
    return decision.reasons


# Nothing finished yet


def test_equal_states_need_nothing() -> None:
    result = plan(elect({0: offer(0), 1: offer(0)}, None))
    assert (result.revision, result.holders, result.fetch, result.rejected) == (0, [0, 1], {}, {})


def test_the_most_popular_content_wins() -> None:
    result = plan(elect({0: offer(0, "x"), 1: offer(0, "a"), 2: offer(0, "a")}, None))
    assert result.holders == [1, 2]
    assert result.fetch == {0: [(0, b"a.......")]}


def test_a_tie_goes_to_the_longest_member() -> None:
    offers = {3: offer(0, "a"), 4: offer(0, "b"), 5: offer(0, "b"), 6: offer(0, "a")}
    assert plan(elect(offers, None)).holders == [3, 6]


def test_a_loaded_checkpoint_wins_over_any_number_of_fresh_starts() -> None:
    result = plan(elect({0: offer(0), 1: offer(0), 2: offer(700, "loaded")}, None))
    assert (result.revision, result.holders, sorted(result.fetch)) == (700, [2], [0, 1])


def test_only_keys_that_differ_are_fetched() -> None:
    mine = offer(0, keys=[key("a", "1"), key("b", "x"), key("c", "3")])
    theirs = offer(1, keys=[key("a", "1"), key("b", "2"), key("c", "3")])
    assert plan(elect({0: mine, 1: theirs}, None)).fetch == {0: [(1, b"2.......")]}


def test_equal_content_at_another_revision_holds_but_does_not_fetch() -> None:
    result = plan(elect({0: offer(3), 1: offer(4)}, None))
    assert (result.revision, result.holders, result.fetch) == (4, [0, 1], {})


def test_content_that_may_differ_is_neither_voted_on_nor_fetched() -> None:
    mine = offer(0, keys=[key("m", "1"), key("own", "x", differs=True)])
    theirs = offer(0, keys=[key("m", "1"), key("own", "y", differs=True)])
    assert plan(elect({0: mine, 1: theirs}, None)).holders == [0, 1]


def test_a_state_without_arrays_is_a_revision_alone() -> None:
    empty = [Offer(revision, "enforce-popular", "rf64", []) for revision in (3, 5)]
    assert plan(elect(dict(enumerate(empty)), None)).revision == 5


# After a finished sync


def test_one_increment_is_next() -> None:
    result = plan(elect({0: offer(6, "b"), 1: offer(6, "b")}, finished(5, {0, 1})))
    assert (result.revision, result.holders) == (6, [0, 1])


def test_nothing_happened_since_is_fine() -> None:
    assert plan(elect({0: offer(5), 1: offer(5)}, finished(5, {0, 1}))).revision == 5


def test_peers_that_joined_since_receive_whatever_they_bring() -> None:
    offers = {0: offer(6, "b"), 7: offer(900, "z"), 8: offer(900, "z"), 9: offer(6, "z")}
    result = plan(elect(offers, finished(5, {0, 1})))
    assert (result.revision, result.holders, sorted(result.fetch)) == (6, [0], [7, 8, 9])


@pytest.mark.parametrize("revision", [0, 4, 7, 100])
def test_a_skipped_or_repeated_revision_is_a_violation_of_that_peer_alone(revision: int) -> None:
    result = plan(elect({0: offer(6, "b"), 1: offer(revision, "b"), 2: offer(6, "b")}, finished(5, {0, 1, 2})))
    assert result.participants == [0, 2]
    reason = result.rejected[1]
    assert (reason.kind, reason.peers, reason.numbers) == ("revision", [1], [6, revision])
    assert "peer 1 has revision" in reason.text


def test_if_all_violate_the_rule_all_get_the_reason() -> None:
    reasons = failed(elect({0: offer(9), 1: offer(8)}, finished(5, {0, 1})))
    assert {peer: reason.numbers for peer, reason in reasons.items()} == {0: [6, 9], 1: [6, 8]}


def test_receivers_get_the_reason_when_no_voter_is_left() -> None:
    reasons = failed(elect({0: offer(9), 7: offer(0)}, finished(5, {0})))
    assert (reasons[0].kind, reasons[7].kind) == ("revision", "state")


def test_a_step_loop_may_have_counted_further() -> None:
    offers = {0: offer(9, "b", stepped=True), 1: offer(9, "b", stepped=True)}
    assert plan(elect(offers, finished(5, {0, 1}))).revision == 9


def test_a_step_loop_does_not_go_back() -> None:
    reasons = failed(elect({0: offer(4, stepped=True)}, finished(5, {0})))
    assert reasons[0].kind == "revision"


def test_the_highest_valid_revision_wins_over_the_most_popular_one() -> None:
    result = plan(elect({0: offer(5), 1: offer(5), 2: offer(6, "b")}, finished(5, {0, 1, 2})))
    assert (result.revision, result.holders, sorted(result.fetch)) == (6, [2], [0, 1])


def test_content_that_changed_without_a_new_revision_is_overwritten() -> None:
    result = plan(elect({0: offer(5, "x"), 1: offer(5, "x"), 2: offer(5)}, finished(5, {0, 1, 2})))
    assert (result.holders, sorted(result.fetch)) == ([2], [0, 1])


def test_if_all_changed_without_a_new_revision_there_is_no_candidate() -> None:
    reasons = failed(elect({0: offer(5, "x"), 1: offer(5, "y")}, finished(5, {0, 1})))
    assert {reason.kind for reason in reasons.values()} == {"state"}
    assert "peer 0 was changed, but still has revision 5" in reasons[1].text


def test_a_new_revision_may_have_new_keys() -> None:
    keys = [key("model", "b"), key("more", "c")]
    assert plan(elect({0: offer(6, keys=keys), 1: offer(6, keys=keys)}, finished(5, {0, 1}))).holders == [0, 1]


# Torn


def test_a_torn_state_does_not_vote() -> None:
    result = plan(elect({0: offer(9, "z", torn=True), 1: offer(0)}, None))
    assert (result.revision, result.holders, sorted(result.fetch)) == (0, [1], [0])


def test_a_torn_participant_is_not_held_to_its_revision() -> None:
    result = plan(elect({0: offer(17, "z", torn=True), 1: offer(6, "b")}, finished(5, {0, 1})))
    assert (result.participants, sorted(result.fetch)) == ([0, 1], [0])


def test_only_torn_states_are_no_candidates() -> None:
    reasons = failed(elect({0: offer(0, torn=True)}, None))
    assert (reasons[0].kind, "peer 0 is torn" in reasons[0].text) == ("state", True)


# Lost


def test_if_all_peers_that_had_it_are_gone_the_state_is_lost() -> None:
    reasons = failed(elect({7: offer(0), 8: offer(3)}, finished(5, {0, 1})))
    for reason in reasons.values():
        assert (reason.kind, reason.numbers) == ("state_lost", [5])
        assert "revision 0 on peer 7; revision 3 on peer 8" in reason.text


def test_the_very_revision_from_disk_becomes_the_source() -> None:
    result = plan(elect({7: offer(0, "fresh"), 8: offer(5, "a")}, finished(5, {0, 1})))
    assert (result.revision, result.holders, sorted(result.fetch), result.rollback) == (5, [8], [7], False)


def test_the_right_revision_with_other_content_is_not_the_one_that_was_lost() -> None:
    reasons = failed(elect({8: offer(5, "other")}, finished(5, {0, 1})))
    assert reasons[8].kind == "state_lost"
    assert "with other content" in reasons[8].text


def test_a_newer_revision_from_elsewhere_is_not_the_one_that_was_lost() -> None:
    assert failed(elect({8: offer(6, "a")}, finished(5, {0, 1})))[8].kind == "state_lost"


def test_a_participant_that_is_torn_has_lost_it_too() -> None:
    offers = {0: offer(5, "z", torn=True), 8: offer(5, "a")}
    assert plan(elect(offers, finished(5, {0, 1}))).holders == [8]
    assert failed(elect({0: offers[0]}, finished(5, {0, 1})))[0].kind == "state_lost"


def test_an_older_revision_wins_if_all_agree_to_a_rollback() -> None:
    offers = {7: offer(3, "old", rollback=True), 8: offer(4, "older", rollback=True)}
    result = plan(elect(offers, finished(5, {0, 1})))
    assert (result.revision, result.holders, result.rollback) == (4, [8], True)


def test_one_peer_that_does_not_agree_prevents_a_rollback() -> None:
    offers = {7: offer(3, "old", rollback=True), 8: offer(4, "older")}
    assert failed(elect(offers, finished(5, {0, 1})))[7].kind == "state_lost"


def test_participants_may_agree_to_go_back_on_purpose() -> None:
    offers = {0: offer(3, "old", rollback=True), 1: offer(3, "old", rollback=True)}
    result = plan(elect(offers, finished(5, {0, 1})))
    assert (result.revision, result.rollback) == (3, True)


def test_agreeing_to_a_rollback_changes_nothing_while_there_is_a_candidate() -> None:
    offers = {0: offer(6, "b", rollback=True), 7: offer(99, "z", rollback=True), 8: offer(99, "z", rollback=True)}
    result = plan(elect(offers, finished(5, {0})))
    assert (result.revision, result.holders, result.rollback) == (6, [0], False)


# Strategies


def test_enforce_popular_is_for_all_or_none() -> None:
    reasons = failed(elect({0: offer(0), 1: offer(0, strategy="receive-only")}, None))
    assert set(reasons) == {0, 1}
    assert reasons[0].kind == "usage"
    assert reasons[0].peers == [1]
    assert "enforce-popular on peer 0; receive-only on peer 1" in reasons[0].text


def test_a_sender_wins_whatever_the_others_have() -> None:
    offers = {0: offer(9, "x", "receive-only"), 1: offer(9, "x", "receive-only"), 2: offer(3, "s", "send-only")}
    result = plan(elect(offers, None))
    assert (result.revision, result.holders, sorted(result.fetch)) == (3, [2], [0, 1])


def test_a_receiver_with_the_right_content_takes_part_but_never_sends() -> None:
    result = plan(elect({0: offer(3, "s", "receive-only"), 2: offer(3, "s", "send-only")}, None))
    assert (result.holders, result.participants, result.fetch) == ([2], [0, 2], {})


def test_equal_senders_share_the_work() -> None:
    offers = {0: offer(3, "s", "send-only"), 1: offer(3, "s", "send-only"), 2: offer(0, "x", "receive-only")}
    assert plan(elect(offers, None)).holders == [0, 1]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (offer(3, "t", "send-only"), "'model' has different content"),
        (offer(4, "s", "send-only"), "one has revision 3 and the other 4"),
        (offer(3, strategy="send-only", keys=[key("m", "s")]), "'m' is float32"),
    ],
)
def test_two_senders_that_differ_are_an_error_that_names_both(other: Offer, words: str) -> None:
    reasons = failed(elect({0: offer(3, "s", "send-only"), 1: other, 2: offer(0, "x", "receive-only")}, None))
    assert set(reasons) == {0, 1, 2}
    assert reasons[2].peers == [0, 1]
    assert words in reasons[2].text


def test_a_sender_that_lags_behind_another_one_differs_from_it() -> None:
    offers = {0: offer(5, strategy="send-only"), 1: offer(6, "b", "send-only")}
    assert failed(elect(offers, finished(5, {0, 1})))[0].peers == [0, 1]


def test_a_sender_that_may_not_vote_is_an_error() -> None:
    offers = {0: offer(6, "b", "receive-only"), 7: offer(6, "c", "send-only")}
    reasons = failed(elect(offers, finished(5, {0})))
    assert "peer 7 wants to send its state (send-only), but may not: it took no part" in reasons[0].text


def test_receivers_alone_have_no_candidate() -> None:
    reasons = failed(elect({0: offer(0, strategy="receive-only"), 1: offer(0, strategy="receive-only")}, None))
    assert "peer 0 only receives; peer 1 only receives" in reasons[1].text


# Structure


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([key("m", "1", shape=(10, 4))], r"peer 3: 'm' is float32 [10, 4] there, but float32 [10, 5] on peer 1"),
        ([key("m", "1", "float16", (10, 5))], "peer 3: 'm' is float16 [10, 5] there, but float32 [10, 5] on peer 1"),
        ([key("n", "1", shape=(10, 5))], "peer 3: 'm' is missing there, but is float32 [10, 5] on peer 1"),
        (
            [key("a", "1"), key("m", "1", shape=(10, 5))],
            "peer 3: 'a' is float32 [4] there, but is not there at all on peer 1",
        ),
        (
            [key("m", "1", shape=(10, 5), differs=True)],
            "peer 3: 'm' is float32 [10, 5] and may differ there, but float32 [10, 5] on peer 1",
        ),
    ],
)
def test_another_structure_is_rejected_with_both_sides(keys: list[KeyOffer], words: str) -> None:
    right = [key("m", "1", shape=(10, 5))]
    result = plan(elect({1: offer(0, keys=right), 2: offer(0, keys=right), 3: offer(0, keys=keys)}, None))
    assert result.participants == [1, 2]
    assert (result.rejected[3].kind, result.rejected[3].text, result.rejected[3].peers) == ("state", words, [3])


def test_another_hash_is_another_structure() -> None:
    other = Offer(0, "enforce-popular", "blake3", [KeyOffer("model", "float32", [4], bytes(32))])
    result = plan(elect({0: offer(0), 1: offer(0), 2: other}, None))
    assert result.rejected[2].text == "peer 2: its hash is blake3, but rf64 on peer 0"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (offer(-1), "-1 is no revision"),
        (offer(9, keys=[key("b", "1"), key("a", "1")]), "'a' is not in order"),
        (offer(9, keys=[key("a", "1"), key("a", "1")]), "'a' is not in order"),
        (offer(9, keys=[KeyOffer("a", "float32", [1], b"short")]), "5 bytes, not 8"),
        (offer(9, keys=[key("a", "1", shape=(-1,))]), "the shape"),
    ],
)
def test_an_offer_that_makes_no_sense_is_rejected(bad: Offer, words: str) -> None:
    result = plan(elect({0: offer(0), 1: bad}, None))
    assert (result.revision, words in result.rejected[1].text) == (0, True)


def test_what_is_remembered_is_what_was_decided() -> None:
    result = plan(elect({0: offer(6, "b"), 1: offer(5), 7: offer(0, "x")}, finished(5, {0, 1})))
    assert result.finished([0, 1]) == finished(6, {0, 1}, "b")


def test_a_decision_explains_itself() -> None:
    result = plan(elect({0: offer(6, "b"), 1: offer(9), 7: offer(0, "x")}, finished(5, {0, 1})))
    assert result.text == (
        "revision 6 of peer 0 wins; peer 7 fetches what differs; without peer 1; 1 of 1 votes at this revision"
    )


# What must hold whatever is offered

SHAPES = [[key("m", "1"), key("n", "1", differs=True)], [key("m", "2"), key("n", "2", differs=True)], [key("m", "1")]]
ALIKE = st.sampled_from([["enforce-popular"], ["send-only", "receive-only"]])


Ballot = tuple[dict[int, Offer], FinishedSync | None]


@st.composite
def ballots(draw: st.DrawFn) -> Ballot:
    strategies = draw(ALIKE)
    one = st.builds(
        lambda revision, keys, strategy, torn, stepped, rollback: Offer(
            revision, strategy, "rf64", keys, torn, stepped, rollback
        ),
        st.integers(4, 7),
        st.sampled_from(SHAPES),
        st.sampled_from(strategies),
        st.booleans() if draw(st.booleans()) else st.just(False),
        st.booleans(),
        st.just(True) if draw(st.booleans()) else st.booleans(),
    )
    offers = draw(st.dictionaries(st.integers(0, 6), one, min_size=1, max_size=6))
    if draw(st.booleans()):
        return offers, None
    last = FinishedSync(
        5, draw(st.frozensets(st.integers(0, 6))), digest_of(offer(5, keys=draw(st.sampled_from(SHAPES))))
    )
    return offers, last


@given(ballots(), st.data())
def test_the_order_of_offers_does_not_matter(ballot: Ballot, data: st.DataObject) -> None:
    offers, last = ballot
    assert elect(dict(data.draw(st.permutations(list(offers.items())))), last) == elect(offers, last)


@given(ballots())
def test_the_winner_is_a_voter_and_holders_have_its_content(ballot: Ballot) -> None:
    offers, last = ballot
    result = elect(offers, last)
    if isinstance(result, NoWinner):
        assert set(result.reasons) == set(offers)
        return
    here = last is not None and any(peer in last.participants and not offers[peer].torn for peer in offers)
    sources = [
        peer
        for peer, each in offers.items()
        if digest_of(each) == result.roots and each.revision == result.revision
        if not each.torn and each.strategy != "receive-only"
        if result.rollback or not here or (last is not None and peer in last.participants)
    ]
    assert sources, "the content that won is not that of a peer that may vote"
    assert set(sources) <= set(result.holders) | set(result.rejected)
    assert all(digest_of(offers[peer]) == result.roots for peer in result.holders)
    assert all(offers[peer].strategy != "receive-only" for peer in result.holders)


@given(ballots())
def test_each_peer_has_one_role_and_fetching_leads_to_the_winners_content(
    ballot: Ballot,
) -> None:
    offers, last = ballot
    result = elect(offers, last)
    if isinstance(result, NoWinner):
        return
    assert sorted([*result.participants, *result.rejected]) == sorted(offers)
    assert not set(result.fetch) & set(result.holders)
    assert set(result.fetch) | set(result.holders) <= set(result.participants)
    for peer in result.participants:
        keys = list(offers[peer].keys)
        for index, root in result.fetch.get(peer, []):
            assert not keys[index].may_differ
            keys[index] = KeyOffer(keys[index].name, keys[index].dtype, keys[index].shape, root)
        assert digest_of(Offer(0, "enforce-popular", "rf64", keys)) == result.roots


@given(ballots())
def test_a_finished_revision_is_not_lost_without_an_agreement(ballot: Ballot) -> None:
    offers, last = ballot
    result = elect(offers, last)
    if last is None or isinstance(result, NoWinner) or result.rollback:
        return
    assert result.revision >= last.revision
    if result.revision == last.revision:
        assert result.roots == last.roots


# Which peers should have had what the others have


def found(offers: dict[int, Offer], last: FinishedSync | None) -> list[DivergedPeer]:
    return diverged(offers, plan(elect(offers, last)), last)


def test_a_participant_with_other_content_at_the_winners_revision_has_diverged() -> None:
    here = [key("a", "1"), key("b", "2"), key("c", "3")]
    there = [key("a", "1"), key("b", "x"), key("c", "y")]
    offers = {0: offer(8, keys=here), 1: offer(8, keys=there), 2: offer(8, keys=here)}
    assert found(offers, finished(7, {0, 1, 2})) == [DivergedPeer(1, ["b", "c"], 7)]


def test_a_participant_that_changed_without_counting_has_diverged() -> None:
    assert found({0: offer(7), 1: offer(7, "x")}, finished(7, {0, 1})) == [DivergedPeer(1, ["model"], 7)]


def test_in_a_step_loop_it_is_the_last_sync_since_which_it_happened() -> None:
    offers = {peer: offer(112, content, stepped=True) for peer, content in enumerate("bbx")}
    assert found(offers, finished(100, {0, 1, 2})) == [DivergedPeer(2, ["model"], 100)]


@pytest.mark.parametrize(
    "other",
    [
        offer(8, "x", torn=True),
        offer(7),
        offer(8, keys=[key("model", "b"), key("seen", "x", differs=True)]),
    ],
    ids=["torn", "a revision behind", "may differ"],
)
def test_a_peer_that_is_not_expected_to_agree_has_not_diverged(other: Offer) -> None:
    differs = len(other.keys) > 1
    own = offer(8, keys=[key("model", "b"), key("seen", "y", differs=True)]) if differs else offer(8, "b")
    assert found({0: own, 1: other}, finished(7, {0, 1})) == []


def test_a_newcomer_has_not_diverged() -> None:
    assert found({0: offer(8, "b"), 1: offer(8, "x")}, finished(7, {0})) == []
    assert found({0: offer(8, "b"), 1: offer(8, "x")}, None) == []


def test_a_peer_that_only_receives_has_not_diverged() -> None:
    offers = {0: offer(8, "b", "send-only"), 1: offer(8, "x", "receive-only")}
    assert found(offers, finished(7, {0, 1})) == []


def test_after_a_rollback_no_peer_has_diverged() -> None:
    offers = {0: offer(5, "b", rollback=True), 1: offer(5, "x", rollback=True)}
    assert found(offers, finished(7, {0, 1})) == []
