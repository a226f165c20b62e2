"""The shell of a node's round machine: prober, fits and log. It decides nothing.

The same shell serves a peer (in the thread of its session) and a process that only probes (in its loop); they differ in
how a message is sent to the master, and pass that as `send`. The owner of the shell calls it from one thread at a time,
and calls `tick` when `due_s` has passed.

Between two windows of a master no node probes, so the shell does there only what the report needs. Lines are fitted
before (`open_window.py`), and a report is made and encoded once as a rehearsal, because code and memory that were not
used for seconds are cold. The window is exported when the next one is open.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence

from ringfold.errors import UsageError
from ringfold.probe.exchanges import EdgeWindow
from ringfold.probe.fit import fit
from ringfold.probe.logs.files import ProbeLog
from ringfold.probe.logs.lines import WindowFields, window_lines
from ringfold.probe.nodes.callbacks import ProbeWindow
from ringfold.probe.nodes.nodes_file import derive_key
from ringfold.probe.nodes.open_window import EarlyFits, ResidualMonitor
from ringfold.probe.nodes.prober import ProbeSocket
from ringfold.probe.rounds.effects import (
    AdoptClock,
    ConfigureProber,
    ExportWindow,
    LogNote,
    NodeEffect,
    PauseProbing,
    ResumeProbing,
    RotateWindow,
    SendToMaster,
)
from ringfold.probe.rounds.events import (
    MS,
    MasterConnected,
    NodeEvent,
    ResidualObserved,
    Tick,
    ToRoundMaster,
    WindowFitted,
)
from ringfold.probe.rounds.node import RoundNode
from ringfold.runtime.clock import monotonic_ns
from ringfold.wire.frames import message_frame
from ringfold.wire.notices import fit_text
from ringfold.wire.probing import EdgeFit, Neighbour, NodeClock, NodeId, RoundReport

EXPORT_AFTER_NS = 50_000_000
"""How long after the end of a window it is exported, if probing is paused."""
CHECK_INTERVAL_NS = 500_000_000
"""How often the open window is checked."""
MAX_SLEEP_S = 1.0

_log = logging.getLogger("ringfold.probe")


class NodeShell:
    """A node: its machine, and the parts that run its effects.

    `adopt` is called with each new clock of this node, `send` with each message for the master. `open_log` makes the
    log of a node once its id is known; None: windows are not logged. `on_window` gets each window that is over.
    `log_fits` logs its lines. The packets are authenticated with the run's token, too, because the master's key for
    them is sent in plain text.
    """

    def __init__(
        self,
        machine: RoundNode,
        prober: ProbeSocket,
        send: Callable[[ToRoundMaster], None],
        adopt: Callable[[NodeClock], None],
        *,
        open_log: Callable[[NodeId], ProbeLog | None] = lambda _: None,
        estimator: str = "auto",
        token: bytes = b"",
        log_fits: bool = False,
        on_window: Callable[[ProbeWindow], None] | None = None,
    ) -> None:
        self.machine, self.prober = machine, prober
        self._send, self._adopt = send, adopt
        self._open_log, self._estimator, self._token = open_log, estimator, token
        self._on_window = on_window
        self._log_fits = log_fits
        self._next_sequence = 0
        """Of the first probe of the open window; 0 if not known."""
        self._log: ProbeLog | None = None
        self._closed: dict[int, tuple[list[EdgeWindow], int]] = {}
        """The windows that were rotated and not yet exported, with UTC minus the node's clock."""
        self._opened_ns = 0
        self._is_sending = False
        self._residuals = ResidualMonitor()
        self._next_check_ns = 0
        self._early_fits = EarlyFits()
        self._exports: deque[ExportWindow] = deque()
        self._export_due_ns: int | None = None
        self._last_tick_ns = 0

    def step(self, event: NodeEvent) -> None:
        """Step the machine, and run its effects."""
        if isinstance(event, MasterConnected):
            self._set_node_id(event.node)
        for effect in self.machine.step(self.prober.now(), event):
            result = self._run_effect(effect)
            if result is not None:
                self.step(result)

    def _set_node_id(self, node: NodeId) -> None:
        """The master has assigned this id; after a restart of the master it may be another one."""
        if self._log is not None and node == self.prober.node:
            return
        self._export_deferred()
        self.prober.rename(node)
        if self._log is not None:
            self._log.close()
        self._log = self._open_log(node)

    def due_s(self) -> float | None:
        """In how many seconds `tick` is due: at least once a second while anything has a deadline."""
        now, due = self.prober.now(), self.machine.next_deadline_ns()
        next_check = self._next_check_ns if self._is_sending else None
        every = (due, next_check, self._early_fits.due_ns, self._export_due_ns)
        times = [time for time in every if time is not None]
        return min(max(0.0, (min(times) - now) / 1e9), MAX_SLEEP_S) if times else None

    def tick(self) -> None:
        """Time has passed. The machine also steps if the clock stepped back: its deadlines move with it."""
        now, due = self.prober.now(), self.machine.next_deadline_ns()
        went_back = now < self._last_tick_ns
        self._last_tick_ns = now
        if went_back:
            self._next_check_ns = min(self._next_check_ns, now + CHECK_INTERVAL_NS)
            self._early_fits.forget()
            self._export_deferred()
        if went_back or (due is not None and due <= now):
            self.step(Tick())
        if self._is_sending and self._next_check_ns <= now:
            self._next_check_ns = now + CHECK_INTERVAL_NS
            for src, dst, residual_ns in self._residuals.check(self.prober.peek()):
                self.step(ResidualObserved(src, dst, residual_ns))
        if self._early_fits.due_ns is not None and self._early_fits.due_ns <= now:
            self._fit_early()
        if self._export_due_ns is not None and self._export_due_ns <= now:
            self._export_deferred()

    def close(self) -> None:
        """Stop probing, and close the socket and the log."""
        self._export_deferred()
        self.prober.close()
        if self._log is not None:
            self._log.close()

    def _run_effect(self, effect: NodeEffect) -> NodeEvent | None:
        match effect:
            case SendToMaster(message):
                self._send(message)
            case ConfigureProber(key, out, into):
                self._residuals.forget()
                self._configure(derive_key(self._token, salt=key), out, into)
            case ResumeProbing(cadence):
                self._opened_ns = self.prober.now()
                self._next_sequence = self._sequence_after()
                self._next_check_ns, self._is_sending = self._opened_ns + CHECK_INTERVAL_NS, True
                self.prober.resume(cadence.gap_us, cadence.pause_us)
                # A log of every exchange gives the same line again only if all of them were fitted.
                if self.machine.kind == "master" and not (self._log and self._log.points):
                    self._early_fits.plan(self._opened_ns, cadence.window_ms * MS)
            case PauseProbing():
                self._is_sending = False
                self.prober.pause()
            case RotateWindow(window):
                return self._rotate(window)
            case AdoptClock(clock):
                self._adopt(clock)
            case ExportWindow():
                self._exports.append(effect)
                if self._is_sending:
                    self._export_deferred()
                elif self._export_due_ns is None:
                    self._export_due_ns = self.prober.now() + EXPORT_AFTER_NS
            case LogNote(text):
                _log.info("%s", text)
        return None

    def _configure(self, key: bytes, out: Sequence[Neighbour], into: Sequence[Neighbour]) -> None:
        """A neighbour that cannot be reached from here (for example IPv6 from IPv4) is skipped."""
        try:
            self.prober.configure(key, out, into)
        except UsageError as error:
            _log.warning("not all neighbours can be probed: %s", error)
            self.prober.configure(key, self._reachable(key, out), self._reachable(key, into))

    def _reachable(self, key: bytes, neighbours: Sequence[Neighbour]) -> list[Neighbour]:
        found = []
        for each in neighbours:
            with contextlib.suppress(UsageError):
                self.prober.configure(key, [each], [])
                found.append(each)
        return found

    def _rotate(self, window: int) -> WindowFitted:
        begin_ns, self._opened_ns = self._opened_ns, self.prober.now()
        windows = self.prober.rotate()
        first, following = self._next_sequence, self._sequence_after()
        self._next_sequence = following
        utc_ns = self.prober.utc()
        fits, fit_ns = self._fit(windows)
        self._early_fits.forget()
        self._closed[window] = (windows, utc_ns)
        return WindowFitted(
            window=window,
            edges=fits,
            begin_ns=begin_ns,
            end_ns=self._opened_ns,
            utc_ns=utc_ns,
            fit_ns=fit_ns,
            first_sequence=first,
            last_sequence=max(0, following - 1),
            next_sequence=following,
        )

    def _sequence_after(self) -> int:
        """The sequence of the next probe; 0 if the prober does not count them."""
        newest = self.prober.stats().sequence
        return newest + 1 if newest else 0

    def _fit_early(self) -> None:
        """Fit one edge of the open window; the owner may handle a message before the next one."""
        early, began = self._early_fits, monotonic_ns()
        if not early.has_begun:
            early.begin(self.prober.so_far())
        early.fit_next(lambda window: fit(window, self._estimator))
        if early.due_ns is None:
            self._rehearse(early.lines())
        early.took(monotonic_ns() - began)

    def _rehearse(self, lines: list[EdgeFit]) -> None:
        """Make a report like the one that is due soon, and discard it."""
        now = self.prober.now()
        message_frame(RoundReport(self.machine.last, 0, now, now, self.prober.utc(), lines, now))

    def _fit(self, windows: Sequence[EdgeWindow]) -> tuple[list[EdgeFit], int]:
        began = monotonic_ns()
        fits = [self._early_fits.line(window) or fit(window, self._estimator) for window in windows]
        self._residuals.update(fits)
        return fits, monotonic_ns() - began

    def _export_deferred(self) -> None:
        self._export_due_ns = None
        while self._exports:
            self._export(self._exports.popleft())

    def _export(self, export: ExportWindow) -> None:
        if self._log_fits:
            for line in export.edges:
                _log.info("round %s, window %d: %s", export.round, export.window, fit_text(line))
        windows, utc_ns = self._closed.pop(export.window, ([], 0))
        # Windows that the machine has dropped are never exported: they are dropped here, too.
        self._closed = {number: kept for number, kept in self._closed.items() if number > export.window}
        if self._on_window is not None:
            self._on_window(
                ProbeWindow(
                    number=export.window,
                    begin_ns=export.begin_ns,
                    end_ns=export.end_ns,
                    utc_ns=utc_ns,
                    fits=list(export.edges),
                    edges=windows,
                    round=export.round,
                    label=export.label,
                    is_alone=export.is_alone,
                )
            )
        if self._log is None:
            return
        fields = WindowFields(
            round_id=export.round,
            label=export.label,
            begin_ns=export.begin_ns,
            end_ns=export.end_ns,
            node=self.prober.node,
            window=export.window,
            utc_ns=utc_ns,
        )
        self._log.write(window_lines(fields, windows, list(export.edges), points=self._log.points))
