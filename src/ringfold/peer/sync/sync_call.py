"""One sync of the shared state, as a program calls it: take a snapshot, agree, and note what came of it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol, TypeVar, get_args

from ringfold.errors import HashMismatch, UsageError
from ringfold.peer.effects import SyncInterrupted, SyncSucceeded
from ringfold.peer.machine import PeerMachine
from ringfold.state.shared import SharedState, set_lineage, set_torn
from ringfold.state.snapshot import Snapshot
from ringfold.wire.messages import Branch, Divergence, Offer, PeerId, SyncStrategy
from ringfold.wire.notices import divergence_error

T = TypeVar("T")
OnDivergence = Literal["repair", "raise"]
"""What a peer does that was found to hold other content than the others: `repair` only warns."""


class SyncInfo(NamedTuple):
    """What a sync did: the revision that all participants have now, and the bytes of blocks that this peer moved.

    `checked` is False where no sync was needed, so that nothing was compared. `diverged` are the members, this one or
    others, that should have had the state before, and had not. `participants` are the sorted ids of the peers that took
    part, the same on all of them; where no sync was needed, in the last one.
    """

    revision: int
    tx_bytes: int = 0
    rx_bytes: int = 0
    checked: bool = True
    diverged: tuple[Divergence, ...] = ()
    participants: tuple[int, ...] = ()


class SyncSession(Protocol):
    """As much of a session as a sync needs."""

    def sync(
        self, offer: Offer, snapshot: Snapshot, min_world: int, timeout_s: float, *, final: bool = True
    ) -> SyncSucceeded | SyncInterrupted: ...
    def locked(self, look: Callable[[PeerMachine], T]) -> T: ...


class Attempt:
    """One try to sync `state`. Until it is known what became of it, the state counts as torn: an interrupt may come at
    any point.
    """

    def __init__(self, state: SharedState, threads: int = 0) -> None:
        self.state, self.snapshot = state, Snapshot.take(state, threads)
        self._was_torn = state.torn
        set_torn(state, True)

    def failed(self, machine: PeerMachine) -> None:
        """The call raises: the state is torn if something was written into it."""
        set_torn(self.state, self._was_torn or machine.has_written(self.snapshot.manifest))

    def succeeded(self, machine: PeerMachine, done: SyncSucceeded) -> SyncInfo:
        """The state is the group's now."""
        self.state.revision = done.revision
        set_lineage(self.state, done.lineage)
        set_torn(self.state, False)
        machine.synced()
        moved = done.tx_bytes, done.rx_bytes
        return SyncInfo(done.revision, *moved, diverged=done.diverged, participants=done.participants)


def sync_state(
    session: SyncSession,
    state: SharedState,
    *,
    strategy: SyncStrategy,
    timeout_s: float,
    stepped: bool = False,
    rollback: bool = False,
    min_world: int = 0,
    final: bool = True,
    checkpoints: Sequence[Branch] = (),
) -> SyncInfo:
    """Make `state` the group's. Returns when it is the same, verified, on every member that takes part.

    If it raises after a part of the state was written, the state is torn: it has no vote, and no op goes on from it
    until it is synced again, or loaded.
    """
    found: dict[PeerId, Divergence] = {}
    while True:
        attempt = Attempt(state)
        offer = attempt.snapshot.manifest.offer(strategy, stepped=stepped, rollback=rollback, checkpoints=checkpoints)
        try:
            done = session.sync(offer, attempt.snapshot, min_world, timeout_s, final=final)
            if isinstance(done, SyncSucceeded):
                state._after_write()
        except BaseException:
            session.locked(attempt.failed)
            raise
        found |= {divergence.peer: divergence for divergence in done.diverged}
        if isinstance(done, SyncSucceeded):
            return session.locked(partial(attempt.succeeded, done=done))._replace(diverged=tuple(found.values()))
        # The master was lost half-way. What was written stays; the next look at the state says what it is worth.
        session.locked(attempt.failed)


def check_on_divergence(on_divergence: str) -> None:
    if on_divergence not in get_args(OnDivergence):
        raise UsageError(f"on_divergence is one of {', '.join(get_args(OnDivergence))}, not {on_divergence!r}")


def check_diverged(info: SyncInfo, me: PeerId, on_divergence: OnDivergence) -> None:
    """For a peer that wants to know, and not only to be repaired."""
    for divergence in info.diverged:
        if on_divergence == "raise" and divergence.peer == me:
            raise divergence_error(divergence)


def check_unchanged(info: SyncInfo) -> None:
    """For a caller that holds the run's state already: whatever it received, it had wrong."""
    if info.rx_bytes:
        text = f"the shared state was not the run's: {info.rx_bytes} bytes of revision {info.revision} were received"
        raise HashMismatch(text)
