"""The dashboard's page in a browser: on a real run, on a made-up one with 256 peers, on a phone, in the dark."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ports import free_ports
from programs import ProgramCluster, ProgramContext, until

from ringfold.tools.made_up_run import EVICTED_S, KILLED_S, STALLED_S, MadeUpRun

pytest.importorskip("aiohttp", reason="needs pip install 'ringfold[dashboard]'")

from pages import Recorded, ServedPages, opened_browser

from ringfold.observe.dashboard.finished import FinishedRuns
from ringfold.tools.made_up_page import MadeUpSource

FIRST_CONTENT_MS = 5_000
"""On a free core it is 0.3 s; here other tests run beside it."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as opened:
        yield opened


@pytest.fixture
def page(browser: Any) -> Iterator[Recorded]:  # noqa: ANN401 - Playwright need not be there when types are checked
    context = browser.new_context(viewport={"width": 1_500, "height": 950})
    yield Recorded(context)
    context.close()


def log(**figures: object) -> None:
    """Figures, to be seen with -s."""
    sys.stdout.write(f"\ndashboard: {', '.join(f'{name} {value}' for name, value in figures.items())}\n")


# A real run


def train_and_log(me: ProgramContext) -> None:
    """Steps of an all-reduce that log a loss. "stall" keeps the others waiting until "continue"; "stop" ends it."""
    import ringfold as rf

    with me.join() as run:
        me.report("joined", peer=run.peer_id)
        weights = np.zeros(20_000, np.float32)
        state = rf.SharedState(weights=weights)
        for step in run.steps(state, until=1_000_000, min_world=1, rejoin=False):
            if me.has_message() and me.receive()["what"] == "stall":
                me.report("stalls")
                me.receive("continue")
            gradient = np.full(20_000, 0.01, np.float32)
            time.sleep(0.005)
            step.all_reduce(gradient, op="avg")
            weights += gradient
            step.log(loss=float(2 * 0.99**step.number))


@pytest.mark.waiting
def test_a_real_run_with_a_kill_a_join_a_freeze_a_stall_and_a_failover(
    cluster: ProgramCluster, page: Recorded, tmp_path: Path
) -> None:
    """Each is on the page within seconds, in words, with its reason and its cost; no reload is needed."""
    one, two, port = free_ports(3)
    store = {"store": f"sqlite://{tmp_path}/journal.db", "lease_s": 3.0, "stall_timeout_s": 2.0, "log_level": "info"}
    leader = cluster.start_master(listen=f"127.0.0.1:{one}", **store)
    leader.expect_log("leading with fence 1")
    standby = cluster.start_master(listen=f"127.0.0.1:{two}", **store)
    addresses = f"{leader.address},{standby.address}"
    dashboard = cluster.start_command("dashboard", "dashboard", addresses, "--listen", f"127.0.0.1:{port}")
    url = dashboard.expect_output("dashboard at").split()[-1]
    peers = cluster.start_program(train_and_log, 3, address=addresses)
    for peer in peers:
        peer.expect("joined")
    page.go(url)
    page.wait_text(".pill", "training")
    page.wait_text(".facts", "loss")
    page.wait_text(".facts", "3 peers")
    assert page.page.locator(".node").count() == 3

    peers[0].kill()
    page.wait_text(".incident-list .title", "(p0) lost")
    page.wait_text(".incident-list .cost", "the others continue in epoch")
    page.wait_text(".facts", "2 peers")
    newcomer = cluster.start_program(train_and_log, 1, address=addresses)[0]
    newcomer.expect("joined")
    page.wait_text(".incident-list li", "(p3) joined")

    peers[2].send("stall")
    peers[2].expect("stalls")
    page.wait_text(".waits li", "evicted in")
    page.wait_text(".incident-list li", "evicted: stalled the others")
    peers[2].kill()
    page.wait_text(".pill", "training")

    newcomer.freeze()
    page.wait_text(".incident-list li", "(p3) evicted")
    newcomer.kill()
    page.wait_text(".pill", "training")

    leader.kill()
    page.wait_text(".incident-list li", f"failover: {standby.address} leads (fence 2)")
    page.wait_text(".pill", "training")
    page.wait_text(".plain-list li", "away")
    page.check(url)
    dashboard.send_signal(signal.SIGTERM)
    dashboard.allow_exit()
    assert dashboard.wait() == 0


@pytest.mark.waiting
def test_a_dashboard_beside_a_master_is_started_again_and_ends_with_it(cluster: ProgramCluster) -> None:
    """Its end touches nobody, and it never outlives the master, even one that is killed."""
    port, other = free_ports(2)
    master = cluster.start_master(arguments=["--dashboard", "--dashboard-listen", f"127.0.0.1:{port}"])
    master.expect_output(f"dashboard at http://127.0.0.1:{port}/")
    [pid] = children(master.pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: len([line for line in master.stdout.lines if "dashboard at" in line]) == 2, "it is started again")
    [again] = children(master.pid)
    assert again != pid
    master.kill()
    until(lambda: not Path(f"/proc/{again}/stat").exists() or is_zombie(again), "it ends with the master")

    clean = cluster.start_master("clean", arguments=["--dashboard", "--dashboard-listen", f"127.0.0.1:{other}"])
    clean.expect_output("dashboard at")
    [child] = children(clean.pid)
    clean.send_signal(signal.SIGTERM)
    clean.allow_exit()
    assert clean.wait() == 0
    assert not Path(f"/proc/{child}").exists() or is_zombie(child)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


# Made-up runs


def test_256_peers_are_readable_and_work_by_keyboard(page: Recorded) -> None:
    run = MadeUpRun(peers=256, per_host=8)
    source = MadeUpSource(run.view(STALLED_S + 3, every_s=3))
    with ServedPages(source) as served:
        first_ms = page.go(served.url)
        page.wait_text(".pill", "waiting")
        drawn_ms = page.page.evaluate("performance.now()")
        assert first_ms < FIRST_CONTENT_MS
        assert page.page.locator("tbody tr[data-peer]").count() == 256
        assert page.page.locator(".node").count() == 256
        page.wait_text(".waits li", "wait for peer 6 (trainer-6)")
        assert page.page.locator("tbody tr[data-peer]").first.get_attribute("data-peer") == "6", "problems first"
        page.page.wait_for_selector("canvas.map:visible")
        page.page.focus("canvas.map")
        page.page.keyboard.press("ArrowDown")
        page.wait_text(".links .readout", "peer 2 itself")
        page.page.fill("input[type=search]", "trainer-25 ")
        until(lambda: page.page.locator("tbody tr[data-peer]").count() < 12, "the table is filtered")
        page.page.fill("input[type=search]", "trainer-251")
        page.page.focus("tbody button.open")
        page.page.keyboard.press("Enter")
        page.wait_text("dialog[open]", "Peer 251")
        page.page.keyboard.press("Escape")
        page.page.fill("input[type=search]", "")
        page.page.click("th >> text=Sends")
        assert page.page.locator("th[aria-sort=descending]").inner_text().startswith("Sends")
        page.check(served.url)
        log(first_content_ms=round(first_ms), drawn_ms=round(drawn_ms), peers=256)


@pytest.mark.parametrize(("scheme", "width", "height"), [("dark", 390, 844), ("light", 1_500, 950)])
def test_a_phone_in_the_dark_and_a_desk_in_the_light_have_no_fault_that_axe_finds(
    browser: Any,  # noqa: ANN401 - as above
    scheme: str,
    width: int,
    height: int,
) -> None:
    """No sideways scroll at 390 px, names and contrasts for everybody."""
    source = MadeUpSource(MadeUpRun().view(EVICTED_S + 20, every_s=1))
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    with ServedPages(source) as served:
        page = Recorded(context)
        page.go(served.url)
        page.wait_text(".pill", "training")
        page.page.wait_for_selector("canvas.map:visible")
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        shade = page.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
        assert (shade < 64) == (scheme == "dark")
        axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
        found = axe.Axe().run(page.page).response["violations"]
        assert not found, [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found]
        page.check(served.url)
    context.close()


def test_a_wrong_token_gets_a_form_and_the_right_one_the_run(page: Recorded) -> None:
    """And names of peers are never markup."""
    view = MadeUpRun(3, name="<img src=x onerror=alert(1)>").view(5)
    with ServedPages(MadeUpSource(view), token="the right one") as served:
        page.go(served.url.replace("right", "wrong"))
        page.page.wait_for_selector("#token-form:visible")
        assert page.page.locator(".panel").count() == 0
        page.page.fill("#token", "the right one")
        page.page.keyboard.press("Enter")
        page.wait_text(".pill", "training")
        assert page.page.locator("#switcher img").count() == 0
        page.check(served.url)


def test_a_replay_shows_any_time_of_a_run_and_three_side_by_side(page: Recorded, tmp_path: Path) -> None:
    MadeUpRun(name="first").record(tmp_path / "first", 150)
    MadeUpRun(4, name="second", is_calm=True).record(tmp_path / "second", 60)
    with ServedPages(FinishedRuns([tmp_path / "first"])) as served:
        page.go(served.url)
        page.wait_text(".pill", "idle")
        slide(page, KILLED_S - 2)
        page.wait_text(".facts", "8 peers")
        assert page.page.locator(".incident-list li[data-tone=bad]").count() == 0, "what comes later is not listed"
        slide(page, STALLED_S + 4)
        page.wait_text(".pill", "waiting")
        page.wait_text(".waits li", "for peer 6")
        page.page.click("[data-speed='100']")
        page.page.click("text=play")
        page.wait_text(".incident-list li", "evicted: stalled the others")
        page.wait_text("button.play", "play")
        page.page.click("[aria-label='incident before']")
        page.wait_text(".replay-time", "of 2 min 31 s")
        page.check(served.url)
    with ServedPages(FinishedRuns([tmp_path / "first", tmp_path / "second", tmp_path / "first"])) as served:
        page.go(served.url)
        slide(page, 45)
        until(lambda: page.page.locator(".panel[data-tone=ok]").count() == 3, "three runs train side by side")
        assert page.text(".panel:nth-child(1) .facts").count("7 peers") == 1
        assert page.text(".panel:nth-child(2) .facts").count("4 peers") == 1


def slide(page: Recorded, at_s: float) -> None:
    """Move the slider of a replay to this time."""
    moved = "(slider, at) => { slider.value = at; slider.dispatchEvent(new Event('input')); }"
    page.page.locator("input[type=range]").evaluate(moved, 1_000 * at_s)


def test_a_day_does_not_grow_the_page(page: Recorded) -> None:
    """Two days are fed in seconds. The second one adds next to nothing to the page: series are thinned by age."""
    run = MadeUpRun(is_calm=True)
    source = MadeUpSource(run.view(30))
    step_s, updates = 432.0, 200

    def feed(begin_s: float) -> None:
        async def days() -> None:
            for number in range(1, updates + 1):
                run.show(source.view, begin_s + (number - 1) * step_s, begin_s + number * step_s, step_s)
                source.publish()
                await asyncio.sleep(0.003)

        served.run(days())

    with ServedPages(source) as served:
        page.go(served.url)
        page.wait_text(".pill", "training")
        sizes = []
        for day in range(3):
            feed(30 + day * step_s * updates)
            page.page.wait_for_timeout(300)
            sizes.append(page.heap_bytes())
        log(heap_kib=[size // 1_024 for size, _ in sizes], nodes=[nodes for _, nodes in sizes])
        assert sizes[2][0] - sizes[1][0] < 300 * 1_024
        assert sizes[2][1] <= sizes[0][1] + 60
        page.check(served.url)
