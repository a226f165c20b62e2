"""Metrics: what the table promises is exposed, under the names, labels and units of the table."""

import json
import math
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import exposition
import numpy as np
import pytest

import ringfold as rf
from ringfold.master.server import MasterFacts, MasterThread
from ringfold.observe import metrics
from ringfold.observe.agent_metrics import add_agent, agent_pages
from ringfold.observe.master_metrics import MasterCounts, add_master, master_pages, targets_of
from ringfold.observe.metrics import METRICS, Exposition, Histogram, Place
from ringfold.observe.peer_endpoint import render
from ringfold.observe.peer_metrics import add_peers
from ringfold.runtime.http_server import PageUnavailable
from ringfold.wire.agent import AgentStatus
from ringfold.wire.notices import (
    EVICTION_CAUSES,
    ConnectionDropped,
    EpochInstalled,
    EpochSealing,
    EvictionCause,
    PeerDiverged,
    PeerGone,
    RoundDone,
    RunForgotten,
    SyncEnded,
)
from ringfold.wire.probing import NodeClock, RoundId, RoundMetrics, RoundSummary
from ringfold.wire.status import (
    Divergence,
    GroupStatus,
    LinkStatus,
    OpTotals,
    PeerStatus,
    Progress,
    RingLink,
    RunInfo,
    Status,
    Waiting,
    World,
)

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
_SUFFIXES = re.compile("_(bucket|sum|count)$")


def peer(number: int, **changed: object) -> PeerStatus:
    facts: dict[str, Any] = {
        "peer": number,
        "name": f"p{number}",
        "host": "h",
        "group": 0,
        "phase": "PEER_ACCEPTED",
        "addresses": [f"10.0.0.{number}"],
        "port": 48_149,
        "silent_ms": 20,
        "suspected": False,
        "committed_ops": 5,
        "totals": OpTotals(5, 1, 2, 4_000, 900, 800, 300, 2_000_000_000, 500_000_000, 0, 0, [0, 5, *[0] * 9]),
        "progress": Progress(
            step=10 + number, steps=10, logged={"loss": 2.5}, clock_offset_ns=-3_000_000, clock_error_ns=2_000
        ),
    }
    return PeerStatus(**{**facts, **changed})


def status(*peers: PeerStatus, run: str = "default", **changed: object) -> Status:
    ring = [each.peer for each in peers]
    links = [RingLink(a, b, "mixed", 3, 1) for a, b in zip(ring, [*ring[1:], *ring[:1]], strict=True) if len(ring) > 1]
    facts: dict[str, Any] = {
        "fence": 3,
        "uptime_ms": 90_000,
        "registrations": 4,
        "epochs": 7,
        "world": World(len(peers), 1, len(peers)),
        "peers": list(peers),
        "groups": [GroupStatus(0, 7, "idle", ring, "ring", bad_edges=[(1, 2)], ring_links=links)],
        "waiting": [Waiting("group 0: all_reduce", [1], [2], 4_500)],
        "links": [LinkStatus(1, 2, 1e8, 150.0, 10, "collective", 0.01), LinkStatus(2, 1, 5e7, None, 10, "measured")],
        "known_links": 2,
        "run": run,
    }
    return Status(**{**facts, **changed})


def facts(*statuses: Status, **changed: object) -> MasterFacts:
    given: dict[str, Any] = {
        "leads": True,
        "infos": [RunInfo(each.run, "running", len(each.peers)) for each in statuses],
        "statuses": list(statuses),
        "frames_waiting": 1,
        "effects_waiting": 2,
        "bytes_waiting": 3,
    }
    return MasterFacts(**{**given, **changed})


def a_round(**changed: object) -> RoundDone:
    cost = RoundMetrics(
        control_latency_ns=[40_000, 60_000],
        stop_spread_ns=200_000,
        total_ns=1_000_000_000,
        report_bytes=5_000,
        retries=1,
        tcp_retransmits=2,
    )
    node = NodeClock(1, 0, 0, 0.0, 300.0, 0, 0, 0.0)
    given: dict[str, Any] = {
        "round": RoundId(1, 1),
        "kind": "master",
        "label": "",
        "begin_ns": 0,
        "end_ns": 4_000_000_000,
        "reference": 1,
        "nodes": [node],
        "edges": [],
        "metrics": cost,
    }
    return RoundDone(RoundSummary(**{**given, **changed}))


def of_master(counts: MasterCounts | None = None, *statuses: Status) -> bytes:
    out = Exposition("master")
    add_master(out, facts(*(statuses or [status(peer(1), peer(2))])), counts or MasterCounts())
    return out.content()


def of_peers(*statuses: Status) -> bytes:
    out = Exposition("peers")
    add_peers(out, statuses or [status(peer(1), peer(2))])
    return out.content()


def of_agent() -> bytes:
    out = Exposition("agent")
    counts = {"connections": 3, "registered": 2, "telemetry congestion": 7, "published": 9}
    refused = {"quota": 1, "telemetry magic": 4, "telemetry of another kind": 5}
    about = AgentStatus(
        0, 1, 60_000, 1, "auto", 2, 3, 2, 100, "", [], counts, refused, monitors={"sys": "", "ebpf": "x"}
    )
    add_agent(out, about)
    return out.content()


@pytest.fixture(scope="module")
def own_page() -> bytes:
    """The page of a real peer with two paths, in a group of two, after an op and a step."""
    barrier, pages = Barrier(2, timeout=30), list[bytes]()

    def one(master: MasterThread, name: str) -> None:
        with rf.join(master.address, name=name, advertise=["127.0.0.1", "127.0.0.2"], timeout_s=30) as run:
            state = rf.SharedState(weights=np.zeros(4, np.float32))
            for step in run.steps(state, until=1, min_world=2):
                step.all_reduce(np.ones(1 << 20, np.float32))
                step.log(loss=float("nan"))
            barrier.wait()
            if name == "one":
                pages.append(render(run))
            barrier.wait()

    with MasterThread() as master, ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(one, master, name) for name in ("one", "two")]:
            done.result()
    return pages[0]


@pytest.fixture
def pages(own_page: bytes) -> dict[Place, bytes]:
    """A page of every endpoint, with all that can be in one; a round has ended at the master."""
    counts = MasterCounts()
    counts.observe("default", a_round())
    return {"master": of_master(counts), "peers": of_peers(), "peer": own_page, "agent": of_agent()}


# The table


def names(page: bytes) -> set[str]:
    """The metrics of a page, without the endings of histograms' series."""
    found = {each.name.removeprefix(metrics.PREFIX) for each in exposition.read(page)}
    return {name if name in METRICS else _SUFFIXES.sub("", name) for name in found}


def test_every_metric_of_the_table_is_exposed_where_it_says_and_nowhere_else(pages: dict[Place, bytes]) -> None:
    absent = {"clock_offset_seconds", "clock_uncertainty_seconds"}  # that peer does not probe
    for place, page in pages.items():
        promised = {metric.name for metric in METRICS.values() if place in metric.where}
        assert names(page) == promised - (absent if place == "peer" else set()), place


def test_every_label_is_in_the_table_with_its_values(pages: dict[Place, bytes]) -> None:
    for sample in [sample for page in pages.values() for sample in exposition.read(page)]:
        name = sample.name.removeprefix(metrics.PREFIX)
        metric = METRICS[name if name in METRICS else _SUFFIXES.sub("", name)]
        more = {"le"} if name.endswith("_bucket") else set()
        assert sample.labels.keys() == metric.labels.keys() | more, sample
        for label, values in metric.labels.items():
            assert isinstance(values, str) or sample.labels[label] in values, sample


def test_a_closed_label_has_all_of_its_values_from_the_start() -> None:
    page = of_master()
    for metric in METRICS.values():
        closed = [(label, values) for label, values in metric.labels.items() if not isinstance(values, str)]
        if metric.kind != "counter" or "master" not in metric.where or not closed:
            continue
        [(label, values)] = closed
        found = [sample for sample in exposition.read(page) if sample.name == metric.full_name]
        assert [sample.labels[label] for sample in found] == list(values), metric.name
        assert {sample.value for sample in found} == {0.0}, metric.name


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: metrics.Metric) -> None:
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert metric.kind != "histogram" or metric.bounds
    assert not metric.bounds or metric.name.endswith(("_seconds", "_bytes"))
    assert metric.help.endswith(".")
    assert re.fullmatch("[a-z][a-z_]*", metric.name)


def test_promtool_finds_no_fault(pages: dict[Place, bytes]) -> None:
    for page in pages.values():
        exposition.check(page)


# Values


def test_histograms_add_up(pages: dict[Place, bytes]) -> None:
    for page in pages.values():
        series: dict[tuple[str, str], list[float]] = {}
        totals: dict[tuple[str, str], float] = {}
        for name, labels, value in exposition.read(page):
            key = json.dumps({each: labels[each] for each in sorted(labels) if each != "le"})
            if name.endswith("_bucket"):
                series.setdefault((name.removesuffix("_bucket"), key), []).append(value)
            elif name.endswith("_count"):
                totals[name.removesuffix("_count"), key] = value
        assert series or page == pages["agent"]
        for which, buckets in series.items():
            assert buckets == sorted(buckets), which
            assert buckets[-1] == totals[which], which


def test_a_value_on_a_bound_is_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 1, 1], 6.0)


def test_labels_are_escaped() -> None:
    page = of_peers(status(peer(1, name='a"b\\c\nd')))
    [info] = [sample for sample in exposition.read(page) if sample.name == "ringfold_peer_info"]
    assert info.labels["name"] == r"a\"b\\c\nd"
    exposition.check(page)


def test_a_loss_that_is_not_finite_is_shown_as_such() -> None:
    page = of_peers(status(peer(1, progress=Progress(step=1, logged={"loss": None}))))
    assert math.isnan(exposition.value(page, "ringfold_logged_value", name="loss"))


def test_few_names_of_logged_values_are_exposed() -> None:
    page = of_peers(status(peer(1, progress=Progress(step=1, logged={f"v{number}": 1.0 for number in range(64)}))))
    assert sum(sample.name == "ringfold_logged_value" for sample in exposition.read(page)) == 16


def test_peers_are_seen_as_the_master_sees_them() -> None:
    page = of_peers(status(peer(1), peer(2)))
    assert exposition.value(page, "ringfold_lag_steps", peer="1") == 1
    assert exposition.value(page, "ringfold_lag_steps", peer="2") == 0
    assert exposition.value(page, "ringfold_waited_for_seconds", peer="2") == 4.5
    assert exposition.value(page, "ringfold_waited_for_seconds", peer="1") == 0
    assert exposition.value(page, "ringfold_link_throughput_bytes_per_second", peer="1") == 1e8
    assert exposition.value(page, "ringfold_link_delay_seconds", peer="1") == pytest.approx(150e-6)
    assert exposition.value(page, "ringfold_link_loss_ratio", peer="1") == 0.01
    assert exposition.value(page, "ringfold_lanes", peer="1", lane="tcp") == 2
    assert exposition.value(page, "ringfold_link_sent_bytes_total", peer="1", lane="tcp") == 600
    assert exposition.value(page, "ringfold_link_sent_bytes_total", peer="1", lane="shm") == 300
    assert exposition.value(page, "ringfold_clock_offset_seconds", peer="1") == -0.003
    assert exposition.value(page, "ringfold_op_duration_seconds_sum", peer="1") == 2.0
    assert exposition.value(page, "ringfold_op_duration_seconds_bucket", peer="1", le="6.4e-05") == 5


def test_a_peer_that_has_reported_nothing_yet_has_no_made_up_figures() -> None:
    page = of_peers(status(peer(1, totals=OpTotals(), progress=Progress()), groups=[], links=[], waiting=[]))
    found = {sample.name for sample in exposition.read(page)}
    for name in ("step", "lag_steps", "clock_offset_seconds", "logged_value", "link_throughput_bytes_per_second"):
        assert metrics.PREFIX + name not in found
    assert exposition.value(page, "ringfold_op_duration_seconds_count", peer="1") == 0


def test_a_peer_that_is_gone_has_no_series() -> None:
    assert b'peer="2"' in of_peers(status(peer(1), peer(2)))
    assert b'peer="2"' not in of_peers(status(peer(1)))


def test_runs_are_kept_apart() -> None:
    page = of_master(None, status(peer(1), run="a"), status(peer(1), peer(2), run="b", fence=1))
    assert exposition.value(page, "ringfold_peers", run="b", state="accepted") == 2
    assert exposition.value(page, "ringfold_failovers_total", run="a") == 2
    assert exposition.value(page, "ringfold_failovers_total", run="b") == 0


def test_a_standby_has_no_runs_and_says_that_it_does_not_lead() -> None:
    out = Exposition("master")
    add_master(out, facts(leads=False), MasterCounts())
    assert exposition.value(out.content(), "ringfold_master_is_leader") == 0
    assert b"run=" not in out.content()
    exposition.check(out.content())


# What the master counts


@pytest.mark.parametrize("cause", EVICTION_CAUSES)
def test_an_eviction_counts_by_its_reason(cause: EvictionCause) -> None:
    counts = MasterCounts()
    counts.observe("default", PeerGone(2, "p2", "evicted", "any text", cause))
    page = of_master(counts)
    assert exposition.value(page, "ringfold_evictions_total", reason=cause) == 1
    assert sum(each.value for each in exposition.read(page) if each.name == "ringfold_evictions_total") == 1
    assert exposition.value(page, "ringfold_departures_total", how="evicted") == 1


def test_the_master_gives_every_reason_of_an_eviction_somewhere() -> None:
    """A reason that no code gives would be a series that stays 0 for ever."""
    source = "".join(path.read_text() for path in (ROOT / "src/ringfold/master").glob("*.py"))
    given = set(re.findall(r"\.evict\(\s*now,\s*[^\"]*?,\s*\"(\w+)\"", source))
    assert given | {"call"} == set(EVICTION_CAUSES)
    assert 'for_call=True), "call")' in source


def test_a_recovery_is_an_epoch_change_because_of_a_lost_peer() -> None:
    counts = MasterCounts()
    for notice in (
        EpochSealing(0, 1, "peers join", "joined"),
        EpochInstalled(0, 2, 70),
        EpochSealing(0, 2, "a link failed", "link"),
        EpochSealing(0, 3, "peer 2 was lost", "lost"),
        EpochInstalled(0, 4, 40),
        EpochSealing(1, 4, "peer 3 leaves", "left"),
        EpochInstalled(1, 5, 20),
    ):
        counts.observe("default", notice)
    page = of_master(counts)
    assert exposition.value(page, "ringfold_recovery_duration_seconds_count") == 1
    assert exposition.value(page, "ringfold_recovery_duration_seconds_sum") == pytest.approx(0.04)
    assert exposition.value(page, "ringfold_epoch_changes_total", reason="lost") == 1
    assert exposition.value(page, "ringfold_epoch_changes_total", reason="left") == 1


def test_other_notices_count() -> None:
    counts = MasterCounts()
    counts.observe("default", SyncEnded(0, 1, 5, 250))
    counts.observe("default", PeerDiverged(0, Divergence(1, "p1", 5, 4, ["w"], 1)))
    counts.observe("", ConnectionDropped("10.0.0.9:1", "garbage"))
    page = of_master(counts)
    assert exposition.value(page, "ringfold_sync_duration_seconds_sum") == 0.25
    assert exposition.value(page, "ringfold_divergences_total") == 1
    assert exposition.value(page, "ringfold_connections_refused_total") == 1


def test_a_round_is_measured() -> None:
    counts = MasterCounts()
    counts.observe("default", a_round())
    counts.observe("default", a_round(missing={"2": "it is late"}))
    counts.observe("default", a_round(anomaly="an edge"))
    page = of_master(counts)
    for outcome in metrics.ROUND_OUTCOMES:
        assert exposition.value(page, "ringfold_rounds_total", outcome=outcome) == 1
    assert exposition.value(page, "ringfold_round_window_skew_seconds_sum") == pytest.approx(600e-6)
    assert exposition.value(page, "ringfold_control_latency_seconds_count") == 6
    assert exposition.value(page, "ringfold_round_request_size_bytes_sum") == 15_000
    assert exposition.value(page, "ringfold_round_duration_seconds_sum", phase="total") == pytest.approx(3)
    assert exposition.value(page, "ringfold_retries_total", what="tcp_segment") == 6
    assert exposition.value(page, "ringfold_probe_overhead_ratio") == 0.2
    assert exposition.value(page, "ringfold_probe_uncertainty_seconds") == pytest.approx(300e-9)


def test_a_run_that_is_forgotten_counts_from_0_again() -> None:
    counts = MasterCounts()
    counts.observe("a", PeerGone(2, "p2", "lost", "gone"))
    counts.observe("a", RunForgotten("a"))
    page = of_master(counts, status(peer(1), run="a"))
    assert exposition.value(page, "ringfold_departures_total", run="a", how="lost") == 0


def test_a_master_that_does_not_respond_is_an_error_and_not_a_page_of_old_figures() -> None:
    def silent(timeout_s: float) -> MasterFacts:
        raise TimeoutError

    pages = master_pages(silent, MasterCounts())
    for path in ("/metrics", "/metrics/peers", "/sd"):
        with pytest.raises(PageUnavailable):
            pages[path]()


def test_an_agent_that_does_not_respond_is_an_error() -> None:
    def silent(timeout_s: float) -> AgentStatus:
        raise TimeoutError

    with pytest.raises(PageUnavailable):
        agent_pages(silent)["/metrics"]()


def test_an_unknown_reason_of_the_agent_counts_as_another() -> None:
    page = of_agent()
    assert exposition.value(page, "ringfold_agent_telemetry_refused_total", reason="magic") == 4
    assert exposition.value(page, "ringfold_agent_telemetry_refused_total", reason="other") == 5
    assert exposition.value(page, "ringfold_agent_requests_refused_total", reason="quota") == 1


# Peers with a port of their own


def test_a_peers_own_page_has_the_series_of_the_master(own_page: bytes) -> None:
    assert exposition.value(own_page, "ringfold_peer_is_member") == 1
    assert exposition.value(own_page, "ringfold_group_size") == 2
    assert exposition.value(own_page, "ringfold_steps_total") == 1
    assert exposition.value(own_page, "ringfold_ops_total", outcome="committed") >= 1
    assert exposition.value(own_page, "ringfold_op_bytes_total") >= 1 << 22
    assert exposition.value(own_page, "ringfold_step_duration_seconds_count") == 1
    shares = [each.value for each in exposition.read(own_page) if each.name == "ringfold_path_share_ratio"]
    assert len(shares) == 2
    assert sum(shares) == pytest.approx(1)


def test_service_discovery_names_the_peers_that_serve_metrics() -> None:
    seen = status(
        peer(1, progress=Progress(metrics="0.0.0.0:48160")),
        peer(2, progress=Progress(metrics="127.0.0.1:48161")),
        peer(3),
        run="a",
    )
    found = [(target.targets, target.labels["ringfold_peer_name"]) for target in targets_of([seen])]
    assert found == [(["10.0.0.1:48160"], "p1"), (["127.0.0.1:48161"], "p2")]


# deploy/


def promtool(*arguments: str) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool (Debian's package prometheus) is not installed")
    result = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_alert_rules_are_valid() -> None:
    promtool("check", "rules", str(DEPLOY / "prometheus/ringfold.rules.yml"))


def test_every_alert_fires_when_it_should_and_no_other() -> None:
    promtool("test", "rules", str(DEPLOY / "prometheus/ringfold.tests.yml"))


def test_every_alert_has_a_test() -> None:
    rules = (DEPLOY / "prometheus/ringfold.rules.yml").read_text()
    tests = (DEPLOY / "prometheus/ringfold.tests.yml").read_text()
    alerts = set(re.findall(r"- alert: (\w+)", rules))
    assert len(alerts) > 10
    assert alerts == set(re.findall(r"  # (Ringfold\w+)\n", tests))


def test_the_example_configuration_is_valid() -> None:
    promtool("check", "config", str(DEPLOY / "prometheus/prometheus.yml"))


def dashboard_queries() -> list[str]:
    board = json.loads((DEPLOY / "grafana/ringfold.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    return queries + [each["expr"] for each in board["annotations"]["list"]]


def test_the_dashboard_and_the_rules_use_metrics_of_the_table() -> None:
    series = {metric.full_name for metric in METRICS.values()}
    for metric in METRICS.values():
        if metric.kind == "histogram":
            series |= {f"{metric.full_name}_{ending}" for ending in ("bucket", "sum", "count")}
    rules = (DEPLOY / "prometheus/ringfold.rules.yml").read_text()
    for text in (*dashboard_queries(), rules):
        used = set(re.findall(r"(?<![:\w])ringfold_[a-z_]+", text)) - {"ringfold_steps:rate1m"}
        assert used <= series, used - series


def test_the_dashboards_queries_are_valid(tmp_path: Path) -> None:
    rules = []
    for number, query in enumerate(dashboard_queries()):
        query = (
            query.replace("$__rate_interval", "1m").replace("$run", "default").replace("$peers_job", "ringfold-peers")
        )
        assert "$" not in query
        rules.append({"record": f"query:number_{number}", "expr": query})
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    board = json.loads((DEPLOY / "grafana/ringfold.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
