"""The sentences of the master: one way to name peers, ops and calls."""

from collections.abc import Iterable

from ringfold.wire.messages import OpRef, PeerId, VoteKind

CALL: dict[VoteKind, str] = {
    "update": "update_topology",
    "pending": "are_peers_pending",
    "sync": "sync_shared_state",
    "optimize": "optimize_topology",
}


def names(peers: Iterable[PeerId]) -> str:
    """`peer 3`, or `peers 1, 3 and 4`."""
    ids = [str(peer) for peer in sorted(peers)]
    match ids:
        case []:
            return "nobody"
        case [only]:
            return f"peer {only}"
        case [*most, last]:
            return f"peers {', '.join(most)} and {last}"
    raise AssertionError("a list is empty, or has one, or has more")


def named(op: OpRef) -> str:
    return f"op tag {op.tag} sequence {op.sequence}"


def seconds(ms: int) -> str:
    return f"{ms / 1000:.1f} s"
