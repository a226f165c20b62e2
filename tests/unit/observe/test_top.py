"""`ringfold top`: what it draws, in a narrow terminal too, with 256 peers too, and what its keys do."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event as ThreadEvent
from typing import Any

import numpy as np
import pytest

pytest.importorskip("textual", reason="Textual (the extra top) is not installed")

from rich.text import Text
from test_metrics import peer, status
from textual.pilot import Pilot

import ringfold as rf
from ringfold.errors import MasterUnreachable
from ringfold.master.server import MasterThread
from ringfold.observe import terminal
from ringfold.observe.top import Details, Look, Peers, Top
from ringfold.observe.view import RunView
from ringfold.runtime import master_client
from ringfold.wire.events import Event, Stamp
from ringfold.wire.notices import PeerGone
from ringfold.wire.status import GroupStatus, LinkStatus, OpTotals, PeerStatus, Progress, RingLink, Status, Waiting

NARROW = (80, 24)


def sample(number: int, at: int, late: int = 0) -> PeerStatus:
    """A peer after `at` looks. The one that is `late` begins its ops last, waits the least, and is 8 steps behind."""
    waited_ns = at * (20_000_000 if number == late else 300_000_000)
    totals = OpTotals(
        10 * at,
        0,
        0,
        4_000,
        at * 50_000_000,
        at * 50_000_000,
        0,
        at * (100_000_000 if number == late else 400_000_000),
        waited_ns,
    )
    step = max(0, 3 * at - 8 * (number == late))
    progress = Progress("0.1.0", step, step, True, {"loss": 3.0 / (at + 1)}, 1_000, 500)
    return peer(number, name=f"host-{number:03}:4711", committed_ops=10 * at, totals=totals, progress=progress)


def seen(count: int, at: int, late: int = 0, **changed: object) -> Status:
    ring = list(range(1, count + 1))
    peers = [sample(number, at, late) for number in ring]
    edges = list(zip(ring, [*ring[1:], ring[0]], strict=True))
    links = [RingLink(a, b, "tcp", 1) for a, b in edges]
    rates = [LinkStatus(a, b, 1e6 if a == 5 else 3e7, 90.0, 100, "collective") for a, b in edges]
    groups = [GroupStatus(0, 8, "idle", ring, "ring", ring_links=links)]
    given: dict[str, Any] = {"groups": groups, "links": rates, "waiting": [], **changed}
    return status(*peers, **given)


WAIT = Waiting("group 0: all_reduce (tag 0)", [1, 2], [3], 4_000, "in 6 s", 6_000)
GONE = Event(Stamp(1, 1_000_000_000_000), PeerGone(9, "p9", "evicted", "silent for 5000 ms"))


def check(body: Callable[[Top, Pilot[None]], Awaitable[None]], size: tuple[int, int] = NARROW) -> None:
    """Run the application without a terminal, and without a master."""
    over = ThreadEvent()

    def none() -> Iterator[Look]:
        over.wait(60)
        yield from ()

    async def run() -> None:
        clock = iter(range(1_000_000, 10_000_000, 500))
        application = Top(none, now_ms=lambda: next(clock))
        async with application.run_test(size=size) as pilot:
            await body(application, pilot)
        over.set()

    asyncio.run(run())


async def feed(pilot: Pilot[None], *looks: Look) -> None:
    for look in looks:
        pilot.app.take(look)
    await pilot.pause()


def screen(top: Top) -> str:
    """The text on the screen, line by line."""
    width, height = top.size
    lines = [top.screen._compositor.render_strips()[number].text for number in range(height)]
    assert all(len(line) <= width for line in lines)
    return "\n".join(lines)


async def shows(top: Top, pilot: Pilot[None], *texts: str) -> str:
    """Wait until all of this is on the screen; what is on it then."""
    deadline = time.monotonic() + 30
    while not all(text in screen(top) for text in texts) and time.monotonic() < deadline:
        await pilot.pause(0.02)
    shown = screen(top)
    assert all(text in shown for text in texts), shown
    return shown


def order(top: Top) -> list[str]:
    table = top.query_one(Peers)
    return [str(table.ordered_rows[number].key.value) for number in range(table.row_count)]


@pytest.mark.parametrize(
    ("count", "size"), [(1, NARROW), (3, NARROW), (16, NARROW), (256, NARROW), (256, (160, 50))], ids=str
)
def test_everything_fits(count: int, size: tuple[int, int]) -> None:
    """The sentence on top, who is waited for, the ring, peers, incidents and keys are on the screen at once."""

    async def body(top: Top, pilot: Pilot[None]) -> None:
        looks = [seen(count, at, late=3, waiting=[WAIT] if at == 3 and count > 2 else []) for at in range(4)]
        await feed(pilot, *(("m", look, [GONE] if at == 0 else []) for at, look in enumerate(looks)))
        texts = [f"{count} peer", "step 9", "loss 0.75", "peer 9 (p9) evicted", "q quit"]
        texts += ["ring"] if count > 1 else ["alone"]
        texts += ["peers 1, 2 wait for peer 3", "evicted in 6.0 s"] if count > 2 else []
        texts += ["5→6 1 MB/s known"] if count == 256 else []
        await shows(top, pilot, *texts)
        if count > 2:
            assert order(top)[0] == "3"
        assert top.query_one(Peers).row_count == count
        assert top.query_one(Peers).size.height >= 5

    check(body, size)


def test_keys_sort_the_peers() -> None:
    async def body(top: Top, pilot: Pilot[None]) -> None:
        await feed(pilot, *(("m", seen(8, at, late=3), []) for at in range(4)))
        assert order(top)[0] == "3", "problems first"
        await pilot.press("p")
        assert order(top) == [str(number) for number in range(1, 9)]
        await pilot.press("l")
        assert order(top)[0] == "3", "the largest lag first"
        await pilot.press("s")
        assert order(top)[-1] == "3", "the highest step first"
        await pilot.press("w")
        assert order(top)[-1] == "3", "the longest wait first"

    check(body)


def test_the_cursor_stays_on_its_peer_when_the_order_changes() -> None:
    async def body(top: Top, pilot: Pilot[None]) -> None:
        await feed(pilot, *(("m", seen(8, at, late=7), []) for at in range(3)))
        await pilot.press("p", "down", "down", "down")
        assert top.query_one(Peers).peer == "4"
        await pilot.press("x")
        await feed(pilot, ("m", seen(8, 3, late=7), []))
        assert order(top)[0] == "7"
        assert top.query_one(Peers).peer == "4"

    check(body)


def test_enter_shows_one_peer_and_follows_it() -> None:
    async def body(top: Top, pilot: Pilot[None]) -> None:
        await feed(pilot, *(("m", seen(4, at), []) for at in range(3)))
        await pilot.press("p", "down", "enter")
        await shows(top, pilot, "peer 2 (host-002:4711) on h", "step  6", "at most 0.5 us off")
        assert isinstance(top.screen, Details)
        await feed(pilot, ("m", seen(4, 3), []))
        await shows(top, pilot, "step  9")
        await feed(pilot, ("m", seen(1, 4), []))
        await shows(top, pilot, "peer 2 is not in the run any more")
        await pilot.press("escape")
        await shows(top, pilot, "q quit")
        assert not isinstance(top.screen, Details)
        assert order(top) == ["1"]

    check(body)


def test_incidents_and_masters_have_screens() -> None:
    async def body(top: Top, pilot: Pilot[None]) -> None:
        await feed(
            pilot, ("m", seen(4, 0, leader="10.0.0.1:48148"), [GONE]), ("m", seen(4, 1, leader="10.0.0.1:48148"), [])
        )
        await pilot.press("i")
        await shows(top, pilot, "1 incident, the newest first", "silent for 5000 ms")
        await pilot.press("escape", "m")
        await shows(top, pilot, "10.0.0.1:48148 leads")
        await pilot.press("q")
        await shows(top, pilot, "q quit")
        assert not isinstance(top.screen, Details)

    check(body)


def test_a_lost_master_is_the_first_thing_to_read() -> None:
    async def body(top: Top, pilot: Pilot[None]) -> None:
        await feed(pilot, *(("m", seen(3, at), []) for at in range(3)), MasterUnreachable("m", "it is gone"))
        assert "no master" in (await shows(top, pilot, "no master")).splitlines()[0]
        await feed(pilot, ("m", seen(3, 3), []))
        assert "no master" not in (await shows(top, pilot, "[training]")).splitlines()[0]

    check(body)


def test_text_of_others_is_not_parsed_as_markup() -> None:
    async def body(top: Top, pilot: Pilot[None]) -> None:
        bad = peer(1, name="[red]x[/]", progress=Progress(step=1, logged={"[b]": 1.0}))
        await feed(pilot, ("m", status(bad, links=[], waiting=[]), []))
        await shows(top, pilot, "[red]x[/]")
        await pilot.press("enter")
        await shows(top, pilot, "([red]x[/])")

    check(body)


def test_only_what_changed_is_drawn_again() -> None:
    """256 peers at two looks a second must not take a core."""

    async def body(top: Top, pilot: Pilot[None]) -> None:
        await feed(pilot, ("m", seen(256, 1), []), ("m", seen(256, 2), []))
        table, updated = top.query_one(Peers), list[tuple[object, object]]()
        real = table.update_cell

        def update(row: str, column: str, value: Text) -> None:
            updated.append((row, column))
            real(row, column, value)

        table.update_cell = update
        page = top.page
        table.show(page.peers.values(), 0)
        before = len(updated)
        page.peers["17"].step += 1
        table.show(page.peers.values(), 0)
        assert updated[before:] == [("17", "3")]

    check(body)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("count", [2, 8, 30, 256])
def test_a_ring_has_three_lines_at_most(width: int, count: int) -> None:
    view = RunView("default")
    for at in range(3):
        view.look(1_000 * at, seen(count, at))
    page = view.page()
    lines = terminal.ring(page.groups["0"], page.peers, width)
    assert 1 <= len(lines) <= terminal.MAX_RING_LINES
    assert all(line.cell_len <= width for line in lines)
    text = Text("\n").join(lines).plain
    assert "1 ─" in text or f"{count} peers" in text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (940, "940 B"), (999.7, "1 kB"), (12_345_678, "12.3 MB"), (5e15, "5e+03 TB")]
)
def test_sizes_have_three_digits(count: float, text: str) -> None:
    assert terminal.size(count) == text


def test_it_shows_a_real_run() -> None:
    """A master and two peers in this process, followed as the command does."""
    stop, ready = ThreadEvent(), ThreadEvent()

    def train(master: MasterThread, name: str) -> None:
        with rf.join(master.address, name=name, timeout_s=30) as run:
            state = rf.SharedState(weights=np.zeros(8, np.float32))
            for step in run.steps(state, until=100_000, min_world=2):
                done = np.array([stop.is_set()], np.int64)
                step.all_reduce(done, op="max")
                step.log(loss=1.0 / (step.number + 1))
                ready.set()
                if done[0]:
                    return

    async def watch(master: MasterThread) -> None:
        application = Top(lambda: master_client.follow([master.address], b"", 0.1))
        async with application.run_test(size=(80, 24)) as pilot:
            for _ in range(300):
                await pilot.pause(0.1)
                shown = screen(application)
                if "2 peers" in shown and "steps/s" in shown and "loss" in shown:
                    break
            assert "[training]" in shown, shown
            assert {"p1", "p2"} <= set(shown.split())

    with MasterThread() as master, ThreadPoolExecutor(2) as pool:
        peers = [pool.submit(train, master, name) for name in ("p1", "p2")]
        try:
            assert ready.wait(30)
            asyncio.run(watch(master))
        finally:
            stop.set()
        for each in peers:
            each.result(30)


def test_a_master_that_is_not_there_is_an_error_and_not_a_screen() -> None:
    async def run() -> Top:
        application = Top(lambda: master_client.follow(["127.0.0.1:1"], b"", 0.1))
        async with application.run_test() as pilot:
            for _ in range(100):
                if application.failure is not None:
                    break
                await pilot.pause(0.05)
        return application

    assert isinstance(asyncio.run(run()).failure, MasterUnreachable)


def test_without_a_terminal_the_command_says_what_to_use() -> None:
    command = [sys.executable, "-m", "ringfold.cli", "top", "127.0.0.1:1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ)
    assert result.returncode == 2
    assert "ringfold status --json" in result.stderr


def test_without_textual_the_command_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['textual'] = sys.modules['textual.app'] = None; sys.stdout.isatty = lambda: True\n"
        "from ringfold.cli.top import top; from ringfold.errors import UsageError\n"
        "try: top()\nexcept UsageError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "pip install 'ringfold[top]'" in result.stdout, result.stderr
