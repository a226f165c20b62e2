"""Effects of the two round machines: what their shells must do."""

from collections.abc import Sequence

from msgspec import Struct

from ringfold.probe.rounds.events import FromRoundMaster, ToRoundMaster
from ringfold.wire.probing import Cadence, EdgeFit, Neighbour, NodeClock, NodeId, ProbeAnswer, RoundId, RoundSummary


class LogNote(Struct, frozen=True):
    """Write a line to the log."""

    text: str


# Of the master


class SendToNode(Struct, frozen=True):
    """Send a message to a node."""

    node: NodeId
    message: FromRoundMaster


class SendProbeResponse(Struct, frozen=True):
    """Respond to a command."""

    requester: int
    response: ProbeAnswer


class PublishSummary(Struct, frozen=True):
    """A round has its result: export it, count it, show it."""

    summary: RoundSummary


MasterEffect = SendToNode | SendProbeResponse | PublishSummary | LogNote


# Of a node


class SendToMaster(Struct, frozen=True):
    """Send a message to the master."""

    message: ToRoundMaster


class ConfigureProber(Struct, frozen=True):
    """Replace the prober's edges."""

    key: bytes
    out: Sequence[Neighbour]
    into: Sequence[Neighbour]


class ResumeProbing(Struct, frozen=True):
    """Send probes in this cadence. Their exchanges belong to window number `window`, until RotateWindow closes it."""

    cadence: Cadence
    window: int


class PauseProbing(Struct, frozen=True):
    """Send no probes; continue to respond to them."""


class RotateWindow(Struct, frozen=True):
    """Close window number `window` now, fit its edges, and step the machine with WindowFitted.

    Unless PauseProbing came just before, probing continues in the same cadence, in window number `window` + 1.
    """

    window: int


class AdoptClock(Struct, frozen=True):
    """Use this clock: it is the result for this node of the round before the present one."""

    clock: NodeClock


class ExportWindow(Struct, frozen=True):
    """Write a window to the log. `is_alone`: no master ended it."""

    round: RoundId
    label: str
    window: int
    begin_ns: int
    end_ns: int
    edges: Sequence[EdgeFit]
    is_alone: bool


NodeEffect = (
    SendToMaster | ConfigureProber | ResumeProbing | PauseProbing | RotateWindow | AdoptClock | ExportWindow | LogNote
)
