"""The shell of a node: neighbours that cannot be reached, and clocks that go back."""

from typing import Any, cast

from ringfold.probe.nodes.prober import ProbeSocket
from ringfold.probe.nodes.shell import NodeShell
from ringfold.probe.rounds.events import FromRoundMaster, MasterConnected, MasterMessageReceived
from ringfold.probe.rounds.node import RoundNode
from ringfold.wire.probing import Cadence, Neighbour, ProbeGraph, RoundEnd, RoundId, RoundReport, RoundStart

S = 1_000_000_000


class FakeProber:
    """A prober whose clock the test sets; its windows are empty."""

    def __init__(self) -> None:
        self.node, self.clock_ns = 0, 1_000 * S

    def now(self) -> int:
        return self.clock_ns

    def utc(self) -> int:
        return 0

    def stats(self) -> "FakeProber":
        return self

    sequence = 0

    def rename(self, node: int) -> None:
        self.node = node

    def rotate(self) -> list[object]:
        return []

    so_far = rotate

    def peek(self) -> list[object]:
        return []

    def ignore(self, *_: object) -> None:
        return None

    configure = resume = pause = close = ignore


def graph(*out: Neighbour) -> FromRoundMaster:
    return ProbeGraph(1, "master", b"k" * 16, list(out), list(out))


def test_a_neighbour_that_cannot_be_reached_costs_its_own_edge_only() -> None:
    said: list[object] = []
    with ProbeSocket(0, "127.0.0.1") as prober:
        shell = NodeShell(RoundNode(), prober, said.append, lambda clock: None)
        shell.step(MasterConnected(1))
        shell.step(MasterMessageReceived(graph(Neighbour(2, "six", "::1", 9), Neighbour(3, "four", "127.0.0.1", 9))))
        shell.step(MasterMessageReceived(RoundStart(RoundId(1, 1), "", Cadence(), 5_000, 0)))
        shell.step(MasterMessageReceived(RoundEnd(RoundId(1, 1), 0)))
    (report,) = said
    assert isinstance(report, RoundReport)
    assert [fit.dst for fit in report.edges] == [3]


def test_a_clock_that_goes_back_does_not_make_a_node_wait_for_it() -> None:
    prober = FakeProber()
    shell = NodeShell(RoundNode(), cast(ProbeSocket, cast(Any, prober)), lambda message: None, lambda clock: None)
    shell.step(MasterConnected(1))
    shell.step(MasterMessageReceived(graph(Neighbour(2, "other", "127.0.0.1", 9))))
    shell.step(MasterMessageReceived(RoundStart(RoundId(1, 1), "", Cadence(), 5_000, 0)))
    shell.step(MasterMessageReceived(RoundEnd(RoundId(1, 1), 0, deadline_ms=2_000)))
    shell.tick()
    prober.clock_ns -= 3_600 * S
    assert (shell.due_s() or 0) <= 1
    shell.tick()
    prober.clock_ns += 3 * S
    shell.tick()
    assert shell.machine.is_alone


def test_fits_are_there_before_the_window_is_over() -> None:
    """The line in the report is the one through what was there shortly before the end."""
    said: list[object] = []
    fits: list[int] = []

    class Counting(NodeShell):
        def _fit_early(self) -> None:
            fits.append(self.prober.now())
            super()._fit_early()

    prober = FakeProber()
    shell = Counting(RoundNode(), cast(ProbeSocket, cast(Any, prober)), said.append, lambda clock: None)
    shell.step(MasterConnected(1))
    shell.step(MasterMessageReceived(graph(Neighbour(2, "other", "127.0.0.1", 9))))
    begun = prober.clock_ns
    shell.step(MasterMessageReceived(RoundStart(RoundId(1, 1), "", Cadence(window_ms=4_000), 5_000, 0)))
    for _ in range(8):
        prober.clock_ns += S // 2 - 1_000_000
        shell.tick()
    assert fits == [begun + 8 * (S // 2 - 1_000_000)]


def test_a_window_of_a_master_is_exported_when_the_next_one_is_open() -> None:
    """What need not be done while probing is paused is done later."""
    exported: list[int] = []
    prober = FakeProber()
    shell = NodeShell(
        RoundNode(first_window=7), cast(ProbeSocket, cast(Any, prober)), lambda message: None, lambda clock: None,
        on_window=lambda window: exported.append(window.number),
    )  # fmt: skip
    shell.step(MasterConnected(1))
    shell.step(MasterMessageReceived(graph(Neighbour(2, "other", "127.0.0.1", 9))))
    for sequence in (1, 2):
        shell.step(MasterMessageReceived(RoundStart(RoundId(1, sequence), "", Cadence(), 5_000, 0)))
        prober.clock_ns += 4 * S
        shell.step(MasterMessageReceived(RoundEnd(RoundId(1, sequence), 0)))
        assert exported == [7][: sequence - 1]
        prober.clock_ns += S // 10
        assert shell.due_s() == 0
        shell.tick()
    assert exported == [7, 8]


def test_no_window_is_lost_when_the_node_ends() -> None:
    exported: list[int] = []
    shell = NodeShell(
        RoundNode(), cast(ProbeSocket, cast(Any, FakeProber())), lambda message: None, lambda clock: None,
        on_window=lambda window: exported.append(window.number),
    )  # fmt: skip
    shell.step(MasterConnected(1))
    shell.step(MasterMessageReceived(graph(Neighbour(2, "other", "127.0.0.1", 9))))
    shell.step(MasterMessageReceived(RoundStart(RoundId(1, 1), "", Cadence(), 5_000, 0)))
    shell.step(MasterMessageReceived(RoundEnd(RoundId(1, 1), 0)))
    shell.close()
    assert exported == [1]
