"""The effects of a master's machines: what the shell must do, in order. The events are in `events.py`."""

from typing import TYPE_CHECKING

from msgspec import Struct

from ringfold.master.events import Conn, Ns
from ringfold.topology.moonshot import MoonshotRequest
from ringfold.wire.frames import Evidence
from ringfold.wire.messages import FromMaster, GroupId, PeerId
from ringfold.wire.notices import Notice

if TYPE_CHECKING:
    from ringfold.master.journal import Journal


class SendMessage(Struct, frozen=True):
    conn: Conn
    message: FromMaster


class SendHeartbeat(Struct, frozen=True):
    """The master's heartbeat; `echo` is the number of the peer's last one."""

    conn: Conn
    number: int
    echo: int


class SendEvidence(Struct, frozen=True, gc=False):
    """The same evidence to every member: the shell encodes it once."""

    conns: tuple[Conn, ...]
    evidence: Evidence


class CloseConnection(Struct, frozen=True):
    """Send what is queued, then close."""

    conn: Conn
    reason: str


class RaiseFrameLimit(Struct, frozen=True):
    """The client has proven the token: accept frames up to the full size from it."""

    conn: Conn


class RecordEvents(Struct, frozen=True):
    """Record events of a peer: lines of `wire/events.py`, as the peer sent them. They are not checked yet."""

    peer: PeerId
    lines: list[bytes]


class SendEvents(Struct, frozen=True):
    """Send the recorded events from number `after` on to a client."""

    conn: Conn
    after: int


class Notify(Struct, frozen=True):
    """Something for observers: logs, metrics and traces."""

    notice: Notice


class WriteJournal(Struct, frozen=True):
    """Write the journal. All effects after this one, in this step and in later ones, wait until it is written.

    If the journal cannot be written, this master stops to decide.
    """

    journal: "Journal"


class WriteLinks(Struct, frozen=True):
    """Write the known link figures, at some time. Nothing waits for it, and it may fail."""

    raw: bytes


class StartMoonshot(Struct, frozen=True):
    """Search for a better ring in a separate process of low priority. There is one search at a time."""

    group: GroupId
    question: MoonshotRequest


class ReportBrokenRun(Struct, frozen=True):
    """A run's machine raised an exception. Its waiting effects are discarded; the run restarts after `pause_ns`."""

    error: Exception
    event: str
    pause_ns: Ns | None


Effect = (
    SendMessage
    | SendHeartbeat
    | SendEvidence
    | CloseConnection
    | RaiseFrameLimit
    | Notify
    | RecordEvents
    | SendEvents
    | StartMoonshot
    | WriteJournal
    | WriteLinks
    | ReportBrokenRun
)
