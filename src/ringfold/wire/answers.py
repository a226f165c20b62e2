"""The answers to calls: what all who waited in one are told, and why something was refused.

An answer that several peers get alike names its `voters`, each with its ballot. When the master dies while it answers,
some have heard and some have not: those who have show the answer to the next master, which hands it on to exactly the
voters that lack it. An answer that concerns one peer alone (its time was over) names nobody.
"""

from msgspec import Struct, field

from ringfold.wire.base import Message, PeerId, ReasonKind
from ringfold.wire.lineage import Branch
from ringfold.wire.status import World


class Reason(Struct, frozen=True):
    """Why something was aborted or refused: which error to raise, which peers it names, and a sentence for people."""

    kind: ReasonKind
    text: str
    peers: list[PeerId] = []
    waited_ms: int = 0
    numbers: list[int] = []
    """What the error's other attributes are made of: revisions, mostly."""
    checkpoint: Branch | None = None
    """Of a state that is lost: the checkpoint to go on from. The peer that has it loads it, and all sync again."""


class SyncVoters(Struct, frozen=True):
    """Who was in a sync when it was decided, and with which call. Whoever is out of it has another call, or none."""

    sync: int
    ballots: dict[PeerId, int]


class Failure(Struct, frozen=True):
    """Why a call failed at these voters."""

    reason: Reason
    voters: dict[PeerId, int]


class CallDone(Message, frozen=True, tag="call_done"):
    """The run-wide call is complete; `pending` answers a "pending" vote. `registrations` is their count by then."""

    ballot: int
    pending: bool
    world: World
    registrations: int = 0
    voters: dict[PeerId, int] = field(default_factory=dict)


class CallFailed(Message, frozen=True, tag="call_failed"):
    """The run-wide call cannot complete."""

    ballot: int
    reason: Reason
    voters: dict[PeerId, int] = field(default_factory=dict)
    of_sync: SyncVoters | None = None
    """Where the peer is out of a sync in which others go on."""
    rest: list[Failure] = field(default_factory=list)
    """The same call failed at these voters for other reasons."""


Answer = CallDone | CallFailed
