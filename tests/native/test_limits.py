"""The limits of the native core are those of the Python code."""

from ringfold import _native
from ringfold.agent.registry import MAX_GENERATION
from ringfold.limits import MAX_PATHS


def test_a_link_and_a_hint_have_as_many_paths_in_native_code_as_in_python() -> None:
    assert _native.HINT_MAX_PATHS == MAX_PATHS
    assert len(_native.Core().path_bytes(True)) == MAX_PATHS


def test_generations_of_slots_have_as_many_bits_in_native_code_as_in_python() -> None:
    assert _native.HINT_LAST_GENERATION == MAX_GENERATION
