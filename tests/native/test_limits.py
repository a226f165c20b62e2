"""The limits of the native core are those of the Python code."""

from ringfold import _native
from ringfold.agent.registry import MAX_GENERATION
from ringfold.limits import MAX_CHANNELS, MAX_PATHS


def test_a_link_and_a_hint_have_as_many_paths_in_native_code_as_in_python() -> None:
    assert _native.HINT_MAX_PATHS == MAX_PATHS
    assert len(_native.Core().path_bytes(True)) == MAX_PATHS


def test_a_record_may_ask_for_as_many_channels_as_the_native_core_has() -> None:
    assert _native.MAX_CHANNELS == MAX_CHANNELS


def test_generations_of_slots_have_as_many_bits_in_native_code_as_in_python() -> None:
    assert _native.HINT_LAST_GENERATION == MAX_GENERATION
