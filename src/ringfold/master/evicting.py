"""Evicting a peer because somebody asked for it: `ringfold evict PEER`, `run.evict(peer, reason)`. Pure.

Everybody who knows the token may ask. A name that several peers have is refused, and so is the last member of a group:
with it the state of the group would be gone, and stopping its process says that more clearly.
"""

from collections.abc import Iterable

from ringfold.errors import RemoteProtocolError
from ringfold.master.claims import MAX_TEXT_CHARS
from ringfold.master.run import Peer, Run, Standing
from ringfold.wire.diagnostics import list_peers
from ringfold.wire.messages import EvictRequest


def check_request(request: EvictRequest) -> None:
    """Logs and errors show these texts: short ones, and printable."""
    for text in (request.peer, request.reason, request.by):
        if not text.isprintable() or len(text) > MAX_TEXT_CHARS:
            raise RemoteProtocolError(f"a text that is not printable, or has more than {MAX_TEXT_CHARS} letters")


def choose(run: Run, wanted: str) -> Peer | str:
    """The peer with this id or name; or why nobody is evicted, and what to do."""
    found = _matching(run.peers.values(), wanted)
    if not run.peers:
        return f"there is no peer {wanted!r} in this run, which has no peers now; `ringfold runs` lists all runs"
    if not found:
        known = run.named(list_peers(run.peers))
        return f"there is no peer {wanted!r} in this run, only {known}; `ringfold status` shows them"
    if len(found) > 1:
        ids = list_peers(peer.id for peer in found)
        return f"{ids} have the name {wanted!r}: give one of their numbers"
    [peer] = found
    if run.away:
        return f"this master waits for {list_peers(run.away)} to come back: ask again in a few seconds"
    if peer.standing is Standing.ACCEPTED and len(run.live(run.groups[peer.group])) == 1:
        return (
            f"peer {peer.id} is the last member of group {peer.group}, and its state would be gone: "
            "stop its process, if that is what you want"
        )
    return peer


def _matching(peers: Iterable[Peer], wanted: str) -> list[Peer]:
    """A number is an id first: a peer may be named like one."""
    known = list(peers)
    by_id = [peer for peer in known if str(peer.id) == wanted]
    return by_id or [peer for peer in known if peer.member.name == wanted]


def reasons(request: EvictRequest) -> tuple[str, str]:
    """Why it is evicted, for the others and for its own program."""
    because = f": {request.reason}" if request.reason else ""
    return f"{request.by} asked for it{because}", f"{request.by} asked for it{because or ', without a reason'}"
