"""Bugs on purpose around the transport agent: in the agent, in the clients of Ringfold's processes, in C clients."""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from planted import Bug
from ringfold.agent.client import FlowRegistrations
from ringfold.agent.effects import Effect
from ringfold.agent.machine import AgentMachine
from ringfold.agent.registry import Client
from ringfold.testing.agents import SLOTS, AgentLife, MsgpackClient, SimClient, Table, run_agents
from ringfold.wire.agent import AgentHello, Flow, FromAgent, Place, Registered, ToAgent

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 1 << 18


class CClient:
    """The core of the C header, as a client of the simulation."""

    def __init__(self, library: ctypes.CDLL, planted: int = 0) -> None:
        self._library, self._client = library, ctypes.c_void_p(library.client_new(planted))
        self._buffer = ctypes.create_string_buffer(MAX_BYTES)

    def __del__(self) -> None:
        self._library.client_free(self._client)

    def add(self, flow: Flow, now_ns: int) -> int:
        def texts(values: Sequence[str]) -> "ctypes.Array[ctypes.c_char_p]":
            return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))

        ends = flow.source.encode(), flow.destination.encode()
        paths = texts([local for local, _ in flow.paths]), texts([remote for _, remote in flow.paths])
        number = self._library.client_add(self._client, *ends, len(flow.paths), *paths, ctypes.c_uint64(now_ns))
        assert number >= 0, f"the C client refuses {flow}"
        return int(number)

    def remove(self, number: int, now_ns: int) -> None:
        assert self._library.client_remove(self._client, number, ctypes.c_uint64(now_ns)) == 0

    def connected(self, now_ns: int) -> None:
        self._library.client_connected(self._client, ctypes.c_uint64(now_ns))

    def disconnected(self) -> None:
        self._library.client_disconnected(self._client)

    def receive(self, chunk: bytes, now_ns: int) -> bool:
        size = ctypes.c_size_t(len(chunk))
        return self._library.client_receive(self._client, chunk, size, ctypes.c_uint64(now_ns)) == 0

    def tick(self, now_ns: int) -> bool:
        return self._library.client_tick(self._client, ctypes.c_uint64(now_ns)) == 0

    def outgoing(self) -> bytes:
        taken = self._library.client_outgoing(self._client, self._buffer, ctypes.c_size_t(MAX_BYTES))
        return ctypes.string_at(self._buffer, taken)

    def place(self, number: int) -> Place | None:
        slot, generation = ctypes.c_uint32(), ctypes.c_uint32()
        found = self._library.client_place(self._client, number, ctypes.byref(slot), ctypes.byref(generation))
        return (slot.value, generation.value) if found == 0 else None


@cache
def c_library() -> ctypes.CDLL | None:
    """The C client as a library; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as made:
        built = Path(made) / "agent_core.so"
        source = ROOT / "tests" / "native" / "agent_core.c"
        flags = ["-std=c99", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
        subprocess.run([compiler, *flags, f"-I{ROOT / 'include'}", str(source), "-o", str(built)], check=True)
        library = ctypes.CDLL(str(built))
    library.client_new.restype = ctypes.c_void_p
    library.client_outgoing.restype = ctypes.c_size_t
    return library


def mixed_clients(number: int) -> SimClient:
    """C clients beside Ringfold's own, on one agent; only those where there is no compiler."""
    library = c_library()
    return MsgpackClient() if library is None or number % 2 else CClient(library)


class RegistersOnce(FlowRegistrations):
    """Registers its flows with the first agent only."""

    def connected(self) -> list[ToAgent]:
        messages = super().connected()
        return messages if self._last_request < 5 else [each for each in messages if isinstance(each, AgentHello)]


class TakesAnyResponse(FlowRegistrations):
    """Gives the place of a response to every flow that waits for one."""

    def receive(self, message: FromAgent) -> list[int]:
        changed = super().receive(message)
        if isinstance(message, Registered):
            for wanted in self.flows.values():
                wanted.place = wanted.place or (message.slot, message.generation)
        return changed


class CountsFromZero(AgentLife):
    """Does not continue the generations of the table that it takes over."""

    def initial_generations(self) -> list[int]:
        return [0] * SLOTS


class KeepsFlowsOfTheDead(AgentMachine):
    """Leaves the flows of a client that is gone where they are."""

    def _close(self, client: Client) -> list[Effect]:
        return []


class AgentOfTheDead(AgentLife):
    def __init__(self, table: Table, now_ns: int) -> None:
        super().__init__(table, now_ns)
        self.machine.__class__ = KeepsFlowsOfTheDead


def _with(
    text: str,
    make_client: Callable[[int], SimClient] = mixed_clients,
    make_life: Callable[[Table, int], AgentLife] = AgentLife,
) -> Bug:
    return Bug(text, lambda seed: run_agents(seed, make_client=make_client, make_life=make_life))


def _in_c(text: str, planted: int) -> Bug:
    def make(number: int) -> SimClient:
        library = c_library()
        assert library is not None
        return CClient(library, planted)

    return _with(text, make)


BUGS = {
    "counts_from_zero": _with("an agent begins again with the generations of slots", make_life=CountsFromZero),
    "keeps_flows_of_the_dead": _with("an agent keeps the flows of a dead client", make_life=AgentOfTheDead),
    "registers_once": _with("a client registers once", lambda number: MsgpackClient(RegistersOnce("planted"))),
    "takes_any_response": _with(
        "a client takes any response for its own", lambda number: MsgpackClient(TakesAnyResponse("planted"))
    ),
}
C_BUGS = {
    "c_registers_once": _in_c("a C client registers once", 1),
    "c_removes_silently": _in_c("a C client does not report the end of a flow", 2),
    "c_takes_any_response": _in_c("a C client takes any response for its own", 3),
}
if c_library() is not None:
    BUGS |= C_BUGS
