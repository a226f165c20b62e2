"""The page of a report: one HTML file without requests and without scripts.

Names and reasons come from other processes. Every text is escaped where it is written (`_text`), and a content security
policy forbids scripts and requests in any case.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from ringfold.observe.report import charts
from ringfold.observe.report.tables import figures, table, text
from ringfold.observe.summary.results import ClockFigures, Incident, LinkFigures, PeerWork, Series, Summary
from ringfold.observe.summary.sentences import main_series
from ringfold.observe.summary.wording import duration_text, number_text, percent, rate_text, size_text, times

MAX_CHARTED_OPS = 40
MAX_SERIES = 8
"""Logged values with a chart."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_WORDS = {
    "begun": "begin", "joined": "joined", "left": "left", "lost": "lost", "evicted": "evicted", "failover": "master",
    "rollback": "rollback", "divergence": "diverged", "ring": "ring", "refused": "refused", "note": "note",
    "ended": "end",
}  # fmt: skip


def page(summary: Summary, version: str) -> str:
    """The whole page. `version` is that of this program."""
    title = f"Report: run {summary.run}"
    sections = [
        (anchor, name, body)
        for anchor, name, body in (
            ("happened", "What happened", _happened(summary)),
            ("cost", "What it cost", _cost(summary)),
            ("timeline", "Who took part, and when", _timeline(summary)),
            ("progress", "Progress", _progress(summary)),
            ("slow", "Who was slow", _slow(summary)),
            ("ops", "Ops", _ops(summary)),
            ("links", "Links and bytes", _links(summary)),
            ("clocks", "Clocks", _clocks(summary)),
            ("records", "Processes and their records", _records(summary)),
        )
        if body
    ]
    navigation = "".join(f'<a href="#{anchor}">{text(name)}</a>' for anchor, name, _ in sections)
    body = "".join(
        f'<section id="{anchor}" aria-labelledby="h-{anchor}"><h2 id="h-{anchor}">{text(name)}</h2>{content}</section>'
        for anchor, name, content in sections
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title><style>{_style()}</style></head><body>"
        f'{_header(summary)}<nav aria-label="Sections">{navigation}</nav></header><main>{body}</main>'
        f"<footer><p>Written by ringfold {text(version)} from the records of "
        f"{times(len(summary.records), 'process', 'processes')}. Times are since the run began, on the run's global "
        "clock where there was one. "
        "The same figures as JSON: <code>ringfold report DIR --json</code>.</p></footer></body></html>\n"
    )


def _style() -> str:
    return Path(__file__).with_name("report.css").read_text(encoding="utf-8")


# The head


def _header(summary: Summary) -> str:
    states = {
        "finished": ("good", "✓ finished"),
        "abandoned": ("bad", "✕ abandoned"),
        "": ("calm", "no end is recorded"),
    }
    kind, state = states.get(summary.ended, ("calm", summary.ended))
    began = datetime.fromtimestamp(summary.began_unix_ns / 1e9, UTC)
    when = f"{began:%Y-%m-%d %H:%M:%S} UTC, {duration_text(summary.seconds)}" if summary.began_unix_ns else "no times"
    hosts = {record.host for record in summary.records}
    return (
        f'<header><h1>Run {text(summary.run)}<span class="state {kind}">{text(state)}</span></h1>'
        f'<p class="soft">{text(when)}, {times(len(hosts), "host")}</p>{figures(_head_figures(summary))}'
    )


def _head_figures(summary: Summary) -> list[tuple[str, str, str]]:
    found = []
    if summary.steps:
        found.append(("steps", f"{summary.steps:,}", f"{summary.first_step} to {summary.last_step}"))
        rate = 1 / summary.step_median_s if summary.step_median_s else 0.0
        found.append(("steps/s, median", number_text(rate), f"median step {duration_text(summary.step_median_s)}"))
    peers = f"{summary.most_peers}"
    if summary.fewest_peers != summary.most_peers:
        peers = f"{summary.fewest_peers} to {summary.most_peers}"
    found.append(("peers", peers, times(summary.epochs, "epoch")))
    broke = sum(charts.tone(one) in ("bad", "warn") for one in summary.incidents)
    joined = sum(one.kind == "joined" and one.at_s >= (summary.first_step_s or 0.0) for one in summary.incidents)
    found.append(("disturbances", f"{broke}", f"and {times(joined, 'join')}"))
    if summary.costs.paused_s is not None:
        share = percent(summary.costs.paused_s / summary.seconds) if summary.seconds else ""
        found.append(("paused", duration_text(summary.costs.paused_s), f"{share} of the run"))
    series = main_series(summary.logged)
    if series is not None and series.points:
        found.append((series.name, number_text(series.points[-1].mean), f"from {number_text(series.points[0].mean)}"))
    return found


# Sections


def _happened(summary: Summary) -> str:
    notes = "".join(f"<li>{text(note)}</li>" for note in summary.notes)
    listed = f'<ul class="notes soft">{notes}</ul>' if notes else ""
    return f'<p class="lead">{text(" ".join(summary.sentences))}</p>{listed}'


def _cost(summary: Summary) -> str:
    costs = summary.costs
    if costs.paused_s is None and not (costs.lost_steps or costs.aborted_ops or costs.fetched_bytes):
        return ""
    found = []
    if costs.paused_s is not None:
        share = f"{percent(costs.paused_s / summary.seconds)} of the run" if summary.seconds else ""
        found.append(("training paused", duration_text(costs.paused_s), share))
        found.append(("longest pause", duration_text(costs.longest_pause_s or 0.0), "of one incident"))
        found.append(("of it planned", duration_text(costs.planned_s or 0.0), "joins, leaves, new rings"))
    repeated = f"{times(costs.repeated_steps, 'step')} repeated"
    found.append(("steps lost", f"{costs.lost_steps:,}", repeated))
    found.append(("ops run again", f"{costs.aborted_ops:,}", "aborted, buffers restored"))
    found.append(("state received", size_text(costs.fetched_bytes), "by new members"))
    return (
        figures(found)
        + '<p class="soft">A pause is the time between two commits of a survivor, without the usual time of a step. '
        "Pauses that several incidents share count once.</p>"
    )


def _timeline(summary: Summary) -> str:
    if not summary.memberships:
        return ""
    hidden = charts.hidden_rows(summary)
    more = (
        f'<p class="soft">{times(hidden, "process", "processes")} more were members from the begin '
        "to the end, and have no row.</p>"
        if hidden
        else ""
    )
    legend = (
        '<ul class="legend"><li><i style="background:var(--accent-soft);border:1px solid var(--accent)"></i>member</li>'
        '<li><i style="background:var(--line)"></i>registered</li><li class="bad">✕ <span class="soft">lost</span></li>'
        '<li class="warn">◆ <span class="soft">evicted</span></li></ul>'
    )
    left_out = (
        f'<p class="soft">{summary.incidents_left_out:,} more incidents are not listed.</p>'
        if summary.incidents_left_out
        else ""
    )
    return (
        charts.both(lambda width: charts.timeline(summary, width)) + legend + more + "<h3>Incidents</h3>"
        + _incident_table(summary.incidents) + left_out
    )  # fmt: skip


def _incident_table(incidents: Sequence[Incident]) -> str:
    rows = [
        (
            f'<span class="num {charts.tone(one)}">{place}</span>',
            text(duration_text(max(0.0, one.at_s))),
            f'<span class="{charts.tone(one)}"><b>{_WORDS[one.kind]}</b></span>',
            text(one.text),
            "" if one.paused_s is None else text(duration_text(one.paused_s)),
            "" if one.next_commit_s is None else text(duration_text(one.next_commit_s)),
        )
        for place, one in enumerate(incidents, 1)
    ]
    columns = ("", "at", "kind", "what happened", "pause", "next commit after")
    caption = "All incidents in order. Numbers are those in the charts; times are since the run began."
    return table(caption, columns, rows, "kkkwnn", cards=True)


def _progress(summary: Summary) -> str:
    parts = []
    if summary.rates.points:
        parts.append("<h3>Steps per second</h3>")
        parts.append(
            charts.both(lambda width: charts.series_chart(summary, summary.rates, width, " steps/s", from_zero=True))
        )
        parts.append(
            '<p class="soft">The band has the slowest and the fastest step of each moment at any peer; pauses are '
            "shaded.</p>"
        )
    shown = sorted(summary.logged, key=lambda series: series is not main_series(summary.logged))[:MAX_SERIES]
    parts += [_logged(summary, series) for series in shown]
    left_out = len(summary.logged) - len(shown) + summary.logged_left_out
    if left_out:
        parts.append(f'<p class="soft">{times(left_out, "other value")} that the program logged have no chart.</p>')
    return "".join(parts)


def _logged(summary: Summary, series: Series) -> str:
    warning = ""
    if series.not_finite:
        warning = f'<p class="bad">✕ {series.not_finite:,} logged values were NaN or infinite.</p>'
    if not series.points:
        return f"<h3>{text(series.name)}</h3>{warning}"
    if all(point.low == point.high == series.points[0].low for point in series.points):
        value = number_text(series.points[0].mean)
        return f'<h3>{text(series.name)}</h3><p class="soft">always {text(value)}</p>{warning}'
    chart = charts.both(lambda width: charts.series_chart(summary, series, width))
    return f"<h3>{text(series.name)}</h3>{chart}{warning}"


# Who was slow


def _slow(summary: Summary) -> str:
    if not summary.work:
        return ""
    shown = sorted(summary.work, key=lambda work: -work.kept_s)[: charts.MAX_ROWS]
    shown = [work for work in summary.work if work in shown]
    legend = "".join(
        f'<li><i class="key-{kind}"></i>{name}</li>'
        for kind, name in charts.WORK_PARTS
        if kind != "sync" or any(work.sync_s for work in shown)
    )
    parts = [charts.both(lambda width: charts.work_chart(shown, width)), f'<ul class="legend">{legend}</ul>']
    if any(work.judged for work in summary.work):
        parts.append("<h3>Who was last, and how often</h3>" + _last_table(summary.work))
    if summary.slow_steps:
        parts.append("<h3>The slowest steps</h3>" + _slow_steps(summary))
    parts.append(
        '<p class="soft">All members end an op together, so it is shortest at the peer that begins last. A slow peer '
        "has much own work and waits little. "
        "<code>ringfold trace --why</code> says whether compute, a link or the host was the cause.</p>"
    )
    return "".join(parts)


def _last_table(work: Sequence[PeerWork]) -> str:
    rows = []
    for peer in sorted(work, key=lambda one: (-one.kept_s, one.peer)):
        share = peer.last / peer.judged if peer.judged else 0.0
        steps = peer.steps or 1
        rows.append(
            (
                text(f"{peer.peer} ({peer.name})" if peer.name else peer.peer),
                text(peer.host),
                text(percent(share)) + charts.share_bar(share) if peer.judged else "",
                text(duration_text(peer.kept_s)) if peer.judged else "",
                text(duration_text(peer.waited_s / steps)) if peer.steps else "",
                text(duration_text(peer.own_s / steps)) if peer.steps else "",
                text(duration_text(peer.cpu_s / steps)) if peer.cpu_s else "",
                text(duration_text(peer.queued_s / steps)) if peer.queued_s else "",
                text(duration_text(peer.missing_s)) if peer.missing_s else "",
            )
        )
    columns = (
        "peer", "host", "began last", "kept others", "waits per step", "own work", "CPU", "no core",
        "long waits for it",
    )  # fmt: skip
    caption = (
        "Began last: in how many of its ops the others waited for it to begin. Kept others: by how much it was later "
        "than the next one, in all. Then averages per step: waits, own work, its CPU time, and how long its thread was "
        "ready and had no core. Long waits: those of a second and more."
    )
    return table(caption, columns, rows, "  knnnnnn")


def _slow_steps(summary: Summary) -> str:
    names = {work.peer: work.name for work in summary.work}
    rows: list[tuple[str, ...]] = [
        (
            f"{slow.step:,}",
            text(duration_text(slow.at_s)),
            text(duration_text(slow.took_s)),
            text(f"{slow.took_s / summary.step_median_s:.3g} x" if summary.step_median_s else ""),
            "" if slow.incident else text(f"{slow.peer} ({names.get(slow.peer, '')}), {duration_text(slow.own_s)}"),
            text(slow.incident),
        )
        for slow in summary.slow_steps
    ]
    columns: tuple[str, ...] = ("step", "ended at", "took", "of the median", "most own work", "meanwhile")
    caption = "Steps that took more than twice the median. Most own work: the peer that was longest without an op."
    kinds = "nnnnkw"
    if all(slow.incident for slow in summary.slow_steps):
        rows = [(*row[:4], row[5]) for row in rows]
        columns, kinds = (*columns[:4], columns[5]), "nnnnw"
        caption = "Steps that took more than twice the median."
    return table(caption, columns, rows, kinds, cards=True)


# Ops, links, clocks


def _ops(summary: Summary) -> str:
    if not summary.ops:
        return ""
    rows = [
        (
            text(op.op),
            text(charts.op_label(op).removeprefix(f"{op.op}, ")),
            f"{op.ops:,}",
            text(duration_text(op.median_us / 1e6)),
            text(duration_text(op.p99_us / 1e6)),
            text(duration_text(op.greatest_us / 1e6)),
            text(duration_text(op.least_median_us / 1e6)) if op.least_median_us else "",
            "" if op.waited_share is None else text(percent(op.waited_share)),
            text(percent(op.blocked_share)),
        )
        for op in summary.ops
    ]
    columns = ("op", "size", "ended", "median", "p99", "longest", "median of the last", "waiting", "blocked")
    caption = (
        "Committed ops at all peers, from their start in an epoch to their end. Median of the last: at the peer that "
        "began last, so without waiting for others. Blocked: the transport took no more for the next peer."
    )
    shown = summary.ops[:MAX_CHARTED_OPS]
    chart = charts.both(lambda width: charts.ops_chart(shown, width)) if len(shown) > 1 else ""
    return chart + table(caption, columns, rows, "  nnnnnnn")


def _links(summary: Summary) -> str:
    parts = []
    rated = [link for link in summary.links if link.bytes_per_s > 0]
    peers = {peer for link in rated for peer in (link.source, link.target)}
    if len(rated) > 1 and len(peers) <= charts.MAX_MAP:
        parts.append(charts.both(lambda width: charts.link_map(rated, width)))
        parts.append(
            '<p class="soft">Rows send, columns receive; Mbit/s or Gbit/s. Colour marks what is slower than the '
            "median.</p>"
        )
    if summary.links:
        parts.append(_link_table(summary))
    if summary.traffic:
        parts.append("<h3>Bytes by transport</h3>" + _traffic_table(summary))
    return "".join(parts)


def _link_table(summary: Summary) -> str:
    rows = [
        (
            f"{link.source} to {link.target}",
            text(link.transport),
            text(rate_text(link.bytes_per_s)) if link.bytes_per_s else "",
            text(_range(link)),
            text(duration_text(link.delay_us / 1e6)) if link.delay_us is not None else "",
            text(percent(link.loss)) if link.loss is not None else "",
            text(link.by),
            f"{link.samples:,}",
        )
        for link in sorted(summary.links, key=lambda link: link.bytes_per_s or float("inf"))
    ]
    columns = ("link", "transport", "rate", "range", "delay", "loss", "rate by", "samples")
    caption = "Links as the master saw them last, the slowest first. The rate of a collective is a lower bound."
    return table(caption, columns, rows, "k nnnn n")


def _range(link: LinkFigures) -> str:
    low, high = rate_text(link.low_bytes_per_s), rate_text(link.high_bytes_per_s)
    return f"{low} to {high}" if link.bytes_per_s and low != high else ""


def _traffic_table(summary: Summary) -> str:
    rows = [
        (
            text(f"{one.peer} ({one.name})" if one.name else one.peer),
            text(size_text(one.sent_bytes)),
            "" if one.memory_bytes is None else text(size_text(one.sent_bytes - one.memory_bytes)),
            "" if one.memory_bytes is None else text(size_text(one.memory_bytes)),
            text(size_text(one.received_bytes)),
        )
        for one in summary.traffic
    ]
    columns = ("peer", "sent", "of it by TCP", "through shared memory", "received")
    return table("What each peer's engine sent and received, retries included.", columns, rows, " nnnn")


def _clocks(summary: Summary) -> str:
    parts = []
    if summary.clocks:
        parts.append(_clock_part(summary))
    elif len({record.host for record in summary.records}) == 1:
        parts.append('<p class="soft">All processes were on one host, and have its clock.</p>')
    elif summary.records:
        parts.append(
            '<p class="soft">No process had the global clock (<code>probe=True</code>): times of different hosts are '
            "those of their wall clocks.</p>"
        )
    rounds = summary.rounds
    if rounds is not None:
        rows = [
            ("duration", *(text(duration_text(ms / 1e3)) for ms in rounds.duration_ms)),
            ("spread of the nodes' stops", *(text(duration_text(us / 1e6)) for us in rounds.stop_spread_us)),
            ("control latency", *(text(duration_text(us / 1e6)) for us in rounds.control_latency_us)),
            ("reports", *(text(size_text(count)) for count in rounds.report_bytes)),
            ("uncertainty of clocks", *(text(duration_text(us / 1e6)) for us in rounds.uncertainty_us)),
        ]
        caption = (
            f"{times(rounds.rounds, 'probing round')} with {rounds.median_nodes} nodes: {rounds.with_missing} with a "
            f"missing node, {rounds.anomalies} with an anomaly, {times(rounds.retries, 'report')} sent again."
        )
        parts.append("<h3>Probing rounds</h3>" + table(caption, ("", "median", "worst"), rows, " nn"))
    return "".join(parts)


def _clock_part(summary: Summary) -> str:
    by_host: dict[str, ClockFigures] = {}
    for clock in summary.clocks:
        known = by_host.get(clock.host)
        if known is None or clock.samples > known.samples:
            by_host[clock.host] = clock
    hosts = [clock for _, clock in sorted(by_host.items()) if len(clock.offsets.points) > 1]
    chart = ""
    if hosts:
        chart = (
            charts.both(lambda width: charts.clock_chart(summary, hosts, width))
            + '<p class="soft">How far the global minus the wall clock has moved since the first sample.</p>'
        )
    rows = [
        (
            text(clock.host),
            text(clock.process),
            f"{clock.samples:,}",
            text(duration_text(clock.last_offset_us / 1e6)),
            "" if clock.drift_ppm is None else f"{clock.drift_ppm:+.2f}",
            text("±" + duration_text(clock.median_bound_us / 1e6)),
            text("±" + duration_text(clock.greatest_bound_us / 1e6)),
        )
        for _, clock in sorted(by_host.items())
    ]
    columns = ("host", "record", "samples", "global minus wall", "drift, ppm", "median bound", "worst bound")
    caption = "The global clock at the end, by each host's longest record. Drift is that of the raw clock."
    return chart + table(caption, columns, rows, "  nnnnn")


# Records


def _records(summary: Summary) -> str:
    rows = [
        (
            text(record.name),
            text(record.role),
            text(record.host),
            f"{record.pid}",
            "" if record.began_s is None else text(duration_text(record.began_s)),
            "" if record.ended_s is None else text(duration_text(record.ended_s)),
            f"{record.events:,}",
            text(record.time_source),
            text("; ".join([f"version {record.version}", *record.notes])),
        )
        for record in summary.records
    ]
    columns = ("record", "role", "host", "process", "from", "to", "events", "time by", "notes")
    counts = [
        times(summary.suspicions, "suspicion of a silent peer", "suspicions of silent peers"),
        times(summary.lanes_lost, "lost lane"),
        times(summary.refused_connections, "refused connection"),
        times(summary.checkpoints, "checkpoint"),
    ]
    return (
        table("Every record in the directory.", columns, rows, "kkknnnnkw")
        + f'<p class="soft">Also counted: {text(", ".join(counts))}.</p>'
    )
