"""The server of the dashboard: what it serves to whom, and how it ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

aiohttp = pytest.importorskip("aiohttp", reason="needs pip install 'ringfold[dashboard]'")

from ringfold.errors import ConfigError  # noqa: E402
from ringfold.observe.dashboard.finished import FinishedRun, FinishedRuns  # noqa: E402
from ringfold.observe.dashboard.server import CLOSE_WRONG_TOKEN, DashboardServer  # noqa: E402
from ringfold.tools.made_up_page import MadeUpSource  # noqa: E402
from ringfold.tools.made_up_run import EVICTED_S, STALLED_S, MadeUpRun  # noqa: E402


@asynccontextmanager
async def served(source: Any, token: str = "") -> AsyncIterator[tuple[DashboardServer, Any]]:  # noqa: ANN401 - aiohttp
    server = DashboardServer(source, token)
    await server.start("127.0.0.1:0")
    async with aiohttp.ClientSession(f"http://{server.address}") as client:
        yield server, client
    await server.stop()


async def received(socket: Any, kind: str) -> Any:  # noqa: ANN401 - a message
    """The next message of this kind."""
    async with asyncio.timeout(10):
        while True:
            message = msgspec.json.decode((await socket.receive()).data)
            if message["kind"] == kind:
                return message


def test_the_page_has_no_foreign_source_and_no_token() -> None:
    async def run() -> None:
        async with served(MadeUpSource(MadeUpRun(3).view(3)), "secret") as (_, client):
            async with client.get("/") as response:
                assert response.status == 200
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
                text = await response.text()
            assert "secret" not in text
            assert "http" not in text
            async with client.get("/main.js") as response:
                assert response.content_type == "text/javascript"
            for path in ("/nothing.js", "/../server.py", "/%2e%2e/server.py", "/page"):
                async with client.get(path) as response:
                    assert response.status == 404, path
            async with client.post("/") as response:
                assert response.status == 405

    asyncio.run(run())


def test_a_foreign_host_or_origin_is_refused() -> None:
    async def run() -> None:
        async with served(MadeUpSource(MadeUpRun(3).view(3))) as (_, client):
            async with client.get("/", headers={"Host": "evil.example"}) as response:
                assert response.status == 403
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await client.ws_connect("/live", headers={"Origin": "http://evil.example"})
            assert refused.value.status == 403

    asyncio.run(run())


@pytest.mark.parametrize("first", ['{"token": "wrong"}', "{}", "[]", "no JSON", '{"token": 3}'])
def test_a_wrong_token_closes_with_a_code_of_its_own(first: str) -> None:
    async def run() -> None:
        source = MadeUpSource(MadeUpRun(3).view(3))
        async with served(source, "right") as (_, client), client.ws_connect("/live") as socket:
            await socket.send_str(first)
            message = await socket.receive(10)
            assert message.type is aiohttp.WSMsgType.CLOSE
            assert message.data == CLOSE_WRONG_TOKEN

    asyncio.run(run())


def test_pages_get_the_same_bytes_and_a_slow_one_only_the_newest() -> None:
    async def run() -> None:
        made_up = MadeUpRun(is_calm=True)
        source = MadeUpSource(made_up.view(5))
        async with served(source) as (server, client):
            sockets = [await client.ws_connect("/live") for _ in range(3)]
            for socket in sockets:
                await socket.send_json({"token": ""})
                await received(socket, "snapshot")
            assert server.pages == 3
            made_up.show(source.view, 5, 6)
            source.publish()
            first, second, third = [(await received(socket, "update")) for socket in sockets]
            assert first == second == third
            assert first["patch"]["at_ms"] == made_up.begin_ms + 6_000
            for number in range(3):  # without a pause: no page is sent anything in between
                made_up.show(source.view, 6 + number, 7 + number)
                source.publish()
            newest = await received(sockets[0], "snapshot")
            assert newest["page"]["at_ms"] == made_up.begin_ms + 9_000
            for socket in sockets:
                await socket.close()

    asyncio.run(run())


def test_links_come_when_asked_and_then_only_those_that_changed() -> None:
    async def run() -> None:
        made_up = MadeUpRun(4)
        source = MadeUpSource(made_up.view(5))
        async with served(source) as (_, client), client.ws_connect("/live") as socket:
            await socket.send_json({"token": ""})
            await received(socket, "snapshot")
            await socket.send_json({"links": True})
            links = await received(socket, "links")
            assert len(links["source"]) == 12
            [changed] = [link for link in made_up.status(5).links if (link.source, link.target) == (1, 2)]
            status = msgspec.structs.replace(
                made_up.status(6), links=[msgspec.structs.replace(changed, bytes_per_s=5.0)]
            )
            source.view.look(made_up.begin_ms + 6_000, status)
            source.publish()
            again = await received(socket, "links")
            assert (again["source"], again["target"], again["rate"]) == ([1], [2], [5.0])

    asyncio.run(run())


def test_it_ends_at_once_with_open_pages() -> None:
    async def run() -> None:
        async with served(MadeUpSource(MadeUpRun(3).view(3))) as (server, client):
            sockets = [await client.ws_connect("/live") for _ in range(20)]
            for socket in sockets:
                await socket.send_json({"token": ""})
                await received(socket, "snapshot")
            async with asyncio.timeout(5):
                await server.stop()

    asyncio.run(run())


def test_a_port_that_is_taken_is_an_error_or_the_next_one_is_used() -> None:
    async def run() -> None:
        source = MadeUpSource(MadeUpRun(3).view(3))
        async with served(source) as (first, _):
            taken = DashboardServer(source)
            with pytest.raises(ConfigError, match="cannot listen"):
                await taken.start(first.address)
            await taken.stop()
            following = DashboardServer(source)
            await following.start(first.address, or_next=True)
            assert following.address != first.address
            await following.stop()

    asyncio.run(run())


def test_beyond_loopback_it_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="join token"):
        asyncio.run(DashboardServer(MadeUpSource(MadeUpRun(3).view(1))).start("0.0.0.0:0"))


# Finished runs


def test_a_finished_run_is_shown_as_it_was_at_any_time(tmp_path: Path) -> None:
    made_up = MadeUpRun()
    made_up.record(tmp_path / "run", EVICTED_S + 20)
    run = FinishedRun(tmp_path / "run")
    assert (run.name, run.begin_ms) == ("llm-350m", made_up.begin_ms)
    waiting = run.page(made_up.begin_ms + 1_000 * (STALLED_S + 5))
    assert waiting["headline"]["state"] == "waiting"
    assert waiting["headline"]["last_open"]
    assert run.page(run.end_ms)["headline"]["state"] == "training"
    assert len(run.links(made_up.begin_ms + 20_000)["source"]) == 56
    assert run.introduction()["series"]["log.loss"]["tiers"][0]["buckets"]


def test_a_cut_line_and_a_lost_file_do_not_end_a_replay(tmp_path: Path) -> None:
    MadeUpRun().record(tmp_path, 30)
    [path] = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-400])
    runs = FinishedRuns([tmp_path])
    path.unlink()
    frame = msgspec.json.decode(runs.frame([runs.runs[0].end_ms]))
    assert len(frame["pages"]) == 1
