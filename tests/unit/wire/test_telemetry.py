"""Telemetry: packets on the wire, who is let in, and which flows a packet is about."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfold.agent.telemetry import MAX_PREFIX_LENGTHS, QueueTable, TelemetryIngest, TelemetrySettings
from ringfold.errors import ConfigError
from ringfold.wire.telemetry import (
    Body,
    Congestion,
    FlowAdded,
    FlowPath,
    FlowRemoved,
    Gate,
    GateSettings,
    NicQueues,
    Packet,
    Reason,
    Refusal,
    TxQueue,
    address_number,
    address_text,
    decode,
    encode,
    masked,
    prefix_number,
)

KEY = bytes(range(32))
HERE, THERE = address_number("10.0.0.1"), address_number("10.0.0.2")
T0 = 1_700_000_000_000_000_000
MS = 1_000_000
PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "telemetry.md"


def body(congestion: int = 10, *, source: int = HERE, destination: int = THERE, path: int = 0) -> Congestion:
    return Congestion(source, destination, path, congestion)


def toward(text: str, congestion: int, source: str = "any") -> Congestion:
    (start, start_bits), (end, end_bits) = prefix_number(source), prefix_number(text)
    return Congestion(start, end, 0, congestion, 0, start_bits, end_bits)


def reason(result: object) -> Reason | None:
    return result.reason if isinstance(result, Refusal) else None


# The packet


def test_the_vectors_of_the_page_are_what_is_encoded() -> None:
    vectors = [bytes.fromhex(re.sub(r"\s", "", block)) for block in PAGE.read_text().split("```\n")[1::2]]
    first = Packet(Congestion(HERE, THERE, 1, 180, 65_536), T0 + 1, T0)
    second = Packet(Congestion(0, address_number("2001:db8::2"), 0, 255, 1 << 20, 0, 128), 7, T0, 3, 1)
    third = Packet(NicQueues("eth0", HERE, 15_000, None), 10, T0)
    assert vectors == [encode(first), encode(second, KEY), encode(third)]
    assert [decode(vector, {1: KEY}) for vector in vectors] == [first, second, third]


numbers = st.integers(0, 2**64 - 2)
addresses = st.integers(0, 2**128 - 1)
small = st.integers(0, 2**32 - 1)
congestions = st.builds(
    lambda source, destination, path, level, depth, one, other: Congestion(
        masked(source, one), masked(destination, other), path, level, depth, one, other
    ),
    addresses,
    addresses,
    st.integers(0, 15),
    st.integers(0, 255),
    numbers,
    st.integers(0, 128),
    st.integers(0, 128),
)
flows = (addresses, addresses, small, small, st.integers(0, 255))
names = st.text("abc0.-@", max_size=15)
bodies = (
    congestions
    | st.builds(FlowAdded, *flows)
    | st.builds(FlowRemoved, *flows)
    | st.builds(NicQueues, names, addresses, st.none() | numbers, st.none() | numbers)
)


@given(bodies, numbers, numbers, small, st.none() | st.integers(0, 255))
def test_what_is_encoded_is_decoded(body: Body, sequence: int, at: int, sender: int, key_id: int | None) -> None:
    packet = Packet(body, sequence, at, sender, key_id)
    keys = {} if key_id is None else {key_id: KEY}
    assert decode(encode(packet, keys.get(key_id or 0)), keys) == packet


@given(st.binary(max_size=120))
def test_garbage_is_refused(datagram: bytes) -> None:
    assert isinstance(decode(datagram, {0: KEY}), Refusal)


@given(bodies, st.integers(0, 2**16), st.integers(1, 255))
def test_a_signed_packet_with_any_byte_changed_is_refused(body: Body, place: int, change: int) -> None:
    datagram = bytearray(encode(Packet(body, 1, T0, 0, 1), KEY))
    datagram[place % len(datagram)] ^= change
    assert isinstance(decode(bytes(datagram), {1: KEY}), Refusal)


PLAIN = encode(Packet(body(), 1, T0))
FAULTS: list[tuple[Reason, bytes]] = [
    ("length", b""),
    ("length", PLAIN[:-1]),
    ("length", PLAIN + b"\0"),
    ("magic", b"RFTN" + PLAIN[4:]),
    ("version", PLAIN[:4] + b"\2" + PLAIN[5:]),
    ("kind", PLAIN[:5] + b"\x09" + PLAIN[6:]),
    ("flags", PLAIN[:6] + b"\x02" + PLAIN[7:]),
    ("flags", PLAIN[:7] + b"\x05" + PLAIN[8:]),
    ("prefix", PLAIN[:60] + b"\x81" + PLAIN[61:]),
    ("prefix", PLAIN[:61] + b"\x10" + PLAIN[62:]),
    ("path", PLAIN[:62] + b"\x10" + PLAIN[63:]),
    ("key", encode(Packet(body(), 1, T0, 0, 2), KEY)),
    ("signature", encode(Packet(body(), 1, T0, 0, 1), b"another key of sixteen")),
]


@pytest.mark.parametrize(("why", "datagram"), FAULTS)
def test_a_malformed_packet_is_refused_for_what_is_wrong_with_it(why: Reason, datagram: bytes) -> None:
    assert reason(decode(datagram, {1: KEY})) == why


def test_addresses_of_both_families_have_one_form() -> None:
    assert address_text(address_number("10.0.0.1")) == "10.0.0.1"
    assert address_text(address_number("2001:db8::1")) == "2001:db8::1"
    assert prefix_number("10.1.2.3/8") == (address_number("10.0.0.0"), 104)


# The gate


def signed(sequence: int, at: int = T0, key: bytes = KEY) -> bytes:
    return encode(Packet(body(), sequence, at, 0, 1), key)


def test_senders_that_are_not_listed_are_refused_and_counted() -> None:
    gate = Gate(GateSettings(allow=["192.0.2.0/24"]))
    assert reason(gate.accept(T0, PLAIN, "198.51.100.1")) == "sender"
    assert reason(gate.accept(T0, PLAIN, "192.0.2.7")) is None
    assert (gate.accepted, dict(gate.refused)) == (1, {"sender": 1})


def test_by_default_only_this_host_is_heard() -> None:
    gate = Gate()
    assert reason(gate.accept(T0, PLAIN, "192.0.2.7")) == "sender"
    assert reason(gate.accept(T0, PLAIN, "::1")) is None


def test_an_ipv4_sender_on_an_ipv6_socket_is_the_same_sender() -> None:
    assert reason(Gate().accept(T0, PLAIN, "::ffff:127.0.0.1")) is None


def test_with_keys_an_unsigned_packet_is_refused() -> None:
    assert reason(Gate(GateSettings(keys={1: KEY})).accept(T0, PLAIN, "127.0.0.1")) == "unsigned"


def test_a_replayed_packet_is_refused_wherever_it_comes_from() -> None:
    gate = Gate(GateSettings(keys={1: KEY}, allow=["any"]))
    assert reason(gate.accept(T0, signed(5), "192.0.2.1")) is None
    assert reason(gate.accept(T0, signed(5), "192.0.2.2")) == "replayed"


def test_packets_that_overtook_each_other_are_all_taken_once() -> None:
    gate = Gate()
    order = [100, 102, 101, 99, 164, 101, 102]
    taken = [reason(gate.accept(T0, encode(Packet(body(), number, T0)), "127.0.0.1")) is None for number in order]
    assert taken == [True, True, True, True, True, False, False]


@given(st.lists(st.integers(0, 200), max_size=60))
def test_no_sequence_is_ever_taken_twice(order: list[int]) -> None:
    gate = Gate()
    taken = [
        number for number in order if reason(gate.accept(T0, encode(Packet(body(), number, T0)), "127.0.0.1")) is None
    ]
    assert len(taken) == len(set(taken))
    assert max(order, default=0) in [*taken, 0]


def test_a_sender_that_counts_anew_is_taken_if_its_time_goes_on() -> None:
    gate = Gate()
    gate.accept(T0, encode(Packet(body(), 10_000, T0)), "127.0.0.1")
    assert reason(gate.accept(T0, encode(Packet(body(), 1, T0)), "127.0.0.1")) == "replayed"
    assert reason(gate.accept(T0, encode(Packet(body(), 1, T0 + 1)), "127.0.0.1")) is None


def test_recordings_are_refused_after_their_sender_has_restarted() -> None:
    gate = Gate(GateSettings(keys={1: KEY}))
    before = [signed(10_000 + number, T0 + number) for number in range(100)]
    after = [signed(1 + number, T0 + 200 + number) for number in range(2)]
    for packet in (*before, *after):
        assert reason(gate.accept(T0, packet, "127.0.0.1")) is None
    for packet in (*before, *after):
        assert reason(gate.accept(T0 + 300, packet, "127.0.0.1")) == "replayed"
    assert reason(gate.accept(T0 + 400, signed(3, T0 + 400), "127.0.0.1")) is None


def test_a_recording_from_before_the_agent_started_is_refused_if_it_is_signed() -> None:
    assert reason(Gate(GateSettings(keys={1: KEY})).accept(T0 + 31 * 10**9, signed(1), "127.0.0.1")) == "clock"


def test_a_time_in_the_future_silences_nobody_without_a_signature() -> None:
    gate = Gate()
    spoofed, real = Packet(body(), 2**64 - 1, T0 + 3_600 * 10**9), Packet(body(), 1_000, T0 + 1)
    assert reason(gate.accept(T0, encode(spoofed), "127.0.0.1")) is None
    assert reason(gate.accept(T0 + 2, encode(real), "127.0.0.1")) is None
    assert reason(gate.accept(T0 + 3, encode(real), "127.0.0.1")) == "replayed"


def test_a_recording_of_a_sender_whose_clock_is_ahead_is_refused_if_it_is_signed() -> None:
    gate = Gate(GateSettings(keys={1: KEY}))
    times = [T0 + 20 * 10**9 + number for number in range(100)]
    packets = [signed(number, at) for number, at in enumerate(times)]
    assert all(reason(gate.accept(T0, packet, "127.0.0.1")) is None for packet in packets)
    assert reason(gate.accept(T0 + 10**9, packets[0], "127.0.0.1")) == "replayed"


def test_a_sequence_that_begins_anew_after_the_last_number_is_taken() -> None:
    gate = Gate()
    taken = [
        reason(gate.accept(T0 + step, encode(Packet(body(), number % 2**64, T0 + step)), "127.0.0.1")) is None
        for step, number in enumerate(range(2**64 - 100, 2**64 + 100))
    ]
    assert all(taken)


def test_senders_have_windows_of_their_own() -> None:
    gate = Gate()
    for sender in (1, 2):
        assert reason(gate.accept(T0, encode(Packet(body(), 5, T0, sender)), "127.0.0.1")) is None


def test_more_senders_than_are_remembered_do_no_harm() -> None:
    gate = Gate(GateSettings(most_senders=10))
    for sender in range(1_000):
        assert reason(gate.accept(T0, encode(Packet(body(), 5, T0, sender)), "127.0.0.1")) is None
    assert reason(gate.accept(T0, encode(Packet(body(), 5, T0, 999)), "127.0.0.1")) == "replayed"


def test_a_short_key_is_refused_as_a_setting() -> None:
    with pytest.raises(ConfigError, match="16 bytes"):
        GateSettings(keys={1: b"short"})


# What a packet is about


def test_an_exact_pair_speaks_of_its_path_only() -> None:
    table = QueueTable()
    table.add_observation(0, T0, body(70, path=1), T0)
    known = table.reading(0, HERE, THERE, 1)
    assert known is not None
    assert known.congestion == 70
    assert table.reading(0, HERE, THERE, 0) is None
    assert table.reading(0, THERE, HERE, 1) is None


def test_a_prefix_speaks_of_all_pairs_in_it() -> None:
    table = QueueTable()
    table.add_observation(0, T0, toward("10.0.0.0/24", 90), T0)
    assert table.reading(0, address_number("192.0.2.9"), THERE, 0) is not None
    assert table.reading(0, HERE, address_number("10.0.1.2"), 0) is None


def test_of_several_that_apply_the_highest_congestion_counts() -> None:
    table = QueueTable()
    for each in (body(20), toward("10.0.0.2", 200), toward("any", 90, "10.0.0.1")):
        table.add_observation(0, T0, each, T0)
    known = table.reading(0, HERE, THERE, 0)
    assert known is not None
    assert known.congestion == 200


def test_what_is_not_renewed_becomes_unknown() -> None:
    table = QueueTable(TelemetrySettings(stale_after_ms=100))
    table.add_observation(0, T0, body(0), T0)
    assert table.reading(100 * MS, HERE, THERE, 0) is not None
    assert table.reading(101 * MS, HERE, THERE, 0) is None


def test_a_stale_pair_gives_way_to_a_fresh_prefix() -> None:
    table = QueueTable(TelemetrySettings(stale_after_ms=100))
    table.add_observation(0, T0, body(250), T0)
    table.add_observation(150 * MS, T0, toward("any", 5), T0)
    known = table.reading(150 * MS, HERE, THERE, 0)
    assert known is not None
    assert known.congestion == 5


def test_an_older_measurement_does_not_replace_a_newer_one() -> None:
    table = QueueTable()
    assert table.add_observation(0, T0, body(9), T0)
    assert not table.add_observation(1, T0, body(8), T0 - 1)
    assert table.add_observation(2, T0, body(7), T0)


def test_a_sender_whose_clock_went_back_is_heard_again_when_the_old_word_is_stale() -> None:
    table = QueueTable(TelemetrySettings(stale_after_ms=100))
    table.add_observation(0, T0, body(9), T0)
    assert table.add_observation(101 * MS, T0, body(8), T0 - 10**15)


def test_age_counts_from_the_measurement_if_clocks_agree_else_from_the_arrival() -> None:
    table = QueueTable()
    for late_ms, age_ms in ((30, 31), (-5, 1), (10_000, 1)):
        table.add_observation(0, T0, body(1), T0 - late_ms * MS)
        known = QueueTable.reading(table, MS, HERE, THERE, 0)
        assert known is not None
        assert known.age_ns == age_ms * MS
        table = QueueTable()


def test_a_full_table_makes_room_from_what_is_stale_only() -> None:
    table = QueueTable(TelemetrySettings(stale_after_ms=100, max_entries=3))
    for path in range(4):
        table.add_observation(0, T0, body(1, path=path), T0)
    assert (len(table), table.counts["full"]) == (3, 1)
    assert table.add_observation(101 * MS, T0, body(1, path=9), T0)
    assert len(table) == 1


def test_a_measurement_from_the_future_gives_way_to_the_next_one() -> None:
    table = QueueTable()
    assert table.add_observation(0, T0, body(200), T0 + 3_600 * 10**9)
    assert table.add_observation(1, T0 + 1, body(10), T0 + 1)


def test_a_full_table_is_not_gone_through_for_every_packet(monkeypatch: pytest.MonkeyPatch) -> None:
    table = QueueTable(TelemetrySettings(max_entries=2))
    for number in range(3):
        table.add_observation(number, T0, body(source=number), T0)
    monkeypatch.setattr(table, "_by_bits", None)  # the entries are not visited
    table._expire(4)


def test_prefix_lengths_without_number_do_not_slow_the_table_down() -> None:
    table = QueueTable()
    for bits in range(129):
        table.add_observation(0, T0, replace(body(), source=masked(HERE, bits), source_bits=bits), T0)
    assert len(table) == MAX_PREFIX_LENGTHS


def test_the_ingest_returns_news_refusals_and_nothing() -> None:
    ingest = TelemetryIngest()
    assert ingest.datagram(0, T0, PLAIN, "127.0.0.1") == body()
    assert reason(ingest.datagram(0, T0, PLAIN, "127.0.0.1")) == "replayed"
    assert ingest.datagram(0, T0, encode(Packet(NicQueues("eth0", HERE, 1, 1), 2, T0)), "127.0.0.1") is None


@pytest.mark.parametrize(
    "body",
    [
        FlowPath(HERE, HERE + 1, 7, 3, 2, 14, "eth1"),
        FlowPath(HERE, HERE + 1, 7, 3, 15),
        TxQueue("eth0", HERE, 2, 63, 10**12, 10**9, 1_514, 65_536),
        TxQueue("eth0", HERE, 2, 0, None, None, 0, None),
    ],
)
def test_paths_of_flows_and_transmit_queues_keep_what_they_say(body: FlowPath | TxQueue) -> None:
    datagram = encode(Packet(body, 1, T0))
    decoded = decode(datagram)
    assert isinstance(decoded, Packet)
    assert decoded.body == body
    assert len(datagram) == 28 + (64 if isinstance(body, FlowPath) else 72)


def test_a_path_of_a_flow_beyond_the_last_is_refused() -> None:
    assert reason(decode(encode(Packet(FlowPath(HERE, HERE, 0, 1, 16), 1, T0)))) == "path"
