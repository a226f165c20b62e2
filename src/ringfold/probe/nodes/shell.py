"""The shell of a node's round machine: prober, fits and log. It decides nothing.

The same shell serves a peer (in the thread of its session) and a process that only probes (in its loop); they differ in
how a message reaches the master, and give that as `say`. Whoever owns the shell calls it from one thread at a time, and
calls `tick` when `due_s` has passed.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence

from ringfold.errors import UsageError
from ringfold.probe.fit import EdgeWindow, fit
from ringfold.probe.logs.files import Log
from ringfold.probe.logs.lines import Stretch, window_lines
from ringfold.probe.nodes.nodes_file import key_of
from ringfold.probe.nodes.open_window import Ahead, Watch
from ringfold.probe.nodes.prober import ProbeSocket
from ringfold.probe.rounds.events import (
    MS,
    Adopt,
    Configure,
    Connected,
    Export,
    NodeEffect,
    NodeEvent,
    Note,
    PauseProbing,
    Resume,
    Rotate,
    Say,
    Tick,
    ToRoundMaster,
    Watched,
    WindowFitted,
)
from ringfold.probe.rounds.node import RoundNode
from ringfold.runtime.clock import monotonic_ns
from ringfold.wire.probing import EdgeFit, Neighbour, NodeClock, NodeId

WATCH_NS = 500_000_000
"""How often the running window is looked into."""
LONGEST_SLEEP_S = 1.0

_log = logging.getLogger("ringfold.probe")


class NodeShell:
    """A node: its machine, and the parts that do what the machine wants.

    `adopt` is given each new clock of this node, `say` each message for the master. `open_log` makes the log of a node
    once its number is known; None: windows are not written down. The packets' tags are made with the run's token, too:
    the master's key for them travels in clear.
    """

    def __init__(
        self,
        machine: RoundNode,
        prober: ProbeSocket,
        say: Callable[[ToRoundMaster], None],
        adopt: Callable[[NodeClock], None],
        *,
        open_log: Callable[[NodeId], Log | None] = lambda _: None,
        estimator: str = "auto",
        token: bytes = b"",
    ) -> None:
        self.machine, self.prober = machine, prober
        self._say, self._adopt = say, adopt
        self._open_log, self._estimator, self._token = open_log, estimator, token
        self._log: Log | None = None
        self._closed: dict[int, tuple[list[EdgeWindow], int]] = {}
        """The windows that were rotated and not yet exported, with UTC minus the node's clock."""
        self._opened_ns = 0
        self._is_sending = False
        self._watch = Watch()
        self._watch_ns = 0
        self._ahead = Ahead()
        self._ticked_ns = 0

    def step(self, event: NodeEvent) -> None:
        """Tell the machine, and do what it says."""
        if isinstance(event, Connected):
            self._be(event.node)
        for effect in self.machine.step(self.prober.now(), event):
            answer = self._carry_out(effect)
            if answer is not None:
                self.step(answer)

    def _be(self, node: NodeId) -> None:
        """The master has given this node its number; after a restart of the master it may be another one."""
        if self._log is not None and node == self.prober.node:
            return
        self.prober.rename(node)
        if self._log is not None:
            self._log.close()
        self._log = self._open_log(node)

    def due_s(self) -> float | None:
        """In how many seconds `tick` is due: while something is waited for, once a second at least."""
        now, due = self.prober.now(), self.machine.next_deadline_ns()
        looks = self._watch_ns if self._is_sending else None
        times = [time for time in (due, looks, self._ahead.due_ns) if time is not None]
        return min(max(0.0, (min(times) - now) / 1e9), LONGEST_SLEEP_S) if times else None

    def tick(self) -> None:
        """Time has passed. A clock that went back is news for the machine too: its deadlines go with it."""
        now, due = self.prober.now(), self.machine.next_deadline_ns()
        went_back, self._ticked_ns = now < self._ticked_ns, now
        if went_back:
            self._watch_ns = min(self._watch_ns, now + WATCH_NS)
            self._ahead.forget()
        if went_back or (due is not None and due <= now):
            self.step(Tick())
        if self._is_sending and self._watch_ns <= now:
            self._watch_ns = now + WATCH_NS
            for src, dst, residual_ns in self._watch.look(self.prober.peek()):
                self.step(Watched(src, dst, residual_ns))
        if self._ahead.due_ns is not None and self._ahead.due_ns <= now:
            self._fit_ahead()

    def close(self) -> None:
        """Stop probing, and let go of the socket and the log."""
        self.prober.close()
        if self._log is not None:
            self._log.close()

    def _carry_out(self, effect: NodeEffect) -> NodeEvent | None:
        match effect:
            case Say(message):
                self._say(message)
            case Configure(key, out, into):
                self._watch.forget()
                self._configure(key_of(self._token, salt=key), out, into)
            case Resume(cadence):
                self._opened_ns = self.prober.now()
                self._watch_ns, self._is_sending = self._opened_ns + WATCH_NS, True
                self.prober.resume(cadence.gap_us, cadence.pause_us)
                # A log of every exchange gives the same line again only if all of them were fitted.
                if self.machine.kind == "master" and not (self._log and self._log.points):
                    self._ahead.plan(self._opened_ns, cadence.window_ms * MS)
            case PauseProbing():
                self._is_sending = False
                self.prober.pause()
            case Rotate(window):
                return self._rotate(window)
            case Adopt(clock):
                self._adopt(clock)
            case Export():
                self._export(effect)
            case Note(text):
                _log.info("%s", text)
        return None

    def _configure(self, key: bytes, out: Sequence[Neighbour], into: Sequence[Neighbour]) -> None:
        """A neighbour that cannot be reached from here (IPv6 from IPv4, say) is left out, and the others are probed."""
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
        utc_ns = self.prober.utc()
        fits, fit_ns = self._fit(windows)
        self._ahead.forget()
        self._closed[window] = (windows, utc_ns)
        return WindowFitted(window, fits, begin_ns, self._opened_ns, utc_ns, fit_ns)

    def _fit_ahead(self) -> None:
        self._ahead.fit(self.prober.so_far(), lambda window: fit(window, self._estimator))

    def _fit(self, windows: Sequence[EdgeWindow]) -> tuple[list[EdgeFit], int]:
        began = monotonic_ns()
        fits = [self._ahead.line(window) or fit(window, self._estimator) for window in windows]
        self._watch.fitted(fits)
        return fits, monotonic_ns() - began

    def _export(self, export: Export) -> None:
        windows, utc_ns = self._closed.pop(export.window, ([], 0))
        # What was given up by the machine is never exported: it is not kept either.
        self._closed = {number: kept for number, kept in self._closed.items() if number > export.window}
        if self._log is None:
            return
        stretch = Stretch(
            round_id=export.round,
            label=export.label,
            begin_ns=export.begin_ns,
            end_ns=export.end_ns,
            node=self.prober.node,
            window=export.window,
            utc_ns=utc_ns,
        )
        self._log.write(window_lines(stretch, windows, list(export.edges), points=self._log.points))
