"""How an epoch's ops are cut, from what its members offer: into how many channels, and how long segments are."""

from dataclasses import dataclass

import pytest
from test_master import TOKEN, MasterHarness, hello

from ringfold.master.channels import channels_for
from ringfold.master.events import ConnectionClosed
from ringfold.wire import messages as m

NAME = "ringfold-" + "0" * 32


@dataclass(frozen=True)
class Peer:
    """A peer as the master knows it."""

    member: m.Member
    cores: int
    threads: int


def on(host: str, cores: int, threads: int = 0, paths: int = 1) -> Peer:
    return Peer(m.Member(1, "p", host, ["10.0.0.1"] * paths, 9, paths), cores, threads)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([on("a", 2), on("a", 2)], 1),
        ([on("a", 16), on("a", 16)], 4),
        ([on("a", 16)] * 4, 4),
        ([on("a", 16)] * 5, 3),
        ([on("a", 16)] * 8, 2),
        ([on("a", 16)] * 20, 1),
        ([on("a", 16), on("b", 2)], 2),
        ([on("a", 64), on("b", 64)], 4),
        ([on("a", 64, 8), on("b", 64, 8)], 8),
        ([on("a", 64, 8), on("b", 64)], 4),
        ([on("a", 1, 3), on("b", 64)], 3),
        ([on("a", 64, 1), on("b", 64)], 1),
        ([on("a", 64, paths=2), on("b", 64)], 1),
        ([], 1),
    ],
)
def test_the_member_with_the_fewest_threads_decides(members: list[Peer], expected: int) -> None:
    assert channels_for(members, members) == expected


def test_peers_of_other_groups_use_cores_too() -> None:
    here = [on("a", 8), on("a", 8)]
    assert channels_for(here, here) == 4
    assert channels_for(here, [*here, on("a", 8), on("a", 8)]) == 2


def join(harness: MasterHarness, conn: int, **offer: int) -> None:
    harness.open(conn)
    harness.conns.append(conn)
    harness.receive(conn, hello(conn, 0, TOKEN, **offer))


def test_a_record_names_the_channels_and_a_death_keeps_them() -> None:
    harness = MasterHarness()
    for conn in (1, 2, 3):
        join(harness, conn, cores=9)
    harness.receive(1, m.Attached(1))
    assert harness.record(1).channels == 4, "alone it has more cores than it can use"
    harness.receive(1, m.Vote(1, "update", 1))
    harness.seal_and_attach(1, [1], [1, 2, 3])
    assert harness.record(1).channels == 3
    harness.step(ConnectionClosed(3, "reset"))
    harness.seal_and_attach(2, [1, 2], [1, 2])
    assert (harness.record(1).epoch, harness.record(1).channels) == (3, 3), "four were possible, with new lanes"
    join(harness, 4, cores=2)
    for conn in (1, 2):
        harness.receive(conn, m.Vote(2, "update", 3))
    harness.seal_and_attach(3, [1, 2], [1, 2, 4])
    assert (harness.record(1).epoch, harness.record(1).channels) == (4, 1)


def test_a_number_set_at_the_master_is_not_questioned() -> None:
    harness = MasterHarness(channels=2)
    join(harness, 1, cores=1)
    assert harness.record(1).channels == 2


@pytest.mark.parametrize("offer", [{"cores": 0}, {"threads": -1}, {"threads": 17}])
def test_an_impossible_offer_is_refused(offer: dict[str, int]) -> None:
    harness = MasterHarness()
    harness.open(1)
    (refused,) = harness.receive(1, hello(1, 0, TOKEN, **offer))
    assert isinstance(refused, m.Refused)
    assert "threads on" in refused.reason


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([{"here": NAME}, {"here": NAME}], 262_144),
        ([{"here": NAME}, {}], 1_048_576),
        ([{"here": NAME}, {"here": NAME, "host": "other"}], 1_048_576),
    ],
)
def test_segments_fit_into_pipes_where_all_members_share_memory(offers: list[dict[str, str]], expected: int) -> None:
    harness = MasterHarness()
    for conn, offer in enumerate(offers, 1):
        harness.open(conn)
        harness.conns.append(conn)
        harness.receive(conn, hello(conn, 0, TOKEN, **offer))
    harness.receive(1, m.Attached(1))
    harness.receive(1, m.Vote(1, "update", 1))
    harness.seal_and_attach(1, [1], [1, 2])
    assert harness.record(1).epoch == 2
    assert harness.record(1).segment_bytes == expected
    assert [member.here for member in harness.record(1).members] == [offer.get("here", "") for offer in offers]


def test_a_name_is_one_that_an_engine_makes() -> None:
    for name in ("two\nlines", "x" * 5_000, "dbus-1234", NAME + "0", NAME.upper()):
        harness = MasterHarness()
        harness.open(1)
        (refused,) = harness.receive(1, hello(1, 0, TOKEN, here=name))
        assert isinstance(refused, m.Refused)
