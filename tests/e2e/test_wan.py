"""Two peers with a high RTT: an op takes at least the RTT, and the lanes have the configured congestion control."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringfold.runtime.network import congestion_missing
from ringfold.tools import lab as labs
from ringfold.tools.bench import wan
from ringfold.tools.bench.wan import Cell, WanPlan
from ringfold.tools.cluster import LocalCluster
from ringfold.tools.lab import Lab

pytestmark = pytest.mark.skipif(labs.missing(delay=True) is not None, reason=str(labs.missing(delay=True)))

FAR = Cell(30.0, 0.0, "auto", 2)
NEAR = Cell(2.0, 0.0, "cubic", 1)
HOSTS_DEFAULT = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@contextmanager
def running(cell: Cell) -> Iterator[tuple[Lab, LocalCluster]]:
    """Two peers and a master in a lab, on hosts whose own congestion control is reno."""
    with Lab(hosts=3, paths=[labs.Path(name="far", up=100.0, rtt_ms=cell.rtt_ms)]) as lab:
        for host in range(2):
            with lab.within(host):
                HOSTS_DEFAULT.write_text("reno")
        with wan.peers(lab, cell, "master") as cluster:
            yield lab, cluster


@pytest.fixture(scope="module")
def far() -> Iterator[tuple[Lab, LocalCluster]]:
    with running(FAR) as both:
        yield both


def controls(lab: Lab, cell: Cell) -> set[str]:
    """The congestion controls of host 0's lanes to host 1."""
    shown = lab.run(0, ["ss", "-tinHO", "dst", lab.address(1)]).stdout.splitlines()
    assert len(shown) == 2 * cell.lanes
    return {word for line in shown for word in line.split() if word in ("reno", "cubic", "bbr")}


def test_a_small_op_takes_the_way_to_the_master_and_back(far: tuple[Lab, LocalCluster]) -> None:
    row = wan.small(far[1], 3, FAR.rtt_ms)
    assert isinstance(row["extra_ms"], float)
    assert row["extra_ms"] > -1


def test_a_large_op_is_measured(far: tuple[Lab, LocalCluster]) -> None:
    plan = WanPlan([], [], [], [], 100.0, 1 << 18, rounds=1, small_rounds=0, plain=False)
    row = wan.large(far[1], plan, 1e7, FAR.rtt_ms)
    assert (row["size_bytes"], row["count"]) == (1 << 18, 1)


def test_on_a_high_rtt_path_lanes_have_bbr_where_the_kernel_offers_it(far: tuple[Lab, LocalCluster]) -> None:
    assert controls(far[0], FAR) == {"reno" if congestion_missing("bbr") else "bbr"}


def test_lanes_have_the_congestion_control_that_was_set() -> None:
    if why := congestion_missing(NEAR.congestion):
        pytest.skip(why)
    with running(NEAR) as (lab, _):
        assert controls(lab, NEAR) == {NEAR.congestion}
