"""OpenTelemetry: steps, syncs, epoch changes, failovers and checkpoints as spans, made from the events of a run.

Nothing is added to a peer or a master: an exporter reads the events that they record, from a run directory or from a
master, as `ringfold events` does. Ops are no spans, because one costs more than a small op itself; `ringfold trace` has
them. Times are those of the hosts' wall clocks, as OpenTelemetry expects.

The spans of one step of all peers are one trace. Its id follows from the run and the step, so that peers, hosts and
exporters that know nothing of each other agree on it.
"""

import hashlib
from collections.abc import Iterable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, TracerProvider

from ringfold.observe.stream import Seen
from ringfold.units import MS
from ringfold.wire.base import GroupId, PeerId
from ringfold.wire.events import CheckpointSaved, EpochRuns, StateSynced, StepEnded
from ringfold.wire.notices import EpochInstalled, EpochSealing, MasterLost, PeerReturned, SyncEnded

Attributes = dict[str, str | bool | int | float]
MAX_OPEN = 4_096
"""Of beginnings without an end: the oldest are forgotten."""


class SpanMaker:
    """Makes spans from events in the order of time. `run` is the name of the run that they belong to."""

    def __init__(self, provider: TracerProvider, run: str) -> None:
        self._tracer = provider.get_tracer("ringfold")
        self._run = run
        self._sealed: dict[tuple[str, GroupId], EpochSealing] = {}
        self._lost: dict[PeerId, int] = {}
        """By peer, when it lost its master."""

    def take(self, seen: Seen) -> None:
        """An event: the span that it ends, if there is one, is made."""
        end_ns, notice = seen.wall_ns, seen.notice
        match notice:
            case StepEnded():
                self._step(seen, notice)
            case StateSynced(revision, received, took_ms):
                about: Attributes = {"revision": revision, "received_bytes": received}
                self._span(seen, "ringfold.sync", end_ns - took_ms * MS, end_ns, about)
            case SyncEnded(group, sync, revision, took_ms):
                about = {"group": group, "sync": sync, "revision": revision}
                self._span(seen, "ringfold.sync", end_ns - took_ms * MS, end_ns, about)
            case CheckpointSaved(revision, took_ms):
                self._span(seen, "ringfold.checkpoint", end_ns - took_ms * MS, end_ns, {"revision": revision})
            case EpochSealing(group=group):
                self._sealed.setdefault((seen.source, group), notice)
            case EpochInstalled():
                self._epoch(seen, notice)
            case MasterLost():
                self._lost.setdefault(seen.peer, end_ns)
                while len(self._lost) > MAX_OPEN:
                    del self._lost[next(iter(self._lost))]
            case EpochRuns(fence=fence):
                self._failover(seen, seen.peer, {"fence": fence})
            case PeerReturned(peer=peer):
                self._failover(seen, peer, {})
            case _:
                pass

    def _step(self, seen: Seen, notice: StepEnded) -> None:
        about: Attributes = {
            "step": notice.step,
            "epoch": notice.epoch,
            "size": notice.size,
            "cpu_seconds": notice.cpu_ns / 1e9,
            "queued_seconds": notice.queued_ns / 1e9,
            "sync_seconds": notice.sync_ns / 1e9,
        }
        about |= {f"logged.{name}": value for name, value in notice.logged.items() if value is not None}
        begin_ns = seen.wall_ns - (seen.event.stamp.at - notice.began_ns)
        parent = self._parent("step", notice.step)
        self._span(seen, "ringfold.step", begin_ns, seen.wall_ns, about, parent=parent)

    def _epoch(self, seen: Seen, notice: EpochInstalled) -> None:
        sealing = self._sealed.pop((seen.source, notice.group), None)
        about: Attributes = {"group": notice.group, "epoch": notice.epoch}
        is_loss = False
        if sealing is not None:
            about |= {"reason": sealing.reason, "cause": sealing.cause or ""}
            is_loss = sealing.cause == "lost"
        begin_ns = seen.wall_ns - notice.took_ms * MS
        self._span(seen, "ringfold.epoch_change", begin_ns, seen.wall_ns, about, is_error=is_loss)

    def _failover(self, seen: Seen, peer: PeerId, about: Attributes) -> None:
        begin_ns = self._lost.pop(peer, None)
        if begin_ns is not None:
            self._span(seen, "ringfold.failover", begin_ns, max(begin_ns, seen.wall_ns), {"peer": peer, **about})

    def _parent(self, kind: str, number: int) -> Context:
        """A context in the trace that all processes have for the same thing."""
        digest = hashlib.sha256(f"{self._run}/{kind}/{number}".encode()).digest()
        trace_id, span_id = int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")
        made = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        return trace.set_span_in_context(NonRecordingSpan(made))

    def _span(
        self,
        seen: Seen,
        name: str,
        begin_ns: int,
        end_ns: int,
        about: Attributes,
        *,
        parent: Context | None = None,
        is_error: bool = False,
    ) -> None:
        who: Attributes = {"run": self._run, "role": seen.role, "process": seen.source}
        if seen.peer:
            who["peer"] = seen.peer
        named = {f"ringfold.{key}": value for key, value in {**who, **about}.items()}
        span = self._tracer.start_span(name, parent or Context(), attributes=named, start_time=begin_ns)
        if is_error:
            span.set_status(Status(StatusCode.ERROR, str(about.get("reason", ""))))
        span.end(end_ns)


def make_spans(found: Iterable[Seen], provider: TracerProvider, run: str) -> int:
    """Make spans of all events that have some; returns how many events there were."""
    maker, count = SpanMaker(provider, run), 0
    for seen in found:
        maker.take(seen)
        count += 1
    return count
