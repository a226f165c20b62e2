"""The moonshot as a function and as a program."""

import json
import subprocess
import sys

import pytest

from ringfold.errors import UsageError
from ringfold.topology.moonshot import moonshot, solve_json
from ringfold.topology.solve import Solution, best_ring, known_or

RATES = [(a, b, 1.0 + (a * 7 + b * 5) % 11) for a in range(18) for b in range(18) if a != b]
QUESTION = {"members": list(range(18)), "rates": RATES, "forbidden": [[0, 1]], "seed": 3, "budget": 300}


def run_program(question: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "ringfold.topology.moonshot"]
    return subprocess.run(program, input=json.dumps(question), capture_output=True, text=True, timeout=60, check=False)


def test_the_program_gives_the_functions_answer() -> None:
    ran = run_program(QUESTION)
    assert ran.returncode == 0, ran.stderr
    found = moonshot(list(range(18)), RATES, [], [(0, 1)], 3, 300)
    assert isinstance(found, Solution)
    assert json.loads(ran.stdout)["solution"]["ring"] == list(found.ring)
    assert json.loads(solve_json(json.dumps(QUESTION).encode())) == json.loads(ran.stdout)


def test_the_function_is_best_ring_with_plain_arguments() -> None:
    rate = known_or({(a, b): figure for a, b, figure in RATES}, 0)
    assert moonshot(range(18), RATES, budget=300) == best_ring(range(18), rate, known_or({}, 0), budget=300)


def test_the_present_ring_and_the_margin_are_used() -> None:
    start = tuple(range(18))
    found = moonshot(start, [], start=start, unknown=5.0, margin=0.1, budget=100)
    assert isinstance(found, Solution)
    assert found.kept


def test_no_ring_is_an_answer() -> None:
    solved = json.loads(solve_json(b'{"members": [1, 2, 3], "rates": [], "forbidden": [[1, 2], [1, 3]]}'))
    assert solved["solution"] is None
    assert solved["no_ring"]["proven"] is True


def test_a_bad_question_is_named_and_ends_the_program_with_two() -> None:
    ran = run_program({"members": [1, 2], "rates": "fast"})
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert "rates" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("question", [b"", b"[]", b'{"members": [1]}', b'{"members": [1], "rates": [], "speed": 1}'])
def test_an_invalid_request_is_refused(question: bytes) -> None:
    with pytest.raises(UsageError, match="not a request"):
        solve_json(question)
