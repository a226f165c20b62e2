"""From the records of a run directory to the summary of the run."""

from collections.abc import Iterable

from msgspec import structs

from ringfold.errors import UsageError
from ringfold.observe.records import Record
from ringfold.observe.summary.collector import Collector, RecordTally
from ringfold.observe.summary.incidents import IncidentList
from ringfold.observe.summary.ops import MAX_LOGGED_NAMES, OpTally
from ringfold.observe.summary.rare_events import History
from ringfold.observe.summary.results import (
    Incident,
    LinkFigures,
    OpClass,
    PeerWork,
    RecordFigures,
    Series,
    SeriesPoint,
    SlowStep,
    Summary,
    Traffic,
)
from ringfold.observe.summary.rounds import series_of
from ringfold.observe.summary.run_time import RunTime, TimeSource
from ringfold.observe.summary.sentences import sentences
from ringfold.observe.summary.thinning import ThinnedSeries
from ringfold.observe.summary.wording import join_words
from ringfold.units import US
from ringfold.wire.notices import PeerRegistered, RunEnded

MAX_SLOW_STEPS = 10
MAX_LINKS = 4_096
_SLOW = 2.0
"""A step is slow if it took so many times the median."""

TIME_SOURCES = {
    TimeSource.NONE: "none",
    TimeSource.FILE_HEADS: "wall clock, at the record's begin",
    TimeSource.WALL: "wall clock",
    TimeSource.GLOBAL: "global clock",
}


def summarise(records: Iterable[Record], run: str = "") -> Summary:
    """The summary of one run; `run` chooses it where the records are of several. UsageError if it is not there."""
    chosen = choose(list(records), run)
    collector = Collector(RunTime(chosen))
    collector.read(chosen)
    return _Builder(collector, chosen[0].begun.run).summary()


def choose(records: list[Record], run: str) -> list[Record]:
    """The records of one run."""
    names = sorted({record.begun.run for record in records})
    if run and run not in names:
        raise UsageError(f"there are no records of run {run!r}, only of {', '.join(map(repr, names))}")
    if not run and len(names) > 1:
        raise UsageError(f"there are records of several runs; choose one by --run: {', '.join(names)}")
    return [record for record in records if not run or record.begun.run == run]


class _Builder:
    """Turns tallies into figures, relative to the run's begin."""

    def __init__(self, collector: Collector, run: str) -> None:
        self._collector, self._run = collector, run
        self._events = collector.rare_events()
        hosts = {
            record.record.name: (record.record.begun.name, record.record.begun.host) for record in collector.records
        }
        self._history = History(hosts)
        for event in self._events:
            self._history.take(event)
        self._began_ns, self._end_ns = self._span()
        ends = {tally.record.name: tally.last_ns for tally in collector.records if tally.last_ns is not None}
        self._history.close(self._end_ns, self._began_ns, ends)
        for peer, (name, host, _) in collector.status.peers.items():
            member = self._history.members.get(peer)
            if member is not None:
                member.name, member.host = member.name or name, member.host or host

    def _span(self) -> tuple[int, int]:
        """The run lasted from its first registration or epoch to its last step, epoch or end."""
        collector = self._collector
        changed = [epoch.runs_ns for epoch in self._history.changes]
        registered = [event.at_ns for event in self._events if isinstance(event.notice, PeerRegistered)]
        begins = [*changed[:1], *registered[:1], *([collector.first_ns] if collector.first_ns else [])]
        times = [event.at_ns for event in self._events]
        if not begins:
            begins = times[:1] or [tally.first_ns for tally in collector.records if tally.first_ns is not None][:1]
        began_ns = min(begins, default=0)
        ends = [*times, *([collector.last_ns] if collector.last_ns else []), began_ns]
        if collector.status.peers and not any(isinstance(event.notice, RunEnded) for event in self._events):
            ends.append(collector.status.last_ns)
        return began_ns, max(ends)

    def _seconds(self, unix_ns: int | None) -> float | None:
        return None if unix_ns is None else (unix_ns - self._began_ns) / 1e9

    def summary(self) -> Summary:
        collector, ops, history = self._collector, self._collector.ops, self._history
        usual_us = ops.step_times.quantile(0.5)
        incidents = IncidentList()
        incidents.gather(self._events, history, ops, self._began_ns)
        sizes = self._sizes()
        ended = [event.notice.how for event in self._events if isinstance(event.notice, RunEnded)]
        count = 0 if ops.first_step is None or ops.last_step is None else ops.last_step - ops.first_step + 1
        summary = Summary(
            run=self._run,
            began_unix_ns=self._began_ns,
            seconds=(self._end_ns - self._began_ns) / 1e9,
            ended=ended[-1] if ended else "",
            sentences=[],
            first_step_s=self._seconds(ops.first_end_ns),
            steps=count,
            first_step=ops.first_step,
            last_step=ops.last_step,
            step_median_s=usual_us / 1e6,
            step_p99_s=ops.step_times.quantile(0.99) / 1e6,
            most_peers=max(sizes, default=0),
            fewest_peers=min(sizes, default=0),
            epochs=len(history.changes),
            checkpoints=len(collector.checkpoints),
            lanes_lost=collector.lanes_lost,
            suspicions=collector.suspicions,
            refused_connections=collector.refused_connections,
            ops_left_out=ops.ops_left_out,
            steps_left_out=ops.steps_left_out,
            costs=incidents.costs,
            memberships=history.memberships(self._began_ns),
            leads=history.leads,
            incidents=incidents.incidents,
            incidents_left_out=incidents.left_out,
            rates=_rates(ops, self._began_ns),
            logged=self._logged(),
            logged_left_out=len(ops.logged_left_out),
            slow_steps=self._slow_steps(incidents.incidents),
            work=self._work(),
            ops=_op_classes(ops),
            traffic=self._traffic(),
            links=self._links(),
            clocks=[clock.figures(self._began_ns) for clock in collector.clocks],
            rounds=collector.rounds.figures(),
            records=[self._record(tally) for tally in collector.records],
            notes=self._notes(),
        )
        return _with_sentences(summary)

    def _sizes(self) -> list[int]:
        """How many members all groups together had, from the first step on."""
        began_ns = self._collector.ops.first_end_ns or 0
        now: dict[tuple[int, int], int] = {}
        found: list[int] = []
        for epoch in sorted(self._history.changes, key=lambda epoch: epoch.runs_ns):
            now[epoch.key[:2]] = len(epoch.ring)
            size = sum(count for (incarnation, _), count in now.items() if incarnation == epoch.key.incarnation)
            found = [*found, size] if epoch.runs_ns > began_ns else [size]
        return found

    def _logged(self) -> list[Series]:
        ops = self._collector.ops
        names = dict.fromkeys([*ops.logged, *list(ops.not_finite)[:MAX_LOGGED_NAMES]])
        return [
            series_of(name, ops.logged.get(name, ThinnedSeries()), self._began_ns, ops.not_finite.get(name, 0))
            for name in names
        ]

    # Who was slow

    def _slow_steps(self, incidents: list[Incident]) -> list[SlowStep]:
        ops = self._collector.ops
        usual_ns = ops.step_times.quantile(0.5) * US
        slow = sorted(ops.slow_steps.items(), key=lambda item: -item[1].took_ns)[:MAX_SLOW_STEPS]
        found = []
        for step, tally in slow:
            if tally.took_ns < _SLOW * usual_ns or not tally.at_ns:
                continue
            at_s = (tally.at_ns - self._began_ns) / 1e9
            took_s = tally.took_ns / 1e9
            during = [one for one in incidents if at_s - took_s - 0.05 <= one.at_s <= at_s and one.kind != "begun"]
            found.append(SlowStep(step, at_s, took_s, tally.peer, tally.own_ns / 1e9, during[0].text if during else ""))
        return found

    def _work(self) -> list[PeerWork]:
        collector, found = self._collector, []
        for peer, work in sorted(collector.ops.work.items()):
            member = self._history.members.get(peer)
            # Of the time in ops, the part that was longer than at the peer that began last.
            in_ops_s = work.in_ops_ns / 1e9
            waited_s = in_ops_s * work.waited_ns / work.compared_ns if work.compared_ns else 0.0
            found.append(
                PeerWork(
                    peer,
                    member.name if member else "",
                    member.host if member else "",
                    work.steps,
                    work.ops,
                    max(0, work.step_ns - work.in_ops_ns) / 1e9,
                    waited_s,
                    in_ops_s - waited_s,
                    work.sync_ns / 1e9,
                    work.cpu_ns / 1e9,
                    work.queued_ns / 1e9,
                    work.last,
                    work.judged,
                    work.kept_ns / 1e9,
                    collector.status.missing_ms.get(peer, 0) / 1e3,
                )
            )
        return found

    # Bytes and links

    def _traffic(self) -> list[Traffic]:
        collector, found = self._collector, []
        statuses = collector.status.peers
        for peer in sorted({*statuses, *(peer for peer in collector.ops.work if peer)}):
            member = self._history.members.get(peer)
            name = member.name if member else statuses[peer][0] if peer in statuses else ""
            work, totals = collector.ops.work.get(peer), statuses[peer][2] if peer in statuses else None
            # The last status may be a second old, and ops may not be recorded: the greater sum is nearer to the truth.
            sent = max(work.sent_bytes if work else 0, totals.sent_bytes if totals else 0)
            received = max(work.received_bytes if work else 0, totals.received_bytes if totals else 0)
            in_memory = None
            if totals is not None and totals.sent_bytes:
                in_memory = sent * totals.memory_bytes // totals.sent_bytes
            if sent or received:
                found.append(Traffic(peer, name, sent, received, in_memory))
        return found

    def _links(self) -> list[LinkFigures]:
        status = self._collector.status
        return [
            LinkFigures(
                source,
                target,
                link.newest.bytes_per_s,
                link.low,
                link.high,
                link.newest.delay_us,
                link.newest.loss,
                link.newest.by,
                link.samples,
                status.transports.get((source, target), ""),
            )
            for (source, target), link in sorted(status.links.items())[:MAX_LINKS]
        ]

    # Records

    def _record(self, tally: RecordTally) -> RecordFigures:
        begun, notes = tally.record.begun, []
        if tally.source is TimeSource.NONE:
            notes.append("no sample of a clock: its events have no place in time, and only its ops are counted")
        elif not tally.has_clock and tally.source is TimeSource.FILE_HEADS:
            notes.append("no sample of a clock: its times are those of the wall clock at its begin")
        if begun.part:
            notes.append("its oldest parts were deleted to limit its size")
        if tally.record.skipped:
            lines = "line" if tally.record.skipped == 1 else "lines"
            notes.append(f"{tally.record.skipped} {lines} could not be read: cut off, or of a newer version")
        if tally.left_out_rare:
            notes.append(f"{tally.left_out_rare} events of frequent kinds are counted only")
        return RecordFigures(
            tally.record.name,
            begun.role,
            begun.host,
            begun.pid,
            begun.version,
            self._seconds(tally.first_ns),
            self._seconds(tally.last_ns),
            tally.events,
            tally.record.skipped,
            TIME_SOURCES[tally.source],
            notes,
        )

    def _notes(self) -> list[str]:
        """What is missing, and so cannot be shown."""
        collector, notes = self._collector, []
        roles = {tally.record.begun.role for tally in collector.records}
        if "master" not in roles:
            notes.append("There is no record of a master: reasons of evictions, links and totals are not known.")
        if "peer" not in roles:
            notes.append("There are no records of peers: ops, steps, pauses and clocks are not known.")
        else:
            recorded = {peer for tally in collector.records for peer in tally.peers}
            without = [member.label for peer, member in sorted(self._history.members.items()) if peer not in recorded]
            if without:
                notes.append(f"There is no record of {join_words(without)}.")
        if collector.ops.ops_left_out or collector.ops.steps_left_out:
            notes.append(
                f"{collector.ops.ops_left_out:,} ops and {collector.ops.steps_left_out:,} steps ended too fast to be "
                "recorded; figures of ops are those of the recorded ones."
            )
        return notes


def _rates(ops: OpTally, began_ns: int) -> Series:
    """Steps per second, from the time that steps took."""
    points = [
        SeriesPoint(
            ((bucket.first_ns + bucket.last_ns) / 2 - began_ns) / 1e9,
            1 / bucket.mean,
            1 / bucket.high,
            1 / bucket.low,
        )
        for bucket in ops.step_series.buckets()
        if bucket.low > 0
    ]
    return Series("steps per second", ops.step_series.added, points)


def _op_classes(ops: OpTally) -> list[OpClass]:
    found = []
    for (op, _), tally in sorted(ops.classes.items()):
        durations = tally.durations
        found.append(
            OpClass(
                op,
                tally.low_bytes,
                tally.high_bytes,
                durations.count,
                durations.quantile(0.5),
                durations.quantile(0.99),
                durations.greatest,
                tally.least.quantile(0.5),
                tally.waited_ns / tally.compared_ns if tally.compared_ns else None,
                min(1.0, tally.blocked_ns / tally.total_ns) if tally.total_ns else 0.0,
            )
        )
    return found


def _with_sentences(summary: Summary) -> Summary:
    return structs.replace(summary, sentences=sentences(summary))
