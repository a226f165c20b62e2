"""What a client wants of its agent and what it has got: flows in, requests out, places back. Pure.

The flows that a process wants are kept here, whether there is an agent or not. When a connection begins, all of them
are asked for anew; when it ends, none has a place any more. So an agent may come, go and come back at any time, and
whoever registered a flow once need not know. A flow that was refused because there was no room is asked for again, one
at a time (`retry`): room may be there later.

A place belongs to the connection that gave it. An answer for a flow that is not wanted any more is undone by the
Deregister that went out behind the request, so nothing needs to be remembered for it.
"""

from collections import Counter
from dataclasses import dataclass, field

from ringfold.agent.registry import fault
from ringfold.wire.agent import (
    AGENT_PROTOCOL,
    AgentHello,
    AgentRefused,
    AgentWelcome,
    Deregister,
    Flow,
    FromAgent,
    Measured,
    Place,
    Register,
    Registered,
    ToAgent,
)

SHORTEST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 30.0
SERVED_S = 1.0
"""An agent that was there for so long is away for the first time when it goes."""


def pause_s(away_s: float) -> float:
    """How long to wait before looking for an agent again, when none was there for so long.

    An eighth of that time: an agent that is restarted is found at once, and on a host that has none there are some 70
    looks in the first four minutes, each of a few microseconds, and then one every 30 s.
    """
    return min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, away_s / 8))


@dataclass(eq=False, slots=True)
class Wish:
    """A flow that the process has. `place` is where its hints are; None: local policy, and `refused` may say why."""

    flow: Flow
    place: Place | None = None
    refused: str = ""
    is_sound: bool = True
    """Whether an agent would take it; if not, none is asked."""


@dataclass(eq=False, slots=True)
class Enrolment:
    """One process's flows and their places."""

    name: str
    wishes: dict[int, Wish] = field(default_factory=dict)
    generation: int = 0
    """The agent's life that the places are of; 0: there is no agent."""
    refusals: Counter[str] = field(default_factory=Counter)
    _is_connected: bool = False
    _last_request: int = 0
    _asked: dict[int, int] = field(default_factory=dict)
    _no_room: dict[int, None] = field(default_factory=dict)

    def want(self, flow: Flow) -> list[ToAgent]:
        assert flow.connection not in self.wishes
        why = fault(flow)
        self.wishes[flow.connection] = Wish(flow, refused=why, is_sound=not why)
        return [self._register(flow)] if self._is_connected and not why else []

    def drop(self, connection: int) -> list[ToAgent]:
        """The flow has ended; one that is not there has ended before."""
        self._no_room.pop(connection, None)
        wish = self.wishes.pop(connection, None)
        if wish is None or not wish.is_sound or not self._is_connected:
            return []
        self._last_request += 1
        return [Deregister(self._last_request, connection)]

    def measured(self, report: Measured) -> list[ToAgent]:
        wish = self.wishes.get(report.connection)
        return [report] if wish is not None and wish.place is not None else []

    @property
    def has_refused(self) -> bool:
        """Whether `retry` would ask for something."""
        return bool(self._no_room)

    def retry(self) -> list[ToAgent]:
        """Ask again for one flow that there was no room for."""
        connection = next(iter(self._no_room), None)
        if connection is None:
            return []
        del self._no_room[connection]
        return [self._register(self.wishes[connection].flow)]

    def connected(self) -> list[ToAgent]:
        """A connection begins: say hello, and ask for everything."""
        self._is_connected = True
        self._asked.clear()
        wanted = [wish.flow for wish in self.wishes.values() if wish.is_sound]
        return [AgentHello(AGENT_PROTOCOL, self.name), *map(self._register, wanted)]

    def disconnected(self) -> list[int]:
        """It ended: the flows that had a place, and have none now."""
        self._is_connected, self.generation = False, 0
        self._no_room.clear()
        lost = [connection for connection, wish in self.wishes.items() if wish.place is not None]
        for wish in self.wishes.values():
            wish.place = None
        return lost

    def heard(self, message: FromAgent) -> list[int]:
        """The flows whose place is another one now."""
        match message:
            case AgentWelcome(_, generation):
                self.generation = generation
            case Registered(request, connection, slot, generation):
                wish = self.wishes.get(connection)
                if self._asked.pop(request, None) is not None and wish is not None:
                    wish.place, wish.refused = (slot, generation), ""
                    return [connection]
            case AgentRefused(request, kind, text):
                self.refusals[kind] += 1
                asked = self._asked.pop(request, None)
                if asked is not None and (wish := self.wishes.get(asked)) is not None:
                    wish.refused = text
                    if kind in ("quota", "full"):
                        self._no_room[asked] = None
            case _:
                pass
        return []

    def _register(self, flow: Flow) -> Register:
        self._last_request += 1
        self._asked[self._last_request] = flow.connection
        return Register(self._last_request, flow)
