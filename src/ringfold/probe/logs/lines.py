"""The lines of a log of probing: JSON, one typed line for one item. Pure; `files.py` has the files.

Every line has `kind`, `round_id`, `label`, and `begin_ns` and `end_ns` of its window: any tool can sort and join them.

    header   whose log this is, and the version of the format; at the start of a file, and again where another process
             continued the file. It has the window of the line that follows it.
    window   the window of one edge: counts, and with `points` every exchange (`pack.py`), exactly
    fit      the line that was fitted to that window and edge
    round    the result of a round for the whole run; its times are global, all others are of the node's clock
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct

from ringfold.errors import RemoteProtocolError, UsageError
from ringfold.probe.exchanges import EdgeWindow, Stamps
from ringfold.probe.logs.pack import pack, unpack
from ringfold.wire.decoding import decode as decode_bytes
from ringfold.wire.probing import Cadence, EdgeFit, NodeId, RoundId, RoundSummary

VERSION = 1


class _Line(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """What every line has. Only the clock of the times depends on the kind."""

    round_id: RoundId
    label: str
    begin_ns: int
    end_ns: int


class HeaderLine(_Line, frozen=True, kw_only=True, tag="header"):
    """The node whose lines follow, and its cadence. Without a `node` it is the log of the whole run."""

    version: int
    node: NodeId | None = None
    name: str = ""
    host: str = ""
    software: str = ""
    cadence: Cadence | None = None


class _NodeLine(_Line, frozen=True, kw_only=True):
    """A line about one window of one node."""

    node: NodeId
    window: int
    """Counts the node's windows; restarts only after a header."""
    utc_ns: int
    """CLOCK_REALTIME minus the node's clock, at the end of the window."""


class WindowLine(_NodeLine, frozen=True, kw_only=True, tag="window"):
    """The window of one edge. `exchanges` is absent where points are not recorded."""

    src: NodeId
    dst: NodeId
    sent: int
    lost: int
    duplicates: int
    filtered: int
    rows: int
    threshold_ns: int
    stamps: Stamps
    stepped: str = ""
    exchanges: bytes | None = None


class FitLine(_NodeLine, frozen=True, kw_only=True, tag="fit"):
    """The line that was fitted to one window and edge, or the reason why there is none."""

    fit: EdgeFit


class RoundLine(_Line, frozen=True, kw_only=True, tag="round"):
    """The result of a round. `names` has the nodes' names by their number as text."""

    summary: RoundSummary
    names: dict[str, str] = {}


Line = HeaderLine | WindowLine | FitLine | RoundLine


class _VersionedHeader(Struct, frozen=True):
    """The part of a header that every version has."""

    kind: str
    version: int


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_header_decoder = msgspec.json.Decoder(_VersionedHeader)


class WindowFields(Struct, frozen=True, kw_only=True):
    """The fields of a node's window that all its lines have; see there."""

    node: NodeId
    window: int
    begin_ns: int
    end_ns: int
    utc_ns: int
    round_id: RoundId = RoundId()
    label: str = ""


def window_lines(
    fields: WindowFields, windows: Sequence[EdgeWindow], fits: Sequence[EdgeFit], *, points: bool
) -> list[WindowLine | FitLine]:
    """All lines about one window of one node: of each edge its window and then its fit, edges in order."""
    recorded = {(window.src, window.dst): window for window in windows}
    fitted = {(fit.src, fit.dst): fit for fit in fits}
    lines: list[WindowLine | FitLine] = []
    for edge in sorted(recorded.keys() | fitted.keys()):
        if edge in recorded:
            lines.append(_window_line(fields, recorded[edge], points=points))
        if edge in fitted:
            lines.append(_fit_line(fields, fitted[edge]))
    return lines


def _window_line(fields: WindowFields, window: EdgeWindow, *, points: bool) -> WindowLine:
    return WindowLine(
        round_id=fields.round_id,
        label=fields.label,
        begin_ns=window.begin_ns,
        end_ns=window.end_ns,
        node=fields.node,
        window=fields.window,
        utc_ns=fields.utc_ns,
        src=window.src,
        dst=window.dst,
        sent=window.sent,
        lost=window.lost,
        duplicates=window.duplicates,
        filtered=window.filtered,
        rows=len(window.exchanges),
        threshold_ns=window.threshold_ns,
        stamps=window.stamps,
        stepped=window.stepped,
        exchanges=pack(window.exchanges, window.kept) if points else None,
    )


def _fit_line(fields: WindowFields, fit: EdgeFit) -> FitLine:
    return FitLine(
        round_id=fields.round_id,
        label=fields.label,
        begin_ns=fields.begin_ns,
        end_ns=fields.end_ns,
        node=fields.node,
        window=fields.window,
        utc_ns=fields.utc_ns,
        fit=fit,
    )


def round_line(summary: RoundSummary, names: Mapping[NodeId, str] | None = None) -> RoundLine:
    """The line of a round. Without `names`, those of the summary; they are stored once, beside it."""
    named = summary.names if names is None else {str(node): name for node, name in sorted(names.items())}
    return RoundLine(
        round_id=summary.round,
        label=summary.label,
        begin_ns=summary.begin_ns,
        end_ns=summary.end_ns,
        summary=msgspec.structs.replace(summary, names={}),
        names=named,
    )


def edge_window(line: WindowLine) -> EdgeWindow | None:
    """The window exactly as it was, or None where its points were not recorded. UsageError if they are corrupt."""
    if line.exchanges is None:
        return None
    try:
        exchanges, kept = unpack(line.exchanges, line.rows)
    except UsageError as error:
        raise UsageError(f"window {line.window} of edge {line.src} -> {line.dst}: {error}") from None
    return EdgeWindow(
        src=line.src,
        dst=line.dst,
        begin_ns=line.begin_ns,
        end_ns=line.end_ns,
        exchanges=exchanges,
        kept=kept,
        sent=line.sent,
        lost=line.lost,
        duplicates=line.duplicates,
        filtered=line.filtered,
        threshold_ns=line.threshold_ns,
        stamps=line.stamps,
        stepped=line.stepped,
    )


def encode(line: Line) -> bytes:
    """One line, with its newline."""
    return _encoder.encode(line) + b"\n"


def decode(raw: bytes) -> Line:
    """The line, checked; UsageError if it is invalid, or a header of another version."""
    try:
        return decode_bytes(_decoder.decode, raw)
    except RemoteProtocolError as error:
        with suppress(RemoteProtocolError):
            check_version(decode_bytes(_header_decoder.decode, raw))
        raise UsageError(str(error)) from None


def check_version(header: "_VersionedHeader | HeaderLine") -> None:
    """Refuse another version of the format."""
    if header.version != VERSION:
        raise OtherVersion(f"it has version {header.version} of the format, and this Ringfold reads version {VERSION}")


class OtherVersion(UsageError):
    """A log in an unsupported version of the format."""
