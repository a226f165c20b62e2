"""Every exception, arranged by what the caller does next.

    UsageError           fix the program
      ConfigError        fix a setting
    CollectiveAborted    call again: the buffers are as they were passed in
      PeerLost
      EpochChanged
    DeadlineExceeded     somebody does not take part; it says who
    TooFewPeers          wait for peers
    Evicted              join anew, sync state first
    MasterUnreachable    wait, or exit
    RemoteProtocolError  the other side was dropped; nothing to do
    StateError           the shared state needs a decision
      RevisionViolation  count the revision up by one, and sync again
      HashMismatch       the content was not what it should be; it says whose
      StateLost          load that revision, or agree to a rollback
    TopologyFailed       the ring is as it was; call again

All carry their facts as attributes and survive pickling. Broken invariants assert instead.
"""

from collections.abc import Sequence


class RingfoldError(Exception):
    """The base of everything Ringfold raises."""


class UsageError(RingfoldError):
    """The program asks for something that cannot work: fix the program."""

    def __init__(self, text: str, peers: Sequence[int] = ()) -> None:
        super().__init__(text, tuple(peers))
        self.text, self.peers = text, tuple(peers)

    def __str__(self) -> str:
        return self.text


class ConfigError(UsageError):
    """A setting is wrong or missing; the text names it."""


class CollectiveAborted(RingfoldError):
    """The op was aborted on every survivor; in-place buffers are as they were. Call again."""

    def __init__(self, text: str, epoch: int, peers: Sequence[int] = ()) -> None:
        super().__init__(text, epoch, tuple(peers))
        self.text, self.epoch, self.peers = text, epoch, tuple(peers)

    def __str__(self) -> str:
        return f"{self.text} (epoch {self.epoch}); the buffers are as they were, call again"


class PeerLost(CollectiveAborted):
    """A member left during the op."""


class EpochChanged(CollectiveAborted):
    """The ring was changed during the op, with all members alive."""


class DeadlineExceeded(RingfoldError):
    """A wait ended at its deadline. Says what was waited for, for whom, and for how long."""

    def __init__(self, operation: str, peers: Sequence[int], waited_ms: int, text: str = "") -> None:
        super().__init__(operation, tuple(peers), waited_ms, text)
        self.operation, self.peers, self.waited_ms, self.text = operation, tuple(peers), waited_ms, text

    def __str__(self) -> str:
        if self.text:
            return self.text
        whom = ", ".join(f"peer {peer}" for peer in self.peers) or "an answer"
        return f"{self.operation} waited {self.waited_ms} ms for {whom}"


class TooFewPeers(RingfoldError):
    """There is nobody to reduce with: wait for peers."""

    def __init__(self, world: int, needed: int = 2) -> None:
        super().__init__(world, needed)
        self.world, self.needed = world, needed

    def __str__(self) -> str:
        return f"the group has {self.world} member(s) and needs {self.needed}; wait for peers with update_topology()"


class Evicted(RingfoldError):
    """The run goes on without this peer: join anew, and sync state before the first op."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"evicted from the run: {self.reason}; join anew and sync state before the first op"


class MasterUnreachable(RingfoldError):
    """The master cannot be reached, or its connection was lost: wait or exit."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address, self.reason = address, reason

    def __str__(self) -> str:
        return f"the master at {self.address} is unreachable: {self.reason}"


class RemoteProtocolError(RingfoldError):
    """The other side does not speak this protocol, or lies; it was dropped."""


class StateError(RingfoldError):
    """The shared state needs a decision of the caller."""


class RevisionViolation(StateError):
    """A revision did not go up by exactly one since the last sync: `expected` says which one it had to be."""

    def __init__(self, expected: int, got: int, text: str = "") -> None:
        super().__init__(expected, got, text)
        self.expected, self.got, self.text = expected, got, text

    def __str__(self) -> str:
        return self.text or f"the shared state has revision {self.got}, but revision {self.expected} is next"


class HashMismatch(StateError):
    """Content is not what its hash says; `peers` are those it came from. Empty: it was changed here."""

    def __init__(self, text: str, peers: Sequence[int] = ()) -> None:
        super().__init__(text, tuple(peers))
        self.text, self.peers = text, tuple(peers)

    def __str__(self) -> str:
        return self.text


class StateLost(StateError):
    """Nobody who is left has `revision`. Load exactly that one from a checkpoint, or agree to a rollback."""

    def __init__(self, revision: int, text: str = "") -> None:
        super().__init__(revision, text)
        self.revision, self.text = revision, text

    def __str__(self) -> str:
        return self.text or (
            f"revision {self.revision} of the shared state is lost: all peers that had it are gone. Load exactly this "
            "revision from a checkpoint, or sync with rollback=True to go on from an older one"
        )


class TopologyFailed(RingfoldError):
    """The links could not be measured; the ring is as it was. Call `optimize_topology` again."""

    def __init__(self, text: str, peers: Sequence[int] = ()) -> None:
        super().__init__(text, tuple(peers))
        self.text, self.peers = text, tuple(peers)

    def __str__(self) -> str:
        return self.text
