"""A peer's guardian: the process that reports the peer's death to the master (`native/guardian`).

After each handshake with a master a thread opens a second connection to it, proves that it is this peer's, starts the
guardian with it, and ends. The join does not wait for it, and nothing else depends on it: where there is no guardian,
the master sees a death when the kernel has closed the dead process's connections.

A guardian ends by itself when the peer has ended, or when the master has closed its connection.
"""

import logging
from functools import partial

from ringfold.errors import MasterUnreachable, RingfoldError
from ringfold.peer.engine import Engine
from ringfold.peer.machine import PeerMachine
from ringfold.peer.settings import Identity
from ringfold.runtime import threads
from ringfold.runtime.master_client import MasterClient
from ringfold.runtime.process import guardian_program
from ringfold.wire.frames import message_frame
from ringfold.wire.messages import PeerDied, PeerId

ATTEMPT_S = 2.0
CLOSE_S = 0.5
"""How long the end of a session waits for an attempt that is in progress."""
PAUSES_S = (0.0, 1.0, 5.0)
"""Before each attempt to reach the master."""

_log = logging.getLogger("ringfold.peer")


class GuardianStarter:
    """Starts a guardian for each control connection of a peer."""

    def __init__(self, engine: Engine, identity: Identity) -> None:
        self._engine, self._identity, self._program = engine, identity, guardian_program()
        self._conn: int | None = None
        self._stop = threads.Event()
        self._thread: threads.Thread | None = None

    def follow(self, conn: int, machine: PeerMachine) -> None:
        """Start a guardian in the background, if this control connection has none yet."""
        if conn == self._conn:
            return
        self._conn = conn
        if self._program is None:
            return
        self._stop.set()  # an attempt to reach an earlier master is given up
        self._stop = threads.Event()
        work = partial(self._start, self._program, machine.masters[0], machine.peer, machine.control_key, self._stop)
        try:
            self._thread = threads.start("ringfold-guardian", work)
        except RuntimeError as error:  # no more threads are allowed, or the interpreter ends
            _log.debug("this peer has no guardian: %s", error)

    def close(self) -> None:
        """Give up what is in progress; a guardian that was started ends by itself."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _start(self, program: str, address: str, peer: PeerId, key: bytes, stop: threads.Event) -> None:
        me, message = self._identity, message_frame(PeerDied()).hex()
        for pause_s in PAUSES_S:
            if stop.wait(pause_s):
                return
            try:
                with MasterClient(address, me.token, ATTEMPT_S, me.run, is_run_token=True) as client:
                    if not self._engine.start_guardian(program, client.guard(peer, key), message):
                        _log.info("this peer has no guardian: %s cannot be run here", program)
                return
            except MasterUnreachable as error:
                _log.debug("the guardian does not reach the master: %s", error)
            except RingfoldError as error:
                _log.debug("this peer has no guardian: %s", error)
                return
