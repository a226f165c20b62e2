"""What a soak says about its samples and its end. The soak itself is in `tests/e2e/test_soak.py`."""

import pytest

from ringfold.cli.soak.checks import checks
from ringfold.cli.soak.director import Outcome, Tally
from ringfold.cli.soak.growth import MIB, Sample, growth


def samples(count: int, grow_bytes: int = 0, grow_descriptors: float = 0) -> list[Sample]:
    return [Sample(100 * MIB + index * grow_bytes, 20 + int(index * grow_descriptors)) for index in range(count)]


def test_a_process_that_stays_as_it_is_is_flat() -> None:
    assert [each.is_flat for each in growth("x", samples(60))] == [True, True]


def test_memory_that_grows_all_the_time_is_found() -> None:
    memory, descriptors = growth("x", samples(60, grow_bytes=MIB // 2))
    assert not memory.is_flat
    assert descriptors.is_flat


def test_descriptors_that_leak_are_found() -> None:
    memory, descriptors = growth("x", samples(60, grow_descriptors=0.5))
    assert memory.is_flat
    assert not descriptors.is_flat


def test_what_a_process_takes_at_its_start_is_no_growth() -> None:
    begin = [Sample(10 * MIB, 3)] * 5
    assert all(each.is_flat for each in growth("x", begin + samples(60)))


def test_peaks_are_no_growth() -> None:
    rising = samples(60)
    rising[-3:] = [Sample(900 * MIB, 500)] * 3
    assert all(each.is_flat for each in growth("x", rising))


def test_a_few_samples_say_nothing() -> None:
    assert growth("x", samples(5)) == []


@pytest.mark.parametrize(
    ("digests", "left", "broken"),
    [
        ({"a": (9, 1), "b": (9, 1)}, [], []),
        ({"a": (9, 1), "b": (9, 2)}, [], ["all end with the same bits"]),
        ({"a": (9, 1), "b": (8, 1)}, [], ["all end with the same bits"]),
        ({"a": (9, 1)}, ["/dev/shm/ringfold-1"], ["nothing is left behind"]),
    ],
)
def test_a_soak_is_judged_by_how_it_ended(
    digests: dict[str, tuple[int, int]], left: list[str], broken: list[str]
) -> None:
    outcome = Outcome(Tally(), 1.0, 7, digests=digests, left_behind=left)
    assert [check.promise for check in checks(outcome) if not check.kept] == broken
