"""What the agent reports about a NIC's queue, beside what `tc -s` reports."""

import json
import socket
import statistics
import subprocess

import pytest

from ringfold.agent.monitors import NicReading, QdiscMonitor, pause_count
from ringfold.agent.telemetry import Reporter
from ringfold.runtime.netlink import EthtoolReader, QdiscReader, interface_index
from ringfold.runtime.network import interfaces
from ringfold.tools.shaped import HUB, Shape, ShapedNetwork, missing
from ringfold.wire.telemetry import NicQueues, Packet, address_number, decode

pytestmark = [pytest.mark.netns, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

SO_SNDBUFFORCE = 32
DEADLINE_S = 20


def tc(device: str) -> dict[str, int | str]:
    """The root qdisc by iproute2, in the namespace of the calling thread."""
    shown = subprocess.run(["tc", "-s", "-j", "qdisc", "show", "dev", device], capture_output=True, check=True)
    root: dict[str, int | str] = json.loads(shown.stdout)[0]
    return root


def fill(network: ShapedNetwork, count: int) -> socket.socket:
    """A socket on host 0 that has queued `count` datagrams of 1,400 bytes towards the hub."""
    with network.within(HUB):
        sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sink.bind((network.address(HUB), 9_000))
        sink.settimeout(DEADLINE_S)
    with network.within(0):
        source = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        source.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 8 << 20)
        source.connect((network.address(HUB), 9_000))
    with sink:
        source.send(b"first")  # the hub's hardware address must be known, or the kernel drops what waits for it
        sink.recv(10)
        for _ in range(count):
            source.send(bytes(1_400))
    return source


def reported(reporter: Reporter, address: str, reading: NicReading) -> int:
    """The depth in the packet that goes out for a reading."""
    (datagram,) = reporter.step(0, 0, {("eth0", address_number(address)): reading})
    packet = decode(datagram)
    assert isinstance(packet, Packet)
    assert isinstance(packet.body, NicQueues)
    assert packet.body.tx_bytes is not None
    return packet.body.tx_bytes


def test_reported_queues_agree_with_tc_within_ten_percent() -> None:
    with ShapedNetwork([Shape(up_mbit=0.1)]) as network, fill(network, 170), network.within(0):
        monitor = QdiscMonitor()
        try:
            before = reported(Reporter(0, 1), network.address(0), monitor.read("eth0"))
            shown = tc("eth0")
            after = reported(Reporter(0, 1), network.address(0), monitor.read("eth0"))
        finally:
            monitor.close()
    # The queue drains meanwhile: what tc reported lies between the two reports.
    assert after > 50_000, "the machine was too slow to look at the queue while it was there"
    assert before * 1.1 >= int(shown["backlog"]) >= after * 0.9
    assert statistics.mean((before, after)) == pytest.approx(int(shown["backlog"]), rel=0.1)


def test_a_shaped_queue_tells_its_limit_its_rate_and_its_drops() -> None:
    with ShapedNetwork([Shape(up_mbit=1)]) as network, fill(network, 400), network.within(0), QdiscReader() as reader:
        queue = reader.root(interface_index("eth0"))
        shown = tc("eth0")
    assert queue is not None
    assert (queue.kind, queue.rate_bytes_s) == ("tbf", 125_000)
    assert queue.limit_bytes == 4 * (65_536 + 1_514)
    assert queue.drops == shown["drops"]
    assert queue.drops > 0


def test_a_nic_without_a_shaper_has_nothing_waiting_and_one_that_is_not_there_raises() -> None:
    with ShapedNetwork([Shape()]) as network, network.within(0), QdiscReader() as reader:
        queue = reader.root(interface_index("eth0"))
        assert queue is None or queue.backlog_bytes == 0
        with pytest.raises(OSError, match="No such device"):
            reader.root(9_999)


def test_addresses_and_statistics_of_a_nic_are_found() -> None:
    with ShapedNetwork([Shape()]) as network, network.within(0):
        assert interfaces()[network.address(0)] == "eth0"
        reader = EthtoolReader()
        try:
            assert "peer_ifindex" in reader.statistics("eth0")
            assert pause_count(reader.statistics("eth0")) is None
            assert reader.statistics("lo") == {}
            with pytest.raises(OSError, match="No such device"):
                reader.statistics("eth7")
        finally:
            reader.close()
