"""The promises about shared state, checked against everything that peers offered and held.

Terms. A *content* is the digest of all arrays that count, by name, dtype, shape and bytes: it is computed here from the
bytes themselves, so that nothing rests on the hashes that are under test. A peer's state is *at rest* while its program
waits in anything but a sync, and between a sync's end and the program's next call.

What is known: every offer with its content (from the peer), which peers were sent a plan and which the end of the sync
(from the master's messages), and what every peer held at its end of the sync.

Checked at once:
- the winner was eligible: a participant of the group's last finished sync with a valid revision; if no participant is
  left, a peer with exactly that sync's content; any peer, if all agree to a rollback and no other could win, or if all
  members of the run were lost with its state and all peers start afresh. A torn state never wins. The highest revision
  wins, then the most common content, then the lowest peer id. Every holder has exactly that content;
- where no participant is left, the run goes on from a checkpoint only if that was reached in the group's present
  history (`_chain`, from the contents of finished syncs: lineages are under test), and no newer one was listed;
- revisions of a group never go back without a rollback (when the last members leave, of their own accord and with the
  state, the group's history has come to its end, and a new one begins);
- a peer that succeeds in a sync holds the winner's content and revision, bit by bit;
- a peer that failed before any plan holds what it held before, and one that failed later and holds something else
  offers it as torn ever after, until the program has replaced it;
- what may differ is never written to, and a state at rest is never written to;
- members that took part in the same sync, and have counted as many steps since, hold the same bits.
"""

from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from ringfold.state.snapshot import Snapshot
from ringfold.testing.checks import Violation
from ringfold.wire.messages import Branch, Offer, PeerId, SyncDone, SyncPlan

Content = bytes
Bits = tuple[Content, bytes]
"""What counts, and what may differ."""


@dataclass(eq=False, slots=True)
class _Offered:
    """One peer's call of one sync."""

    peer: PeerId
    group: int
    offer: Offer
    snapshot: Snapshot
    bits: Bits
    is_torn: bool
    sync: int | None = None
    meddled: bool = False
    """Its own program wrote to it meanwhile: it may hold anything."""


@dataclass(frozen=True, slots=True)
class _Finished:
    sync: int
    revision: int
    content: Content
    participants: frozenset[PeerId] = frozenset()


@dataclass(slots=True)
class _Sync:
    """A sync that the master has planned."""

    number: int
    group: int
    revision: int
    last: _Finished | None
    is_orphaned: bool = False
    """Whether all members of the run have gone since the last one, and took nothing along."""
    voters: dict[PeerId, _Offered] = field(default_factory=dict)
    holders: list[PeerId] = field(default_factory=list)
    content: Content = b""
    goes_back: bool = False


Point = tuple[int, Content]
"""A revision with its content."""


class SyncHistory:
    """Everything the checkers need to know about the shared states of one run."""

    def __init__(self) -> None:
        self.begun = self.finished = self.failed_calls = self.rollbacks = self.resumes = self.fetched = 0
        self.errors: dict[str, int] = {}
        self._calls: dict[tuple[PeerId, int], _Offered] = {}
        self._syncs: dict[int, _Sync] = {}
        self._last: dict[int, _Finished] = {}
        self._torn: dict[PeerId, Bits] = {}
        self._whole: set[Content] = set()
        """Everything that a peer offered as whole."""
        self._at_rest: dict[PeerId, tuple[Snapshot, Bits]] = {}
        self._watched: dict[PeerId, Snapshot] = {}
        self._took_part: dict[PeerId, int] = {}
        self._members: dict[int, set[PeerId]] = {}
        self._left: dict[int, tuple[int, set[PeerId]]] = {}
        self._orphaned: set[int] = set()
        self._steps: dict[tuple[int, int], tuple[PeerId, Content]] = {}
        self._chain: dict[int, tuple[Point, ...]] = {}
        """What the group's syncs have finished, without what was abandoned."""
        self._chains: dict[tuple[int, Point], tuple[Point, ...]] = {}
        """The same as it was when each point was finished."""
        self._saved: dict[Branch, Content] = {}

    # What peers do

    def saved(self, branch: Branch, content: Content) -> None:
        """A peer has saved a checkpoint."""
        self._saved[branch] = content

    def is_reached(self, group: int, branch: Branch) -> bool:
        """Whether this checkpoint is of the group's present history."""
        return branch in self._saved and (branch.revision, self._saved[branch]) in self._chain.get(group, ())

    def offered(self, peer: PeerId, group: int, ballot: int, offer: Offer, snapshot: Snapshot) -> None:
        """A program calls for a sync."""
        bits = bits_of(snapshot)
        # The same bits may be whole after all: all that was missing had come, and then a checkpoint was loaded.
        was_torn = self._torn.get(peer) == bits and (offer.torn or bits[0] not in self._whole)
        if was_torn and not offer.torn:
            raise Violation(f"peer {peer} offers a state that a sync has left half-written, as if it were whole")
        if not was_torn:
            self._torn.pop(peer, None)
        if not offer.torn:
            self._whole.add(bits[0])
        self._calls[peer, ballot] = _Offered(peer, group, offer, snapshot, bits, was_torn or offer.torn)
        self._watched[peer] = snapshot
        self._at_rest.pop(peer, None)

    def meddled(self, peer: PeerId, ballot: int) -> None:
        """A peer's program writes to its state during a sync."""
        self._calls[peer, ballot].meddled = True

    def succeeded(self, peer: PeerId, ballot: int, revision: int) -> None:
        """A peer's sync is done: it must hold the winner's state now."""
        call = self._calls[peer, ballot]
        bits = bits_of(call.snapshot)
        sync = self._syncs.get(call.sync or 0)
        if sync is None:
            raise Violation(f"peer {peer} succeeds in a sync that the master has not planned")
        if revision != sync.revision:
            raise Violation(f"sync {sync.number}: peer {peer} ends at revision {revision}, not {sync.revision}")
        if bits[0] != sync.content and not call.meddled:
            raise Violation(f"sync {sync.number}: peer {peer} succeeds, and does not hold the content that won")
        self._check_private(call, bits)
        self.fetched += bits[0] != call.bits[0]
        self._torn.pop(peer, None)
        self._took_part[peer] = sync.number
        self._at_rest[peer] = call.snapshot, bits

    def failed(self, peer: PeerId, ballot: int, error: str) -> None:
        """A peer's sync has failed, or its session is over."""
        call = self._calls[peer, ballot]
        bits = bits_of(call.snapshot)
        self.failed_calls += 1
        self.errors[error] = self.errors.get(error, 0) + 1
        self._check_private(call, bits)
        if bits != call.bits and not call.meddled:
            if call.sync is None:
                raise Violation(f"peer {peer}'s sync failed ({error}) before it was planned, and wrote to its state")
            self._torn[peer] = bits
        self._at_rest[peer] = call.snapshot, bits

    def _check_private(self, call: _Offered, bits: Bits) -> None:
        if bits[1] != call.bits[1] and not call.meddled:
            raise Violation(f"peer {call.peer}: a sync wrote to an array that may differ")

    def rests(self, peer: PeerId) -> None:
        """A program waits in something that does not concern its state."""
        if peer in self._watched:
            snapshot = self._watched[peer]
            self._at_rest[peer] = snapshot, bits_of(snapshot)

    def goes_on(self, peer: PeerId) -> None:
        """The program is about to do its own work, which may change the state."""
        rest = self._at_rest.pop(peer, None)
        if rest is not None and bits_of(rest[0]) != rest[1]:
            raise Violation(f"peer {peer}'s state was written to outside of a sync")

    def is_torn(self, peer: PeerId) -> bool:
        """Whether a sync has left the state of this peer half-written, and nothing has happened to it since."""
        return peer in self._torn and bits_of(self._watched[peer]) == self._torn[peer]

    def stepped(self, peer: PeerId, revision: int) -> None:
        """A step loop begins the step `revision`.

        One that is out of the run by now may have been the only one to commit a small op: no peer is compared with it.
        """
        members = set[PeerId]().union(*self._members.values())
        if peer not in members:
            return
        sync, snapshot = self._took_part[peer], self._watched[peer]
        content = bits_of(snapshot)[0]
        other, theirs = self._steps.get((sync, revision), (peer, content))
        if other not in members:
            other, theirs = peer, content
        self._steps[sync, revision] = other, theirs
        if theirs != content:
            raise Violation(f"peers {other} and {peer} took part in sync {sync}, and differ at step {revision}")

    # What the master decides

    def planned(self, peer: PeerId, plan: SyncPlan) -> None:
        """The master sends a plan."""
        call = self._calls[peer, plan.ballot]
        call.sync = plan.sync
        sync = self._syncs.get(plan.sync)
        if sync is None:
            holders = [member.peer for member in plan.holders]
            last, is_orphaned = self._last.get(call.group), call.group in self._orphaned
            sync = _Sync(plan.sync, call.group, plan.revision, last, is_orphaned, holders=holders)
            self._syncs[plan.sync] = sync
        sync.voters[peer] = call

    def all_planned(self, number: int) -> None:
        """All participants have been sent the plan."""
        self.begun += 1
        self._judge(self._syncs[number])

    def done(self, peer: PeerId, message: SyncDone) -> None:
        """The master reports to a participant that the sync is done. From the first one on, it counts as finished."""
        sync = self._syncs[message.sync]
        finished = self._last.get(sync.group)
        if finished is None or finished.sync != sync.number:
            self.finished += 1
            finished = _Finished(sync.number, sync.revision, sync.content)
            self._extend(sync)
        self._orphaned.discard(sync.group)
        self._last[sync.group] = replace(finished, participants=finished.participants | {peer})

    def recorded(self, group: int, members: list[PeerId]) -> None:
        """A group has these members from now on."""
        self._members[group] = set(members)

    def gone(self, now_ns: int, peer: PeerId, how: str) -> None:
        """A peer is out of the run. If the last ones leave, and had the state, a new history begins."""
        for group, members in self._members.items():
            if peer not in members:
                continue
            members.discard(peer)
            when, leavers = self._left.get(group, (0, set()))
            self._left[group] = now_ns, (leavers if when == now_ns else set()) | ({peer} if how == "left" else set())
            last = self._last.get(group)
            if not members and last is not None and last.participants & self._left[group][1]:
                del self._last[group]
        if not any(self._members.values()):
            self._orphaned |= self._last.keys()

    def _extend(self, sync: _Sync) -> None:
        point, before = (sync.revision, sync.content), self._chain.get(sync.group, ())
        if sync.goes_back or sync.last is None:
            chain = self._chains.get((sync.group, point), (point,))
        else:
            chain = before if point in before else (*before, point)
        self._chain[sync.group] = self._chains[sync.group, point] = chain

    # Which states may win

    def _judge(self, sync: _Sync) -> None:
        chain = self._chain.get(sync.group, ())
        candidates, is_rollback = _candidates(sync, chain)
        sync.goes_back = is_rollback
        if not candidates:
            raise Violation(f"sync {sync.number}: no peer's state may win, and the master planned {sync.holders}'s")
        last = sync.last
        if last is not None and sync.revision < last.revision and not is_rollback:
            went_back = f"revision {sync.revision} wins after {last.revision}, without a rollback"
            raise Violation(f"sync {sync.number}: {went_back}")
        self.rollbacks += is_rollback
        if is_rollback and any(_is_reached(call, chain) for call in candidates):
            self.resumes += 1
            self._check_listed(sync)
        newest = max(call.offer.revision for call in candidates)
        if sync.revision != newest:
            raise Violation(f"sync {sync.number}: revision {sync.revision} wins over the valid revision {newest}")
        sets: dict[Content, list[PeerId]] = {}
        for call in candidates:
            if call.offer.revision == newest:
                sets.setdefault(call.bits[0], []).append(call.peer)
        sync.content = max(sets, key=lambda content: (len(sets[content]), -min(sets[content])))
        for peer in sync.holders:
            call = sync.voters[peer]
            if call.bits[0] != sync.content:
                torn = ", and is torn" if call.is_torn else ""
                raise Violation(f"sync {sync.number}: peer {peer} is to give its state, which did not win{torn}")

    def _check_listed(self, sync: _Sync) -> None:
        """A run that resumes does so from the newest checkpoint that a peer could have loaded."""
        for call in sync.voters.values():
            for branch in call.offer.checkpoints:
                if branch.revision > sync.revision and self.is_reached(sync.group, branch):
                    newer = f"peer {call.peer} could have loaded revision {branch.revision} of its history"
                    raise Violation(f"sync {sync.number}: the run resumes from revision {sync.revision}, and {newer}")


def _candidates(sync: _Sync, chain: tuple[Point, ...]) -> tuple[list[_Offered], bool]:
    """Which of the planned peers may win, and whether that is a rollback."""
    whole = [call for call in sync.voters.values() if not call.is_torn]
    voting = [call for call in whole if call.offer.strategy != "receive-only"]
    last = sync.last
    if last is None:
        return voting, False
    if any(call.peer in last.participants for call in whole):
        found = [call for call in voting if call.peer in last.participants and _is_valid(call, last)]
    else:
        found = [call for call in voting if _is_exact(call, last)]
        resumed = [call for call in voting if _is_reached(call, chain)]
        if not found and resumed:
            return resumed, True
    if not found and sync.is_orphaned and all(call.offer.revision == 0 for call in sync.voters.values()):
        return voting, True
    if not found and all(call.offer.rollback for call in sync.voters.values()):
        return voting, True
    return found, False


def _is_reached(call: _Offered, chain: tuple[Point, ...]) -> bool:
    return call.offer.is_loaded and (call.offer.revision, call.bits[0]) in chain


def _is_exact(call: _Offered, last: _Finished) -> bool:
    return (call.offer.revision, call.bits[0]) == (last.revision, last.content)


def _is_valid(call: _Offered, last: _Finished) -> bool:
    ahead = call.offer.revision - last.revision
    return _is_exact(call, last) or ahead == 1 or (call.offer.stepped and ahead > 0)


def bits_of(snapshot: Snapshot) -> Bits:
    """Everything that the arrays of a snapshot hold now."""
    counts, differs = blake2b(digest_size=16), blake2b(digest_size=16)
    for key, memory in zip(snapshot.manifest.keys, snapshot.memories, strict=True):
        counts.update(repr((key.name, key.dtype, key.shape, key.may_differ)).encode())
        assert memory.host is not None
        (differs if key.may_differ else counts).update(np.ascontiguousarray(memory.host).data)
    return counts.digest(), differs.digest()
