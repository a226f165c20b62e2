"""Who may look at a dashboard: the check of its token, and of `Host` and `Origin`. Pure.

The token is that of viewers (`wire/proof.py`), with which nobody can join. A browser never sends the fragment of an
address, so the printed address ends with `#token=...`, and the page sends the token in its first message.

Without a join token a dashboard listens on loopback only, and needs no token. There, another page in the same browser
could reach it by a name that it has rebound to 127.0.0.1: so the `Host` must be a name of loopback, and the `Origin` of
a WebSocket the same host.
"""

import hmac
from urllib.parse import urlsplit

from ringfold.config import is_loopback


def may_look(token: str, given: object) -> bool:
    """Whether a page has shown the right token, compared in constant time."""
    return not token or (isinstance(given, str) and hmac.compare_digest(token.encode(), given.encode()))


def why_refused(host: str, origin: str | None, *, only_loopback: bool) -> str:
    """Why a request with these headers is refused; empty if it is not. `only_loopback`: the server is on loopback."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        from_host = None if origin is None else urlsplit(origin).netloc
    except ValueError:
        return "it has no valid Host or Origin"
    if only_loopback and not is_loopback(name):
        return f"the Host {name!r} is not a name of this machine's loopback"
    if from_host is not None and from_host != host:
        return f"the Origin {origin!r} is another host"
    return ""
