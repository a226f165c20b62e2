"""NIC monitors: what a reading says, and that what a monitor does not know stays unknown."""

import struct
import tomllib
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ringfold.agent import adapters, monitors
from ringfold.agent.client import AgentClient, AgentConsole
from ringfold.agent.daemon import AgentSettings, AgentThread
from ringfold.agent.monitors import (
    EbpfMonitor,
    EthtoolMonitor,
    NicMonitors,
    NicReading,
    QdiscMonitor,
    SysMonitor,
    open_monitors,
    overlay,
    pause_count,
    queue_counts,
)
from ringfold.errors import ConfigError
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.netlink import EthtoolReader
from ringfold.runtime.network import interfaces

WAIT_S = 20.0
ROOT = Path(__file__).parents[3]


class Counters:
    """Statistics of a driver, one after the other."""

    def __init__(self, *readings: Mapping[str, int]) -> None:
        self._readings = list(readings)

    def statistics(self, interface: str) -> Mapping[str, int]:
        return self._readings.pop(0)

    def close(self) -> None:
        pass


class Gone:
    """A monitor whose NIC is away."""

    def read(self, nic: str) -> NicReading:
        raise OSError("gone")

    def close(self) -> None:
        pass


class Fixed:
    def __init__(self, reading: NicReading) -> None:
        self._reading = reading

    def read(self, nic: str) -> NicReading:
        return self._reading

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("reading", "pressure"),
    [
        (NicReading(), None),
        (NicReading(tx_bytes=0), 0.0),
        (NicReading(tx_bytes=500, tx_limit_bytes=1_000), 127.5),
        (NicReading(tx_bytes=5_000, tx_limit_bytes=1_000), 255.0),
        (NicReading(tx_bytes=500, tx_limit_bytes=1_000_000, rate_bytes_s=20_000), 127.5),
        (NicReading(tx_bytes=1 << 19), 127.5),
        (NicReading(is_paused=False), 0.0),
        (NicReading(tx_bytes=0, is_paused=True), 255.0),
    ],
)
def test_pressure_is_how_full_the_queue_is(reading: NicReading, pressure: float | None) -> None:
    assert reading.pressure() == pressure


NAMES = {
    "mlx5": """rx_packets rx_out_of_buffer rx_discards_phy rx_mac_control_phy rx_pause_ctrl_phy tx_pause_ctrl_phy
        rx_prio0_bytes rx_prio0_buf_discard rx_prio0_pause rx_prio0_pause_duration tx_prio0_pause
        tx_prio0_pause_duration rx_prio0_pause_transition rx_prio3_pause tx_prio3_pause rx_global_pause
        rx_global_pause_duration tx_global_pause rx_global_pause_transition tx_pause_storm_warning_events
        tx_pause_storm_error_events rx0_cache_busy""",
    "ixgbe": """rx_packets tx_packets rx_missed_errors tx_restart_queue tx_flow_control_xon rx_flow_control_xon
        tx_flow_control_xoff rx_flow_control_xoff rx_no_dma_resources os2bmc_rx_by_bmc tx_queue_0_packets
        tx_pb_0_pxon tx_pb_0_pxoff rx_pb_0_pxon rx_pb_0_pxoff rx_pb_7_pxoff""",
    "ice": "tx_bytes rx_dropped.nic link_xon_rx.nic link_xoff_rx.nic link_xoff_tx.nic rx_priority_3_xoff.nic "
    "tx_priority_3_xoff.nic rx_priority_3_xon.nic",
    "bnxt": "rx_pause_frames rx_pfc_frames tx_pause_frames rx_pfc_ena_frames_pri0 pfc_pri0_rx_duration_us",
    "sfc": "port_tx_pause port_rx_pause port_rx_control",
    "ena": "tx_timeout suspend resume wd_expired interface_up admin_q_pause bw_in_allowance_exceeded "
    "bw_out_allowance_exceeded queue_0_tx_cnt queue_0_rx_cnt ena_admin_q_aborted_cmd",
    "veth": "peer_ifindex rx_queue_0_xdp_packets rx_queue_0_drops tx_queue_0_xdp_xmit",
}
"""What `ethtool -S` calls the counters of these drivers (in part), by their sources and vendors' manuals."""


@pytest.mark.parametrize(
    ("driver", "counted"),
    [
        ("mlx5", {"rx_pause_ctrl_phy", "rx_prio0_pause", "rx_prio3_pause", "rx_global_pause"}),
        ("ixgbe", {"rx_flow_control_xoff", "rx_pb_0_pxoff", "rx_pb_7_pxoff"}),
        ("ice", {"link_xoff_rx.nic", "rx_priority_3_xoff.nic"}),
        ("bnxt", {"rx_pause_frames", "rx_pfc_frames", "rx_pfc_ena_frames_pri0"}),
        ("sfc", {"port_rx_pause"}),
        ("ena", set()),
        ("veth", set()),
    ],
)
def test_pauses_that_were_received_count_whatever_the_driver_calls_them(driver: str, counted: set[str]) -> None:
    names = NAMES[driver].split()
    assert {name for name in names if pause_count({name: 1}) == 1} == counted
    assert pause_count(dict.fromkeys(names, 1)) == (len(counted) or None)


def test_a_nic_is_paused_when_its_count_has_grown_since_the_last_look() -> None:
    counts = Counters({"rx_pause": 7}, {"rx_pause": 7}, {"rx_pause": 8}, {})
    monitor = EthtoolMonitor(counts)  # type: ignore[arg-type]
    assert [monitor.read("eth0").is_paused for _ in range(4)] == [False, False, True, None]


def test_counters_come_from_sys(tmp_path: Path) -> None:
    (tmp_path / "eth0" / "statistics").mkdir(parents=True)
    (tmp_path / "eth0" / "speed").write_text("1000\n")
    for name, value in (("tx_bytes", 10), ("rx_bytes", 20), ("tx_dropped", 3)):
        (tmp_path / "eth0" / "statistics" / name).write_text(f"{value}\n")
    (tmp_path / "softnet").write_text("00000001 " * 11 + "00000010 00000000\n" + "00000001 " * 11 + "00000002 0\n")
    monitor = SysMonitor(str(tmp_path), str(tmp_path / "softnet"))
    assert monitor.read("eth0") == NicReading(
        rate_bytes_s=125_000_000, rx_bytes=18 * 1_500, drops=3, sent_bytes=10, received_bytes=20
    )
    with pytest.raises(OSError, match="eth1"):
        monitor.read("eth1")


def test_a_link_without_a_speed_has_no_rate(tmp_path: Path) -> None:
    (tmp_path / "eth0").mkdir()
    (tmp_path / "eth0" / "speed").write_text("-1\n")
    assert SysMonitor(str(tmp_path), str(tmp_path / "none")).read("eth0") == NicReading()


def test_the_first_monitor_that_knows_a_part_is_believed() -> None:
    first = NicReading(tx_bytes=0, rate_bytes_s=None)
    assert overlay(first, NicReading(tx_bytes=9, rate_bytes_s=7)) == NicReading(tx_bytes=0, rate_bytes_s=7)


def test_a_monitor_that_fails_leaves_the_others_alone() -> None:
    several = NicMonitors({"gone": Gone(), "fixed": Fixed(NicReading(tx_bytes=4))})
    assert several.read("eth0") == NicReading(tx_bytes=4)
    assert several.failures == 1


@pytest.mark.parametrize(
    "wrong",
    [
        5,
        NicReading(tx_bytes="7"),  # type: ignore[arg-type]
        NicReading(tx_bytes=1.5),  # type: ignore[arg-type]
        NicReading(drops=-1),
        NicReading(sent_bytes=2**64),
        NicReading(interface_index=2**32),
        NicReading(is_paused="no"),  # type: ignore[arg-type]
        NicReading(queue_counts=[(1, 2)]),  # type: ignore[arg-type]
        NicReading(queue_counts={"tx": (1, 2)}),  # type: ignore[dict-item]
        NicReading(queue_counts={2**16: (1, 2)}),
        NicReading(queue_counts={None: (1, 2)}),  # type: ignore[dict-item]
        NicReading(queue_limits={0: (1, 2, 3)}),  # type: ignore[dict-item]
        NicReading(queue_limits={0: (1, "2")}),  # type: ignore[dict-item]
    ],
)
def test_a_monitor_that_returns_wrong_types_is_not_asked_again(wrong: NicReading) -> None:
    several = NicMonitors({"wrong": Fixed(wrong), "fixed": Fixed(NicReading(tx_bytes=4))})
    assert [several.read("eth0") for _ in range(2)] == [NicReading(tx_bytes=4)] * 2
    assert several.states["wrong"]
    assert several.states["fixed"] == ""


def test_a_reading_with_everything_is_accepted() -> None:
    whole = NicReading(1, 2, 3, 4, 5, 2**64 - 1, 7, True, 9, {0: (1, None)}, {65_535: (1, 2)})
    several = NicMonitors({"fixed": Fixed(whole)})
    assert several.read("eth0") == whole
    assert several.states == {"fixed": ""}


class Peaks:
    """Peaks of queues: of packets that were counted while nothing waited, and of some that waited."""

    def __init__(self) -> None:
        self.found = [(0, 12), (900, 3)]

    def take(self, index: int) -> tuple[int, int]:
        return self.found.pop(0)

    def close(self) -> None:
        pass


def test_no_peak_does_not_hide_what_others_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "QueuePeaks", Peaks)
    several = NicMonitors({"ebpf": EbpfMonitor(), "sampled": Fixed(NicReading(tx_bytes=500))})
    assert [several.read("lo").tx_bytes for _ in range(2)] == [500, 900]


def test_an_unknown_monitor_is_refused_with_the_names_of_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'nope'; there are ebpf, ethtool, qdisc, sys"):
        open_monitors(["nope"])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package were installed that declares monitors: a good one, one that does not load, one that breaks."""
    (tmp_path / "other_nics.py").write_text(OTHER_NICS)
    about = tmp_path / "other_nics-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other-nics\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[ringfold.monitors]\nrings = other_nics:Rings\nlost = other_nics:NotThere\nwild = other_nics:Wild\n"
        "qdisc = other_nics:Rings\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


OTHER_NICS = """
from ringfold.agent.monitors import NicReading

class Rings:
    def read(self, nic):
        return NicReading(tx_bytes=7_000)

    def close(self):
        pass

class Wild(Rings):
    def read(self, nic):
        raise ZeroDivisionError("no rings")
"""


@pytest.mark.usefixtures("package")
def test_a_monitor_of_another_package_is_found_by_its_entry_point() -> None:
    assert open_monitors(["rings"]).read("eth0") == NicReading(tx_bytes=7_000)


@pytest.mark.usefixtures("package")
def test_no_package_replaces_a_monitor_of_ours_by_its_name() -> None:
    assert monitors.known_monitors()["qdisc"]() is QdiscMonitor


@pytest.mark.usefixtures("package")
def test_a_monitor_that_does_not_load_is_left_out_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    several = open_monitors(["lost", "rings"])
    assert several.read("eth0") == NicReading(tx_bytes=7_000)
    assert several.states["rings"] == ""
    assert "NotThere" in several.states["lost"]
    assert "'lost' does not work here" in caplog.text


@pytest.mark.usefixtures("package")
def test_a_monitor_that_breaks_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    several = open_monitors(["wild", "rings"])
    assert [several.read("eth0") for _ in range(3)] == [NicReading(tx_bytes=7_000)] * 3
    assert several.states == {"wild": "ZeroDivisionError: no rings", "rings": ""}
    assert caplog.text.count("'wild' failed") == 1


@pytest.mark.usefixtures("package")
def test_the_agent_serves_with_monitors_that_are_broken_and_its_status_names_them(tmp_path: Path) -> None:
    directory = tmp_path / "agent"
    settings = AgentSettings(directory=directory, telemetry=(), monitors=("lost", "wild", "rings"))
    with AgentThread(settings), AgentClient([directory], "job") as client:
        flow = client.register("127.0.0.1", "127.0.0.2", [("127.0.0.1", "127.0.0.2"), ("127.0.0.1", "127.0.0.3")])
        assert client.wait(lambda each: each.place(flow) is not None, WAIT_S)
        deadline_ns, pause = monotonic_ns() + int(WAIT_S * 1e9), threads.Event()
        with AgentConsole([directory]) as console:
            while not (states := console.status().monitors)["wild"]:
                assert monotonic_ns() < deadline_ns, "the interfaces are not looked at"
                pause.wait(0.001)
    assert states["rings"] == states["sys"] == ""
    assert states["wild"] == "ZeroDivisionError: no rings"
    assert "NotThere" in states["lost"]


def test_what_is_built_in_is_declared_as_other_packages_declare_theirs() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, built_in in (("ringfold.monitors", monitors.BUILT_IN), ("ringfold.telemetry", adapters.BUILT_IN)):
        loaded = {name: EntryPoint(name, value, group).load() for name, value in declared[group].items()}
        assert loaded == built_in


def test_addresses_are_found_with_their_interfaces() -> None:
    assert interfaces()["127.0.0.1"] == "lo"


class Driver(EthtoolReader):
    """An interface whose driver has so many statistics at the moment, written as a kernel does: without asking."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self._counts = counts

    def _call(self, interface: str, room: bytearray) -> None:
        asked = struct.unpack_from("=I", room)[0]
        count = self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]
        if asked == 0x37:
            struct.pack_into("=QI", room, 8, 2, count)
        elif asked == 0x1B:
            struct.pack_into("=I" + "32s" * count, room, 8, count, *(b"count%d" % each for each in range(count)))
        else:
            struct.pack_into(f"=I{count}Q", room, 4, count, *range(count))


def test_statistics_that_become_more_are_asked_for_anew() -> None:
    driver = Driver([2, 2, 2, 5])
    try:
        assert driver.statistics("eth0") == {"count0": 0, "count1": 1}
        assert driver.statistics("eth0") == {f"count{each}": each for each in range(5)}
    finally:
        driver.close()


def test_statistics_that_become_more_between_two_calls_are_left_for_the_next_time() -> None:
    driver = Driver([2, 2, 900])
    try:
        assert driver.statistics("eth0") == {}
        assert len(driver.statistics("eth0")) == 900
    finally:
        driver.close()


def test_transmit_queues_are_counted_under_the_names_of_several_drivers() -> None:
    assert queue_counts({"tx_queue_0_packets": 5, "tx_queue_0_bytes": 700, "rx_queue_0_bytes": 9}) == {0: (700, 5)}
    assert queue_counts({"tx3_bytes": 8, "tx-12.packets": 4}) == {3: (8, None), 12: (None, 4)}
    assert queue_counts({"queue_2_tx_cnt": 6, "queue_2_tx_bytes": 60, "tx_bytes[1]": 11}) == {2: (60, 6), 1: (11, None)}
    assert queue_counts({"tx_bytes": 1, "tx_queue_0_xdp_xmit": 2, "peer_ifindex": 3}) == {}


def test_byte_queue_limits_are_read_where_the_driver_has_them(tmp_path: Path) -> None:
    for queue, figures in (("tx-0", ("1514", "65536")), ("tx-1", ("0", "3028")), ("rx-0", ("1", "2"))):
        limits = tmp_path / "eth0" / "queues" / queue / "byte_queue_limits"
        limits.mkdir(parents=True)
        for name, figure in zip(("inflight", "limit"), figures, strict=True):
            (limits / name).write_text(figure)
    (tmp_path / "eth0" / "queues" / "tx-2").mkdir()
    (tmp_path / "eth0" / "ifindex").write_text("12\n")
    reading = SysMonitor(str(tmp_path), str(tmp_path / "none")).read("eth0")
    assert reading.queue_limits == {0: (1_514, 65_536), 1: (0, 3_028)}
    assert reading.interface_index == 12
