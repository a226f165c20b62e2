"""Metrics of real processes: promtool reads every endpoint, and a real Prometheus server raises an alert."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import exposition
import pytest
from metrics_program import train_with_metrics
from ports import free_port
from programs import ProgramCluster, until
from training_program import end_training, start_training, step_with

from ringfold.wire.proof import viewer_token

DEPLOY = Path(__file__).parents[2] / "deploy/prometheus"
PROMETHEUS = shutil.which("prometheus")

pytestmark = pytest.mark.waiting


def page(address: str, path: str = "/metrics", token: str = "") -> bytes:
    status, body = exposition.get(f"http://{address}{path}", {"Authorization": f"Bearer {token}"} if token else {})
    assert status == 200, body
    return body


def has(look: Callable[[], float], expected: float) -> Callable[[], bool]:
    """Whether a series exists and has this value."""

    def now() -> bool:
        try:
            return look() == expected
        except AssertionError:
            return False

    return now


def test_every_endpoint_of_a_run_shows_what_happens(cluster: ProgramCluster) -> None:
    master, first = f"127.0.0.1:{free_port()}", free_port()
    cluster.start_master(metrics_listen=master)
    peers = cluster.start_program(train_with_metrics, 3, world=3, floats=1_000, port=first)
    ids = [peer.expect("joined")["peer"] for peer in peers]
    step_with(peers[0], 3)

    def serving() -> list[str]:
        return [target for group in json.loads(page(master, "/sd")) for target in group["targets"]]

    until(lambda: len(serving()) == 3, "all three peers report where they serve metrics")
    for text in (page(master), page(master, "/metrics/peers"), *(page(target) for target in serving())):
        exposition.check(text)
    assert exposition.value(page(master), "ringfold_peers", state="accepted") == 3
    assert exposition.value(page(serving()[0]), "ringfold_group_size") == 3

    def committed() -> float:
        figures = page(master, "/metrics/peers")
        return exposition.value(figures, "ringfold_ops_total", peer=str(ids[0]), outcome="committed")

    until(lambda: committed() > 3, "heartbeats bring the ops of three steps")

    peers[1].kill()
    lost = has(lambda: exposition.value(page(master), "ringfold_departures_total", how="lost"), 1)
    until(lost, "the death is counted")
    recovered = has(lambda: exposition.value(page(master), "ringfold_recovery_duration_seconds_count"), 1)
    until(recovered, "the recovery is measured")
    assert 0 < exposition.value(page(master), "ringfold_recovery_duration_seconds_sum") < 5
    series = f'peer="{ids[1]}"'.encode()
    until(lambda: series not in page(master, "/metrics/peers"), "the series of the lost peer are gone")
    until(lambda: len(serving()) == 2, "two peers serve metrics")
    end_training([peers[0], peers[2]])
    gone = has(lambda: exposition.value(page(master), "ringfold_departures_total", how="left"), 2)
    until(gone, "the others have left")


def test_a_standby_says_that_it_does_not_lead(cluster: ProgramCluster, tmp_path: Path) -> None:
    store, places = f"sqlite://{tmp_path}/shared.db", [f"127.0.0.1:{free_port()}" for _ in range(2)]
    masters = [cluster.start_master(store=store, metrics_listen=place, lease_s=1) for place in places]
    leads = [has(lambda at=place: exposition.value(page(at), "ringfold_master_is_leader"), 1) for place in places]  # type: ignore[misc]
    until(lambda: [look() for look in leads] == [True, False], "the first one leads, and the other one responds, too")
    peers = start_training(cluster, 2, address=",".join(master.address for master in masters))
    masters[0].kill()
    until(leads[1], "the other one leads")
    took_over = has(lambda: exposition.value(page(places[1]), "ringfold_failovers_total"), 1)
    until(took_over, "the failover is counted")
    end_training(peers)


def test_from_other_machines_the_viewer_token_is_needed(cluster: ProgramCluster, tmp_path: Path) -> None:
    port, token = free_port(), tmp_path / "run.token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    cluster.start_master(metrics_listen=f"0.0.0.0:{port}", token_file=token)
    printed = cluster.start_command("viewer-token", "viewer-token", "--token-file", str(token))
    viewer = printed.expect_output("").strip()
    assert viewer == viewer_token(token.read_bytes().strip())
    assert exposition.get(f"http://127.0.0.1:{port}/metrics")[0] == 401
    assert b"ringfold_build_info" in page(f"127.0.0.1:{port}", token=viewer)


def test_the_agent_has_metrics(cluster: ProgramCluster, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    cluster.start_agent(
        "agent", tmp_path / "agent", "--metrics-listen", address, "--no-nics", "--telemetry", "127.0.0.1:0"
    )
    up: list[bytes] = []

    def responds() -> bool:
        try:
            status, body = exposition.get(f"http://{address}/metrics")
        except OSError:
            return False
        up.append(body)
        return status == 200

    until(responds, "the agent serves metrics")
    exposition.check(up[-1])
    assert exposition.value(up[-1], "ringfold_agent_clients") == 0


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus (a package of Debian) is not installed")
def test_an_alert_fires_in_a_real_prometheus(cluster: ProgramCluster, tmp_path: Path) -> None:
    """The example configuration and the rules as they are in deploy/, with shorter intervals and this test's ports."""
    master, web = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    config = (DEPLOY / "prometheus.yml").read_text().replace("127.0.0.1:48146", master)
    config = config.replace("interval: 15s", "interval: 1s").replace("interval: 5s", "interval: 250ms")
    (tmp_path / "prometheus.yml").write_text(config)
    (tmp_path / "ringfold.rules.yml").write_text((DEPLOY / "ringfold.rules.yml").read_text())
    cluster.start_master(metrics_listen=master)
    peers = start_training(cluster, 3, floats=1_000)
    storage = ["--storage.tsdb.path", str(tmp_path / "data")]
    command = [
        str(PROMETHEUS),
        "--config.file",
        str(tmp_path / "prometheus.yml"),
        *storage,
        "--web.listen-address",
        web,
    ]
    cluster.start("prometheus", command)

    def ask(path: str) -> dict[str, list[dict[str, dict[str, str]]]]:
        try:
            status, body = exposition.get(f"http://{web}/api/v1/{path}")
        except OSError:
            return {}
        found: dict[str, list[dict[str, dict[str, str]]]] = json.loads(body)["data"] if status == 200 else {}
        return found

    def samples(query: str) -> int:
        return len(ask(f"query?query={query}").get("result", []))

    def firing() -> set[str]:
        return {alert["labels"]["alertname"] for alert in ask("alerts").get("alerts", []) if alert["state"] == "firing"}  # type: ignore[comparison-overlap]

    until(lambda: samples("count_over_time(ringfold_departures_total%7Bhow=%22lost%22%7D%5B1m%5D)%3E2"), "it scrapes")
    until(lambda: samples("ringfold_steps_total") == 3, "it has the peers, by what the master knows of them")
    assert "RingfoldPeerLost" not in firing()
    peers[1].kill()
    until(lambda: "RingfoldPeerLost" in firing(), "the alert fires")
    until(lambda: samples("ringfold_steps_total") == 2, "the series of the dead peer has ended")
    assert "RingfoldMasterDown" not in firing()
    end_training([peers[0], peers[2]])
