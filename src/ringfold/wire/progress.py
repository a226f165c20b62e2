"""Who works and who hangs: what a peer says of its own work, and how somebody has a peer evicted."""

from ringfold.wire.base import Message, PeerId

MAX_BUSY_MS = 7 * 86_400_000
"""A week."""


class Busy(Message, frozen=True, tag="busy"):
    """For so long from now the peer works on something else than its calls (`run.busy`); 0: no longer.

    It is not evicted meanwhile for keeping others waiting."""

    ms: int


class CallGoesOn(Message, frozen=True, tag="call_goes_on"):
    """Those whom the call of this ballot waited for are evicted, or busy: its caller may wait as long again."""

    ballot: int


class EvictRequest(Message, frozen=True, tag="evict_request"):
    """Somebody wants a peer out of the run: `peer` is its id or its name, `by` says who asks, for the log and for the
    peer itself. Proves the token like a peer."""

    version: int
    peer: str
    reason: str
    by: str
    nonce: bytes
    proof: bytes
    run: str = ""
    """Without a name it is the default run, or the only one."""


class EvictResponse(Message, frozen=True, tag="evict_response"):
    """What came of it. `peer` and `name` are those of the peer that was evicted, if one was."""

    done: bool
    text: str
    peer: PeerId = 0
    name: str = ""
