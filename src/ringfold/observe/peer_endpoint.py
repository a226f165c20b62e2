"""The endpoint of a peer: a thread in the training process, which reads the engine's counters when it is scraped.

It outlives the sessions of a communicator: a peer that is evicted and joins again is scraped at the same port. It has
the series of `/metrics/peers` at the master, with the same names and labels, and some that only the peer knows.
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple

from ringfold.config import Resolved
from ringfold.errors import ConfigError
from ringfold.observe import metrics
from ringfold.observe.metrics import Exposition, Number, labels
from ringfold.observe.peer_metrics import Counted, add_counted
from ringfold.peer.communicator import Communicator
from ringfold.peer.session import Session
from ringfold.runtime.http_server import Page, PageServer
from ringfold.wire.proof import viewer_token
from ringfold.wire.status import DURATION_BOUNDS_US, OpTotals, Progress

PORT_TRIES = 512
_log = logging.getLogger("ringfold.peer")


class _Paths(NamedTuple):
    sent: list[int]
    rates: list[int]


def serve(joined: Communicator, settings: Resolved, token: bytes) -> None:
    """Serve the metrics of a peer until it has left. A peer that cannot serve them still trains."""
    host, port = settings.text("metrics_host"), settings.integer("metrics_port")
    try:
        server = PageServer(
            {"/metrics": lambda: Page(render(joined))},
            [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"],
            secret=token,
            viewer=viewer_token(token),
            insecure=settings.switch("insecure"),
            tries=PORT_TRIES,
        )
    except (OSError, ConfigError) as error:
        _log.warning("this peer serves no metrics: %s", error)
        return
    joined._at_end(server.stop)
    if joined._recording is not None:
        joined._recording.serves_metrics(server.addresses[0])
    _log.info("metrics at http://%s/metrics", server.addresses[0])


def render(joined: Communicator) -> bytes:
    """The page of a peer."""
    out = Exposition("peer")
    metrics.add_build_info(out, "peer")
    session = joined._shown
    is_member = not session.is_over and session.machine.record is not None
    out.add_one("peer_is_member", int(is_member))
    if is_member:
        _add_session(out, joined, session)
    return out.content()


def _add_session(out: Exposition, joined: Communicator, session: Session) -> None:
    identity, engine, record = session.machine.identity, session.engine, session.machine.record
    if record is None:
        return
    stats, text = engine.stats(), labels(run=identity.run, peer=session.machine.peer)
    about = labels(name=identity.name, host=identity.host, group=identity.group)
    out.add("peer_info", [(f"{text},{about}", 1)])
    progress = Progress() if joined._recording is None else joined._recording.progress
    add_counted(out, [Counted(text, totals_of(stats), progress)])

    def gauge(name: str, value: Number) -> None:
        out.add(name, [(text, value)])

    gauge("group_size", len(record.members))
    gauge("epoch", record.epoch)
    gauge("ops_in_flight", len(engine.tags_in_flight()))
    if joined._recording is not None:
        taken = list(joined._recording.step_durations), joined._recording.step_ns / 1e9
        out.add_histograms("step_duration_seconds", [(text, *taken)])
    counts = {"reissued": stats["reissued"], "duplicate": stats["duplicates"], "drained": stats["drained"]}
    out.add("segments_total", [(f'{text},what="{what}"', counts[what]) for what in metrics.SEGMENTS])
    paths = _paths(session)
    if paths is not None:
        total = sum(paths.sent)
        shares = [(_path(text, path), sent / total) for path, sent in enumerate(paths.sent)] if total else []
        out.add("path_share_ratio", shares)
        rates = [(_path(text, path), rate) for path, rate in enumerate(paths.rates)]
        out.add("path_throughput_bytes_per_second", rates)


def _paths(session: Session) -> _Paths | None:
    """The paths to the next peer, if there are several."""
    record, me = session.machine.record, session.machine.peer
    count = session.machine.identity.paths
    if record is None or count < 2 or len(record.members) < 2:
        return None
    ring = [member.peer for member in record.members]
    following = ring[(ring.index(me) + 1) % len(ring)]
    return _Paths(session.engine.path_bytes(True)[:count], session.engine.path_rates(following)[:count])


def _path(text: str, path: int) -> str:
    return f'{text},path="{path}"'


def totals_of(stats: Mapping[str, int]) -> OpTotals:
    """The counters of an engine as in heartbeats."""
    return OpTotals(
        committed=stats["committed"],
        aborted=stats["aborted"],
        restarted=stats["restarted"],
        bytes=stats["op_bytes"],
        sent_bytes=stats["sent_bytes"],
        received_bytes=stats["received_bytes"],
        memory_bytes=stats["memory_bytes"],
        busy_ns=stats["busy_ns"],
        waited_ns=stats["waited_ns"],
        blocked_ns=stats["blocked_ns"],
        lanes_lost=stats["lanes_lost"],
        durations=[stats[f"duration_{number}"] for number in range(len(DURATION_BOUNDS_US) + 1)],
    )
