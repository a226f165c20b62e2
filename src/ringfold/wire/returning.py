"""Coming back: what a peer and a master say to each other when the master that the peer knew is gone.

    peer                                             a master with a higher fence
      |  <------------------------ Challenge(nonce)    |
      |  Resume(who, what it knows, proofs) -------->  |     a member of the journalled epoch: it was away
      |  <------------------- Resumed(fence, proof)    |
      |  Returned(answers, ballot) ----------------->  |     now it is back
      |  <----- Record of its newest epoch, if it has only an older one; then Seal of that epoch

A peer that is a member nowhere yet is registered anew (`Welcome`); one that the run has gone on without is `Evicted`.
"""

from msgspec import field

from ringfold.wire.answers import Answer, SyncVoters
from ringfold.wire.base import Epoch, GroupId, Liveness, Message, PeerId


class Resume(Message, frozen=True, tag="resume"):
    """A peer comes back to the run. `fence` and `epoch` are the newest that it knows, 0 where it knows none.

    The rest is as in `Hello`. `proof` is about the token, `member_proof` about the secret that `Welcome` gave it.
    """

    version: int
    peer: PeerId
    fence: int
    epoch: Epoch
    group: GroupId
    host: str
    name: str
    addresses: list[str]
    port: int
    nonce: bytes
    proof: bytes
    member_proof: bytes
    probes: bool = False
    paths: int = 1
    run: str = ""


class Resumed(Message, frozen=True, tag="resumed"):
    """The peer is known here. The master proves the token and the member's secret, both bound to its fence."""

    fence: int
    proof: bytes
    liveness: Liveness


class Returned(Message, frozen=True, tag="returned"):
    """What the peer brings along, so that nothing is decided twice.

    `answers` are the last ones that it shares with others; `ballot` is the call that its program waits in (0: none).
    `installed` says whether it heard that every member of its epoch is attached, `last_sync` who was in the last sync
    that it heard of, unless it heard of its end. `redoes`: that sync was interrupted by an earlier change of masters,
    and what the program waits in, or is about to call, is the same sync anew.
    """

    answers: list[Answer] = field(default_factory=list)
    ballot: int = 0
    installed: bool = False
    last_sync: SyncVoters | None = None
    redoes: bool = False
