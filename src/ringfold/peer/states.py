"""Every state machine of a peer as an enumeration of states and a table of transitions. Pure.

A table maps a state and an input to the next state. What is not in the table cannot happen: `next_state` raises
AssertionError, so that the simulation fails loudly. Whatever a remote sends is checked before it becomes an input; no
message can cause an illegal transition.

**The peer** (`machine.py`). A member goes round the circle once per epoch:

    CONNECTING --WELCOMED--> REGISTERED --RECORDED--> ATTACHING --LANES_COMPLETE--> INSTALLED --ALL_ATTACHED--> STEADY
                                                       ^  |  |                          |                         |
                                                       |  |  +--ATTACH_FAILED--+        |                         |
                                                       |  |                    v        v                         |
                                                       |  +----------------> SEALED <---+-------------------------+
                                                       +-----RECORDED----------+         (the master seals the epoch)

`CONNECTING`: no master has welcomed this peer. `REGISTERED`: it waits to be admitted. `ATTACHING`: the master has
recorded an epoch with this peer, and its lanes are being connected. `ATTACH_FAILED`: a lane could not be connected; the
master knows, and seals the epoch. `INSTALLED`: the engine runs the epoch here. `STEADY`: every member is attached.
`SEALED`: the epoch ends, and the next record says how. `ENDED`: this peer is out of the run, and sends nothing.

A lost master changes little: a steady epoch is no longer known to be steady, and everything else stays as it is until a
master has resumed the run. A record may also come without a seal, from a master that resumed the run.

**The control connection** (`control.py`): masters are tried in turn until one is proven.

    IDLE --DIAL--> DIALLING --OPENED--> CHALLENGE --HELLO_SENT--> WELCOME --PROVED--> PROVEN --LOST--> IDLE
      ^               |                     |                        |
      +---------------+------ATTEMPT_FAILED-+------------------------+

**An outgoing connection to another peer** (`lanes.py`, `side_channels.py`): a lane or a bulk session. One that is
established leaves this machine.

    PAUSED --DIAL--> DIALLING --OPENED--> CHALLENGE --HELLO_SENT--> WELCOME
                        |                     |                        |
                        +---------------------+------------------------+--DIAL--> DIALLING (the next address)
                                                                       +--PAUSE-> PAUSED   (all addresses were tried)
                                                                       +--GIVE_UP-> FAILED

**The measurement of a link** (`measure/link_rate.py`): both ends fill the link until both have a rate.

    CONNECTING --OPENED--> FILLING --REPORTED-------> REPORTED    (waits for the other end's rate)
                              +-----RATE_RECEIVED---> PEER_DONE   (the other end has its rate; this one fills no more)
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import TypeVar

S = TypeVar("S", bound=Enum)
I = TypeVar("I", bound=Enum)  # noqa: E741


def next_state(table: Mapping[S, Mapping[I, S]], state: S, given: I) -> S:
    """The state after `given`; AssertionError if the table has no such transition."""
    after = table[state].get(given)
    if after is None:
        raise AssertionError(f"illegal transition: {given} in {state}")
    return after


class PeerState(Enum):
    CONNECTING = auto()
    REGISTERED = auto()
    ATTACHING = auto()
    ATTACH_FAILED = auto()
    INSTALLED = auto()
    STEADY = auto()
    SEALED = auto()
    ENDED = auto()


class PeerInput(Enum):
    WELCOMED = auto()
    RECORDED = auto()
    LANES_COMPLETE = auto()
    ATTACH_FAILED = auto()
    ALL_ATTACHED = auto()
    SEALED = auto()
    MASTER_LOST = auto()
    ENDED = auto()


PEER_TRANSITIONS: Mapping[PeerState, Mapping[PeerInput, PeerState]] = {
    PeerState.CONNECTING: {
        PeerInput.WELCOMED: PeerState.REGISTERED,
        PeerInput.ENDED: PeerState.ENDED,
    },
    PeerState.REGISTERED: {
        PeerInput.RECORDED: PeerState.ATTACHING,
        PeerInput.MASTER_LOST: PeerState.REGISTERED,
        PeerInput.ENDED: PeerState.ENDED,
    },
    PeerState.ATTACHING: {
        PeerInput.LANES_COMPLETE: PeerState.INSTALLED,
        PeerInput.ATTACH_FAILED: PeerState.ATTACH_FAILED,
        PeerInput.SEALED: PeerState.SEALED,
        PeerInput.RECORDED: PeerState.ATTACHING,
        PeerInput.MASTER_LOST: PeerState.ATTACHING,
        PeerInput.ENDED: PeerState.ENDED,
    },
    PeerState.ATTACH_FAILED: {
        PeerInput.SEALED: PeerState.SEALED,
        PeerInput.RECORDED: PeerState.ATTACHING,
        PeerInput.MASTER_LOST: PeerState.ATTACH_FAILED,
        PeerInput.ENDED: PeerState.ENDED,
    },
    PeerState.INSTALLED: {
        PeerInput.ALL_ATTACHED: PeerState.STEADY,
        PeerInput.SEALED: PeerState.SEALED,
        PeerInput.RECORDED: PeerState.ATTACHING,
        PeerInput.MASTER_LOST: PeerState.INSTALLED,
        PeerInput.ENDED: PeerState.ENDED,
    },
    PeerState.STEADY: {
        PeerInput.ALL_ATTACHED: PeerState.STEADY,
        PeerInput.SEALED: PeerState.SEALED,
        PeerInput.RECORDED: PeerState.ATTACHING,
        PeerInput.MASTER_LOST: PeerState.INSTALLED,
        PeerInput.ENDED: PeerState.ENDED,
    },
    PeerState.SEALED: {
        PeerInput.SEALED: PeerState.SEALED,
        PeerInput.RECORDED: PeerState.ATTACHING,
        PeerInput.MASTER_LOST: PeerState.SEALED,
        PeerInput.ENDED: PeerState.ENDED,
    },
    PeerState.ENDED: {},
}


class ControlState(Enum):
    IDLE = auto()
    DIALLING = auto()
    CHALLENGE = auto()
    WELCOME = auto()
    PROVEN = auto()


class ControlInput(Enum):
    DIAL = auto()
    OPENED = auto()
    HELLO_SENT = auto()
    PROVED = auto()
    ATTEMPT_FAILED = auto()
    LOST = auto()


CONTROL_TRANSITIONS: Mapping[ControlState, Mapping[ControlInput, ControlState]] = {
    ControlState.IDLE: {ControlInput.DIAL: ControlState.DIALLING},
    ControlState.DIALLING: {
        ControlInput.OPENED: ControlState.CHALLENGE,
        ControlInput.ATTEMPT_FAILED: ControlState.IDLE,
    },
    ControlState.CHALLENGE: {
        ControlInput.HELLO_SENT: ControlState.WELCOME,
        ControlInput.ATTEMPT_FAILED: ControlState.IDLE,
    },
    ControlState.WELCOME: {
        ControlInput.PROVED: ControlState.PROVEN,
        ControlInput.ATTEMPT_FAILED: ControlState.IDLE,
    },
    ControlState.PROVEN: {ControlInput.LOST: ControlState.IDLE},
}


class DialState(Enum):
    PAUSED = auto()
    DIALLING = auto()
    CHALLENGE = auto()
    WELCOME = auto()
    FAILED = auto()


class DialInput(Enum):
    DIAL = auto()
    OPENED = auto()
    HELLO_SENT = auto()
    PAUSE = auto()
    GIVE_UP = auto()


_ATTEMPT_FAILED: Mapping[DialInput, DialState] = {
    DialInput.DIAL: DialState.DIALLING,
    DialInput.PAUSE: DialState.PAUSED,
    DialInput.GIVE_UP: DialState.FAILED,
}
DIAL_TRANSITIONS: Mapping[DialState, Mapping[DialInput, DialState]] = {
    DialState.PAUSED: {DialInput.DIAL: DialState.DIALLING, DialInput.GIVE_UP: DialState.FAILED},
    DialState.DIALLING: {DialInput.OPENED: DialState.CHALLENGE, **_ATTEMPT_FAILED},
    DialState.CHALLENGE: {DialInput.HELLO_SENT: DialState.WELCOME, **_ATTEMPT_FAILED},
    DialState.WELCOME: _ATTEMPT_FAILED,
    DialState.FAILED: {},
}


class MeasureState(Enum):
    CONNECTING = auto()
    FILLING = auto()
    PEER_DONE = auto()
    REPORTED = auto()
    DONE = auto()


class MeasureInput(Enum):
    OPENED = auto()
    REPORTED = auto()
    RATE_RECEIVED = auto()


MEASURE_TRANSITIONS: Mapping[MeasureState, Mapping[MeasureInput, MeasureState]] = {
    MeasureState.CONNECTING: {MeasureInput.OPENED: MeasureState.FILLING},
    MeasureState.FILLING: {
        MeasureInput.REPORTED: MeasureState.REPORTED,
        MeasureInput.RATE_RECEIVED: MeasureState.PEER_DONE,
    },
    MeasureState.PEER_DONE: {
        MeasureInput.REPORTED: MeasureState.DONE,
        MeasureInput.RATE_RECEIVED: MeasureState.PEER_DONE,
    },
    MeasureState.REPORTED: {MeasureInput.RATE_RECEIVED: MeasureState.DONE},
    MeasureState.DONE: {},
}
