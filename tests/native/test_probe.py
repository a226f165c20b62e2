"""Probers on loopback: real packets, the kernel's stamps, and forged packets."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfold import _native
from ringfold.errors import ConfigError, UsageError
from ringfold.probe.exchanges import BACKWARD_KEPT, COLUMNS, FORWARD_KEPT, EdgeWindow
from ringfold.probe.nodes.prober import ProbeSocket, virtual
from ringfold.wire.probing import Neighbour

KEY = bytes(range(16))
PT1, PT2, PR1 = 1, 2, 3


def neighbour(prober: ProbeSocket, host: str = "127.0.0.1") -> Neighbour:
    return Neighbour(prober.node, f"n{prober.node}", host, prober.port)


def until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)


def everybody(probers: Sequence[ProbeSocket], host: str = "127.0.0.1") -> None:
    """All probe all."""
    for prober in probers:
        others = [neighbour(each, host) for each in probers if each is not prober]
        prober.configure(KEY, others, others)


@contextmanager
def nodes(count: int, host: str = "127.0.0.1", *, user_stamps: bool = False) -> Iterator[list[ProbeSocket]]:
    """Probers that know each other, with clocks far apart."""
    with ExitStack() as stack:
        probers = [
            stack.enter_context(
                ProbeSocket(
                    i, host, offset_ns=50_000_000 * i, drift_ppb=30_000 * i, anchor_ns=0, user_stamps=user_stamps
                )
            )
            for i in range(count)
        ]
        everybody(probers, host)
        yield probers


def collect(probers: Sequence[ProbeSocket], rows: int) -> list[list[EdgeWindow]]:
    """Let all probe until each has so many exchanges an edge, on average, and close the windows."""
    for prober in probers:
        prober.resume(gap_us=200, pause_us=500)
    before = [prober.stats().complete for prober in probers]
    wanted = rows * (len(probers) - 1)
    until(
        lambda: all(p.stats().complete - b >= wanted for p, b in zip(probers, before, strict=True)), f"{rows} exchanges"
    )
    return [prober.rotate() for prober in probers]


def raw_of(stamps: np.ndarray, prober: ProbeSocket) -> np.ndarray:
    """Undo a virtual clock, to within a nanosecond."""
    since = stamps - prober.offset_ns - prober.anchor_ns
    return prober.anchor_ns + np.array([round(int(each) * 10**9 / (10**9 + prober.drift_ppb)) for each in since])


def delays(window: EdgeWindow, probers: Sequence[ProbeSocket]) -> np.ndarray:
    """One-way delays of all packets of whole exchanges, with the virtual clocks taken away."""
    column = {name: window.exchanges[(window.exchanges != 0).all(axis=1), i] for i, name in enumerate(COLUMNS)}
    src, dst = probers[window.src], probers[window.dst]
    there = [raw_of(column[f"t{i}_rx"], dst) - raw_of(column[f"t{i}_tx"], src) for i in (1, 2)]
    back = [raw_of(column[f"r{i}_rx"], src) - raw_of(column[f"r{i}_tx"], dst) for i in (1, 2)]
    return np.concatenate(there + back)


def send_raw(packets: Sequence[bytes], port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for packet in packets:
            sender.sendto(packet, ("127.0.0.1", port))


@pytest.mark.parametrize("count", [2, 4])
def test_every_edge_gets_causal_rows_by_kernel_stamps(count: int) -> None:
    with nodes(count) as probers:
        for windows, prober in zip(collect(probers, 100), probers, strict=True):
            assert [window.dst for window in windows] == [each.node for each in probers if each is not prober]
            for window in windows:
                assert (window.src, window.stamps, window.stepped) == (prober.node, "kernel", "")
                assert len(window.exchanges) >= 20
                assert window.exchanges.dtype == np.int64
                assert window.exchanges.shape[1] == len(COLUMNS)
                assert window.exchanges.flags.c_contiguous
                one_way = delays(window, probers)
                assert one_way.min() > 0
                assert np.median(one_way) < 20_000  # user space would be tens of microseconds
                assert np.all(np.diff(window.exchanges[:, 0]) > 0)
                assert window.begin_ns < window.exchanges[0, 0] < window.exchanges[-1, 2] < window.end_ns


def test_the_filter_flags_every_whole_pair() -> None:
    with nodes(2) as probers:
        (window,), _ = collect(probers, 200)
    assert window.kept.dtype == np.uint8
    assert len(window.kept) == len(window.exchanges)
    whole = (window.exchanges != 0).all(axis=1)
    kept = int(((window.kept & FORWARD_KEPT) != 0).sum() + ((window.kept & BACKWARD_KEPT) != 0).sum())
    assert kept + window.filtered >= 2 * whole.sum()
    assert kept > window.filtered / 3
    assert 0 < window.threshold_ns <= 200_000 // 5


def test_user_stamps_are_reported_and_causal() -> None:
    with nodes(2, user_stamps=True) as probers:
        (window,), _ = collect(probers, 50)
        assert window.stamps == "user"
        assert probers[0].stats().stamps == "user"
        assert delays(window, probers).min() > 0


def test_one_end_with_user_stamps_makes_the_edge_so() -> None:
    with ProbeSocket(0, "127.0.0.1") as one, ProbeSocket(1, "127.0.0.1", user_stamps=True) as other:
        everybody([one, other])
        (window,), _ = collect([one, other], 20)
        assert window.stamps == "user"
        assert one.stats().stamps == "kernel"


def test_ipv6() -> None:
    try:
        with nodes(2, "::1") as probers:
            (window,), _ = collect(probers, 50)
            assert delays(window, probers).min() > 0
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_an_ipv6_socket_reaches_ipv4() -> None:
    try:
        one, other = ProbeSocket(0, "::"), ProbeSocket(1, "127.0.0.1")
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with one, other:
        everybody([one, other])
        (window,), _ = collect([one, other], 20)
        assert window.stamps == "kernel"
        assert len(window.exchanges) >= 10


def test_windows_follow_each_other() -> None:
    with nodes(2) as probers:
        (first,), _ = collect(probers, 50)
        done = probers[0].stats().complete
        until(lambda: probers[0].stats().complete > done + 20, "more exchanges")
        (second,) = probers[0].rotate()
        assert second.begin_ns == first.end_ns
        assert len(second.exchanges) > 0
        assert second.exchanges[0, 0] > first.exchanges[-1, 0]
        (third,) = probers[0].rotate()
        assert third.end_ns - third.begin_ns < 1_000_000_000
        assert third.exchanges.shape[1] == len(COLUMNS)


def test_a_rotation_is_cheap() -> None:
    with nodes(2) as probers:
        for prober in probers:
            prober.resume(gap_us=200, pause_us=500)
        until(lambda: probers[0].stats().complete > 1_000, "a thousand exchanges")
        before = time.thread_time_ns()
        (window,) = probers[0].rotate()
        spent = time.thread_time_ns() - before
        assert len(window.exchanges) > 1_000
        assert spent < 1_000_000


def test_a_paused_prober_answers_and_does_not_probe() -> None:
    with nodes(2) as probers:
        one, other = probers
        one.resume(gap_us=200, pause_us=500)
        until(lambda: one.stats().complete > 20, "answers from a node that never probed")
        one.pause()
        assert len(other.rotate()[0].exchanges) == 0
        sent = -1

        def is_still() -> bool:
            nonlocal sent
            before, sent = sent, one.stats().sent
            time.sleep(0.05)
            return sent == before

        until(is_still, "silence")
        other.resume(gap_us=200, pause_us=500)
        until(lambda: other.stats().complete > 20, "answers from the one that is paused")
        assert len(other.rotate()[0].exchanges) > 20


def test_resume_begins_a_fresh_window() -> None:
    with nodes(2) as probers:
        collect(probers, 20)
        before = probers[0].now()
        probers[0].resume(gap_us=200, pause_us=500)
        (window,) = probers[0].rotate()
        assert window.begin_ns >= before
        assert (window.exchanges[:, 0] >= before).all()  # a slow machine has made some of the new window already


def test_a_dead_neighbour_is_loss_and_nothing_else() -> None:
    with ProbeSocket(0, "127.0.0.1") as one, ProbeSocket(1, "127.0.0.1") as other, ProbeSocket(2, "127.0.0.1") as dead:
        one.configure(KEY, [neighbour(other), neighbour(dead)], [])
        other.configure(KEY, [], [neighbour(one)])
        dead.close()
        one.resume(gap_us=200, pause_us=800)
        begun = one.now()
        until(lambda: one.stats().complete > 100 and one.now() - begun > 1_500_000_000, "a time-out")
        alive, gone = one.rotate()
        assert len(alive.exchanges) > 100
        assert len(gone.exchanges) == 0
        assert gone.lost == gone.sent > 20
        assert one.stats().send_errors == 0


def test_an_address_without_a_route_costs_the_others_nothing() -> None:
    with ProbeSocket(0, "127.0.0.1") as one, ProbeSocket(1, "127.0.0.1") as other:
        nowhere = Neighbour(2, "nowhere", "192.0.2.1", 9)
        one.configure(KEY, [nowhere, neighbour(other)], [])
        other.configure(KEY, [], [neighbour(one)])
        one.resume(gap_us=200, pause_us=500)
        until(lambda: one.stats().complete > 80, "answers")
        lost, alive = one.rotate()
        assert len(lost.exchanges) == 0
        assert (alive.exchanges != 0).all(axis=1).sum() > 80
        assert one.stats().send_errors > 80


def test_garbage_and_forged_packets_are_counted_and_do_no_harm() -> None:
    with nodes(2) as probers:
        one = probers[0]
        for prober in probers:
            prober.resume(gap_us=200, pause_us=500)
        wrong_key = bytes(16)
        liars = [_native.probe_packet(wrong_key, kind, 1, 0, 7) for kind in (1, 2, 3, 4, 5)] * 20
        strangers = [_native.probe_packet(KEY, PT1, 9, 0, 7), _native.probe_packet(KEY, PT1, 1, 9, 7)] * 20
        garbage = [os.urandom(size) for size in (0, 1, 39, 41, 64, 65, 1_400)] * 20
        send_raw(liars + strangers + garbage, one.port)
        until(lambda: one.stats().malformed >= len(garbage), "the garbage")
        stats = one.stats()
        assert (stats.spoofed, stats.strangers, stats.malformed) == (len(liars), len(strangers), len(garbage))
        for windows in collect(probers, 50):
            assert delays(windows[0], probers).min() > 0
            assert len(windows[0].exchanges) >= 30


def test_a_replayed_probe_is_answered_once() -> None:
    with ProbeSocket(0, "127.0.0.1") as one, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as friend:
        friend.bind(("127.0.0.1", 0))
        friend.settimeout(10)
        one.configure(KEY, [], [Neighbour(1, "friend", "127.0.0.1", 9)])
        packets = [_native.probe_packet(KEY, kind, 1, 0, 5_000) for kind in (PT1, PT2)]
        for packet in packets:
            friend.sendto(packet, ("127.0.0.1", one.port))
        answers = [friend.recv(100) for _ in range(3)]  # they come to where the probe came from
        assert [answer[17] & 7 for answer in answers] == [3, 4, 5]
        assert all(len(answer) == 40 for answer in answers)
        for _ in range(10):
            send_raw(packets, one.port)
        until(lambda: one.stats().replayed == 20, "the replays")
        friend.sendto(_native.probe_packet(KEY, PT1, 1, 0, 5_001), ("127.0.0.1", one.port))
        until(lambda: one.stats().sent == 6, "the answers to a fresh one")


def test_unexpected_answers_are_counted() -> None:
    with nodes(2) as probers:
        send_raw([_native.probe_packet(KEY, PR1, 1, 0, 12, 5, 6)] * 3, probers[0].port)
        until(lambda: probers[0].stats().replayed == 3, "the answers")
        assert len(probers[0].rotate()[0].exchanges) == 0


def test_a_step_of_the_time_of_day_is_flagged_here_and_there() -> None:
    with nodes(2) as probers:
        collect(probers, 20)
        probers[0].pretend_step(1_000_000)
        (here,), (there,) = collect(probers, 100)
        assert "stepped by" in here.stepped
        assert "node 0" in there.stepped
        for window in (here, there):
            assert delays(window, probers).min() > 0  # what could be of either side is thrown away
        until(lambda: not probers[1].rotate()[0].stepped and not probers[0].rotate()[0].stepped, "the end of it")


@given(
    raw=st.integers(0, 2**61),
    anchor=st.integers(0, 2**61),
    offset=st.integers(-(2**50), 2**50),
    drift=st.integers(-(10**6), 10**6),
)
def test_the_virtual_clock_is_the_same_in_both_worlds(raw: int, anchor: int, offset: int, drift: int) -> None:
    assert virtual(raw, anchor, offset, drift) == _native.probe_virtual(raw, anchor, offset, drift)


def test_now_is_the_virtual_clock() -> None:
    with ProbeSocket(0, "127.0.0.1", offset_ns=-7_000, drift_ppb=-30_000) as prober:
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        now = prober.now()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        low, high = (virtual(raw, prober.anchor_ns, -7_000, -30_000) for raw in (before, after))
        assert low <= now <= high
        before = time.time_ns()
        utc = prober.utc() + prober.now()
        assert abs(utc - before) < 1_000_000_000


def test_a_port_in_use_is_an_error_with_a_clear_text() -> None:
    with (
        ProbeSocket(0, "127.0.0.1") as prober,
        pytest.raises(ConfigError, match=rf"127.0.0.1 port {prober.port}.*taken"),
    ):
        ProbeSocket(1, "127.0.0.1", prober.port)


def test_the_number_of_a_tcp_port_can_be_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with ProbeSocket(0, "127.0.0.1", port) as prober:
            assert prober.port == port


@pytest.mark.parametrize(
    ("neighbours", "words"),
    [
        ([Neighbour(0, "me", "127.0.0.1", 9)], "itself"),
        ([Neighbour(1, "x", "127.0.0.1", 9)] * 2, "twice"),
        ([Neighbour(1, "x", "localhost", 9)], "not an address: localhost"),
        ([Neighbour(1, "x", "127.0.0.1", 0)], "no port"),
        ([Neighbour(1, "x", "127.0.0.1", 70_000)], "node 0"),
        ([Neighbour(1, "x", "::1", 9)], "cannot be reached"),
    ],
)
def test_invalid_neighbours_are_refused(neighbours: list[Neighbour], words: str) -> None:
    with ProbeSocket(0, "127.0.0.1") as prober:
        with pytest.raises(UsageError, match=words):
            prober.configure(KEY, neighbours, [])
        with pytest.raises(UsageError, match=words):
            prober.configure(KEY, [], neighbours)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="not an address"):
        ProbeSocket(0, "nonsense")
    with ProbeSocket(0, "127.0.0.1") as prober:
        with pytest.raises(UsageError, match="gap_us"):
            prober.resume(gap_us=1)
        with pytest.raises(UsageError, match="pause_us"):
            prober.resume(pause_us=0)
        with pytest.raises(UsageError, match="16 bytes"):
            prober.configure(b"short", [], [])


def test_closed_is_closed() -> None:
    prober = ProbeSocket(0, "127.0.0.1")
    prober.close()
    prober.close()
    assert prober.stats().sent == 0
    with pytest.raises(UsageError, match="closed"):
        prober.rotate()


def test_a_forked_child_closes_the_socket() -> None:
    """The parent's port is free as soon as the parent closes it, though the child lives."""
    with nodes(2) as probers:
        collect(probers, 20)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # pragma: no cover - another process
            os.close(write)
            try:
                probers[0].rotate()
                os._exit(1)
            except UsageError:
                probers.clear()
                os.read(read, 1)
                os._exit(0)
        os.close(read)
        (window,), _ = collect(probers, 20)
        assert len(window.exchanges) > 0
        probers[0].close()
        ProbeSocket(5, "127.0.0.1", probers[0].port).close()
        os.close(write)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
