"""When a peer takes its master for silent: its own frames must be echoed, or at least make progress."""

import pytest

from ringfold.testing.core import Core, new_core
from ringfold.wire.frames import master_heartbeat

MS = 1_000_000
DEAD_AFTER_MS = 1_000
LARGE = 1_000_000


class Wire:
    """A peer's core, and a master that sends all the time but whose echoes do not advance."""

    def __init__(self) -> None:
        self.now = 5_000 * MS
        self.core: Core = new_core()
        self.conn = self.core.open("master", False)
        self.core.set_now(self.now)
        self.core.make_control(self.conn, 100, DEAD_AFTER_MS)
        self.silent = False

    def wait(self, ms: int) -> None:
        self.now += ms * MS
        self.core.receive(self.now, self.conn, master_heartbeat(1, 0))
        self.core.tick(self.now)
        while (event := self.core.next_event()) is not None:
            self.silent |= event.kind == "silent"


@pytest.mark.parametrize("drains", [True, False])
def test_progress_of_a_large_frame_counts_as_an_echo(drains: bool) -> None:
    wire = Wire()
    wire.core.send(wire.conn, bytes(LARGE))
    for _ in range(2 * DEAD_AFTER_MS // 100):
        wire.wait(100)
        if drains:
            assert wire.core.transmit(wire.now, wire.conn, 1_000)
    assert wire.silent != drains


@pytest.mark.parametrize("drains", [True, False])
def test_progress_of_a_frame_in_the_kernel_counts_as_an_echo(drains: bool) -> None:
    wire = Wire()
    wire.core.send(wire.conn, bytes(LARGE))
    left = 0
    for _ in range(2 * DEAD_AFTER_MS // 100):
        while taken := wire.core.transmit(wire.now, wire.conn, LARGE):
            left += len(taken)
        left -= 10_000 if drains else 0
        wire.core.acknowledged(wire.now, wire.conn, left)
        wire.wait(100)
    assert wire.silent != drains
