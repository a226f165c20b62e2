"""Every exception, ordered by what the caller does next.

    UsageError           fix the program
      CallMismatch       this peer called something else than the others, which go on without it
      ConfigError        fix a setting
        MissingPackage   install the package that it names
    CollectiveAborted    call again: the buffers are as they were passed in
      PeerLost
      EpochChanged
    DeadlineExceeded     a peer does not take part; it names the peer
    TooFewPeers          wait for peers
    Evicted              join again, sync state first
    Superseded           a newer process of this rank took over: exit
    MasterUnreachable    wait, or exit
    AgentUnreachable     start the host's agent; runs go on without it
    RemoteProtocolError  the remote side was disconnected; nothing to do
    StateError           the shared state needs a decision
      RevisionViolation  count the revision up by one, and sync again
      HashMismatch       content does not match its hash; it names the peers
      StateDiverged      find out why this peer computed something else; its state is repaired
      StateLost          start a peer that has a checkpoint, or agree to a rollback
    TopologyFailed       the ring is as it was; call again
    ClockNotReady        turn probing on, or wait for its first round
    StoreError           the store cannot be used for this
      StoreUnreachable   nothing was changed; wait, and call again
      StoreUnknown       it was changed or not; read before you go on
      StoreWentBack      an older state of the store: do not go on with it
        StoreReset
      LeaseLost          another process may hold it by now; stop what it protected

All have their facts as attributes and can be pickled. A broken invariant raises AssertionError instead.
"""

from collections.abc import Sequence


class RingfoldError(Exception):
    """The base of everything Ringfold raises."""


class UsageError(RingfoldError):
    """The program calls something that cannot work: fix the program."""

    def __init__(self, text: str, peers: Sequence[int] = ()) -> None:
        super().__init__(text, tuple(peers))
        self.text, self.peers = text, tuple(peers)

    def __str__(self) -> str:
        return self.text


class CallMismatch(UsageError):
    """This peer called something else than the others, and was evicted: they go on. The text prints both calls."""


class ConfigError(UsageError):
    """A setting is wrong or missing; the text names it."""


class MissingPackage(ConfigError):
    """An optional package is not installed; the text has the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        UsageError.__init__(self, f"{purpose} needs the package {package}: pip install 'ringfold[{extra}]'")
        self.args = (package, extra, purpose)
        self.package, self.extra, self.purpose = package, extra, purpose


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
    """A wait ended at its deadline. It has the operation, the peers that were waited for, and the time."""

    def __init__(self, operation: str, peers: Sequence[int], waited_ms: int, text: str = "") -> None:
        super().__init__(operation, tuple(peers), waited_ms, text)
        self.operation, self.peers, self.waited_ms, self.text = operation, tuple(peers), waited_ms, text

    def __str__(self) -> str:
        if self.text:
            return self.text
        missing = ", ".join(f"peer {peer}" for peer in self.peers) or "an answer"
        return f"{self.operation} waited {self.waited_ms} ms for {missing}"


class TooFewPeers(RingfoldError):
    """There is no other peer to reduce with: wait for peers."""

    def __init__(self, world: int, needed: int = 2) -> None:
        super().__init__(world, needed)
        self.world, self.needed = world, needed

    def __str__(self) -> str:
        return f"the group has {self.world} member(s) and needs {self.needed}; wait for peers with update_topology()"


class Evicted(RingfoldError):
    """The run goes on without this peer: join again, and sync state before the first op. `who` is this peer.

    `on_request`: it was evicted by a command (`ringfold evict`), and `steps` does not join again by itself.
    """

    def __init__(self, reason: str, who: str = "", on_request: bool = False) -> None:
        super().__init__(reason, who, on_request)
        self.reason, self.who, self.on_request = reason, who, on_request

    def __str__(self) -> str:
        who = self.who or "this peer"
        return f"{who} was evicted from the run: {self.reason}; join again and sync state before the first op"


class Superseded(RingfoldError):
    """A newer process has replaced this one as its rank: exit."""

    def __init__(self, rank: int, incarnation: str, successor: str) -> None:
        super().__init__(rank, incarnation, successor)
        self.rank, self.incarnation, self.successor = rank, incarnation, successor

    def __str__(self) -> str:
        return (
            f"another process registered as rank {self.rank} after this one (incarnation {self.successor[:8]}, here "
            f"{self.incarnation[:8]}): it goes on, and this one has to exit"
        )


class MasterUnreachable(RingfoldError):
    """The master cannot be reached, or its connection was lost: wait or exit."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address, self.reason = address, reason

    def __str__(self) -> str:
        return f"the master at {self.address} is unreachable: {self.reason}"


class AgentUnreachable(RingfoldError):
    """No transport agent answers on this host: start it with `ringfold agent`. Runs go on without it."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where, self.reason = where, reason

    def __str__(self) -> str:
        return f"the agent at {self.where} is unreachable: {self.reason}"


class RemoteProtocolError(RingfoldError):
    """The remote side violated the protocol, and was disconnected."""


class StateError(RingfoldError):
    """The shared state needs a decision of the caller."""


class RevisionViolation(StateError):
    """A revision did not go up by exactly one since the last sync; it had to be `expected`."""

    def __init__(self, expected: int, got: int, text: str = "") -> None:
        super().__init__(expected, got, text)
        self.expected, self.got, self.text = expected, got, text

    def __str__(self) -> str:
        return self.text or f"the shared state has revision {self.got}, but revision {self.expected} is next"


class HashMismatch(StateError):
    """Content does not match its hash. `peers` are those that sent it; empty: it was changed here."""

    def __init__(self, text: str, peers: Sequence[int] = ()) -> None:
        super().__init__(text, tuple(peers))
        self.text, self.peers = text, tuple(peers)

    def __str__(self) -> str:
        return self.text


class StateDiverged(StateError):
    """This peer's content differed from that of the others at `revision`. They last agreed at `since`.

    `keys` are the names of arrays that differed (the first few of `key_count`), and `received_bytes` were fetched to
    repair them. What may differ between peers belongs in `MayDiffer`.
    """

    def __init__(
        self,
        peer: int,
        name: str,
        revision: int,
        since: int,
        keys: Sequence[str],
        key_count: int,
        received_bytes: int,
    ) -> None:
        super().__init__(peer, name, revision, since, tuple(keys), key_count, received_bytes)
        self.peer, self.name, self.revision, self.since = peer, name, revision, since
        self.keys, self.key_count, self.received_bytes = tuple(keys), key_count, received_bytes

    def __str__(self) -> str:
        named = ", ".join(repr(key) for key in self.keys)
        more = f" and {self.key_count - len(self.keys)} more" if self.key_count > len(self.keys) else ""
        return (
            f"peer {self.peer} ({self.name}) had diverged from the run at revision {self.revision}: {named}{more} held "
            f"other bits than the content that won, and {self.received_bytes} bytes were received to repair that. Peer "
            f"{self.peer} last agreed with the others at revision {self.since}, so it happened since. What may differ "
            "between peers, such as BatchNorm statistics or the state of a random generator, belongs in MayDiffer"
        )


class StateLost(StateError):
    """No remaining peer has `revision`, or a checkpoint to continue from. The text says what to do.

    `checkpoint` is for the step loop: (lineage, revision) of the one that a peer must load.
    """

    def __init__(self, revision: int, text: str = "", checkpoint: tuple[str, int] | None = None) -> None:
        super().__init__(revision, text, checkpoint)
        self.revision, self.text, self.checkpoint = revision, text, checkpoint

    def __str__(self) -> str:
        return self.text or (
            f"revision {self.revision} of the shared state is lost: all peers that had it are gone. Start a peer that "
            "has a checkpoint of the run, or let all sync with rollback=True to go on from what they have"
        )


class TopologyFailed(RingfoldError):
    """The links could not be measured; the ring is as it was. Call `optimize_topology` again."""

    def __init__(self, text: str, peers: Sequence[int] = ()) -> None:
        super().__init__(text, tuple(peers))
        self.text, self.peers = text, tuple(peers)

    def __str__(self) -> str:
        return self.text


class ClockNotReady(RingfoldError):
    """There is no global time yet: turn probing on, or wait for its first round (`run.clock.is_ready`)."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text or (
            "the global clock is not ready: no round of probing has ended yet. Turn probing on "
            "(`rf.join(probe=True)`, or the setting `probe`), or wait for its first round, 4 s by default"
        )


class StoreError(RingfoldError):
    """A store cannot be used for this; `store` is its address."""

    def __init__(self, store: str, text: str) -> None:
        super().__init__(store, text)
        self.store, self.text = store, text

    def __str__(self) -> str:
        return f"store {self.store}: {self.text}"


class StoreUnreachable(StoreError):
    """The store did not answer in time, and nothing was changed. Wait, and call again."""


class StoreUnknown(StoreError):
    """A change was sent and got no response: it was made, or not, or will be. Read before you go on."""


class StoreWentBack(StoreError):
    """The store shows an older state than this client has seen, as from an old snapshot. Do not go on with it."""


class StoreReset(StoreWentBack):
    """The store is another one than before: it was emptied, or initialised again."""


class LeaseLost(StoreError):
    """The lease has ended, or may have. Another process may hold the key: stop what it protected."""
