"""The same question with far more steps, as a program: `python -m ringfold.topology.moonshot`.

It reads one JSON object on stdin (a `Question`) and writes one on stdout (an `Answer`). The master starts it after an
`optimize_topology` of many members, and looks at the answer at the next one: a ring that is better by then is adopted
if the members are still the same. A process of its own, so that the master's event loop never waits for it.
"""

import sys
from collections.abc import Collection, Sequence

import msgspec

from ringfold.errors import UsageError
from ringfold.topology.ring import Edge
from ringfold.topology.solve import NoRing, Solution, best_ring, known_or
from ringfold.wire.decoding import decode

BUDGET = 400_000
"""Fifty times what is spent while the peers wait. For 64 members, about 20 seconds."""

Figures = Collection[tuple[int, int, float]]


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Links are (source, target, figure); one that is not named has `unknown` bytes a second and no delay."""

    members: list[int]
    rates: list[tuple[int, int, float]]
    delays: list[tuple[int, int, float]] = []
    forbidden: list[tuple[int, int]] = []
    start: list[int] = []
    unknown: float = 0.0
    margin: float = 0.0
    seed: int = 0
    budget: int = BUDGET


class Answer(msgspec.Struct, frozen=True):
    """Either a solution, or why there is none."""

    solution: Solution | None = None
    no_ring: NoRing | None = None


def moonshot(
    members: Sequence[int],
    rates: Figures,
    delays: Figures = (),
    forbidden: Collection[Edge] = (),
    seed: int = 0,
    budget: int = BUDGET,
    *,
    start: Sequence[int] = (),
    unknown: float = 0.0,
    margin: float = 0.0,
) -> Solution | NoRing:
    """`best_ring` with a large budget and plain arguments. What it relies on is what `best_ring` promises."""
    return best_ring(
        members,
        known_or({(source, target): figure for source, target, figure in rates}, unknown),
        known_or({(source, target): figure for source, target, figure in delays}, 0.0),
        budget=budget,
        seed=seed,
        start=start,
        forbidden={(source, target) for source, target in forbidden},
        margin=margin,
    )


def answer(asked: Question) -> Answer:
    """The answer to a question. UsageError if it makes no sense."""
    found = moonshot(**{field: getattr(asked, field) for field in Question.__struct_fields__})
    return Answer(no_ring=found) if isinstance(found, NoRing) else Answer(solution=found)


_question = msgspec.json.Decoder(Question)
_answer = msgspec.json.Decoder(Answer)


def decode_answer(said: bytes) -> Answer:
    """What the program wrote; RemoteProtocolError if it is no answer."""
    return decode(_answer.decode, said, what="no answer of a moonshot: ")


def answer_json(question: bytes) -> bytes:
    """JSON in, JSON out."""
    asked = decode(_question.decode, question, UsageError, "no question for a moonshot: ")
    return msgspec.json.encode(answer(asked))


def main() -> int:
    try:
        said = answer_json(sys.stdin.buffer.read())
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.buffer.write(said + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
