"""The lines of a log of probing: JSON, one typed line for one thing. Pure; `log.py` has the files.

Every line has `kind`, `round_id`, `label`, and `begin_ns` and `end_ns` of its window: any tool can sort and join them.

    header   whose log this is, and the version of the format; stands where a file begins, and again where a writer went
             on with the file of an earlier life. It has the window of the line that follows it.
    window   what a window holds about one edge: counts, and with `points` every exchange (`pack.py`), exactly
    fit      the line that was fitted to that window and edge
    round    the result of a round for the whole run; its times are global, all others are by the node's clock
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
    """What every line has. Its meaning depends on the kind only in whose clock the times are."""

    round_id: RoundId
    label: str
    begin_ns: int
    end_ns: int


class HeaderLine(_Line, frozen=True, kw_only=True, tag="header"):
    """Whose lines follow, and how they were made. Without a `node` it is the log of the whole run."""

    version: int
    node: NodeId | None = None
    name: str = ""
    host: str = ""
    software: str = ""
    cadence: Cadence | None = None


class _OfWindow(_Line, frozen=True, kw_only=True):
    """A line about one window of one node."""

    node: NodeId
    window: int
    """Counts the node's windows; begins again only after a header."""
    utc_ns: int
    """CLOCK_REALTIME minus the node's clock, at the end of the window."""


class WindowLine(_OfWindow, frozen=True, kw_only=True, tag="window"):
    """What one window holds about one edge. `exchanges` is absent where points are not recorded."""

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


class FitLine(_OfWindow, frozen=True, kw_only=True, tag="fit"):
    """The line that was fitted to one window and edge, or why there is none."""

    fit: EdgeFit


class RoundLine(_Line, frozen=True, kw_only=True, tag="round"):
    """The result of a round. `names` has the nodes' names by their number as text."""

    summary: RoundSummary
    names: dict[str, str] = {}


Line = HeaderLine | WindowLine | FitLine | RoundLine


class _Opening(Struct, frozen=True):
    """Just enough of a header to know whether the rest can be understood."""

    kind: str
    version: int


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_opening = msgspec.json.Decoder(_Opening)


class Stretch(Struct, frozen=True, kw_only=True):
    """A window of a node, as all lines about it have it; see the lines for the words."""

    node: NodeId
    window: int
    begin_ns: int
    end_ns: int
    utc_ns: int
    round_id: RoundId = RoundId()
    label: str = ""


def window_lines(
    stretch: Stretch, windows: Sequence[EdgeWindow], fits: Sequence[EdgeFit], *, points: bool
) -> list[WindowLine | FitLine]:
    """All lines about one window of one node: of each edge its window and then its fit, edges in order."""
    held = {(window.src, window.dst): window for window in windows}
    fitted = {(fit.src, fit.dst): fit for fit in fits}
    lines: list[WindowLine | FitLine] = []
    for edge in sorted(held.keys() | fitted.keys()):
        if edge in held:
            lines.append(_window_line(stretch, held[edge], points=points))
        if edge in fitted:
            lines.append(_fit_line(stretch, fitted[edge]))
    return lines


def _window_line(stretch: Stretch, window: EdgeWindow, *, points: bool) -> WindowLine:
    return WindowLine(
        round_id=stretch.round_id,
        label=stretch.label,
        begin_ns=window.begin_ns,
        end_ns=window.end_ns,
        node=stretch.node,
        window=stretch.window,
        utc_ns=stretch.utc_ns,
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


def _fit_line(stretch: Stretch, fit: EdgeFit) -> FitLine:
    return FitLine(
        round_id=stretch.round_id,
        label=stretch.label,
        begin_ns=stretch.begin_ns,
        end_ns=stretch.end_ns,
        node=stretch.node,
        window=stretch.window,
        utc_ns=stretch.utc_ns,
        fit=fit,
    )


def round_line(summary: RoundSummary, names: Mapping[NodeId, str] | None = None) -> RoundLine:
    """The line of a round. Without `names`, those that the summary brings; they stand once, beside it."""
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
    """The window exactly as it was, or None where its points were not recorded. UsageError if they are damaged."""
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
    """One line with its end."""
    return _encoder.encode(line) + b"\n"


def decode(raw: bytes) -> Line:
    """The line, checked; UsageError if it is none, or a header of another version."""
    try:
        return decode_bytes(_decoder.decode, raw)
    except RemoteProtocolError as error:
        with suppress(RemoteProtocolError):
            check_version(decode_bytes(_opening.decode, raw))
        raise UsageError(str(error)) from None


def check_version(opening: "_Opening | HeaderLine") -> None:
    """Refuse what was written by another version of the format."""
    if opening.version != VERSION:
        raise OtherVersion(f"it has version {opening.version} of the format, and this Ringfold reads version {VERSION}")


class OtherVersion(UsageError):
    """A log in a version of the format that is not read here."""
