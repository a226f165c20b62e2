"""Runs take turns: one that floods the master delays another by a bounded number of frames."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st
from test_master_runs import MasterHarness

from ringfold.master.effects import SendHeartbeat
from ringfold.master.events import HeartbeatReceived
from ringfold.master.scheduling import QUANTUM, SHARE, FrameScheduler
from ringfold.wire.frames import Heartbeat


class Loop:
    """Frames that wait at connections, and the turns of the master's loop."""

    def __init__(self, frames: dict[tuple[str, int], int]) -> None:
        self.turns = FrameScheduler()
        self.left = dict(frames)
        self.runs = {conn: run for run, conn in frames}
        self.handled: list[tuple[str, int]] = []
        for run, conn in frames:
            self.turns.wait(run, conn)

    def turn(self) -> None:
        self.turns.begin()
        while (chosen := self.turns.next()) is not None:
            run, conn, most = chosen
            count = min(most, self.left[run, conn])
            self.handled += [(run, conn)] * count
            self.left[run, conn] -= count
            self.turns.spend(run, count)
            if self.left[run, conn]:
                self.turns.wait(run, conn)


def test_a_flood_of_one_run_delays_another_by_no_more_than_its_share() -> None:
    """However many connections flood, and however much is in their queues."""
    frames = {("flood", conn): 100_000 for conn in range(500)} | {("calm", 1_000): 1}
    loop = Loop(frames)
    loop.turn()
    assert loop.handled.index(("calm", 1_000)) <= SHARE
    assert loop.handled.count(("calm", 1_000)) == 1


def test_a_frame_that_arrives_while_others_flood_is_handled_in_the_same_turn() -> None:
    loop = Loop({("flood", conn): 100_000 for conn in range(50)})
    loop.turn()
    assert loop.turns.budget("calm") == QUANTUM, "the flood has spent its own share, and not the other's"
    assert loop.turns.budget("flood") == 0


def test_connections_of_a_run_take_turns_too() -> None:
    loop = Loop({("a", conn): 1_000 for conn in range(4)})
    loop.turn()
    assert {conn for _, conn in loop.handled} == {0, 1, 2, 3}
    assert len(loop.handled) == SHARE


@given(st.dictionaries(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), st.integers(1, 400), min_size=1))
def test_everything_is_handled_and_no_turn_gives_a_run_more_than_its_share(frames: dict[tuple[str, int], int]) -> None:
    unique = {(f"{run}", 10 * ord(run) + conn): count for (run, conn), count in frames.items()}
    loop = Loop(unique)
    turns = deque[int]()
    while not loop.turns.is_over:
        before = len(loop.handled)
        loop.turn()
        new = loop.handled[before:]
        assert new, "a turn that does nothing would never end"
        assert all(sum(each == run for each, _ in new) <= SHARE for run in "abc")
        turns.append(len(new))
    assert len(loop.handled) == sum(unique.values())


def test_heartbeats_of_a_calm_run_are_handled_in_the_turn_after_their_arrival() -> None:
    """With the machines of real runs: 50 peers of one send heartbeats without end, one peer of another sends one."""
    harness, turns = MasterHarness(), FrameScheduler()
    for conn in range(1, 52):
        harness.join(conn, "calm" if conn == 51 else "flood")
    queues = {conn: deque(range(1, 2 if conn == 51 else 2_000)) for conn in range(1, 52)}
    for conn in queues:
        turns.wait(harness.runs.owner(conn), conn)
    handled = 0
    turns.begin()
    while (chosen := turns.next()) is not None:
        run, conn, most = chosen
        for _ in range(min(most, len(queues[conn]))):
            harness.step(HeartbeatReceived(conn, Heartbeat(queues[conn].popleft(), 0)))
            turns.spend(run, 1)
            handled += run == "flood"
        if run == "calm":
            break
        turns.wait(run, conn)
    assert handled <= SHARE
    answers = [effect for _, effect in harness.wait(300) if isinstance(effect, SendHeartbeat) and effect.conn == 51]
    assert [answer.echo for answer in answers] == [1]
