"""What a new epoch decides about the ops of the old one.

The argument. A peer returns success only after it has seen Done of *every* member, and once it has sealed it sends no
Done and accepts no evidence. Take the survivors' seals together, when all of them are in:

* Some survivor says `committed`: it has seen Done of every member, so every survivor was done, and stays done until
  evidence or verdict. Commit, and everybody has the result.
* Every survivor says at least `done`: a peer that died may have seen all Dones and returned. Everybody alive has the
  result, so commit is safe whatever the dead one saw.
* Some survivor is not done: then nobody, dead or alive, can have seen Done of every member. Abort; whoever finished
  restores its buffers.

A small op travels whole inside Done, so the one who holds every payload holds result and evidence at once, and the
others hold nothing yet. Its seal then carries the payloads and the verdict brings them to everybody. If nobody alive
has them, the op is aborted, even if a dead peer returned it: a seal lists a small op as `done` never, only as
`unfinished` or `committed`.

An op that a survivor does not list is not done there. An op that nobody lists needs no verdict. Two members that called
different things under one (tag, sequence) list two ops: neither is done by all.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ringfold.wire.diagnostics import list_peers
from ringfold.wire.messages import OpRef, PeerId, Reason, SealedOp, Verdict

_TEXTS_SHOWN = 3


class Cause(Struct, frozen=True):
    """Why an epoch ends. `op` is the guilty op if the program is at fault: its verdict carries this very reason.

    With a `descriptor` only the call that has it is meant, and not what others called under that tag and sequence.
    """

    reason: Reason
    op: OpRef | None = None
    descriptor: bytes = b""


def decide(seals: Mapping[PeerId, Sequence[SealedOp]], causes: Sequence[Cause]) -> list[Verdict]:
    """A verdict for each op that some survivor's seal names. `seals` has one entry per survivor."""
    by_call: dict[tuple[OpRef, bytes], list[SealedOp]] = {}
    for peer in sorted(seals):
        for sealed in seals[peer]:
            by_call.setdefault((sealed.op, sealed.descriptor), []).append(sealed)
    guilty = {(cause.op, cause.descriptor): cause.reason for cause in reversed(causes)}
    innocent = explain(causes)
    return [
        _verdict(op, called, by_call[op, called], len(seals), guilty.get((op, called), guilty.get((op, b""), innocent)))
        for op, called in sorted(by_call)
    ]


def _verdict(op: OpRef, called: bytes, states: Sequence[SealedOp], survivors: int, reason: Reason) -> Verdict:
    payloads = next((state.payloads for state in states if state.payloads is not None), None)
    committed = [state for state in states if state.state == "committed"]
    finished = sum(state.state != "unfinished" for state in states)
    if payloads is None and not committed and finished < survivors:
        return Verdict(op, commit=False, reason=reason, descriptor=called)
    # Whoever committed has the maximum over all Dones, and everybody must give the same answer to "is anybody pending".
    deciding = committed[:1] or states
    if len(committed) == survivors:
        payloads = None  # everybody has the result
    registrations = max(state.registrations for state in deciding)
    return Verdict(op, commit=True, registrations=registrations, payloads=payloads, descriptor=called)


def explain(causes: Sequence[Cause]) -> Reason:
    """The reason told to ops that are not guilty themselves: they may all be called again.

    A lost peer explains more than a lost edge. A fault of another op is no fault of this one, so it reads like a
    change of the ring.
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
    more = len(texts) - _TEXTS_SHOWN
    return "; ".join(texts[:_TEXTS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def lost(peer: PeerId, how: str) -> Cause:
    """A member is gone: `how` completes the sentence."""
    return Cause(Reason("lost", f"peer {peer} {how}", [peer]))


def broken_edge(source: PeerId, target: PeerId, how: str) -> Cause:
    return Cause(Reason("edge", f"the link from peer {source} to peer {target} failed: {how}", [source, target]))


def joining(newcomers: Iterable[PeerId]) -> Cause:
    """An admission. Ops are not in flight then, so its reason is for people only."""
    who = sorted(newcomers)
    return Cause(Reason("edge", f"{list_peers(who)} {'joins' if len(who) == 1 else 'join'}"))
