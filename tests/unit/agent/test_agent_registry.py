"""The registry: who has which slot, whatever comes and goes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfold.agent.registry import MAX_GENERATION, Quota, Registry, RegistryChange, RequestRefusal
from ringfold.wire.agent import Flow

PATHS = (("10.0.0.1", "10.0.0.2"), ("10.1.0.1", "10.1.0.2"))


def flow(connection: int, destination: int = 2, paths: tuple[tuple[str, str], ...] = PATHS) -> Flow:
    return Flow(connection, "10.0.0.1", f"10.0.0.{destination}", paths)


def registry(slots: int = 4, clients: int = 1, **quota: int) -> Registry:
    made = Registry([0] * slots, Quota(**quota))
    for client in range(1, clients + 1):
        assert made.open(client, uid=1000, pid=client) is None
    return made


def added(found: RegistryChange | RequestRefusal) -> RegistryChange:
    assert isinstance(found, RegistryChange), found
    return found


def refused(found: RegistryChange | RequestRefusal | None) -> str:
    assert isinstance(found, RequestRefusal), found
    return found.kind


def test_flows_of_one_pair_share_a_slot_across_clients() -> None:
    host = registry(clients=2)
    first, second = added(host.register(1, flow(1))), added(host.register(2, flow(1)))
    assert first.entry.pair is second.entry.pair
    assert (first.pair_changed, second.pair_changed) == (True, False)


def test_other_paths_are_another_slot() -> None:
    host = registry()
    first, second = added(host.register(1, flow(1))), added(host.register(1, flow(2, paths=PATHS[::-1])))
    assert first.entry.pair.slot != second.entry.pair.slot


def test_the_last_flow_of_a_pair_frees_its_slot() -> None:
    host = registry(clients=2)
    host.register(1, flow(1))
    host.register(2, flow(1))
    assert not added(host.deregister(1, 1)).pair_changed
    assert added(host.deregister(2, 1)).pair_changed
    assert host.pair_count == 0


def test_the_end_of_a_client_frees_all_it_had_and_nothing_else() -> None:
    host = registry(clients=2)
    for number in range(3):
        host.register(1, flow(number, destination=number))
    host.register(2, flow(7, destination=0))
    assert len(host.close(1)) == 3
    assert [entry.flow.connection for entry in host.entries()] == [7]


def test_a_reused_slot_has_another_generation() -> None:
    host = registry(slots=1)
    places = set()
    for number in range(5):
        places.add(added(host.register(1, flow(number, destination=number))).entry.pair.place)
        host.deregister(1, number)
    assert len(places) == 5


def test_a_generation_is_never_zero() -> None:
    host = Registry([MAX_GENERATION])
    host.open(1, 0, 1)
    assert added(host.register(1, flow(1))).entry.pair.place == (0, 1)


def test_a_freed_slot_is_used_last() -> None:
    host = registry(slots=3)
    slot = added(host.register(1, flow(1))).entry.pair.slot
    host.deregister(1, 1)
    used = [added(host.register(1, flow(number, destination=number))).entry.pair.slot for number in range(3)]
    assert used[-1] == slot


def test_a_full_table_refuses_new_pairs_and_still_takes_known_ones() -> None:
    host = registry(slots=2)
    for number in range(2):
        host.register(1, flow(number, destination=number))
    assert refused(host.register(1, flow(5, destination=5))) == "full"
    assert not added(host.register(1, flow(6, destination=1))).pair_changed


def test_a_user_cannot_take_more_flows_than_his_quota() -> None:
    host = registry(clients=2, flows=3)
    for number in range(3):
        added(host.register(1 + number % 2, flow(number)))
    assert refused(host.register(1, flow(9))) == "quota"
    host.open(3, uid=2000, pid=9)
    added(host.register(3, flow(1)))


def test_a_user_cannot_take_more_slots_than_his_quota() -> None:
    host = Registry([0] * 8, Quota(slots=2))
    host.open(1, uid=1000, pid=1)
    host.register(1, flow(1, destination=1))
    host.register(1, flow(2, destination=2))
    assert refused(host.register(1, flow(3, destination=3))) == "quota"
    added(host.register(1, flow(4, destination=2)))


def test_a_user_cannot_open_more_connections_than_his_quota() -> None:
    limited = Registry([0], Quota(clients=1))
    assert limited.open(1, 5, 1) is None
    assert refused(limited.open(2, 5, 1)) == "quota"
    limited.close(1)
    assert limited.open(3, 5, 1) is None


def test_a_client_cannot_touch_anothers_flow() -> None:
    host = registry(clients=2)
    host.register(1, flow(1))
    assert refused(host.deregister(2, 1)) == "unknown"


def test_a_connection_number_is_used_once() -> None:
    host = registry()
    host.register(1, flow(1))
    assert refused(host.register(1, flow(1, destination=9))) == "duplicate"


@pytest.mark.parametrize(
    "bad",
    [
        flow(-1),
        flow(2**63),
        flow(1, paths=PATHS[:1]),
        flow(1, paths=PATHS * 9),
        flow(1, paths=(("10.0.0.1", "nowhere"), PATHS[0])),
        Flow(1, "10.0.0.1", "example.org", PATHS),
        Flow(1, "1" * 5_000, "10.0.0.1", PATHS),
        Flow(1, "10.0.0.1", "10.0.0.2", PATHS, source_host="a\x1b[31m"),
        Flow(1, "10.0.0.1", "10.0.0.2", PATHS, destination_host="a" * 256),
    ],
)
def test_a_flow_that_makes_no_sense_is_refused(bad: Flow) -> None:
    host = registry()
    assert refused(host.register(1, bad)) == "invalid"
    assert host.flows == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "close", "register", "register", "register", "deregister"]),
            st.integers(1, 4),
            st.integers(0, 5),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_slots_flows_and_quotas_always_agree(script: list[tuple[str, int, int, int]]) -> None:
    """And two pairs never hold one place, nor a pair a place that another had before it."""
    host = Registry([0] * 3, Quota(clients=2, flows=4, slots=2))
    owners: dict[tuple[int, int], object] = {}
    for action, client, connection, destination in script:
        is_there = host.record(client) is not None
        if action == "open" and not is_there:
            host.open(client, uid=client % 2, pid=client)
        elif action == "close":
            host.close(client)
        elif action == "register" and is_there:
            found = host.register(client, flow(connection, destination))
            if isinstance(found, RegistryChange):
                pair = found.entry.pair
                assert owners.setdefault(pair.place, pair) is pair
        elif action == "deregister" and is_there:
            host.deregister(client, connection)
        host.check()


@pytest.mark.parametrize(
    ("one", "other"),
    [("2001:DB8::1", "2001:db8:0:0::1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "FE80::0001%eth0")],
)
def test_an_address_written_another_way_is_the_same_pair(one: str, other: str) -> None:
    host = registry()
    pairs = []
    for number, text in enumerate((one, other)):
        paths = ((text, "10.0.0.2"), (text, "10.1.0.2"))
        pairs.append(added(host.register(1, Flow(number, text, "10.0.0.2", paths))).entry.pair)
    assert pairs[0] is pairs[1]
    assert host.between(other, "::ffff:10.0.0.2") == pairs[:1]


def test_link_local_addresses_of_two_interfaces_are_two() -> None:
    host = registry()
    for number in (0, 1):
        source = f"fe80::1%eth{number}"
        host.register(1, Flow(number, source, "fe80::2", ((source, "fe80::2"), PATHS[1])))
    assert host.pair_count == 2


@pytest.mark.parametrize("scope", ["\x1b[2J", "a\nb", "x" * 16, "\u202e", "a b"])
def test_an_address_brings_no_escape_sequences_along(scope: str) -> None:
    found = registry().register(1, Flow(1, f"fe80::1%{scope}", "10.0.0.2", PATHS))
    assert refused(found) == "invalid"
    assert isinstance(found, RequestRefusal)
    assert found.text.isprintable()
