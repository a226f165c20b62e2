"""`are_peers_pending`: every question has one answer, whichever peer sends it first. Pure.

All peers ask at the same points of their programs, but at different times; in between a peer may register. So a
question has a name that all peers give it: the number of the last run-wide call that changed members or rings
(`update_topology`, `optimize_topology`), which is the same for all peers that continued from it, newcomers too; and the
count of questions since then. The first peer that asks decides the answer, and all others get the same one. No peer
waits for another. So the call is legal at any time, from any thread, with ops in flight.

A True stays True until the next run-wide call, so that two numbers describe all answers (`PendingAnswers`). They are
not journalled: each peer remembers the answers that it got, and sends them to the next master. A question that no
living peer has an answer to may be decided again.
"""

from ringfold.errors import RemoteProtocolError
from ringfold.wire.messages import PendingAnswers, PendingQuestion

MAX_CALLS = 4
"""The answers since so many run-wide calls are kept: a peer may ask while it is not aware of the newest call."""
MAX_QUESTIONS = 1 << 53


class PendingQuestions:
    """The answers since the last run-wide calls."""

    def __init__(self) -> None:
        self._known: dict[int, PendingAnswers] = {}

    def answer(self, question: PendingQuestion, last_call: int, is_pending: bool) -> bool:
        """The answer to a question. `is_pending` is the answer if this is the first peer that asks it."""
        known = self._known.get(question.call, PendingAnswers(question.call))
        if not 0 <= question.call <= last_call or not 1 <= question.number <= known.asked + 1:
            raise RemoteProtocolError(
                f"it asks question {question.number} of call {question.call}, and there were {known.asked} since then, "
                f"and {last_call} calls"
            )
        answer = known.answer(question.number)
        if answer is None:
            answer = is_pending
        self._keep(known.with_answer(question.number, answer))
        return answer

    def learn(self, answers: PendingAnswers) -> None:
        """A peer that returns to this master knows these answers."""
        if not (0 <= answers.call < MAX_QUESTIONS and 0 <= answers.true_from <= answers.asked < MAX_QUESTIONS):
            raise RemoteProtocolError(f"it knows impossible answers about pending peers: {answers}")
        known = self._known.get(answers.call)
        self._keep(answers if known is None else known.with_others(answers))

    def _keep(self, answers: PendingAnswers) -> None:
        self._known[answers.call] = answers
        for old in sorted(self._known)[:-MAX_CALLS]:
            del self._known[old]
