"""Which peers are alive, as far as one observer can tell.

A closed connection is a death at once. Silence needs a decision: it may be a frozen process, a broken link, or a link
broken in one direction. Each peer's heartbeats echo the highest number received from the master, so both directions are
observed: a peer is silent since its last bytes, or since its echo last advanced, whichever is longer ago.

The observer itself may have been suspended. After a long gap, everything that it receives is old, and what it has not
received may be in its socket buffers. So the master's own clock, `StallCompensatedClock`, stops while the master does
not run: it leaves out the gap between two ticks, and thereby shifts all deadlines.
"""

from dataclasses import dataclass

from ringfold.master.events import Ns
from ringfold.units import MS
from ringfold.wire.messages import Liveness

LATE_NS = 200 * MS
"""Ticks arrive every 50 ms; a longer gap than this means that the master itself was late."""


class StallCompensatedClock:
    """The master's clock, without the time in which the master did not run. Never runs backwards."""

    def __init__(self, started_ns: Ns) -> None:
        self._ticked_ns = started_ns
        self._lost_ns = 0
        self._latest = started_ns

    def read(self, now_ns: Ns, *, tick: bool) -> Ns:
        """The master's time at this event. The first event after a gap removes the gap, whatever event it is."""
        if now_ns - self._ticked_ns > LATE_NS:
            self._lost_ns += now_ns - self._ticked_ns
            self._ticked_ns = now_ns
        elif tick:
            self._ticked_ns = now_ns
        self._latest = self.peek(now_ns)
        return self._latest

    def peek(self, now_ns: Ns) -> Ns:
        """The master's time, without an event."""
        return max(self._latest, now_ns - self._lost_ns)


@dataclass(slots=True)
class StepProgress:
    """A member's progress, and how long its steps take, as far as the master can observe it."""

    last_progress_ns: Ns
    """When it last sent a message, committed an op, or was in one."""
    step_since_ns: Ns
    """When it last committed an op, or waited in a call."""
    longest_step_ns: Ns = 0

    def on_heartbeat(self, now: Ns, *, committed: bool, in_op: bool, in_call: bool) -> None:
        if committed:
            self.longest_step_ns = max(self.longest_step_ns, now - self.step_since_ns)
        if committed or in_call:
            self.step_since_ns = now
        if committed or in_op:
            self.last_progress_ns = now

    def is_in_time(self, now: Ns, heartbeat_ms: int) -> bool:
        """Whether it is no slower than allowed: a step may take twice as long as the longest one so far."""
        return now - self.last_progress_ns < max(2 * self.longest_step_ns, 2 * heartbeat_ms * MS)


def silent_ms(now: Ns, received_ns: Ns, echo_ns: Ns) -> int:
    """For how long a peer has been silent, in the direction that has been silent longer."""
    return max(0, now - min(received_ns, echo_ns)) // MS


def is_suspected(silence_ms: int, liveness: Liveness) -> bool:
    return silence_ms >= liveness.suspect_after_ms


def evict_reason(now: Ns, received_ns: Ns, echo_ns: Ns, liveness: Liveness) -> str | None:
    """Why a peer must be evicted now, or None."""
    silence = silent_ms(now, received_ns, echo_ns)
    if silence < liveness.evict_after_ms:
        return None
    if received_ns > echo_ns and silent_ms(now, received_ns, received_ns) < liveness.suspect_after_ms:
        return (
            f"it has not received a heartbeat of the master for {silence} ms (evict_after_ms {liveness.evict_after_ms})"
        )
    return f"silent for {silence} ms (evict_after_ms {liveness.evict_after_ms})"
