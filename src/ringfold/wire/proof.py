"""Proving a shared secret without sending it: HMAC-SHA256 over both nonces and the content of the request."""

import hashlib
import hmac

from ringfold.config import DEFAULT_RUN

NONCE_BYTES = 32


def prove(secret: bytes, purpose: str, *parts: bytes) -> bytes:
    """A proof that the sender knows `secret`, bound to a purpose and to every part (each length-prefixed)."""
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (purpose.encode(), *parts):
        mac.update(len(part).to_bytes(4, "little"))
        mac.update(part)
    return mac.digest()


def proven(secret: bytes, proof: bytes, purpose: str, *parts: bytes) -> bool:
    """Whether `proof` was made with the same secret for the same parts, in constant time."""
    return hmac.compare_digest(proof, prove(secret, purpose, *parts))


def link_key(token: bytes, secret: bytes) -> bytes:
    """The key of proofs between two peers: derived from what the master sent them, and from the token, which is never
    sent.

    An eavesdropper on the master's messages has the one without the other.
    """
    return prove(token, "link", secret)


def run_token(token: bytes, run: str) -> bytes:
    """The token of one run of a master: a proof for one run is not valid for another. Without a token of the master
    there is none to derive; the default run has the master's own."""
    return token if not token or run == DEFAULT_RUN else prove(token, "run", run.encode())


def viewer_token(token: bytes) -> str:
    """The token for clients that only look: who has it cannot join, because the join token does not follow from it.
    Empty without a join token."""
    return prove(token, "viewer").hex() if token else ""


def derive(secret: bytes, purpose: str, *numbers: int) -> bytes:
    """Derive a secret for one purpose, so that a run needs randomness once."""
    return prove(secret, purpose, *(number.to_bytes(8, "little") for number in numbers))
