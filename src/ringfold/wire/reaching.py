"""Why a master could not be reached, in words that say what to do: for peers that join, and for commands that look."""

import re

_HINTS = {
    "Connection refused": "nothing listens there ({}): start `ringfold master` there, or correct the address",
    "No route to host": "that machine cannot be reached ({}): correct the address, or let it through the firewall",
    "Network is unreachable": "this machine has no route to that network ({}): correct the address, or the routes",
    "no answer to the connection attempt": "that machine does not answer: start it, correct the address, or let "
    "the port through the firewall",
}
_HINTS |= dict.fromkeys(("Connection timed out", "timed out"), _HINTS["no answer to the connection attempt"])
_FOREIGN = "what listens there is no Ringfold master"
_SERVERS = {b"SSH-": "an SSH server", b"HTTP": "a web server", b"220 ": "a mail or FTP server", b"\x15\x03": "TLS"}


def in_plain_words(reason: str) -> str:
    """The reason of a failed connection attempt, and what to do about it."""
    return _HINTS.get(reason, reason).replace("{}", reason)


def not_a_master(reason: str) -> str:
    """Why the first bytes, or the end, of a connection cannot come from a master. A length that makes no sense is text
    of another protocol, mostly."""
    found = re.search(r"a frame of ([0-9]{1,10}) bytes", reason)
    began = int(found[1]).to_bytes(8, "little")[:4] if found and int(found[1]) < 1 << 32 else b""
    guess = next((f" ({server}?)" for start, server in _SERVERS.items() if began.startswith(start)), "")
    if began.isascii() and began.decode("ascii").isprintable() and began:
        return f"{_FOREIGN}: it began with {began.decode('ascii')!r}{guess}; correct the address"
    if "closed" in reason:
        return f"it closed the connection before it said anything ({reason}): is this the port of a Ringfold master?"
    return f"{_FOREIGN}, or one of another version ({reason}){guess}: correct the address"


def said_nothing(waited_ms: int) -> str:
    """Somebody accepts connections and keeps quiet; a master speaks first."""
    return (
        f"it accepted the connection, but said nothing within {waited_ms / 1000:g} s, and a Ringfold master speaks "
        "first: another program listens there (a web server?), or the master hangs"
    )
