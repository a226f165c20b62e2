"""OpenTelemetry spans: from made-up events, and from the record of a real run, also through a collector's protocol."""

import os
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry (the extra otel) is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import ringfold as rf
from ringfold.master.server import MasterThread
from ringfold.master.settings import MasterSettings
from ringfold.observe import stream
from ringfold.observe.otel import make_spans
from ringfold.observe.stream import Seen
from ringfold.wire.events import CheckpointSaved, EpochRuns, Event, OpEnded, Role, Stamp, StateSynced, StepEnded
from ringfold.wire.notices import EpochInstalled, EpochSealing, MasterLost, Notice, PeerReturned, SyncEnded

S = 1_000_000_000


def seen(at_s: float, notice: Notice, peer: int = 0, role: Role = "peer") -> Seen:
    """An event at this second of Unix time; the monotonic clock reads 1,000 s less."""
    event = Event(Stamp(int((at_s - 1_000) * S), 0, peer), notice)  # type: ignore[arg-type]
    return Seen(int(at_s * S), role, f"p{peer}" if peer else "m", event)


def spans(*events: Seen) -> list[ReadableSpan]:
    provider, memory = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    assert make_spans(events, provider, "nightly") == len(events)
    return list(memory.get_finished_spans())


def about(span: ReadableSpan) -> dict[str, object]:
    return {name.removeprefix("ringfold."): value for name, value in dict(span.attributes or {}).items()}


def test_a_step_has_its_duration_and_what_was_logged() -> None:
    step = StepEnded(7, 3, 4, began_ns=500 * S, cpu_ns=S // 2, logged={"loss": 2.5, "bad": None})
    [span] = spans(seen(1_502.5, step, peer=2))
    assert (span.name, span.start_time, span.end_time) == ("ringfold.step", 1_500 * S, int(1_502.5 * S))
    facts = about(span)
    assert (facts["step"], facts["epoch"], facts["size"], facts["cpu_seconds"]) == (7, 3, 4, 0.5)
    assert (facts["logged.loss"], facts["peer"], facts["run"], facts["process"]) == (2.5, 2, "nightly", "p2")
    assert "logged.bad" not in facts


def test_the_same_step_of_all_peers_is_one_trace() -> None:
    made = spans(*(seen(1_502, StepEnded(step, 3, 2, 500 * S), peer) for step in (7, 8) for peer in (1, 2)))
    traces = [span.context.trace_id for span in made if span.context is not None]
    assert traces[0] == traces[1] != traces[2] == traces[3]


def test_syncs_and_checkpoints() -> None:
    made = spans(
        seen(1_010, StateSynced(5, 4_096, 250), peer=1),
        seen(1_011, SyncEnded(0, 2, 5, 300), role="master"),
        seen(1_012, CheckpointSaved(5, 1_500), peer=1),
    )
    assert [(span.name, (span.end_time or 0) - (span.start_time or 0)) for span in made] == [
        ("ringfold.sync", 250_000_000),
        ("ringfold.sync", 300_000_000),
        ("ringfold.checkpoint", 1_500_000_000),
    ]
    assert about(made[0])["received_bytes"] == 4_096
    assert about(made[1])["role"] == "master"


def test_an_epoch_change_says_why_and_a_loss_is_an_error() -> None:
    made = spans(
        seen(1_010, EpochSealing(0, 3, "peer 2 was lost", "lost"), role="master"),
        seen(1_010.02, EpochSealing(0, 3, "a link failed", "link"), role="master"),
        seen(1_010.05, EpochInstalled(0, 4, 50), role="master"),
        seen(1_020, EpochSealing(0, 4, "peer 5 joins", "joined"), role="master"),
        seen(1_020.01, EpochInstalled(0, 5, 10), role="master"),
    )
    assert [span.status.status_code for span in made] == [StatusCode.ERROR, StatusCode.UNSET]
    assert (made[0].start_time, made[0].end_time) == (1_010 * S, int(1_010.05 * S))
    assert (about(made[0])["reason"], about(made[1])["cause"]) == ("peer 2 was lost", "joined")


def test_a_failover_lasts_from_the_loss_of_the_master_to_the_first_epoch_of_the_next_one() -> None:
    lost = MasterLost("10.0.0.1:48148", "it closed the connection")
    made = spans(
        seen(1_010, lost, peer=1),
        seen(1_010.1, lost, peer=2),
        seen(1_011, lost, peer=1),
        seen(1_013, EpochRuns(0, 4, 2, [1, 2]), peer=1),
        seen(1_014, PeerReturned(2, "p2"), role="master"),
        seen(1_015, EpochRuns(0, 4, 2, [1, 2]), peer=2),
        seen(1_016, EpochRuns(0, 5, 2, [1, 2]), peer=1),
    )
    assert [(span.name, about(span)["peer"], span.start_time) for span in made] == [
        ("ringfold.failover", 1, 1_010 * S),
        ("ringfold.failover", 2, int(1_010.1 * S)),
    ]


def test_ops_are_no_spans() -> None:
    op = OpEnded("all_reduce", 0, 1, 3, "committed", 4_096, called_ns=1, started_ns=2)
    assert spans(seen(1_010, op, peer=1)) == []


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a run of two peers and three steps."""
    directory = tmp_path_factory.mktemp("run")

    def train(master: MasterThread, name: str) -> None:
        with rf.join(master.address, name=name, timeout_s=30) as run:
            state = rf.SharedState(weights=np.zeros(8, np.float32))
            for step in run.steps(state, until=3, min_world=2):
                step.all_reduce(np.ones(8, np.float32))
                step.log(loss=1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGFOLD_EVENTS_DIR", str(directory))
        with MasterThread(MasterSettings(events_dir=directory)) as master, ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(train, master, name) for name in ("a", "b")]:
                done.result()
    return directory


def test_a_recorded_run_has_its_steps_syncs_and_epochs(run_directory: Path) -> None:
    made = spans(*stream.merged(run_directory))
    counts = Counter((span.name, about(span)["role"]) for span in made)
    assert counts["ringfold.step", "peer"] == 6
    assert counts["ringfold.sync", "peer"] >= 2
    assert counts["ringfold.epoch_change", "master"] >= 2
    steps = [span for span in made if span.name == "ringfold.step"]
    assert len({span.context.trace_id for span in steps if span.context is not None}) == 3
    assert all((span.end_time or 0) > (span.start_time or 0) > 1.6e18 for span in steps)


def test_the_command_sends_them_to_a_collector(run_directory: Path) -> None:
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        command = [sys.executable, "-m", "ringfold.cli", "otel", str(run_directory), "--endpoint", endpoint]
        plain = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=plain)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(" events\n")
    sent = b"".join(received)
    for text in (b"ringfold.step", b"ringfold.epoch_change", b"ringfold.sync", b"service.name"):
        assert text in sent
