"""What the master machine is told, and what it wants done. The shell around it speaks nothing else.

A connection is known by a number that the shell chooses and never uses again. After a `Close` effect the machine has
forgotten the connection; whatever the shell still reports about it is ignored.
"""

from typing import TYPE_CHECKING

from msgspec import Struct

from ringfold.config import DEFAULT_RUN
from ringfold.topology.moonshot import MoonshotRequest
from ringfold.topology.solve import Solution
from ringfold.wire.frames import Done, Evidence, Heartbeat
from ringfold.wire.messages import FromMaster, GroupId, ToMaster
from ringfold.wire.notices import Notice

if TYPE_CHECKING:
    from ringfold.master.journal import Journal

Ns = int
"""Integer nanoseconds."""
Conn = int
"""A control connection."""


class Opened(Struct, frozen=True):
    """Somebody connected. `nonce` is fresh randomness for its challenge.

    With a `token` the challenge has been sent already, and claims are proven with that one.
    """

    conn: Conn
    remote: str
    nonce: bytes
    token: bytes | None = None


class Received(Struct, frozen=True):
    """A message came, in so many bytes."""

    conn: Conn
    message: ToMaster
    size: int = 0


class Beat(Struct, frozen=True):
    conn: Conn
    heartbeat: Heartbeat


class Piece(Struct, frozen=True):
    """Bytes came, but no frame is whole yet: the connection is busy with a large one."""

    conn: Conn


class DoneSeen(Struct, frozen=True, gc=False):
    conn: Conn
    done: Done


class Malformed(Struct, frozen=True):
    """The connection sent what is not of this protocol."""

    conn: Conn
    reason: str


class Closed(Struct, frozen=True):
    """The connection is gone; the shell did not close it on the machine's behalf."""

    conn: Conn
    reason: str


class Tick(Struct, frozen=True):
    """Comes every 50 ms. All deadlines are judged here."""


class MoonshotFound(Struct, frozen=True):
    """The answer to `StartMoonshot` of a run, where one came."""

    group: GroupId
    solution: Solution
    run: str = DEFAULT_RUN


class Ended(Struct, frozen=True):
    """Somebody ends the run on purpose: its journal is closed, and its peers are told. No event comes after this."""

    reason: str


Event = Ended | Opened | Received | Beat | Piece | DoneSeen | Malformed | Closed | Tick | MoonshotFound


class Send(Struct, frozen=True):
    conn: Conn
    message: FromMaster


class SendBeat(Struct, frozen=True):
    """The master's heartbeat; `echo` is the number of the peer's last one."""

    conn: Conn
    number: int
    echo: int


class SendEvidence(Struct, frozen=True, gc=False):
    """The same evidence to every member: the shell encodes it once."""

    conns: tuple[Conn, ...]
    evidence: Evidence


class Close(Struct, frozen=True):
    """Send what is queued, then close."""

    conn: Conn
    reason: str


class Trust(Struct, frozen=True):
    """The other side has proven the token: frames up to the full size may be taken from it."""

    conn: Conn


class Tell(Struct, frozen=True):
    """For observers."""

    notice: Notice


class Persist(Struct, frozen=True):
    """Write the journal. What comes after this effect, in this step and in later ones, waits until it is written.

    A journal that cannot be written is the end of this master's decisions.
    """

    journal: "Journal"


class KeepLinks(Struct, frozen=True):
    """Write down what is known about links, some time. Nothing waits for it, and it may fail."""

    raw: bytes


class StartMoonshot(Struct, frozen=True):
    """Search long for a better ring, outside of this process and with what time it leaves. One search at a time: while
    one is going on, another is not begun."""

    group: GroupId
    question: MoonshotRequest


class Broken(Struct, frozen=True):
    """A run's machine broke. What of it still waits to be carried out is void; it begins again after `pause_ns`."""

    error: Exception
    event: str
    pause_ns: Ns | None


Effect = Send | SendBeat | SendEvidence | Close | Trust | Tell | StartMoonshot | Persist | KeepLinks | Broken
