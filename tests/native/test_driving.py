"""An engine that a loop of calls drives: its other duties do not wait until the loop ends."""

import socket
import time

import numpy as np

from ringfold._native import EpochSpec
from ringfold.peer.engine import Engine, new_engine
from ringfold.wire.frames import FrameKind, FrameReader

HEARTBEAT_MS = 10
MIN_HEARTBEATS = 100
DEADLINE_S = 5.0
"""Five times as long as so many heartbeats take."""
FLOAT32 = 10


def test_a_loop_of_short_calls_sends_its_heartbeats() -> None:
    """Each call ends without waiting, and the next one comes before the engine's own thread may drive.

    A peer alone in its ring is the extreme: its ops end when they are submitted.
    """
    engine = new_engine(spin_us=300)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            conn = engine.dial("127.0.0.1", listener.getsockname()[1], 5_000)
            master, _ = listener.accept()
        with master:
            opened = engine.next_event(DEADLINE_S)
            assert opened is not None
            assert (opened.kind, opened.conn) == ("opened", conn)
            engine.make_control(conn, HEARTBEAT_MS, 60_000)
            alone = EpochSpec(
                epoch=1, rank=0, members=[1], evidence_by_master=False, small_bytes=1024, segment_bytes=1 << 20
            )
            engine.install(alone)
            heartbeats, took_s = _call_until_heartbeats_came(engine, master)
    finally:
        engine.shutdown()
    assert heartbeats >= MIN_HEARTBEATS, (
        f"{heartbeats} heartbeats in {took_s:.1f} s of calls; one is due every {HEARTBEAT_MS} ms"
    )


def _call_until_heartbeats_came(engine: Engine, master: socket.socket) -> tuple[int, float]:
    """Call without a pause until enough heartbeats have come, or the deadline is over; their number, and the time."""
    array, reader, heartbeats, began = np.ones(4, np.float32), FrameReader(), 0, time.monotonic()
    master.setblocking(False)
    while heartbeats < MIN_HEARTBEATS and time.monotonic() - began < DEADLINE_S:
        for _ in range(100):
            engine.all_reduce(array, FLOAT32, 0, 0, False, 10**12)
        try:
            chunk = master.recv(65_536)
        except BlockingIOError:
            continue
        heartbeats += sum(kind is FrameKind.HEARTBEAT for kind, _ in reader.feed(chunk))
    return heartbeats, time.monotonic() - began
