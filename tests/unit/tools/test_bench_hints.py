"""The parts of `ringfold bench hints`, with small numbers."""

from ringfold.tools.bench import hints


def test_a_read_is_measured() -> None:
    row = hints.read_cost()
    assert isinstance(row["read_ns"], float)
    assert 0 < row["read_ns"] <= row["worst_turn_ns"]


def test_packets_are_followed_into_shared_memory() -> None:
    assert hints.telemetry(packets=20)["count"] == 20


def test_flows_are_registered_and_removed() -> None:
    row = hints.registry(flows=500)
    assert row["flows"] == 500
    assert row["flows_per_s"] > 0
    assert row["client_flows_per_s"] > 0


def test_reads_against_killed_writers_count_if_there_was_something_to_read() -> None:
    row = hints.torn(reads=200_000)
    assert row["hints"] + row["busy"] == 200_000
    assert row["hints"] > 0
    assert row["torn"] == 0
    assert row["kills"] >= 1
