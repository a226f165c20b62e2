"""What a round cost, from the figures in its reports.

The master's clock is not part of the graph. The master knows a node's clock only by the round trip of ROUND_END: the
message was sent at `end_sent` (master) and received at `sent - held` (node); the report was sent at `sent` and received
at `at` (master). Half of the round trip without `held` is the *control latency*, one way. It also gives the offset of
the node's clock, as exactly as the path is symmetric. That is enough to measure durations.

Spreads are different: they are between nodes, and the calculation has just given every node its clock.

Which figure belongs to which round: the stop, the fits, the gathering and the calculation are those at the end of the
round's window. The restart and its spread are those at the *beginning* of the window, because only the report of a
window says when it began. `total_ns` is how long probing was paused: the sum of all of them except the calculation,
which is made while the next window is already open.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from ringfold.wire.probing import NodeClock, NodeId, NodeWindow, RoundMetrics, RoundReport

MAX_NS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ReceivedReport:
    """A report, with its size and when it was received (the master's clock)."""

    report: RoundReport
    at_ns: int
    bytes: int
    retransmits: int = 0
    """Segments that were sent to the node again since its last report."""

    def without_edges_to(self, node: NodeId) -> "ReceivedReport":
        """The same report, without its fits of edges to this node."""
        edges = [fit for fit in self.report.edges if fit.dst != node]
        if len(edges) == len(self.report.edges):
            return self
        return replace(self, report=structs.replace(self.report, edges=edges))


def measure(
    received: Mapping[NodeId, ReceivedReport],
    clocks: Mapping[NodeId, NodeClock],
    *,
    start_sent_ns: int,
    end_sent_ns: int,
    calculate_ns: int,
    sequence_skew: int,
) -> RoundMetrics:
    """The metrics of a round. `end_sent_ns` is 0 where no ROUND_END was sent; then nothing is known of latencies."""
    reports = {node: one.report for node, one in sorted(received.items())}
    latency = {node: one_way for node in reports if (one_way := control_latency_ns(received[node])) is not None}
    restarts = [_restart_ns(received[node], one_way, start_sent_ns) for node, one_way in latency.items()]
    stop_ns = max(latency.values(), default=0)
    fit_ns = max((report.fit_ns for report in reports.values()), default=0)
    last_ns = max((one.at_ns for one in received.values()), default=0)
    gather_ns = max(0, last_ns - end_sent_ns - stop_ns - fit_ns) if end_sent_ns else 0
    restart_ns = max(restarts, default=0)
    return RoundMetrics(
        control_latency_ns=list(latency.values()),
        stop_spread_ns=_spread((clocks[node], reports[node].end_ns) for node in reports if node in clocks),
        resume_spread_ns=_spread(
            (clocks[node], report.resumed_ns)
            for node, report in reports.items()
            if node in clocks and report.resumed_ns
        ),
        stop_ns=stop_ns,
        fit_ns=fit_ns,
        gather_ns=gather_ns,
        calculate_ns=calculate_ns,
        restart_ns=restart_ns,
        total_ns=stop_ns + fit_ns + gather_ns + restart_ns,
        sequence_skew=sequence_skew,
        report_bytes=sum(one.bytes for one in received.values()),
        retries=sum(report.retries for report in reports.values()),
        tcp_retransmits=sum(one.retransmits for one in received.values()),
    )


def node_windows(received: Mapping[NodeId, ReceivedReport]) -> list[NodeWindow]:
    """The windows of a round, node by node."""
    return [_node_window(node, one.report) for node, one in sorted(received.items())]


def _node_window(node: NodeId, report: RoundReport) -> NodeWindow:
    sent, lost = sum(fit.sent for fit in report.edges), sum(fit.lost for fit in report.edges)
    return NodeWindow(
        node=node,
        round=report.round,
        window=report.window,
        begin_ns=report.begin_ns,
        end_ns=report.end_ns,
        first_sequence=report.first_sequence,
        last_sequence=report.last_sequence,
        next_sequence=report.next_sequence,
        fit_ns=report.fit_ns,
        sent=sent,
        received=max(0, sent - lost),
        lost=lost,
    )


def control_latency_ns(received: ReceivedReport) -> int | None:
    """The one-way latency of a control message; None if it is not known, or a clock stepped in between."""
    report = received.report
    if not report.end_sent_ns:
        return None
    rtt_ns = received.at_ns - report.end_sent_ns - report.held_ns
    return rtt_ns // 2 if rtt_ns >= 0 else None


def global_ns(clock: NodeClock, node_ns: int) -> int:
    """A node's time as global time. The difference from t0 is small, so a float is exact enough for its part.

    Whatever a node reported, the result fits into a message.
    """
    since = node_ns - clock.t0_ns
    return min(max(clock.global_ns + since + round(since * clock.rate), -MAX_NS), MAX_NS)


def window_ends(reports: Iterable[tuple[NodeClock, RoundReport]]) -> tuple[int, int]:
    """The beginning of the earliest window and the end of the latest, in global time; zeros if nothing is known."""
    both = [(global_ns(clock, report.begin_ns), global_ns(clock, report.end_ns)) for clock, report in reports]
    if not both:
        return 0, 0
    return min(begin for begin, _ in both), max(end for _, end in both)


def _restart_ns(received: ReceivedReport, latency_ns: int, start_sent_ns: int) -> int:
    """How long after ROUND_START was sent a node resumed; 0 where a clock stepped in the window."""
    report = received.report
    node_minus_master = (report.sent_ns - report.held_ns) - (report.end_sent_ns + latency_ns)
    took = report.resumed_ns - node_minus_master - start_sent_ns
    return took if report.resumed_ns and 0 <= took <= report.end_sent_ns - start_sent_ns else 0


def _spread(instants: Iterable[tuple[NodeClock, int]]) -> int:
    times: Sequence[int] = [global_ns(clock, node_ns) for clock, node_ns in instants]
    return max(times) - min(times) if times else 0
