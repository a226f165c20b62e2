"""`run.evict`: ask the master to evict another peer, over a connection of its own, as `ringfold evict` does."""

from ringfold.errors import UsageError
from ringfold.peer.session import Session
from ringfold.runtime import ask
from ringfold.wire.messages import PeerId


def evict_peer(session: Session, peer: PeerId | str, reason: str) -> None:
    """Returns when it is out; raises `UsageError` if the master refuses, and says why."""
    session.check_usable("evict")
    machine, wanted = session.machine, str(peer)
    me, name = machine.peer, machine.identity.name
    if wanted in (str(me), name):
        raise UsageError(f"evict: {wanted} is this peer itself: call leave()")
    of_run, run = machine.identity.token, machine.identity.run
    with ask.reach(machine.masters, of_run, run=run, is_of_run=True) as connection:
        response = connection.evict(wanted, reason, f"peer {me} ({name})")
    if not response.done:
        raise UsageError(f"evict: {response.text}")
