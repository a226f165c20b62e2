"""Who is alive, as far as one observer can tell.

A closed connection is death at once and needs no judgement. Silence does: a frozen process, a cut cable, a cable cut in
one direction. Each peer's heartbeats echo the highest number heard from the master, so both directions are seen: a peer
is silent since it was last heard, or since its echo last advanced, whichever is longer ago.

The observer may be the one that was asleep. Everything it hears after a long gap is old, and everything it did not hear
may lie in its socket buffers. So the master's own time, by which all its deadlines are set and judged, does not run
while the master did not run: `PatientClock` takes a gap between two ticks out of it, and all deadlines move at once.
"""

from dataclasses import dataclass

from ringfold.master.events import Ns
from ringfold.units import MS as MS
from ringfold.wire.messages import Liveness

LATE_NS = 200 * MS
"""Ticks come every 50 ms; a gap longer than this means that the master itself was late."""


class PatientClock:
    """Time as the master lived it. Never runs backwards."""

    def __init__(self, started_ns: Ns) -> None:
        self._ticked_ns = started_ns
        self._lost_ns = 0
        self._latest = started_ns

    def read(self, now_ns: Ns, *, tick: bool) -> Ns:
        """The master's time at this event. The first event after a gap takes the gap out, whatever it is."""
        if now_ns - self._ticked_ns > LATE_NS:
            self._lost_ns += now_ns - self._ticked_ns
            self._ticked_ns = now_ns
        elif tick:
            self._ticked_ns = now_ns
        self._latest = self.peek(now_ns)
        return self._latest

    def peek(self, now_ns: Ns) -> Ns:
        """The master's time, for somebody who only looks."""
        return max(self._latest, now_ns - self._lost_ns)


@dataclass(slots=True)
class Pace:
    """How a member gets on with its work, and how long its steps take, as far as that can be seen from here."""

    moved: Ns
    """When it last said something, committed an op, or was in one."""
    step_since: Ns
    """When it last committed an op, or waited in a call."""
    longest_step: Ns = 0

    def beat(self, now: Ns, *, committed: bool, in_op: bool, in_call: bool) -> None:
        if committed:
            self.longest_step = max(self.longest_step, now - self.step_since)
        if committed or in_call:
            self.step_since = now
        if committed or in_op:
            self.moved = now

    def is_moving(self, now: Ns, heartbeat_ms: int) -> bool:
        """Whether it is no slower than it may be: a step takes twice the longest one at most."""
        return now - self.moved < max(2 * self.longest_step, 2 * heartbeat_ms * MS)


def silent_ms(now: Ns, heard: Ns, echoed: Ns) -> int:
    """For how long a peer has been silent, in the direction that is silent longer."""
    return max(0, now - min(heard, echoed)) // MS


def suspected(silence_ms: int, liveness: Liveness) -> bool:
    return silence_ms >= liveness.suspect_after_ms


def evict_reason(now: Ns, heard: Ns, echoed: Ns, liveness: Liveness) -> str | None:
    """Why a peer must go now, or None."""
    silence = silent_ms(now, heard, echoed)
    if silence < liveness.evict_after_ms:
        return None
    if heard > echoed and silent_ms(now, heard, heard) < liveness.suspect_after_ms:
        return f"it hears no heartbeat of the master since {silence} ms (evict_after_ms {liveness.evict_after_ms})"
    return f"silent for {silence} ms (evict_after_ms {liveness.evict_after_ms})"
