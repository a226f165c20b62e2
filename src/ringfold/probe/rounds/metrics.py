"""What a round cost, from what its reports say.

The master's clock is not part of the graph. What it knows of a node's clock it knows from the round trip of ROUND_END:
the message left at `end_sent` (master) and was heard at `sent - held` (node); the report left at `sent` and came at
`at` (master). Half of what the round trip took beside `held` is the *control latency*, one way, and it says where the
node's clock stood: good to the asymmetry of the way, which is enough to say how long things took.

Spreads are another matter: those are between nodes, and the calculation has just given every node its clock.

What belongs to which round: the stop, the fits, the gathering and the calculation are those at the end of the round's
window. The restart and its spread are those at the *beginning* of the window, for only the report of a window can tell
when it began. `total_ns` is how long probing rested: the sum of all of them but the calculation, which is made while
the next window is open already.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ringfold.wire.probing import NodeClock, NodeId, RoundMetrics, RoundReport

MOST_NS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Received:
    """A report, and when and in how many bytes it came (the master's clock)."""

    report: RoundReport
    at_ns: int
    bytes: int


def measure(
    received: Mapping[NodeId, Received],
    clocks: Mapping[NodeId, NodeClock],
    *,
    start_sent_ns: int,
    end_sent_ns: int,
    calculate_ns: int,
    sequence_skew: int,
) -> RoundMetrics:
    """The metrics of a round. `end_sent_ns` is 0 where no ROUND_END was sent; then nothing is known of latencies."""
    reports = {node: one.report for node, one in sorted(received.items())}
    latency = {node: way for node in reports if (way := control_latency_ns(received[node])) is not None}
    restarts = [_restart_ns(received[node], way, start_sent_ns) for node, way in latency.items()]
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
        queue_depth=max((report.queue_depth for report in reports.values()), default=0),
    )


def control_latency_ns(received: Received) -> int | None:
    """One way of a control message; None if the report does not tell, or a clock stepped in between."""
    report = received.report
    if not report.end_sent_ns:
        return None
    both_ways = received.at_ns - report.end_sent_ns - report.held_ns
    return both_ways // 2 if both_ways >= 0 else None


def global_ns(clock: NodeClock, node_ns: int) -> int:
    """A node's time as global time. The difference from t0 is small, so a float holds its part exactly enough.

    Whatever a node said, the result is a number that a message can carry.
    """
    since = node_ns - clock.t0_ns
    return min(max(clock.global_ns + since + round(since * clock.rate), -MOST_NS), MOST_NS)


def window_ends(reports: Iterable[tuple[NodeClock, RoundReport]]) -> tuple[int, int]:
    """The beginning of the earliest window and the end of the latest, in global time; zeros if nothing is known."""
    both = [(global_ns(clock, report.begin_ns), global_ns(clock, report.end_ns)) for clock, report in reports]
    if not both:
        return 0, 0
    return min(begin for begin, _ in both), max(end for _, end in both)


def _restart_ns(received: Received, latency_ns: int, start_sent_ns: int) -> int:
    """How long after ROUND_START was sent a node resumed; 0 where a clock stepped in the window."""
    report = received.report
    node_minus_master = (report.sent_ns - report.held_ns) - (report.end_sent_ns + latency_ns)
    took = report.resumed_ns - node_minus_master - start_sent_ns
    return took if report.resumed_ns and 0 <= took <= report.end_sent_ns - start_sent_ns else 0


def _spread(instants: Iterable[tuple[NodeClock, int]]) -> int:
    times: Sequence[int] = [global_ns(clock, node_ns) for clock, node_ns in instants]
    return max(times) - min(times) if times else 0
