"""`ringfold top`: a run on a terminal, by Textual. `terminal.py` draws; this file has screen, keys and feed.

A thread follows the master that leads, as the dashboard does, and hands each look to the application. The application
changes only what is different: two cells of a row, not the table.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from ringfold.errors import MasterUnreachable, RingfoldError
from ringfold.observe import terminal
from ringfold.observe.terminal import COLUMNS, SORTED_BY_PROBLEM, TONES
from ringfold.observe.view import Page, PeerRow, RunView
from ringfold.runtime import threads
from ringfold.runtime.clock import unix_ns
from ringfold.wire.events import Event
from ringfold.wire.status import Status

Look = tuple[str, Status, list[Event]] | MasterUnreachable
Looks = Callable[[], Iterator[Look]]
MAX_WAITS = 2
INCIDENT_LINES = 4


class Details(ModalScreen[None]):
    """A screen of text over the others, which follows the run: one peer, all incidents, or the masters."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q,i,m", "dismiss", "back")]

    def __init__(self, lines: Callable[[], list[Text]]) -> None:
        super().__init__()
        self._lines = lines

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="details"):
            yield Static(id="text")
        yield Footer()

    def on_mount(self) -> None:
        self.show()

    def show(self) -> None:
        self.query_one("#text", Static).update(Text("\n").join(self._lines()))


class Peers(DataTable[Text]):
    """The table of peers. It keeps the cursor on its peer, whatever the order."""

    def on_mount(self) -> None:
        self.cursor_type, self.cell_padding, self.zebra_stripes = "row", 0, False
        for number, column in enumerate(COLUMNS):
            self.add_column(Text(column.name, style="dim"), width=column.width, key=str(number))
        self._shown: dict[str, tuple[str, ...]] = {}
        self._order: list[str] = []

    def show(self, rows: Iterable[PeerRow], by: int) -> None:
        """Show these peers in the order of a column."""
        chosen = terminal.ordered(list(rows), COLUMNS[by])
        wanted = {str(row.peer): row for row in chosen}
        for key in [key for key in self._shown if key not in wanted]:
            self.remove_row(key)
            del self._shown[key]
        for key, row in wanted.items():
            cells = (row.tone, *(column.cell(row) for column in COLUMNS))
            before = self._shown.get(key)
            if before is None:
                self.add_row(*_styled(cells), key=key)
            elif before != cells:
                styled = _styled(cells)
                for number in range(len(COLUMNS)):
                    if before[0] != cells[0] or before[number + 1] != cells[number + 1]:
                        self.update_cell(key, str(number), styled[number])
            self._shown[key] = cells
        if list(wanted) != self._order:
            self._order = list(wanted)
            self._sort()

    def _sort(self) -> None:
        rank = {key: number for number, key in enumerate(self._order)}
        chosen = self.peer
        self.sort("0", key=lambda cell: rank.get(cell.plain.split()[-1], 0))
        if chosen in rank:
            self.move_cursor(row=rank[chosen], animate=False)

    @property
    def peer(self) -> str:
        """The peer under the cursor."""
        if not self.row_count or not 0 <= self.cursor_row < self.row_count:
            return ""
        return str(self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value)


def _styled(cells: tuple[str, ...]) -> list[Text]:
    """The first of `cells` is the tone of the row. Numbers are on the right of their columns."""
    tone, *texts = cells
    style = TONES[tone][1] if tone in ("bad", "warning", "note") else ""
    styled = []
    for column, text in zip(COLUMNS, texts, strict=True):
        is_number = column.name not in ("peer", "name", "state", COLUMNS[-1].name)
        room = column.width - 1
        shown = text if len(text) <= room or column is COLUMNS[-1] else f"{text[: room - 1]}…"
        first = TONES[tone][1] if column.name == "peer" else style
        styled.append(Text(f"{shown:>{room}} " if is_number else shown, style=first))
    return styled


class Top(App[None]):
    """The application. `looks` begins to follow a master; it is called in a thread of its own."""

    TITLE = "ringfold top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #headline, #course, #ring, #waits, #incidents { height: auto; padding: 0 1; }
    #ring, #waits, #incidents { border-top: solid $surface-lighten-2; }
    #waits.none, #ring.none { display: none; }
    Peers { height: 1fr; border-top: solid $surface-lighten-2; scrollbar-size-horizontal: 0; }
    Details { align: center middle; }
    #details { width: 100%; height: 1fr; border: round $primary; background: $surface; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(column.key, f"sort({number})", column.name.split(",")[0], show=number in (3, 4, 6, 7, 9))
            for number, column in enumerate(COLUMNS)
            if column.key
        ),
        Binding("i", "incidents", "incidents"),
        Binding("m", "masters", "masters"),
        Binding("enter", "peer", "peer", priority=False),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, looks: Looks, run: str = "", now_ms: Callable[[], int] = lambda: unix_ns() // 1_000_000) -> None:
        super().__init__()
        self._looks, self._now_ms = looks, now_ms
        self._view = RunView(run or "default")
        self._page = self._view.page()
        self._by = SORTED_BY_PROBLEM
        self._is_over = False
        self.failure: RingfoldError | None = None
        """Why it ended, if it did not because of a key."""

    def compose(self) -> ComposeResult:
        yield Static(id="headline")
        yield Static(id="course")
        yield Static(id="waits", classes="none")
        yield Static(id="ring", classes="none")
        yield Peers()
        yield Static(id="incidents")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.draw()
        threads.start("ringfold-top", self._follow)

    def on_unmount(self) -> None:
        self._is_over = True

    def on_resize(self) -> None:
        self.draw()

    # The feed

    def _follow(self) -> None:
        """In a thread: each look goes to the application, until that has ended."""
        try:
            for look in self._looks():
                if self._is_over:
                    return
                with suppress(RuntimeError):  # it ends just now
                    self.call_from_thread(self.take, look)
        except RingfoldError as error:
            self.failure = error
            with suppress(RuntimeError):
                self.call_from_thread(self.exit)

    def take(self, look: Look) -> None:
        """Take in one look at the master, and draw what is different."""
        at_ms = self._now_ms()
        if isinstance(look, MasterUnreachable):
            self._view.lose(at_ms, str(look))
        else:
            _, status, events = look
            self._view.run = status.run
            self._view.look(at_ms, status, events)
        self._page = self._view.page()
        self.draw()

    # Drawing

    @property
    def page(self) -> Page:
        return self._page

    def draw(self) -> None:
        if not self.is_mounted or not self.query("#headline"):
            return
        page, width = self._page, max(20, self.screen_stack[0].size.width - 2)
        root = self.screen_stack[0]
        root.query_one("#headline", Static).update(terminal.headline(page))
        root.query_one("#course", Static).update(terminal.course(self._view.series, page.headline.logged, width))
        waits = root.query_one("#waits", Static)
        waiting = terminal.waits(page, width, MAX_WAITS)
        waits.set_class(not waiting, "none")
        waits.update(Text("\n").join(waiting))
        rings = [line for group in page.groups.values() for line in terminal.ring(group, page.peers, width)]
        ring = root.query_one("#ring", Static)
        ring.set_class(not rings, "none")
        ring.update(Text("\n").join(rings[: 2 * terminal.MAX_RING_LINES]))
        root.query_one(Peers).show(page.peers.values(), self._by)
        latest = terminal.incidents(page, width, INCIDENT_LINES)
        nothing = [Text("no incidents yet", style="dim")]
        root.query_one("#incidents", Static).update(Text("\n").join(latest or nothing))
        if isinstance(self.screen, Details):
            self.screen.show()

    # Keys

    def action_sort(self, number: int) -> None:
        self._by = number
        self.draw()

    def action_incidents(self) -> None:
        self.push_screen(Details(lambda: terminal.incident_lines(self._page)))

    def action_masters(self) -> None:
        self.push_screen(Details(lambda: terminal.master_lines(self._page)))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        peer = int(str(event.row_key.value))
        self.push_screen(Details(lambda: terminal.peer_lines(self._page, peer)))
