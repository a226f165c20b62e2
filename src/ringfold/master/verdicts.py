"""Which ops commit: evidence while an epoch lasts, a verdict when it ends.

*Evidence by the master.* In a group with many members, each member sends Done to the master, and the master sends
evidence when it has Done of every member. This is the hot path of such a run: n Dones in and one evidence out per op.
A `Collector` lives from the record of its epoch to its seal. What it holds then is dropped: the seals say which ops
are done.

*Verdicts.* Why they are safe: a peer returns success only after it has seen Done of *every* member, and after it has
sealed it sends no Done and accepts no evidence. When the seals of all survivors have arrived:

* Some survivor reports `committed`: it has seen Done of every member, so every survivor was done, and stays done until
  evidence or verdict. Commit: every survivor has the result.
* Every survivor reports at least `done`: a peer that died may have seen all Dones and returned. Every survivor has the
  result, so a commit is safe whatever the dead peer saw.
* Some survivor is not done: then no peer, dead or alive, can have seen Done of every member. Abort; peers that had
  finished restore their buffers.

A small op travels whole inside Done. A peer that holds every payload holds result and evidence at once, and the others
hold nothing yet. Its seal then carries the payloads, and the verdict sends them to all. If no survivor has them, the op
is aborted, even if a dead peer returned it: a seal never lists a small op as `done`, only as `unfinished` or
`committed`.

An op that a survivor does not list is not done there. An op that no survivor lists needs no verdict. Two members that
called different things under one (tag, sequence) list two ops: neither is done by all.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ringfold.errors import RemoteProtocolError
from ringfold.master.effects import SendEvidence
from ringfold.master.events import Conn
from ringfold.wire.descriptor import fingerprint
from ringfold.wire.diagnostics import list_peers
from ringfold.wire.frames import Done, Evidence
from ringfold.wire.messages import Epoch, OpRef, PeerId, Reason, SealedOp, Verdict, is_before
from ringfold.wire.notices import EPOCH_CAUSES, EpochCause

MAX_OPEN_OPS = 65_536
"""Far more ops than a program has in flight: no correct peer opens more."""


MAX_CAUSES_SHOWN = 3


class Mismatch(Exception):
    """Two members called different things under one (tag, sequence)."""

    def __init__(self, first: PeerId, first_descriptor: bytes) -> None:
        super().__init__(first, first_descriptor)
        self.first, self.first_descriptor = first, first_descriptor


class _Open:
    """One op that some members have done."""

    __slots__ = ("descriptor", "first", "missing", "payloads", "registrations", "seen")

    def __init__(self, done: Done, members: int) -> None:
        self.descriptor = done.descriptor
        self.first = done.rank
        self.missing = members
        self.seen = [False] * members
        self.payloads: list[bytes | None] = [None] * members
        self.registrations = 0


class Collector:
    """The Dones of one epoch."""

    def __init__(self, epoch: Epoch, ring: Sequence[PeerId], conns: Sequence[Conn]) -> None:
        self._epoch = epoch
        self._ring = list(ring)
        self._ranks = {peer: rank for rank, peer in enumerate(ring)}
        self._conns = tuple(conns)
        self._open: dict[tuple[int, int], _Open] = {}
        self._finished: dict[int, int] = {}

    def add(self, peer: PeerId, done: Done) -> SendEvidence | None:
        """Take one Done of this epoch; return the evidence, if it was the last missing one.

        Raises RemoteProtocolError if no correct peer sends it, and Mismatch if two members called different ops.
        """
        tag, sequence, rank = done.tag, done.sequence, done.rank
        if self._ranks[peer] != rank:
            raise RemoteProtocolError(f"Done for rank {rank}, but its rank is {self._ranks[peer]}")
        key = (tag, sequence)
        op = self._open.get(key)
        if op is None:
            op = self._begin(key, done)
        if op.seen[rank]:
            raise RemoteProtocolError(f"Done twice for tag {tag} sequence {sequence}")
        if op.descriptor != done.descriptor:
            raise Mismatch(self._ring[op.first], op.descriptor)
        op.seen[rank], op.payloads[rank] = True, done.payload
        op.missing -= 1
        if done.registrations > op.registrations:
            op.registrations = done.registrations
        if op.missing:
            return None
        del self._open[key]
        self._finished[tag] = sequence
        crc = fingerprint(op.descriptor)
        return SendEvidence(self._conns, Evidence(self._epoch, tag, sequence, crc, op.registrations, op.payloads))

    def callers(self, tag: int, sequence: int) -> tuple[bytes, list[PeerId]]:
        """The descriptor in the first Done of an open op, and the members whose Done has the same one."""
        op = self._open.get((tag, sequence))
        if op is None:
            return b"", []
        return op.descriptor, [peer for peer, seen in zip(self._ring, op.seen, strict=True) if seen]

    def _begin(self, key: tuple[int, int], done: Done) -> _Open:
        tag, sequence = key
        finished = self._finished.get(tag)
        if finished is not None and not is_before(finished, sequence):
            raise RemoteProtocolError(f"Done for tag {tag} sequence {sequence}, which finished before")
        if len(self._open) >= MAX_OPEN_OPS or (len(self._finished) >= MAX_OPEN_OPS and tag not in self._finished):
            raise RemoteProtocolError(f"Done for more than {MAX_OPEN_OPS} ops at once")
        op = self._open[key] = _Open(done, len(self._ring))
        return op


class Cause(Struct, frozen=True):
    """Why an epoch ends. If the program is at fault, `op` is the failed op, and its verdict carries this reason.

    With a `descriptor` it is only the call with that descriptor, and not what others called under that tag and
    sequence.
    """

    reason: Reason
    op: OpRef | None = None
    descriptor: bytes = b""
    kind: EpochCause = "call"


def decide(seals: Mapping[PeerId, Sequence[SealedOp]], causes: Sequence[Cause]) -> list[Verdict]:
    """A verdict for each op that some survivor's seal names. `seals` has one entry per survivor."""
    by_call: dict[tuple[OpRef, bytes], list[SealedOp]] = {}
    for peer in sorted(seals):
        for sealed in seals[peer]:
            by_call.setdefault((sealed.op, sealed.descriptor), []).append(sealed)
    failed = {(cause.op, cause.descriptor): cause.reason for cause in reversed(causes)}
    general = explain(causes)
    return [
        _verdict(op, called, by_call[op, called], len(seals), failed.get((op, called), failed.get((op, b""), general)))
        for op, called in sorted(by_call)
    ]


def _verdict(op: OpRef, called: bytes, states: Sequence[SealedOp], survivors: int, reason: Reason) -> Verdict:
    payloads = next((state.payloads for state in states if state.payloads is not None), None)
    committed = [state for state in states if state.state == "committed"]
    finished = sum(state.state != "unfinished" for state in states)
    if payloads is None and not committed and finished < survivors:
        return Verdict(op, commit=False, reason=reason, descriptor=called)
    # A peer that committed has the maximum over all Dones, and all must get the same result of "are peers pending".
    deciding = committed[:1] or states
    if len(committed) == survivors:
        payloads = None  # every survivor has the result
    registrations = max(state.registrations for state in deciding)
    return Verdict(op, commit=True, registrations=registrations, payloads=payloads, descriptor=called)


def explain(causes: Sequence[Cause]) -> Reason:
    """The reason for ops that did not fail themselves: they may all be retried.

    A lost peer explains more than a lost edge. The failure of another op is not this one's, so it reads like a change
    of the ring.
    """
    text = summary(causes)
    lost = {peer for cause in causes if cause.reason.kind == "lost" for peer in cause.reason.peers}
    if lost:
        return Reason("lost", text, sorted(lost))
    edges = {peer for cause in causes if cause.reason.kind == "edge" for peer in cause.reason.peers}
    cancelled = {peer for cause in causes if cause.reason.kind == "cancelled" for peer in cause.reason.peers}
    if cancelled and not edges:
        return Reason("cancelled", text, sorted(cancelled))
    return Reason("edge", text, sorted(edges))


def summary(causes: Sequence[Cause]) -> str:
    """All causes in one line; the first few if there are many."""
    texts = list(dict.fromkeys(cause.reason.text for cause in causes))
    more = len(texts) - MAX_CAUSES_SHOWN
    return "; ".join(texts[:MAX_CAUSES_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def kind_of(causes: Sequence[Cause]) -> EpochCause:
    """The kind that explains most."""
    kinds = {cause.kind for cause in causes}
    return next(kind for kind in EPOCH_CAUSES if kind in kinds)


def lost(peer: PeerId, how: str, kind: EpochCause = "lost") -> Cause:
    """A member is gone; `how` is the rest of the sentence."""
    return Cause(Reason("lost", f"peer {peer} {how}", [peer]), kind=kind)


def broken_edge(source: PeerId, target: PeerId, how: str) -> Cause:
    return Cause(
        Reason("edge", f"the link from peer {source} to peer {target} failed: {how}", [source, target]), kind="link"
    )


def joining(newcomers: Iterable[PeerId]) -> Cause:
    """An admission. No op is in flight then, so its reason is for people only."""
    joining = sorted(newcomers)
    return Cause(Reason("edge", f"{list_peers(joining)} {'joins' if len(joining) == 1 else 'join'}"), kind="joined")
