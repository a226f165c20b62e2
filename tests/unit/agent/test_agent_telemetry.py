"""Reports to switches: said on change and on time, repeated for those who missed them."""

import asyncio

from ringfold.agent.host_monitor import HostMonitor
from ringfold.agent.monitors import NicReading
from ringfold.agent.telemetry import Reporter, ReportSettings
from ringfold.runtime.clock import unix_ns
from ringfold.wire.telemetry import (
    Congestion,
    FlowAdded,
    FlowPath,
    FlowRemoved,
    Gate,
    GateSettings,
    NicQueues,
    Packet,
    TxQueue,
    decode,
)

MS = 1_000_000
T0 = 1_700_000_000_000_000_000


def said(datagrams: list[bytes], keys: dict[int, bytes] | None = None) -> list[object]:
    packets = [decode(datagram, keys) for datagram in datagrams]
    assert all(isinstance(packet, Packet) for packet in packets)
    return [packet.body for packet in packets if isinstance(packet, Packet)]


def depth(tx_bytes: int | None, rx_bytes: int | None = None) -> dict[tuple[str, int], NicReading]:
    return {("eth0", 7): NicReading(tx_bytes=tx_bytes, rx_bytes=rx_bytes)}


def flow(slot: int) -> FlowAdded:
    return FlowAdded(1, 2, slot, 1, 2)


def test_a_queue_that_changed_is_reported_at_once() -> None:
    reporter = Reporter(T0, 1)
    reporter.step(0, T0, depth(100_000))
    assert said(reporter.step(1, T0, depth(110_000))) == [NicQueues("eth0", 7, 110_000, None)]


def test_a_queue_that_hardly_changed_waits_for_the_timer() -> None:
    reporter = Reporter(T0, 1)
    reporter.step(0, T0, depth(100_000))
    assert reporter.step(MS - 1, T0, depth(100_100)) == []
    assert said(reporter.step(MS, T0, depth(100_100))) == [NicQueues("eth0", 7, 100_100, None)]


def test_an_empty_queue_is_repeated_rarely() -> None:
    reporter = Reporter(T0, 1)
    reports = [len(reporter.step(now * MS, T0, depth(0, 0))) for now in range(201)]
    assert [now for now, count in enumerate(reports) if count] == [0, 100, 200]


def test_becoming_empty_is_a_change_however_small() -> None:
    reporter = Reporter(T0, 1)
    reporter.step(0, T0, depth(60))
    assert said(reporter.step(1, T0, depth(0))) == [NicQueues("eth0", 7, 0, None)]


def test_both_addresses_of_one_nic_are_reported() -> None:
    reading = NicReading(tx_bytes=100)
    said_of = said(Reporter(T0, 1).step(0, T0, {("eth0", 7): reading, ("eth0", 8): reading}))
    assert said_of == [NicQueues("eth0", 7, 100, None), NicQueues("eth0", 8, 100, None)]


def test_a_nic_of_which_nothing_is_known_is_not_reported() -> None:
    assert Reporter(T0, 1).step(0, T0, depth(None)) == []


def test_flows_are_reported_when_they_come_and_when_they_go() -> None:
    reporter = Reporter(T0, 1)
    assert said(reporter.flow_added(T0, flow(3))) == [flow(3)]
    assert said(reporter.flow_removed(T0, flow(3))) == [FlowRemoved(1, 2, 3, 1, 2)] * 2


def test_every_flow_is_repeated_within_the_round_and_those_that_ended_are_not() -> None:
    reporter = Reporter(T0, 1)
    for slot in range(50):
        reporter.flow_added(T0, flow(slot))
    reporter.flow_removed(T0, flow(9))
    steps = [said(reporter.step(now * MS, T0, {})) for now in range(1_051)]
    repeated = [body.slot for step in steps for body in step if isinstance(body, FlowAdded)]
    assert set(repeated) == set(range(50)) - {9}
    assert len(repeated) < 60
    assert max(len(step) for step in steps) <= 2


def test_a_flow_that_comes_while_others_are_repeated_has_its_turn_too() -> None:
    reporter = Reporter(T0, 1)
    reporter.flow_added(T0, flow(0))
    reporter.step(0, T0, {})
    reporter.flow_added(T0, flow(1))
    bodies = [body for now in range(1, 1_100) for body in said(reporter.step(now * MS, T0, {}))]
    assert {body.slot for body in bodies if isinstance(body, FlowAdded)} == {0, 1}


def test_sequences_grow_also_over_a_restart() -> None:
    def sequences(reporter: Reporter) -> list[int]:
        packets = [decode(datagram) for slot in range(3) for datagram in reporter.flow_added(T0, flow(slot))]
        return [packet.sequence for packet in packets if isinstance(packet, Packet)]

    before, after = sequences(Reporter(T0, 1)), sequences(Reporter(T0 + 10**9, 1))
    assert before == sorted(set(before))
    assert before[-1] < after[0]


def test_reports_are_signed_if_there_is_a_key() -> None:
    key = bytes(range(16))
    reporter = Reporter(T0, 1, ReportSettings(key_id=4, key=key))
    assert said(reporter.flow_added(T0, flow(0)), {4: key}) == [flow(0)]


def test_agents_with_one_key_have_windows_of_their_own() -> None:
    """The agents of two hosts forward to a third; reports of the slower one were measured earlier."""
    key, gate = bytes(range(16)), Gate(GateSettings(keys={4: bytes(range(16))}, allow=["any"]))
    forwarders = [_forwarder(ReportSettings(key_id=4, key=key)) for _ in range(2)]
    now_ns = unix_ns()
    for step in range(10):
        for forwarder in forwarders:
            packet = forwarder.forwarded(now_ns - step, Congestion(1, 2, 0, 100))
            assert isinstance(gate.accept(now_ns, packet, "10.0.0.9"), Packet)


def test_the_reports_and_the_forwards_of_an_agent_are_different_senders() -> None:
    async def senders() -> set[int]:
        sent: list[bytes] = []
        monitor = HostMonitor(lambda event: None, watch=None, report_to=("127.0.0.1:9",))
        assert monitor._reporter is not None
        sent += monitor._reporter.flow_added(T0, flow(0))
        sent.append(monitor._forwarder.forwarded(T0, Congestion(1, 2, 0, 100)))
        monitor.close()
        return {packet.sender for datagram in sent if isinstance(packet := decode(datagram), Packet)}

    found = asyncio.run(senders())
    assert len(found) == 2
    assert 0 not in found


def _forwarder(settings: ReportSettings) -> Reporter:
    async def made() -> Reporter:
        monitor = HostMonitor(lambda event: None, watch=None, reports=settings)
        monitor.close()
        return monitor._forwarder

    return asyncio.run(made())


def test_a_flow_is_reported_with_its_paths_and_so_it_is_repeated() -> None:
    reporter = Reporter(T0, 1)
    flow = FlowAdded(1, 2, 5, 9, 2)
    paths = [FlowPath(1, 2, 5, 9, 0, 3, "eth0"), FlowPath(11, 12, 5, 9, 1, 4, "eth1")]
    assert said(reporter.flow_added(T0, flow, paths)) == [flow, *paths]
    reporter.step(0, T0, {})
    assert said(reporter.step(2_000 * MS, T0, {})) == [flow, *paths]
    reporter.flow_removed(T0, flow)
    assert said(reporter.step(4_000 * MS, T0, {})) == []


def test_transmit_queues_are_reported_about_once_a_second_where_the_kernel_has_them() -> None:
    reporter = Reporter(T0, 1)
    reading = NicReading(interface_index=4, queue_counts={0: (100, 2), 1: (7, None)}, queue_limits={1: (10, 20)})
    nics = {("eth0", 7): reading, ("eth1", 8): NicReading()}
    queues = [TxQueue("eth0", 7, 4, 0, 100, 2), TxQueue("eth0", 7, 4, 1, 7, None, 10, 20)]
    assert said(reporter.step(0, T0, nics)) == queues
    assert said(reporter.step(500 * MS, T0, nics)) == []
    assert said(reporter.step(1_000 * MS, T0, nics)) == queues
