"""The master's part in rounds: a pure state machine, `step(now, event) -> effects`.

Nodes come and go. While probing is on and there is somebody to probe, one *round* follows the other:

    still --> probing --(the window is over)--> gathering --(all reported, or the deadline)--> probing of the next
                 local has no gathering: its round lasts until the members change

What was gathered is combined after the next start, with `master` in a later step: nobody rests while the master
calculates. So the nodes' clocks follow their RoundStart, and advice about the cadence is followed one round later.

At the boundary between two rounds, and only there, the machine looks at who is there: if that has changed it draws a
new graph with a fresh key, once for everybody who came in the meantime. *Participants* of a round are the nodes that
probe in its graph, fixed when it begins. Nobody else is waited for: not listeners, not newcomers; and a participant
whose connection is lost is not waited for either. A round always gets its summary by its deadline, and the summary
names each participant that is missing from it.

**Ids never go back.** A round's id is (fence, sequence). Whatever a node has seen before (it says so when it comes, and
its reports say so too) the next id is above it: the sequence goes on over masters. A graph bears the sequence of the
first round that uses it, so its numbers never go back either.

**Early ends.** A command (`round`) or an anomaly ends a window before its time, but never earlier than
`least_window_ms` after its beginning; an anomaly does so once a round, and not again for `alarm_rest_ms`.

**Own lateness.** If the machine notices a deadline long after it has passed, it was itself frozen or starved, and
the reports may lie unread in its sockets: once a round it waits `PATIENCE_MS` more before it judges.

The kinds differ in few places: who ends a window (`_end`), which reports count (`_report`, `_take`), and when a round
is complete (`_is_complete`). With `gloo` this machine runs on rank 0, and collectives carry its messages (`gloo.py`).
"""

from collections.abc import Callable
from typing import assert_never

from ringfold.probe.graph.draw import neighbours
from ringfold.probe.rounds.events import (
    MS,
    Alarmed,
    Answer,
    Calculate,
    Commanded,
    Draw,
    FromRoundMaster,
    MasterEffect,
    MasterEvent,
    NodeCame,
    NodeGone,
    Note,
    Publish,
    Reported,
    SendTo,
    Tick,
)
from ringfold.probe.rounds.gather import (
    MOST_ASKS,
    Asks,
    Gathered,
    Newest,
    OpenRound,
    fault_of,
    of_graph,
    sound,
    summarise,
)
from ringfold.probe.rounds.metrics import Received
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.wire.probing import (
    Cadence,
    EdgeFit,
    NodeId,
    ProbeAnswer,
    ProbeGraph,
    ProbeHalt,
    RoundClock,
    RoundEnd,
    RoundId,
    RoundStart,
    RoundSummary,
)

MOST = 1 << 53
"""Nobody counts so far: a higher fence or sequence is a lie or a broken memory."""


class RoundMaster:
    """The rounds of one run.

    `key` gives a fresh 16-byte key for a graph's number. `sequence` is the last one that a journal remembers; without
    one, the nodes' memories do.
    """

    def __init__(
        self,
        settings: RoundSettings,
        fence: int,
        key: Callable[[int], bytes],
        draw: Draw,
        calculate: Calculate,
        *,
        sequence: int = 0,
    ) -> None:
        self.settings = settings
        self._key, self._draw, self._calculate = key, draw, calculate
        self._highest = RoundId(fence, sequence)
        self._members: dict[NodeId, NodeCame] = {}
        self._edges: list[tuple[NodeId, NodeId]] = []
        self._is_dirty = True
        self._round: OpenRound | None = None
        self._begin_due_ns: int | None = None
        self._boundary_ns: int | None = None
        self._is_on = settings.is_on
        self._label = ""
        self._asks = Asks()
        self._cadence = settings.cadence
        self._newest = Newest()
        self._history: object = None
        self._gathered: Gathered | None = None
        self._last: RoundSummary | None = None
        self._skew = 0
        self._alarms_after_ns: int | None = None
        self._out: list[MasterEffect] = []

    # What the shell and the curious may look at

    @property
    def is_on(self) -> bool:
        return self._is_on

    @property
    def sequence(self) -> int:
        """The highest sequence that any round has had, as far as is known: for a journal."""
        return self._highest.sequence

    @property
    def summary(self) -> RoundSummary | None:
        """The newest result."""
        return self._last

    @property
    def round(self) -> RoundId | None:
        """The round that is under way."""
        return self._round.id if self._round else None

    @property
    def owes_summary(self) -> bool:
        """Whether a round is under way, or not combined yet."""
        return self._round is not None or self._gathered is not None

    @property
    def is_gathering(self) -> bool:
        """Whether the window of the round under way is over."""
        return self._round is not None and self._round.is_gathering

    def waiting_for(self) -> list[NodeId]:
        """Whose reports the round under way still waits for; empty while its window is open."""
        return sorted(self._waiting_for(self._round)) if self._round and self._round.is_gathering else []

    def next_deadline_ns(self) -> int | None:
        """When Tick is due; None when nothing is waited for."""
        times = [self._begin_due_ns, *(ask.deadline_ns for ask in self._asks.waiting)]
        if self._round is not None:
            times.append(self._round.deadline_ns if self._round.is_gathering else self._round.end_due_ns)
        if self._gathered is not None:
            times.append(self._gathered.due_ns)
        return min((time for time in times if time is not None), default=None)

    def step(self, now_ns: int, event: MasterEvent) -> list[MasterEffect]:
        """Apply one event; return what the shell must now do, in order."""
        out = self._out = []
        match event:
            case NodeCame():
                self._came(now_ns, event)
            case NodeGone(node, reason):
                self._gone(now_ns, node, reason)
            case Reported():
                self._report(now_ns, event)
            case Alarmed():
                self._alarm(now_ns, event)
            case Commanded():
                self._command(now_ns, event)
            case Tick():
                pass
            case _:
                assert_never(event)
        self._settle(now_ns)
        return out

    def _settle(self, now_ns: int) -> None:
        """Move on as far as the facts and the time allow."""
        for ask in self._asks.expire(now_ns):
            self._answer(ask.asker, f"no summary within {ask.waits_ms} ms", done=False)
        if self._gathered is not None and now_ns >= self._gathered.due_ns:
            self._combine(self._gathered)
        while True:
            round = self._round
            if round is None:
                if self._begin_due_ns is None or now_ns < self._begin_due_ns:
                    return
                self._begin(now_ns)
            elif round.is_gathering:
                if not self._is_complete(now_ns, round) and not round.is_over(now_ns):
                    return
                self._finish(now_ns, round)
            else:
                is_due = round.end_due_ns is not None and now_ns >= round.end_due_ns
                if not is_due and (self.settings.kind != "gloo" or self._waiting_for(round)):
                    return
                self._end(now_ns, round)

    # Who is there

    def _came(self, now_ns: int, event: NodeCame) -> None:
        if event.node in self._members:
            self._gone(now_ns, event.node, "it came again")
        self._learn(event.last, event.node)
        self._members[event.node] = event
        self._newest.forget(event.node)
        self._is_dirty = True
        if not self._is_on and self._round is None:
            self._send(event.node, ProbeHalt(self._highest, "probing is off"))
        self._members_changed(now_ns)

    def _gone(self, now_ns: int, node: NodeId, reason: str) -> None:
        if self._members.pop(node, None) is None:
            return
        self._newest.forget(node)
        self._is_dirty = True
        round, gathered = self._round, self._gathered
        for begun in (round, gathered.round if gathered else None):
            if begun is not None:
                begun.present.discard(node)
        if round is not None and node in round.participants and node not in round.received:
            round.gone[node] = f"its connection was lost{f': {reason}' if reason else ''}"
        self._members_changed(now_ns)

    def _members_changed(self, now_ns: int) -> None:
        round = self._round
        if round is None:
            self._schedule(now_ns + self.settings.settle_ms * MS)
        elif self.settings.kind == "local":
            round.end_by(now_ns + self.settings.settle_ms * MS)
        elif not round.is_gathering and not round.participants & self._members.keys():
            self._abandon(now_ns, "every participant left")

    def _schedule(self, due_ns: int) -> None:
        """Begin a round at `due_ns`, or sooner if that is already planned; not at all if there is nothing to do."""
        if not self._can_probe() or not (self._is_on or self._asks):
            self._begin_due_ns = None
        elif self._begin_due_ns is None or due_ns < self._begin_due_ns:
            self._begin_due_ns = due_ns

    def _can_probe(self) -> bool:
        return len(self._members) >= 2 and any(not member.listen_only for member in self._members.values())

    def _learn(self, seen: RoundId, node: NodeId) -> None:
        """Somebody has seen this round: the next one will be above it."""
        if not (0 <= seen.fence < MOST and 0 <= seen.sequence < MOST):
            self._out.append(Note(f"node {node} says that it has seen round {seen}: ignored, nobody counts so far"))
            return
        if seen > self._highest and self._last is not None:
            self._out.append(Note(f"node {node} has seen round {seen}; the next one goes above it"))
        self._highest = RoundId(max(self._highest.fence, seen.fence), max(self._highest.sequence, seen.sequence))

    # The life of a round

    def _next_id(self) -> RoundId:
        return RoundId(self._highest.fence, self._highest.sequence + 1)

    def _begin(self, now_ns: int) -> None:
        """Draw if members changed, and start the next window."""
        self._begin_due_ns, self._round = None, None
        if not self._can_probe():
            self._still("there is nobody to probe")
            return
        self._highest = id = self._next_id()
        if self._is_dirty:
            self._redraw(id.sequence)
        cadence, settings = self._cadence, self.settings
        participants = frozenset(src for src, _ in self._edges)
        round = OpenRound(id, self._label, participants, cadence, now_ns, self._end_due(now_ns))
        self._round, round.present = round, set(self._members)
        if not self._is_on:
            round.label = self._asks.bind(id) or round.label
        self._newest.start(id, now_ns, cadence.window_ms)
        start = RoundStart(id, round.label, cadence, settings.deadline_ms(cadence), now_ns, settings.anomaly_ns)
        for node in sorted(self._members):
            self._send(node, start)
        if self._asks.has_free:
            round.end_by(now_ns + settings.least_window_ms * MS)

    def _end_due(self, now_ns: int) -> int | None:
        window_ns = self._cadence.window_ms * MS
        match self.settings.kind:
            case "local":
                return None
            case "time":
                # Boundaries keep their pace, however long a gathering took.
                late = 0 if self._boundary_ns is None else max(0, now_ns - self._boundary_ns) % window_ns
                self._boundary_ns = now_ns + window_ns - late
                return self._boundary_ns
            case _:
                return now_ns + window_ns

    def _redraw(self, number: int) -> None:
        members = sorted(self._members)
        listeners = [node for node in members if self._members[node].listen_only]
        self._edges = self._draw(members, listeners, self.settings.neighbours, self.settings.seed)
        self._is_dirty = False
        facts, key = {node: self._members[node].facts for node in members}, self._key(number)
        for node, (out, into) in neighbours(facts, self._edges).items():
            self._send(node, ProbeGraph(number, self.settings.kind, key, out, into))

    def _end(self, now_ns: int, round: OpenRound) -> None:
        """The window is over: say so where the nodes do not know by themselves, and wait for the reports."""
        if self.settings.kind == "local":
            self._begin(now_ns)
            return
        round.label = self._asks.bind(round.id) or round.label
        gather_ms = self.settings.gather_ms(round.cadence)
        round.is_gathering, round.deadline_ns = True, now_ns + gather_ms * MS
        if self.settings.kind == "master":
            round.end_sent_ns = now_ns
            end = RoundEnd(round.id, now_ns, round.label, gather_ms + self.settings.grace_ms)
            for node in sorted(round.participants & self._members.keys()):
                self._send(node, end)

    def _waiting_for(self, round: OpenRound) -> list[NodeId]:
        return round.waiting_for()

    def _is_complete(self, now_ns: int, round: OpenRound) -> bool:
        """Whether everybody who may still report has."""
        if self.settings.kind == "time":
            return all(self._newest.is_fresh(now_ns, node) for node in round.participants - round.gone.keys())
        return round.is_complete

    def _finish(self, now_ns: int, round: OpenRound) -> None:
        """Start the next window, and combine what came after that."""
        if self._gathered is not None:
            self._combine(self._gathered)
        received, fits, missing = self._take(now_ns, round)
        asks, due_ns = self._asks.take(round.id), now_ns + self.settings.combine_after_ms * MS
        gathered = Gathered(round, received, fits, missing, asks, self._skew, due_ns)
        self._gathered, self._skew, self._round = gathered, 0, None
        if self._is_on or self._asks:
            self._begin(now_ns)
        else:
            self._still("one round was asked for")
        if self.settings.kind != "master":
            self._combine(gathered)  # one broadcast carries both (`gloo`), or nobody rests meanwhile (`time`)

    def _combine(self, gathered: Gathered) -> None:
        """The result of a round: to each node its clock, and the summary to everybody who wants to know."""
        round, received, result, self._gathered = gathered.round, gathered.received, None, None
        if gathered.fits:
            utc = {node: one.report.utc_ns for node, one in received.items() if one.report.edges}
            result = self._calculate(gathered.fits, utc, self._history)
            self._history = result.history
            if result.advice is not None:
                self._cadence = Cadence(self._cadence.gap_us, result.advice.pause_us, result.advice.window_ms)
            for clock in result.nodes:
                if clock.node in round.present:
                    self._send(clock.node, RoundClock(round.id, clock))
        self._last = summary = summarise(self.settings.kind, gathered, result)
        self._out.append(Publish(summary))
        text = f"round {round.id.sequence}: {len(received)} of {len(round.participants)} reported"
        for ask in gathered.asks:
            self._answer(ask.asker, text, summary=summary)

    def _take(self, now_ns: int, round: OpenRound) -> tuple[dict[NodeId, Received], list[EdgeFit], dict[NodeId, str]]:
        """The reports that count, their fits, and why others are missing."""
        missing = dict(round.gone)
        if self.settings.kind == "time":
            late = [node for node in sorted(round.participants) if not self._newest.is_fresh(now_ns, node)]
            received, fits = self._newest.take(now_ns, round.participants)
            silent = {node: "no new window" if node in received else "no window of the last two" for node in late}
        else:
            received = round.received
            fits = [fit for _, one in sorted(received.items()) for fit in one.report.edges]
            gather_ms = self.settings.gather_ms(round.cadence)
            silent = {node: f"no report within {gather_ms} ms" for node in round.waiting_for()}
        fits, empty = of_graph(self._edges, received, fits)
        return received, fits, empty | silent | missing

    def _still(self, reason: str) -> None:
        """No window is open any more."""
        self._round, self._begin_due_ns, self._boundary_ns = None, None, None
        for node in sorted(self._members):
            self._send(node, ProbeHalt(self._highest, reason))

    def _abandon(self, now_ns: int, reason: str) -> None:
        """The round under way comes to nothing."""
        round, self._round = self._round, None
        assert round is not None
        self._out.append(Note(f"round {round.id.sequence} is given up: {reason}"))
        self._refuse(reason, round.id)
        self._still(reason)
        self._schedule(now_ns + self.settings.settle_ms * MS)

    # Reports and alarms

    def _report(self, now_ns: int, event: Reported) -> None:
        node, report, round = event.node, event.report, self._round
        if node not in self._members:
            return
        if fault := fault_of(node, report):
            self._out.append(Note(f"a report of node {node} is ignored: {fault}"))
            return
        if report.round > self._highest:
            self._learn(report.round, node)
            return
        if round is None:
            return
        self._skew = max(self._skew, abs(round.id.sequence - report.round.sequence))
        received = Received(sound(report), now_ns, event.bytes)
        if self.settings.kind == "time":
            self._newest.add(node, received, self._members)
        elif self._counts(round, node, received):
            round.received[node] = received
            round.gone.pop(node, None)
        elif report.round < round.id:
            behind = round.id.sequence - report.round.sequence
            self._out.append(Note(f"the report of node {node} came {behind} round(s) late"))

    def _counts(self, round: OpenRound, node: NodeId, received: Received) -> bool:
        """Whether a report belongs to this round: of a participant, with this id, the first one, and in time."""
        is_open = round.is_gathering or self.settings.kind == "gloo"
        is_first = node in round.participants and node not in round.received
        return is_open and is_first and received.report.round == round.id

    def _alarm(self, now_ns: int, event: Alarmed) -> None:
        alarm, round = event.alarm, self._round
        if round is None or alarm.round != round.id or event.node not in round.participants or round.anomaly:
            return
        if alarm.src != event.node or abs(alarm.residual_ns) <= self.settings.anomaly_ns:
            return
        round.anomaly = f"edge {alarm.src} -> {alarm.dst} strays by {alarm.residual_ns} ns"
        rests = self._alarms_after_ns is not None and now_ns < self._alarms_after_ns
        if self.settings.kind == "master" and not round.is_gathering and not rests:
            self._alarms_after_ns = now_ns + self.settings.alarm_rest_ms * MS
            round.end_by(max(now_ns, round.begun_ns + self.settings.least_window_ms * MS))

    # Commands

    def _command(self, now_ns: int, event: Commanded) -> None:
        match event.action:
            case "show":
                self._answer(event.asker, self._state(), summary=self._last)
            case "start":
                was_on, self._is_on, self._label = self._is_on, True, event.label
                if self._round is None:
                    self._schedule(now_ns)
                on = f"probing is on; {self._count()}"
                self._answer(event.asker, "probing was on already" if was_on else on)
            case "stop":
                self._is_on, self._label = False, ""
                self._refuse("probing was stopped")
                self._still("stopped by command")
                self._answer(event.asker, "probing is off")
            case "round":
                self._ask(now_ns, event)
            case _:
                assert_never(event.action)

    def _ask(self, now_ns: int, event: Commanded) -> None:
        settings = self.settings
        if settings.kind in ("local", "gloo"):
            why = f"{settings.kind} rounds are not the master's: there is nothing to ask it for"
            self._answer(event.asker, why, done=False)
            return
        if not self._can_probe():
            self._answer(event.asker, f"there is nobody to probe: {self._count()}", done=False)
            return
        if self._asks.is_full:
            self._answer(event.asker, f"{MOST_ASKS} already wait for a round", done=False)
            return
        round_ms = self._cadence.window_ms + settings.gather_ms(self._cadence)
        self._asks.add(now_ns, event.asker, event.label, round_ms, settings.settle_ms + settings.grace_ms)
        if self._round is None:
            self._schedule(now_ns)
        elif not self._round.is_gathering:
            self._round.end_by(max(now_ns, self._round.begun_ns + settings.least_window_ms * MS))

    def _refuse(self, reason: str, round: RoundId | None = None) -> None:
        """Tell all who wait (for this round, or for any) that it comes to nothing."""
        for ask in self._asks.take(round):
            self._answer(ask.asker, reason, done=False)

    def _count(self) -> str:
        return "1 node" if len(self._members) == 1 else f"{len(self._members)} nodes"

    def _state(self) -> str:
        nodes, round = self._count(), self._round
        if round is None:
            return f"{nodes}, no window is open"
        if waits := self.waiting_for():
            named = f"{', '.join(map(str, waits[:8]))}{' ...' if len(waits) > 8 else ''}"
            return f"{nodes}, round {round.id.sequence} waits for {named}"
        return f"{nodes}, round {round.id.sequence} probes"

    def _answer(self, asker: int, text: str, *, done: bool = True, summary: RoundSummary | None = None) -> None:
        self._out.append(Answer(asker, ProbeAnswer(done, text, self._is_on, summary)))

    def _send(self, node: NodeId, message: FromRoundMaster) -> None:
        self._out.append(SendTo(node, message))
