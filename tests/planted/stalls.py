"""Wrong watchdogs on purpose: the simulation of stalls must find them (see `planted.py`)."""

from functools import partial

from planted import Bug
from ringfold.master.events import Ns
from ringfold.master.machine import Master
from ringfold.master.run import Peer
from ringfold.master.stalls import Stall, StallDecision, Watchdog
from ringfold.testing.scenario import run_stalls
from ringfold.testing.simulation import Setup
from ringfold.wire.messages import Busy


class _Impatient(Watchdog):
    """Evicts a peer that is late for one of the others, and does not check whether all others wait."""

    def judge(self, now: Ns, stall: Stall) -> StallDecision:
        timeout = self._timeout(stall.key)
        if timeout is None or not stall.absent or stall.excuse or not all(each.is_idle for each in stall.absent):
            return StallDecision(None)
        return StallDecision(min(stall.since_ns.values()) + timeout)


class _Deaf(Watchdog):
    def busy(self, now: Ns, peer: Peer, message: Busy) -> None:
        return


def _with_watchdog(watchdog: type[Watchdog]) -> Setup:
    class Wrong(Master):
        def __init__(self, *arguments: object, **named: object) -> None:
            super().__init__(*arguments, **named)  # type: ignore[arg-type]
            self._watchdog.__class__ = watchdog

    return Setup(master=Wrong)


def _bug(text: str, setup: Setup) -> Bug:
    return Bug(text, partial(run_stalls, base=setup))


BUGS: dict[str, Bug] = {
    "impatient_watchdog": _bug("the watchdog evicts in a step that is slow for all", _with_watchdog(_Impatient)),
    "deaf_watchdog": _bug("the watchdog ignores that a peer is busy", _with_watchdog(_Deaf)),
}
