"""Which lanes a record asks for: by path and by channel."""

from collections import Counter

import pytest
from msgspec import structs

from ringfold.peer.effects import Dial, Promote
from ringfold.peer.lanes import Lanes, needed_lanes, route_of
from ringfold.peer.settings import PeerTimings
from ringfold.wire.messages import Member, Record, World


def record(channels: int = 1, *, lanes: int = 1, paths: int = 1, epoch: int = 1) -> Record:
    addresses = [f"10.0.{path}.1" for path in range(paths)]
    members = [Member(peer=peer, name="", host="", addresses=addresses, port=9000, paths=paths) for peer in (1, 2, 3)]
    return Record(
        group=0,
        epoch=epoch,
        fence=0,
        previous=epoch - 1,
        reason="",
        members=members,
        dialers=[1, 2, 3],
        newcomers=[],
        secret=b"s" * 32,
        evidence="ring",
        small_bytes=0,
        segment_bytes=1024,
        lanes=lanes,
        registrations=0,
        pending=False,
        verdicts=[],
        world=World(3, 1, 3),
        channels=channels,
    )


@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("paths", [1, 2])
def test_every_channel_has_its_lanes_on_every_path(channels: int, lanes: int, paths: int) -> None:
    wanted = record(channels, lanes=lanes, paths=paths)
    places = Counter(
        (lane[:2], lane[2] % channels, route_of(wanted, 1, lane).path) for lane, _ in needed_lanes(wanted, 1)
    )
    links = [(True, 2), (False, 3)]
    assert places == {(link, c, path): lanes for link in links for c in range(channels) for path in range(paths)}


def connected(lanes: Lanes, numbers: list[int]) -> list[Promote]:
    """Lanes with these numbers are up, of both links; what they were promoted to."""
    promoted: list[Promote] = []
    for outgoing, peer in ((True, 2), (False, 3)):
        for number in numbers:
            effects = lanes._add_lane(100 * peer + number, (outgoing, peer, number))
            promoted += [effect for effect in effects if isinstance(effect, Promote)]
    return promoted


def test_a_link_is_up_when_every_channel_has_a_lane() -> None:
    lanes = Lanes(PeerTimings())
    lanes.me = 1
    lanes.begin(0, record(2, lanes=2))
    late_ns = 10**12
    connected(lanes, [0, 2])  # both of channel 0
    assert not lanes.is_complete(late_ns)
    promoted = connected(lanes, [1])
    assert lanes.is_complete(late_ns)
    assert not lanes.is_complete(0), "it waits a moment for the other lanes"
    assert [effect.channel for effect in promoted] == [1, 1]
    assert all(effect.shared for effect in promoted)


def test_the_last_lane_of_a_channel_ends_the_link() -> None:
    lanes = Lanes(PeerTimings())
    lanes.me = 1
    lanes.begin(0, record(2, lanes=2))
    connected(lanes, [0, 1, 2])
    lanes.installed(10**12)
    assert not lanes.closed(10**12, 200, "reset").lost, "lane 2 is of the same channel"
    update = lanes.closed(10**12, 201, "reset")
    assert [(link.outgoing, link.peer) for link in update.lost] == [(True, 2)]


@pytest.mark.parametrize("direct", [False, True])
def test_a_late_report_about_a_direct_lane_leaves_the_ring_alone(direct: bool) -> None:
    """Peer 2 had a direct lane in the epoch before, and is the next peer in this one."""
    lanes = Lanes(PeerTimings())
    lanes.me = 1
    lanes.begin(0, record())
    connected(lanes, [0])
    lanes.installed(10**12)
    update = lanes.link_lost(10**12, (True, 2), (), "reset", direct=direct)
    assert [(link.outgoing, link.peer) for link in update.lost] == ([] if direct else [(True, 2)])
    assert ((True, 2, 0) in lanes._connected) == direct


def test_another_number_of_channels_connects_every_lane_again() -> None:
    """Two lanes of one channel and one lane of each of two have the same numbers, and other places."""
    lanes = Lanes(PeerTimings())
    lanes.me = 1
    lanes.begin(0, record(1, lanes=2))
    connected(lanes, [0, 1])
    lanes.installed(10**12)
    lanes.begin(10**12, record(2, lanes=1, epoch=2))
    assert not lanes._connected


NAME = "ringfold-" + "0" * 32


def of_hosts(hosts: tuple[str, ...], *, lanes: int = 1, paths: int = 1, nameless: tuple[int, ...] = ()) -> Record:
    """A ring of peers on these hosts, each with a name for the peers of its host, except the nameless ones."""
    plain = record(lanes=lanes, paths=paths)
    members = [
        structs.replace(member, host=host, here="" if member.peer in nameless else NAME)
        for member, host in zip(plain.members, hosts, strict=True)
    ]
    return structs.replace(plain, members=members)


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        (of_hosts(("a", "a", "a")), NAME),
        (of_hosts(("a", "b", "a")), ""),
        (of_hosts(("a", "a", "a"), nameless=(2,)), ""),
        (of_hosts(("a", "a", "a"), nameless=(1,)), ""),
        (of_hosts(("a", "a", "a"), lanes=2), ""),
        (of_hosts(("a", "a", "a"), paths=2), ""),
    ],
)
def test_a_neighbour_on_the_same_host_is_dialled_by_its_name(wanted: Record, name: str) -> None:
    lanes = Lanes(PeerTimings())
    lanes.me = 1
    first, *_ = (effect for effect in lanes.begin(0, wanted).effects if isinstance(effect, Dial))
    assert (first.here, first.host) == (name, "10.0.0.1")


def test_whatever_was_wrong_with_the_name_tcp_comes_next() -> None:
    lanes = Lanes(PeerTimings())
    lanes.me = 1
    (first,) = (effect for effect in lanes.begin(0, of_hosts(("a", "a", "a"))).effects if isinstance(effect, Dial))
    assert first.here
    (again,) = (effect for effect in lanes.dial_failed(0, first.key, "refused") if isinstance(effect, Dial))
    assert (again.here, again.host) == ("", first.host)
    assert first.timeout_ms < again.timeout_ms, "there is time left for it"
