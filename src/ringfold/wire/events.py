"""Events: what a process records about itself, and the lines in which it does.

An event is a notice with its time. Some notices are only for records and never logged; those are here, the others in
`notices.py`. A line is one JSON object: the fields of `Stamp`, then those of the notice, whose kind is in `event`. The
same lines are in the files of a run directory, in the master's memory for live views, and in flight records.

A file begins with a `RecordBegun`, and has a `ClockSampled` every few seconds: with these a reader maps the times of
all files, which are CLOCK_MONOTONIC of their hosts, to one timeline.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Struct, field

from ringfold.errors import RemoteProtocolError
from ringfold.wire import notices
from ringfold.wire.base import Epoch, GroupId, PeerId
from ringfold.wire.decoding import decode
from ringfold.wire.notices import Level, Notice
from ringfold.wire.status import Status

RECORD_FORMAT = 1

Role = Literal["master", "peer", "agent"]
OpOutcome = Literal["committed", "aborted", "too_few", "failed", "cancelled"]
OP_OUTCOMES: tuple[OpOutcome, ...] = ("committed", "aborted", "too_few", "failed", "cancelled")
"""In the order of the engine's numbers."""
OpName = Literal["all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"]
OP_NAMES: tuple[OpName, ...] = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier")


Time = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Stamp(Struct, frozen=True, omit_defaults=True, rename={"peer": "by"}):
    """When and by which process an event was recorded.

    `at` is CLOCK_MONOTONIC of its host in nanoseconds. `wall` is Unix time in nanoseconds, by the host's own clock (0:
    not recorded, as for ops and steps). `peer`, which is `by` in a line, is 0 for the master. In a live view, an event
    of a peer has the peer's `at` and `wall`.
    """

    at: Time
    wall: Time = 0
    peer: PeerId = 0


class RecordBegun(Notice, frozen=True, tag="record_begun"):
    """The first line of a file: whose events these are.

    `peer` is 0 until the peer has joined; `PeerJoined` has it then. `capacity_bytes` limits the size of a record: if it
    is exceeded, the oldest part is deleted.
    """

    format: int
    role: Role
    run: str
    name: str
    host: str
    boot_id: str
    """Processes with the same one share CLOCK_MONOTONIC."""
    pid: int
    version: str
    part: int = 0
    """Parts of one record follow each other; the oldest may be deleted."""
    capacity_bytes: int = 0

    @property
    def level(self) -> Level:
        return "debug"

    def __str__(self) -> str:
        return f"the record of {self.role} {self.name} (process {self.pid} on {self.host}) begins"


class ClockSampled(Notice, frozen=True, tag="clock_sampled"):
    """What this process's clocks read at the same instant, `Stamp.at` being CLOCK_MONOTONIC.

    `raw_ns` is CLOCK_MONOTONIC_RAW, `wall_ns` Unix time. `global_ns` is the run's global clock, at most `error_ns` off;
    None where this process has no global clock.
    """

    raw_ns: int
    wall_ns: int
    global_ns: int | None = None
    error_ns: int | None = None

    @property
    def level(self) -> Level:
        return "debug"

    def __str__(self) -> str:
        shared = "" if self.global_ns is None else f", global {self.global_ns} +- {self.error_ns} ns"
        return f"clocks: raw {self.raw_ns}, wall {self.wall_ns}{shared}"


class PeerJoined(Notice, frozen=True, tag="peer_joined"):
    """This peer has become a member of its group."""

    peer: PeerId
    group: GroupId
    epoch: Epoch

    def __str__(self) -> str:
        return f"joined group {self.group} as peer {self.peer}, in epoch {self.epoch}"


class EpochRuns(Notice, frozen=True, tag="epoch_runs"):
    """An epoch begins to run at this peer, before any op can end in it."""

    group: GroupId
    epoch: Epoch
    fence: int
    ring: list[PeerId]

    @property
    def level(self) -> Level:
        return "debug"

    def __str__(self) -> str:
        return f"group {self.group}: epoch {self.epoch} (fence {self.fence}) runs here, with ring {self.ring}"


class OpEnded(Notice, frozen=True, tag="op_ended", omit_defaults=True):
    """An op of this peer has ended, `Stamp.at` being the end. The other times are CLOCK_MONOTONIC; 0: there is none.

    An op that was aborted and started again is one event, with the times of its last attempt: `called_ns` is the call
    of the program, `started_ns` the start in the epoch. `out_first_ns` and `out_last_ns` are when the first and the
    last payload for the next peer were handed to the transport, `in_first_ns` and `in_last_ns` when the first and the
    last payload of another peer came, and `local_ns` is when this peer's part was finished; from then on it waits for
    evidence. `blocked_ns` is for how long payload for the next peer waited because the transport took no more.
    `last_peer` is the peer whose Done completed the evidence (0: this peer's own, or it is not known).

    `arriving_ns` is for how long segments were arriving, each from its first byte to its last, from that peer with
    which it took longest, `arriving_from`: a slow link takes long for its bytes, whatever they wait for before.
    """

    op: OpName
    tag: int
    sequence: int
    epoch: Epoch
    outcome: OpOutcome
    bytes: int
    called_ns: int
    started_ns: int
    step: int = -1
    """The step of `run.steps` that the op belongs to; -1 outside of one."""
    attempts: int = 1
    out_first_ns: int = 0
    out_last_ns: int = 0
    in_first_ns: int = 0
    in_last_ns: int = 0
    local_ns: int = 0
    blocked_ns: int = 0
    arriving_ns: int = 0
    arriving_from: PeerId = 0
    last_peer: PeerId = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def level(self) -> Level:
        return "debug"

    def __str__(self) -> str:
        times = f"{self.attempts} attempts" if self.attempts > 1 else "1 attempt"
        return f"{self.op} of {self.bytes} bytes (tag {self.tag}, sequence {self.sequence}): {self.outcome}, {times}"


class OpsLeftOut(Notice, frozen=True, tag="ops_left_out"):
    """Ops or steps that ended since the last such event, and are not recorded: there were too many.

    Those whose number is a multiple of `every` are recorded, which are the same on all peers, and so are slow ops and
    those that did not commit.
    """

    ops: int
    steps: int
    every: int

    @property
    def level(self) -> Level:
        return "debug"

    def __str__(self) -> str:
        return f"{self.ops} ops and {self.steps} steps are not recorded: one in {self.every} is"


class StepEnded(Notice, frozen=True, tag="step_ended", omit_defaults=True):
    """A step of `run.steps` has ended, `Stamp.at` being the end. Times are CLOCK_MONOTONIC.

    The program had the step from `began_ns` on, and first waited for an op of it at `waited_ns` (0: for none). From the
    one to the other the process used `cpu_ns` of CPU time, and for `queued_ns` the thread of the loop was ready to run
    and had no core. `sync_ns` is what the loop needed before the step for admissions and the sync. `logged` is what the
    program passed to `step.log`; None is a number that is not finite.
    """

    step: int
    epoch: Epoch
    size: int
    began_ns: int
    waited_ns: int = 0
    cpu_ns: int = 0
    queued_ns: int = 0
    sync_ns: int = 0
    logged: dict[str, float | None] = field(default_factory=dict)

    @property
    def level(self) -> Level:
        return "debug"

    def __str__(self) -> str:
        logged = f", {values_text(self.logged)}" if self.logged else ""
        return f"step {self.step} in epoch {self.epoch} with {self.size} peers{logged}"


def values_text(logged: Mapping[str, float | None]) -> str:
    """Logged values as text."""
    return ", ".join(f"{name} {'not finite' if value is None else f'{value:g}'}" for name, value in logged.items())


class StateSynced(Notice, frozen=True, tag="state_synced"):
    """A sync of the shared state has ended at this peer: what it received, and how long the call took."""

    revision: int
    received_bytes: int
    took_ms: int

    @property
    def level(self) -> Level:
        return "info" if self.received_bytes else "debug"

    def __str__(self) -> str:
        return f"synced revision {self.revision} in {self.took_ms} ms, {self.received_bytes} bytes received"


class CheckpointSaved(Notice, frozen=True, tag="checkpoint_saved"):
    """This peer has saved a checkpoint."""

    revision: int
    took_ms: int

    def __str__(self) -> str:
        return f"checkpoint of revision {self.revision} saved in {self.took_ms} ms"


class PeerEvicted(Notice, frozen=True, tag="peer_evicted"):
    """This peer was evicted."""

    reason: str

    @property
    def level(self) -> Level:
        return "warning"

    def __str__(self) -> str:
        return f"evicted: {self.reason}"


class PathSharesChanged(Notice, frozen=True, tag="path_shares_changed"):
    """The paths to a neighbour carry other shares of the bytes than before, as measured: fractions of 1, by path."""

    peer: PeerId
    shares: list[float]

    def __str__(self) -> str:
        return f"paths to peer {self.peer} carry {', '.join(f'{share:.0%}' for share in self.shares)}"


class LeaderChanged(Notice, frozen=True, tag="leader_changed"):
    """This master leads from now on, or no longer does. `fence` is that of its lead."""

    leader: str
    leads: bool
    fence: int
    reason: str = ""

    @property
    def level(self) -> Level:
        return "info" if self.leads else "warning"

    def __str__(self) -> str:
        verb = "leads" if self.leads else "no longer leads"
        return f"{self.leader} {verb} (fence {self.fence}){f': {self.reason}' if self.reason else ''}"


class StatusSampled(Notice, frozen=True, tag="status_sampled"):
    """The status of the run, as `ringfold status` shows it: recorded every second, with links every 15 seconds."""

    status: Status

    @property
    def level(self) -> Level:
        return "debug"

    def __str__(self) -> str:
        return f"status: {self.status.world.peers} peers"


class StacksDumped(Notice, frozen=True, tag="stacks_dumped"):
    """What each thread of the process was doing when a flight record was written, by the thread's name."""

    stacks: dict[str, str]

    @property
    def level(self) -> Level:
        return "debug"

    def __str__(self) -> str:
        return f"the stacks of {len(self.stacks)} threads"


class ValuesLogged(Notice, frozen=True, tag="values_logged"):
    """What the program passed to `run.log` outside of a step."""

    logged: dict[str, float | None]

    @property
    def level(self) -> Level:
        return "debug"

    def __str__(self) -> str:
        return values_text(self.logged)


class FlightDumped(Notice, frozen=True, tag="flight_dumped"):
    """The last line of a flight record: why it was written, and how many older events were lost."""

    reason: str
    lost: int

    def __str__(self) -> str:
        return f"flight record because {self.reason}; {self.lost} older events were overwritten"


EventKind = (
    notices.LaneLost
    | notices.ConnectionDropped
    | notices.ConnectionAbandoned
    | notices.PeerRegistered
    | notices.PeerSuspected
    | notices.PeerGone
    | notices.PeersStalled
    | notices.MasterLost
    | notices.MasterAway
    | notices.AdmissionDelayed
    | notices.PeerReturned
    | notices.RunEnded
    | notices.RunBegun
    | notices.RunForgotten
    | notices.EpochSealing
    | notices.EpochRecorded
    | notices.EpochInstalled
    | notices.SyncBegun
    | notices.SyncEnded
    | notices.StateRolledBack
    | notices.ResumeDelayed
    | notices.PeerDiverged
    | notices.LinksMeasured
    | notices.RingChosen
    | notices.EdgeBad
    | notices.CallRefused
    | notices.RoundDone
    | notices.EdgeFitted
    | notices.ProbeNote
    | notices.ProbingBroke
    | RecordBegun
    | ClockSampled
    | PeerJoined
    | EpochRuns
    | OpEnded
    | OpsLeftOut
    | StepEnded
    | StateSynced
    | CheckpointSaved
    | PeerEvicted
    | PathSharesChanged
    | LeaderChanged
    | StatusSampled
    | StacksDumped
    | ValuesLogged
    | FlightDumped
)
"""Every notice. A test compares this with the classes of both files."""

KINDS: tuple[str, ...] = tuple(sorted(kind.__struct_config__.tag for kind in get_args(EventKind)))
"""The names of all kinds, as in a line."""

_encoder = msgspec.json.Encoder()
_stamps = msgspec.json.Decoder(Stamp)
_events: msgspec.json.Decoder[EventKind] = msgspec.json.Decoder(EventKind)


class Event(Struct, frozen=True):
    """One line of a record."""

    stamp: Stamp
    notice: EventKind


def kind_of(notice: Notice) -> str:
    """The name of its kind, as in a line."""
    tag = notice.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def encode_event(stamp: Stamp, notice: Notice) -> bytes:
    """The line of an event, without the newline."""
    try:
        return _encoder.encode(stamp)[:-1] + b"," + _encoder.encode(notice)[1:]
    except UnicodeEncodeError:  # a text with a file name that is not UTF-8
        return _encoder.encode(stamp)[:-1] + b"," + _encoder.encode(_readable(msgspec.to_builtins(notice)))[1:]


def _readable(value: object) -> object:
    """The same, with `?` in place of what UTF-8 cannot encode."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode("utf-8")
        case dict():
            return {_readable(name): _readable(each) for name, each in value.items()}
        case list():
            return [_readable(each) for each in value]
    return value


def decode_event(line: bytes) -> Event | None:
    """The event of a line; None if it is not one: the line was cut off, or a newer version wrote it."""
    try:
        return Event(decode(_stamps.decode, line), decode(_events.decode, line))
    except RemoteProtocolError:
        return None
