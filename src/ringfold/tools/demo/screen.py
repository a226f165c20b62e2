"""What one sees while the demo runs: a live table in a terminal, plain lines elsewhere, nothing beside JSON."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.demo.director import DemoDirector, DemoPeer

REDRAW_NS = 100_000_000
STATES = {"training": "green", "killed": "bold red", "frozen": "bold cyan", "waking": "cyan", "finished": "bold green"}


class Quiet:
    """Shows nothing. The others are made from it."""

    @contextmanager
    def watching(self, director: DemoDirector) -> Iterator[None]:
        """Inside, the screen follows the director."""
        yield

    def follow(self, work: Iterable[object], total: int, what: str) -> None:
        """Go through the work to its end, and show how much of it is done."""
        for _ in work:
            pass


class Plain(Quiet):
    """Plain lines: the events, and the position after every tenth of the steps."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def watching(self, director: DemoDirector) -> Iterator[None]:
        seen, tenth = 0, 0

        def look() -> None:
            nonlocal seen, tenth
            fresh = director.events[seen:]
            for event in fresh:
                self._console.print(Text(event), soft_wrap=True)
            seen += len(fresh)
            leader = leading(director)
            if leader is not None and leader.last and leader.last.step * 10 // director.steps > tenth:
                tenth = leader.last.step * 10 // director.steps
                self._console.print(Text(f"         {position(leader, director.steps)}"))

        director.on_change = look
        yield
        look()

    def follow(self, work: Iterable[object], total: int, what: str) -> None:
        self._console.print(Text(what))
        super().follow(work, total, what)


class Terminal(Quiet):
    """A row for each peer, drawn again and again; the events stay above."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def watching(self, director: DemoDirector) -> Iterator[None]:
        seen, drawn_ns = 0, 0
        with Live(console=self._console, auto_refresh=False) as live:

            def look() -> None:
                nonlocal seen, drawn_ns
                fresh = director.events[seen:]
                for event in fresh:
                    live.console.print(Text(event))
                seen += len(fresh)
                if fresh or monotonic_ns() - drawn_ns > REDRAW_NS:
                    drawn_ns = monotonic_ns()
                    live.update(self._picture(director), refresh=True)

            director.on_change = look
            yield
            look()
            live.update(self._picture(director), refresh=True)

    def follow(self, work: Iterable[object], total: int, what: str) -> None:
        with Progress(console=self._console, transient=True) as progress:
            super().follow(progress.track(work, total, description=what), total, what)

    def _picture(self, director: DemoDirector) -> Group:
        rows = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("", "state", "step", "loss", "epoch", "world", ""):
            rows.add_column(heading, justify="right" if heading in ("step", "loss", "epoch", "world") else "left")
        for peer in list(director.peers.values()):
            last = peer.last
            figures = [f"{last.step}", f"{last.loss:.3f}", f"{last.epoch}", f"{last.world}"] if last else [""] * 4
            bar = ProgressBar(director.steps, last.step + 1 if last else 0, width=30)
            rows.add_row(peer.name, Text(peer.state, STATES.get(peer.state, "dim")), *figures, bar)
        leader = leading(director)
        foot = position(leader, director.steps) if leader else "a master and the peers are starting"
        return Group(Text(), rows, Text(foot, "dim"))


def leading(director: DemoDirector) -> DemoPeer | None:
    """The peer that is farthest."""
    return max((peer for peer in list(director.peers.values()) if peer.last), key=_step, default=None)


def position(peer: DemoPeer, steps: int) -> str:
    last = peer.last
    assert last is not None
    return f"step {last.step} of {steps}, loss {last.loss:.3f}, epoch {last.epoch}, world {last.world}"


def _step(peer: DemoPeer) -> int:
    return peer.last.step if peer.last else -1
