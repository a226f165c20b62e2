"""NIC monitors and rates: what a reading says, and that what a monitor does not know stays unknown."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from ringfold.agent import monitors
from ringfold.agent.monitors import (
    EthtoolMonitor,
    Monitor,
    NicMonitors,
    NicReading,
    RateMeter,
    SysMonitor,
    TcpSample,
    open_monitors,
    overlay,
    pause_count,
    queueing_pressure,
)
from ringfold.errors import ConfigError
from ringfold.runtime.netlink import interface_addresses


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


def test_pauses_that_were_received_count_whatever_the_driver_calls_them() -> None:
    mlx5 = {"rx_prio3_pause": 5, "tx_prio3_pause": 100, "rx_prio3_pause_duration": 9, "rx_prio0_pause": 1}
    assert pause_count(mlx5) == 6
    assert pause_count({"rx_pause_ctrl_phy": 2, "rx_pause_transition": 7}) == 2
    assert pause_count({"port.link_xoff_rx": 4, "port.link_xon_rx": 4}) == 4
    assert pause_count({"rx_bytes": 4, "tx_pause": 1}) is None


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
    several = NicMonitors([Gone(), Fixed(NicReading(tx_bytes=4))])
    assert several.read("eth0") == NicReading(tx_bytes=4)
    assert several.failures == 1


def test_an_unknown_monitor_is_refused_with_the_names_of_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'nope'; known are ethtool, qdisc, sys"):
        open_monitors(["nope"])


def test_a_monitor_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "mine"

        def load(self) -> type[Monitor]:
            return Gone

    monkeypatch.setattr(monitors, "entry_points", lambda group: [Point()] if group == "ringfold.monitors" else [])
    assert open_monitors(["mine"]).read("eth0") == NicReading()


def test_addresses_are_found_with_their_interfaces() -> None:
    assert interface_addresses()["127.0.0.1"] == "lo"


def test_a_rate_is_growth_over_busy_time() -> None:
    meter = RateMeter()
    assert meter.update(TcpSample(0, 0)) is None
    assert meter.update(TcpSample(50_000, 10_000)) == 5_000_000
    assert meter.update(TcpSample(50_500, 10_500)) is None  # too little to tell; it counts the next time
    assert meter.update(TcpSample(60_000, 11_000)) == 10_000_000


def test_counters_of_new_connections_begin_anew() -> None:
    meter = RateMeter()
    meter.update(TcpSample(100_000, 50_000))
    assert meter.update(TcpSample(10, 60_000)) is None
    assert meter.update(TcpSample(20_010, 70_000)) == 2_000_000


def test_round_trips_beyond_the_smallest_are_pressure() -> None:
    assert queueing_pressure(TcpSample(0, 0, srtt_us=30_000, min_rtt_us=5_000)) == 127.5
    assert queueing_pressure(TcpSample(0, 0, srtt_us=4_000, min_rtt_us=5_000)) == 0
    assert queueing_pressure(TcpSample(0, 0)) is None
