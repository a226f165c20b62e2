"""One answer to every question about pending peers, whichever peer asks first."""

import itertools
from random import Random

import pytest

from ringfold.errors import RemoteProtocolError
from ringfold.master.pending import MAX_CALLS, PendingQuestions
from ringfold.wire.messages import PendingAnswers, PendingQuestion


def ask(questions: PendingQuestions, number: int, pending: bool, call: int = 3) -> bool:
    return questions.answer(PendingQuestion(call, number), 3, pending)


def test_the_first_peer_that_asks_decides_for_all() -> None:
    questions = PendingQuestions()
    assert ask(questions, 1, False) is False
    assert ask(questions, 2, True) is True
    assert ask(questions, 1, True) is False
    assert ask(questions, 2, False) is True


def test_a_true_stays_until_the_next_call() -> None:
    questions = PendingQuestions()
    assert ask(questions, 1, True) is True
    assert ask(questions, 2, False) is True
    assert questions.answer(PendingQuestion(4, 1), 4, False) is False


def test_the_answers_are_the_same_in_whatever_order_peers_ask() -> None:
    for seed in range(200):
        rng, questions, got = Random(seed), PendingQuestions(), dict[int, set[bool]]()
        next_of = dict.fromkeys(range(4), 1)
        for _ in range(40):
            peer = rng.randrange(4)
            got.setdefault(next_of[peer], set()).add(ask(questions, next_of[peer], rng.random() < 0.2))
            next_of[peer] += 1
        assert all(len(answers) == 1 for answers in got.values())


def test_another_master_gives_the_same_answers_if_a_peer_knows_them() -> None:
    for seed in range(200):
        rng, first = Random(seed), PendingQuestions()
        known = [PendingAnswers(3) for _ in range(3)]
        for number, peer in itertools.product(range(1, 6), range(3)):
            if rng.random() < 0.7 and known[peer].asked == number - 1:
                known[peer] = known[peer].with_answer(number, ask(first, number, rng.random() < 0.3))
        second = PendingQuestions()
        for answers in known:
            second.learn(answers)
        for answers in known:
            for number in range(1, answers.asked + 1):
                assert ask(second, number, rng.random() < 0.5) is answers.answer(number)


@pytest.mark.parametrize(("call", "number"), [(3, 0), (3, 2), (4, 1), (-1, 1)])
def test_a_question_that_no_correct_peer_asks_is_refused(call: int, number: int) -> None:
    with pytest.raises(RemoteProtocolError):
        ask(PendingQuestions(), number, False, call)


@pytest.mark.parametrize("answers", [PendingAnswers(-1), PendingAnswers(1, -1), PendingAnswers(1, 2, 3)])
def test_answers_that_cannot_be_are_refused(answers: PendingAnswers) -> None:
    with pytest.raises(RemoteProtocolError):
        PendingQuestions().learn(answers)


def test_old_calls_are_forgotten() -> None:
    questions = PendingQuestions()
    for call in range(MAX_CALLS + 3):
        questions.answer(PendingQuestion(call, 1), call, True)
    assert len(questions._known) == MAX_CALLS
