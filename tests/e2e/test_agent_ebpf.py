"""The eBPF monitor on a real queue: it sees a burst that has drained before anybody looks."""

import pytest
from test_agent import until
from test_agent_queues import fill, tc

from ringfold.agent.monitors import EbpfMonitor, NicWatch, QdiscMonitor, open_monitors
from ringfold.runtime import bpf
from ringfold.runtime.bpf import QueueOffsets, QueuePeaks
from ringfold.runtime.netlink import interface_index
from ringfold.tools.shaped import HUB, Shape, ShapedNetwork, missing


def refused() -> str:
    """Why this kernel does not run the program; empty if it does."""
    if (why := missing()) is not None:
        return why
    try:
        QueuePeaks().close()
    except OSError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(refused()), reason=refused() or "it does")]


def test_the_peak_of_a_drained_queue_is_seen_once() -> None:
    with ShapedNetwork([Shape(up_mbit=20)]) as network, network.within(0):
        monitor, sampled = EbpfMonitor(), QdiscMonitor()
        monitor.read("eth0")
        with fill(network, 100):
            until(lambda: tc("eth0")["backlog"] == 0, "the queue does not drain")
        assert sampled.read("eth0").tx_bytes == 0
        peak = monitor.read("eth0").tx_bytes
        assert peak is not None
        assert 20_000 < peak <= 101 * 1_500
        assert (monitor.read("eth0").tx_bytes or 0) < peak / 10
        for each in (monitor, monitor, sampled):
            each.close()


def test_queues_of_other_namespaces_do_not_count() -> None:
    """Their interfaces may have the same index."""
    with ShapedNetwork([Shape(up_mbit=20)]) as network:
        with network.within(HUB):
            elsewhere = QueuePeaks()
        with network.within(0):
            here = QueuePeaks()
            index = interface_index("eth0")
        with fill(network, 20):
            until(lambda: here.take(index)[1] > 0, "no packet is counted")
        assert elsewhere.take(index) == (0, 0)
        here.close()
        elsewhere.close()


def test_the_watch_reads_it_before_the_samples() -> None:
    with ShapedNetwork([Shape(up_mbit=20)]) as network, network.within(0):
        watch = NicWatch(["ebpf"])
        assert watch.states()["ebpf"] == ""
        watch.add_address(network.address(0))
        watch.read(0)
        with fill(network, 100):
            until(lambda: tc("eth0")["backlog"] == 0, "the queue does not drain")
        [reading] = watch.read(1).values()
        assert reading.tx_bytes is not None
        assert reading.tx_bytes > 20_000
        assert reading.rate_bytes_s  # from the others
        watch.close()


def test_a_kernel_that_refuses_it_leaves_the_other_monitors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpf, "BTF_FILE", "/nonexistent")
    monitors = open_monitors(["ebpf", "qdisc"])
    assert "nonexistent" in monitors.states["ebpf"]
    assert monitors.states["qdisc"] == ""
    monitors.close()


@pytest.mark.parametrize("raw", [b"", b"garbage" * 10, b"\x9f\xeb\x01\x00" + bytes(40)])
def test_other_type_information_is_refused(raw: bytes) -> None:
    with pytest.raises(OSError, match=r"BTF|no Qdisc"):
        QueueOffsets.from_kernel(raw)
