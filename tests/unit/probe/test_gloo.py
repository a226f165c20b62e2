"""`gloo` rounds without Gloo: the same class over collectives of threads (real ones: tests/e2e/test_gloo_rounds.py)."""

import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import pytest

from ringfold.errors import ConfigError, DeadlineExceeded, RemoteProtocolError
from ringfold.probe.exchanges import EdgeWindow
from ringfold.probe.rounds.calculation import RoundResult
from ringfold.probe.rounds.gloo import GlooRoundResult, GlooRounds, TorchCollectives
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.wire.probing import EdgeFit, EdgeView, Neighbour, NodeClock, NodeId, RoundId


class Board:
    """Where threads meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.content: dict[int, bytes] = {}


class ByThreads:
    """Collectives on a board. `fails_at` is the number of the call that finds the group broken."""

    def __init__(self, board: Board, rank: int, fails_at: int = 0) -> None:
        self.board, self.rank, self.size, self.fails_at = board, rank, board.size, fails_at
        self.calls = 0
        self.garble = False

    def gather(self, content: bytes, timeout_ms: int) -> list[bytes]:
        self._meet(b"\xc1" if self.garble else content, timeout_ms)
        everything = [self.board.content[rank] for rank in range(self.size)]
        self.board.barrier.wait(10)
        return everything if self.rank == 0 else []

    def broadcast(self, content: bytes, timeout_ms: int) -> bytes:
        self._meet(content, timeout_ms)
        said = self.board.content[0]
        self.board.barrier.wait(10)
        return said

    def _meet(self, content: bytes, timeout_ms: int) -> None:
        self.calls += 1
        if self.calls == self.fails_at:
            raise DeadlineExceeded("gather", [1], timeout_ms)
        self.board.content[self.rank] = content
        self.board.barrier.wait(10)


class StillProber:
    """Probes nobody, and knows when it was told to."""

    def __init__(self, node: NodeId) -> None:
        self.node, self.out, self.said = node, [], []  # type: ignore[var-annotated]

    def now(self) -> int:
        return time.monotonic_ns()

    def utc(self) -> int:
        return 7

    def configure(self, key: bytes, out: Sequence[Neighbour], into: Sequence[Neighbour]) -> None:
        self.out = [other.node for other in out]

    def resume(self, gap_us: int, pause_us: int) -> None:
        self.said.append("resume")

    def pause(self) -> None:
        self.said.append("pause")

    def rotate(self) -> list[EdgeWindow]:
        self.said.append("rotate")
        none = np.empty((0, 8), np.int64), np.empty(0, np.uint8)
        return [EdgeWindow(self.node, dst, 1, 2, *none, 1, 0, 0, 0, 0, "kernel") for dst in self.out]


def ring(nodes: Sequence[NodeId], listeners: Collection[NodeId], neighbours: int, seed: int) -> list[tuple[int, int]]:
    return [(src, dst) for src in nodes if src not in listeners for dst in nodes if src != dst]


def plain(fits: Sequence[EdgeFit], utc: Mapping[NodeId, int], history: object) -> RoundResult:
    nodes = sorted({node for fit in fits for node in (fit.src, fit.dst)})
    clocks = [NodeClock(node, 0, 0, 0.0, 1.0, -1, 1, 0.0) for node in nodes]
    return RoundResult(nodes[0], clocks, [EdgeView(fit) for fit in fits])


def make(collectives: ByThreads, *, node_id: int | None = None, last: GlooRounds | None = None) -> GlooRounds:
    node = collectives.rank if node_id is None else node_id
    return GlooRounds(
        collectives,
        RoundSettings(kind="gloo", window_ms=20, gloo_timeout_ms=5_000),
        Neighbour(node, f"rank{node}", "127.0.0.1", 1),
        StillProber(node),
        lambda window: EdgeFit(window.src, window.dst, pairs=100),
        ring,
        plain,
        lambda _: bytes(16),
        node=last.node if last else None,
    )


def together(works: Sequence[Callable[[], object]]) -> list[object]:
    """What each of some things gives that happen at the same time: its result, or its error."""
    results: list[object] = [None] * len(works)

    def run(place: int) -> None:
        try:
            results[place] = works[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def taken(results: Sequence[object]) -> list[GlooRoundResult]:
    for result in results:
        assert isinstance(result, GlooRoundResult), result
    return [result for result in results if isinstance(result, GlooRoundResult)]


def test_every_rank_gets_the_summary_and_its_clock() -> None:
    board = Board(3)
    ranks = [make(ByThreads(board, rank)) for rank in range(3)]
    for sequence in (1, 2):
        for rank, one in enumerate(taken(together([rank.round for rank in ranks]))):
            assert one.summary is not None
            assert (one.summary.round, one.summary.missing) == (RoundId(1, sequence), {})
            assert one.clock is not None
            assert one.clock.node == rank
            assert [export.window for export in one.exports] == [sequence]


def test_a_failed_collective_is_raised_and_the_node_goes_on_alone() -> None:
    board = Board(1)
    rounds = make(ByThreads(board, 0, fails_at=1))
    with pytest.raises(DeadlineExceeded):
        rounds.round()
    board = Board(2)
    ranks = [make(ByThreads(board, rank, fails_at=3)) for rank in range(2)]
    for result in together([rank.round for rank in ranks]):
        assert isinstance(result, DeadlineExceeded)
    alone = ranks[0].round()
    assert ranks[0].is_broken
    assert alone.summary is None
    assert [(export.window, export.is_alone) for export in alone.exports] == [(2, True)]


def test_a_new_group_goes_on_above_what_any_rank_has_seen() -> None:
    board = Board(2)
    old = [make(ByThreads(board, rank)) for rank in range(2)]
    together([rank.round for rank in old])
    board = Board(2)
    new = [make(ByThreads(board, 0)), make(ByThreads(board, 1), last=old[1])]
    first = taken(together([rank.round for rank in new]))[0]
    assert first.summary is not None
    assert first.summary.round == RoundId(2, 3)


def test_a_rank_that_talks_nonsense_is_named() -> None:
    board = Board(2)
    ranks = [make(ByThreads(board, rank)) for rank in range(2)]
    together([rank.join for rank in ranks])
    ranks[1]._group.garble = True  # type: ignore[attr-defined]
    board.barrier = threading.Barrier(2)

    def ended() -> object:
        try:
            return ranks[0].round()
        finally:
            board.barrier.abort()

    error = together([ended, ranks[1].round])[0]
    assert isinstance(error, RemoteProtocolError)
    assert "rank 1" in str(error)


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"ringfold\[torch\]"):
        TorchCollectives(0, 1, "127.0.0.1", 1)


def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 2 is not one of 2"):
        TorchCollectives(2, 2, "127.0.0.1", 1)
