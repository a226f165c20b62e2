"""What a connection says of itself before it is anybody: which claims the master believes. Pure checks, no state.

The master runs them under `checked` (decision 31): they only look, so that whatever they raise is the remote's fault.
"""

from ringfold.config import GIVE_TOKEN
from ringfold.errors import RemoteProtocolError
from ringfold.limits import MAX_PATHS
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    EvictRequest,
    ForgetRun,
    Hello,
    Resume,
    RunsRequest,
    StatusRequest,
)
from ringfold.wire.probing import NodeHello, ProbeCommand
from ringfold.wire.proof import proven

OLDEST_VERSION = PROTOCOL_VERSION
MIN_NONCE_BYTES = 16
MAX_GROUP = (1 << 31) - 1
MAX_ADDRESSES = 64
MAX_TEXT_CHARS = 1_024

RunClaim = Hello | Resume | StatusRequest | EvictRequest | NodeHello | ProbeCommand
"""The first message of a connection, with a proof, if it is about one run."""
Claim = RunClaim | RunsRequest | ForgetRun


def check_claim(claim: Claim, token: bytes, purpose: str, challenge: bytes) -> None:
    """Refuse a version that is not spoken here, and whoever does not know the token."""
    if not OLDEST_VERSION <= claim.version <= PROTOCOL_VERSION:
        speaks = f"this master speaks {OLDEST_VERSION} to {PROTOCOL_VERSION}"
        raise RemoteProtocolError(f"protocol version {claim.version} is not spoken here ({speaks})")
    if len(claim.nonce) < MIN_NONCE_BYTES:
        raise RemoteProtocolError(f"a nonce of {len(claim.nonce)} bytes is too short")
    if proven(token, claim.proof, purpose, challenge, claim.nonce):
        return
    if not token:
        raise RemoteProtocolError("this master has no token, but one was given: join without, or start it with one")
    if proven(b"", claim.proof, purpose, challenge, claim.nonce):
        raise RemoteProtocolError(f"this master needs a token, and none was given: {GIVE_TOKEN}")
    raise RemoteProtocolError("wrong token: it is not the one that this master was started with")


def check_facts(hello: Hello) -> None:
    """Refuse what no honest peer says of itself."""
    if not 0 <= hello.group <= MAX_GROUP:
        raise RemoteProtocolError(f"group {hello.group} is out of range (0 to {MAX_GROUP})")
    if not 1 <= hello.port <= 65_535 or not hello.addresses:
        raise RemoteProtocolError(f"nobody can reach it at {hello.addresses} port {hello.port}")
    if not 1 <= hello.paths <= min(len(hello.addresses), MAX_PATHS):
        raise RemoteProtocolError(f"{hello.paths} paths over {len(hello.addresses)} addresses")
    check_names(hello)


def check_names(hello: Hello | NodeHello) -> None:
    """Every member gets these texts in a record, and `ringfold status` shows them: short ones, and printable."""
    if len(hello.addresses) > MAX_ADDRESSES:
        raise RemoteProtocolError(f"it has {len(hello.addresses)} addresses (limit {MAX_ADDRESSES})")
    texts = (hello.name, hello.host, *hello.addresses)
    if not all(text.isprintable() for text in texts):
        raise RemoteProtocolError("its name, its host or an address is not printable")
    if max(map(len, texts)) > MAX_TEXT_CHARS:
        raise RemoteProtocolError(f"its name, its host or an address has more than {MAX_TEXT_CHARS} letters")
