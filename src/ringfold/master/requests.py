"""The first message of a connection, before it is authenticated: which requests the master accepts. Pure checks.

The master runs them under `checked` (decision 31): they only read, so whatever they raise is the remote's fault.

Any client that knows the token may request an eviction (`ringfold evict PEER`, `run.evict(peer, reason)`). A name that
several peers have is refused, and so is the last member of a group: the state of the group would be lost with it, and
stopping its process says that more clearly.
"""

from collections.abc import Iterable

from ringfold.config import GIVE_TOKEN
from ringfold.errors import RemoteProtocolError
from ringfold.limits import MAX_CHANNELS, MAX_PATHS
from ringfold.master.run import Peer, Run
from ringfold.wire.diagnostics import list_peers
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    EventsRequest,
    EvictRequest,
    ForgetRun,
    GuardianHello,
    Hello,
    Resume,
    RunsRequest,
    StatusRequest,
    is_local_name,
)
from ringfold.wire.probing import NodeHello, ProbeCommand
from ringfold.wire.proof import proven
from ringfold.wire.regions import NodeEntry, RelayHello

OLDEST_VERSION = PROTOCOL_VERSION
MIN_NONCE_BYTES = 16
MAX_GROUP = (1 << 31) - 1
MAX_ADDRESSES = 64
MAX_TEXT_CHARS = 1_024

Command = StatusRequest | EventsRequest | EvictRequest | ProbeCommand
"""What a process that is in no run requests."""
RunRequest = Hello | Resume | GuardianHello | NodeHello | RelayHello | Command
"""The first message of a connection, with a proof, if it concerns one run."""
FirstRequest = RunRequest | RunsRequest | ForgetRun


def authenticate(request: FirstRequest, token: bytes, purpose: str, challenge: bytes) -> None:
    """Refuse a protocol version that is not supported, and a client that does not know the token."""
    if not OLDEST_VERSION <= request.version <= PROTOCOL_VERSION:
        supported = f"this master supports {OLDEST_VERSION} to {PROTOCOL_VERSION}"
        raise RemoteProtocolError(f"protocol version {request.version} is not supported ({supported})")
    if len(request.nonce) < MIN_NONCE_BYTES:
        raise RemoteProtocolError(f"a nonce of {len(request.nonce)} bytes is too short")
    if proven(token, request.proof, purpose, challenge, request.nonce):
        return
    if not token:
        raise RemoteProtocolError("this master has no token, but one was given: join without, or start it with one")
    if proven(b"", request.proof, purpose, challenge, request.nonce):
        raise RemoteProtocolError(f"this master needs a token, and none was given: {GIVE_TOKEN}")
    raise RemoteProtocolError("wrong token: it is not the one that this master was started with")


def check_guardian(run: Run, hello: GuardianHello, challenge: bytes) -> Peer:
    """The peer that a guardian's connection belongs to. Refuse it unless that peer itself has opened it."""
    peer = run.peers.get(hello.peer)
    if peer is None:
        raise RemoteProtocolError(f"a guardian of peer {hello.peer}, which is not here")
    if not proven(peer.key, hello.peer_proof, "guarded", challenge, hello.nonce):
        raise RemoteProtocolError(f"a guardian that peer {peer.id} has not started, or not from its present connection")
    if peer.guardian is not None:
        raise RemoteProtocolError(f"peer {peer.id} has a guardian already")
    return peer


def check_hello(hello: Hello) -> None:
    """Refuse a `Hello` that no correct peer sends."""
    if not 0 <= hello.group <= MAX_GROUP:
        raise RemoteProtocolError(f"group {hello.group} is out of range (0 to {MAX_GROUP})")
    if not 1 <= hello.port <= 65_535 or not hello.addresses:
        raise RemoteProtocolError(f"it cannot be reached at {hello.addresses} port {hello.port}")
    if not 1 <= hello.paths <= min(len(hello.addresses), MAX_PATHS):
        raise RemoteProtocolError(f"{hello.paths} paths over {len(hello.addresses)} addresses")
    if not is_local_name(hello.here):
        raise RemoteProtocolError(f"{hello.here[:80]!r} is no name on its host")
    if hello.cores < 1 or not 0 <= hello.threads <= MAX_CHANNELS:
        raise RemoteProtocolError(f"{hello.threads} threads on {hello.cores} cores")
    check_names(hello)


def check_names(hello: Hello | NodeHello | NodeEntry) -> None:
    """Every member gets these texts in a record, and `ringfold status` shows them: they must be short and printable."""
    if len(hello.addresses) > MAX_ADDRESSES:
        raise RemoteProtocolError(f"it has {len(hello.addresses)} addresses (limit {MAX_ADDRESSES})")
    texts = (hello.name, hello.host, *hello.addresses)
    if not all(text.isprintable() for text in texts):
        raise RemoteProtocolError("its name, its host or an address is not printable")
    if max(map(len, texts)) > MAX_TEXT_CHARS:
        raise RemoteProtocolError(f"its name, its host or an address has more than {MAX_TEXT_CHARS} characters")


def check_evict_request(request: EvictRequest) -> None:
    """Logs and errors show these texts: they must be short and printable."""
    for text in (request.peer, request.reason, request.by):
        if not text.isprintable() or len(text) > MAX_TEXT_CHARS:
            raise RemoteProtocolError(f"a text that is not printable, or has more than {MAX_TEXT_CHARS} characters")


def select_peer(run: Run, wanted: str) -> Peer | str:
    """The peer with this id or name; or why no peer is evicted, and what to do."""
    found = _matching(run.peers.values(), wanted)
    if not run.peers:
        return f"there is no peer {wanted!r} in this run, which has no peers now; `ringfold runs` lists all runs"
    if not found:
        known = run.add_names(list_peers(run.peers))
        return f"there is no peer {wanted!r} in this run, only {known}; `ringfold status` shows them"
    if len(found) > 1:
        ids = list_peers(peer.id for peer in found)
        return f"{ids} have the name {wanted!r}: give one of their numbers"
    [peer] = found
    if run.away:
        return f"this master waits for {list_peers(run.away)} to return: try again in a few seconds"
    if peer.is_member and len(run.live(run.groups[peer.group])) == 1:
        return (
            f"peer {peer.id} is the last member of group {peer.group}, and its state would be gone: "
            "stop its process, if that is what you want"
        )
    return peer


def _matching(peers: Iterable[Peer], wanted: str) -> list[Peer]:
    """A number is an id first: a peer's name may be a number."""
    known = list(peers)
    by_id = [peer for peer in known if str(peer.id) == wanted]
    return by_id or [peer for peer in known if peer.member.name == wanted]


def eviction_reasons(request: EvictRequest) -> tuple[str, str]:
    """Why the peer is evicted, for the others and for its own program."""
    because = f": {request.reason}" if request.reason else ""
    return f"{request.by} requested it{because}", f"{request.by} requested it{because or ', without a reason'}"
