"""The core's commands under the network's connection numbers.

A real engine gives a dialled connection its number at once; the core learns of one when it is established. So the
peer machine is given the number of the network's end, and this translates both ways.
"""

from collections.abc import Iterator, Sequence

from ringfold._native import EngineEvent, EpochSpec, LaneInfo, LanePromotion, OpAtSeal, OpVerdict
from ringfold.peer.engine import RawBlock
from ringfold.testing.core import Core
from ringfold.testing.network import End, Network

_ABOUT_A_CONNECTION = frozenset({"opened", "accepted", "message", "closed", "silent", "blocks", "sample"})


class Sockets:
    """All connections of one process. Events of one that is gone are ignored, as an engine does."""

    def __init__(self, core: Core, network: Network) -> None:
        self._core, self._network = core, network
        self.ends: dict[int, End] = {}
        """By the core's number."""
        self._numbers: dict[int, int] = {}
        """From the network's number to the core's."""
        self._dialling: dict[int, End] = {}

    def dialled(self, end: End) -> None:
        self._dialling[end.id] = end

    def add(self, end: End, *, accepted: bool) -> None:
        """A connection is established."""
        self._dialling.pop(end.id, None)
        number = self._core.open(end.remote.name, accepted)
        self.ends[number] = end
        self._numbers[end.id] = number

    def number(self, end: End) -> int | None:
        return self._numbers.get(end.id)

    def live(self) -> Iterator[tuple[int, End]]:
        return ((number, end) for number, end in self.ends.items() if not end.closed)

    def translate(self, event: EngineEvent) -> EngineEvent:
        """An event of the core, with the network's number in it."""
        if event.kind in _ABOUT_A_CONNECTION:
            event.conn = self.ends[event.conn].id
        return event

    # The commands of an engine

    def send(self, conn: int, body: bytes) -> None:
        if conn in self._numbers:
            self._core.send(self._numbers[conn], body)

    def resume(self, conn: int) -> None:
        if conn in self._numbers:
            self._core.resume(self._numbers[conn])

    def make_control(self, conn: int, heartbeat_ms: int, dead_after_ms: int) -> None:
        self._core.make_control(self._numbers[conn], heartbeat_ms, dead_after_ms)

    def promote(self, lane: LanePromotion) -> None:
        if lane.conn in self._numbers:
            lane.conn = self._numbers[lane.conn]
            self._core.promote(lane)

    def close(self, conn: int, reason: str) -> None:
        if conn in self._numbers:
            self._core.close(self._numbers[conn], reason)
        elif conn in self._dialling:
            self._network.close(self._dialling.pop(conn))

    def lanes(self) -> list[LaneInfo]:
        lanes = self._core.lanes()
        for lane in lanes:
            lane.conn = self.ends[lane.conn].id
        return lanes

    def set_registrations(self, count: int) -> None:
        self._core.set_registrations(count)

    def seal(self, epoch: int) -> list[OpAtSeal]:
        return self._core.seal(epoch)

    def settle(self, epoch: int, verdicts: list[OpVerdict], default_reason: bytes) -> None:
        self._core.settle(epoch, verdicts, default_reason)

    def refuse(self, tag: int, step: int, call: int, reason: bytes) -> None:
        self._core.refuse(tag, step, call, reason)

    def set_step(self, step: int) -> None:
        self._core.set_step(step)

    def restart_calls(self) -> None:
        self._core.restart_calls()

    def install(self, epoch: EpochSpec) -> None:
        self._core.install(epoch)

    def fail_all(self, status: int, reason: bytes) -> None:
        self._core.fail_all(status, reason)

    def progress(self) -> list[tuple[int, int]]:
        return self._core.progress()

    def set_path_shares(self, peer: int, shares: Sequence[int], flags: int = 0) -> None:
        self._core.set_path_shares(peer, shares, flags)

    def path_bytes(self, to_next: bool) -> list[int]:
        return self._core.path_bytes(to_next)

    def make_bulk(self, conn: int) -> None:
        if conn in self._numbers:
            self._core.make_bulk(self._numbers[conn])

    def send_blocks(self, conn: int, blocks: Sequence[RawBlock]) -> list[int]:
        return self._core.send_blocks(self._numbers[conn], blocks) if conn in self._numbers else []

    def expect_blocks(self, conn: int, batch: int, blocks: Sequence[RawBlock]) -> None:
        if conn in self._numbers:
            self._core.expect_blocks(self._numbers[conn], batch, blocks)

    def fill(self, conn: int, on: bool) -> None:
        if conn in self._numbers:
            self._core.fill(self._numbers[conn], on)

    def sample(self, conn: int, every_ns: int) -> None:
        if conn in self._numbers:
            self._core.sample(self._numbers[conn], every_ns)
