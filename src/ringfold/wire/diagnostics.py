"""Texts for people that several rooms share: peers, ops and calls by name, and why a master cannot be reached.

Texts are made with peer numbers, wherever they are made (an election, a measurement, another machine): `peer 3`. The
master adds the names once, when it sends the text (`with_names`): it knows the names of all groups, and of peers that
are gone. The peer that shows the text marks its own number (`with_you`): `peer 2 (gpu-2, you)`.
"""

import re
from collections.abc import Iterable, Mapping

from ringfold.wire.base import PeerId, VoteKind
from ringfold.wire.messages import OpRef

CALL_NAMES: dict[VoteKind, str] = {
    "update": "update_topology",
    "pending": "meet",
    "sync": "sync_shared_state",
    "optimize": "optimize_topology",
}


def list_peers(peers: Iterable[PeerId]) -> str:
    """`peer 3`, or `peers 1, 3 and 4`."""
    ids = [str(peer) for peer in sorted(peers)]
    match ids:
        case []:
            return "no peer"
        case [only]:
            return f"peer {only}"
        case [*most, last]:
            return f"peers {', '.join(most)} and {last}"
    raise AssertionError("a list is empty, or has one item, or has more")


def name_op(op: OpRef) -> str:
    return f"op tag {op.tag} sequence {op.sequence}"


def format_seconds(ms: int) -> str:
    return f"{ms / 1000:.1f} s"


# Names of peers

MAX_NAME_CHARS = 40
_NUMBER = r"[0-9]{1,18}\b(?! more)"
"""Another machine may have written a part of the text: thousands of digits are not a peer's number."""
_PEERS = re.compile(rf"\b(peers? )({_NUMBER}(?:(?:, | and ){_NUMBER})*)(?! \()")
_BRACKETS = str.maketrans("()", "[]")


def with_names(text: str, names: Mapping[PeerId, str]) -> str:
    """The text with the name after each peer's number, if it is known and not there already."""

    def name(number: re.Match[str]) -> str:
        known = names.get(int(number[0]), "")
        return f"{number[0]} ({_shorten(known)})" if known else number[0]

    return _PEERS.sub(lambda found: found[1] + re.sub(r"[0-9]+", name, found[2]), text)


def with_you(text: str, me: PeerId) -> str:
    """The text as peer `me` reads it: `peer 2 (gpu-2, you)`."""
    item = r"[0-9]{1,18}(?: \([^()]*\))?(?:, | and )"
    mine = re.compile(rf"\b(peers? (?:{item})*?{me}\b)(?! more)(?: \(([^()]*)\))?")
    return mine.sub(lambda found: f"{found[1]} ({f'{found[2]}, ' if found[2] else ''}you)", text)


def _shorten(name: str) -> str:
    shown = name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 3]}..."
    return shown.translate(_BRACKETS)


# A master that cannot be reached

_HINTS = {
    "Connection refused": "nothing listens there ({}): start `ringfold master` there, or correct the address",
    "No route to host": "that machine cannot be reached ({}): correct the address, or let it through the firewall",
    "Network is unreachable": "this machine has no route to that network ({}): correct the address, or the routes",
    "no answer to the connection attempt": "that machine does not answer: start it, correct the address, or let "
    "the port through the firewall",
}
_HINTS |= dict.fromkeys(("Connection timed out", "timed out"), _HINTS["no answer to the connection attempt"])
_NO_MASTER = "what listens there is no Ringfold master"
_SERVERS = {b"SSH-": "an SSH server", b"HTTP": "a web server", b"220 ": "a mail or FTP server", b"\x15\x03": "TLS"}


def explain_connect_error(reason: str) -> str:
    """The reason of a failed connection attempt, and what to do about it."""
    return _HINTS.get(reason, reason).replace("{}", reason)


def explain_not_a_master(reason: str) -> str:
    """Why the first bytes, or the end, of a connection cannot come from a master. An absurd frame length is usually
    text of another protocol."""
    found = re.search(r"a frame of ([0-9]{1,10}) bytes", reason)
    began = int(found[1]).to_bytes(8, "little")[:4] if found and int(found[1]) < 1 << 32 else b""
    guess = next((f" ({server}?)" for start, server in _SERVERS.items() if began.startswith(start)), "")
    if began.isascii() and began.decode("ascii").isprintable() and began:
        return f"{_NO_MASTER}: it began with {began.decode('ascii')!r}{guess}; correct the address"
    if "closed" in reason:
        return f"it closed the connection before it sent anything ({reason}): is this the port of a Ringfold master?"
    return f"{_NO_MASTER}, or one of another version ({reason}){guess}: correct the address"


def explain_no_challenge(waited_ms: int) -> str:
    """A server accepts connections and sends nothing; a master sends its challenge at once."""
    return (
        f"it accepted the connection, but sent nothing within {waited_ms / 1000:g} s, and a Ringfold master sends "
        "first: another program listens there (a web server?), or the master hangs"
    )
