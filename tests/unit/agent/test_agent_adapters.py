"""Other feeds: lines of JSON from wherever they come, and what makes no sense is refused without harm."""

import asyncio
import http.server
import json
import os
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfold.agent import adapters
from ringfold.agent.adapters import MAX_LINE_BYTES, JsonAdapter, Observation, open_adapter, parse_feed, pump
from ringfold.errors import ConfigError
from ringfold.runtime import feeds
from ringfold.wire.telemetry import Congestion, Refusal, address_number, prefix_number

HERE, THERE = address_number("10.0.0.1"), address_number("10.0.0.2")
LINE = b'{"source": "10.0.0.1", "destination": "10.0.0.2", "path": 1, "congestion": 180, "switch": "leaf-3"}\n'
SEEN = Observation(Congestion(HERE, THERE, 1, 180))
DEADLINE_S = 20


def refused(said: list[Observation | Refusal]) -> list[str]:
    return [each.text for each in said if isinstance(each, Refusal)]


def test_a_line_is_an_observation() -> None:
    assert JsonAdapter().feed(LINE) == [SEEN]


def test_congestion_follows_from_depth_and_limit() -> None:
    network, bits = prefix_number("10.1.0.0/16")
    line = b'{"destination": "10.1.0.0/16", "path": 0, "depth_bytes": 50, "limit_bytes": 100, "unix_ns": 7}\n'
    assert JsonAdapter().feed(line) == [Observation(Congestion(0, network, 0, 100, 50, 0, bits), 7)]


def test_an_array_on_one_line_is_several_observations() -> None:
    assert JsonAdapter().feed(b"[" + LINE.strip() + b"," + LINE.strip() + b"]\n") == [SEEN, SEEN]


@given(st.lists(st.integers(1, 40), max_size=20))
def test_lines_may_come_in_any_pieces(sizes: list[int]) -> None:
    adapter, text, found = JsonAdapter(), LINE * 4, []
    for size in sizes:
        found += adapter.feed(text[:size])
        text = text[size:]
    assert found + adapter.feed(text) == [SEEN] * 4


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"garbage", "not a line"),
        (b"\xff\xfe", "not a line"),
        (b'{"path": 16, "congestion": 1}', "path"),
        (b'{"path": 0, "congestion": 256}', "congestion"),
        (b'{"path": 0, "congestion": "high"}', "congestion"),
        (b'{"path": 0}', "congestion is unknown"),
        (b'{"path": 0, "congestion": 1, "source": "leaf-3"}', "leaf-3"),
        (b'{"congestion": 1}', "path"),
    ],
)
def test_a_line_that_makes_no_sense_is_refused_and_the_next_one_is_taken(line: bytes, why: str) -> None:
    said = JsonAdapter().feed(line + b"\n" + LINE)
    assert why in refused(said)[0]
    assert said[1:] == [SEEN]


def test_a_line_without_end_is_dropped_and_the_feed_goes_on() -> None:
    adapter = JsonAdapter()
    said = [each for _ in range(40) for each in adapter.feed(b"x" * (MAX_LINE_BYTES // 16))]
    assert len(said) == 1
    assert "longer than" in refused(said)[0]
    assert adapter.feed(b"tail\n" + LINE) == [SEEN]


def test_an_unknown_adapter_is_refused_with_the_names_of_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'gnmi'; there are json"):
        open_adapter("gnmi")


def test_an_adapter_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "mine"

        def load(self) -> type[JsonAdapter]:
            return JsonAdapter

    monkeypatch.setattr(adapters, "entry_points", lambda group: [Point()] if group == "ringfold.telemetry" else [])
    assert isinstance(open_adapter("mine"), JsonAdapter)


def test_a_feed_names_its_adapter_and_its_place() -> None:
    assert parse_feed("json=http://collector/a?b=c") == ("json", "http://collector/a?b=c")
    with pytest.raises(ConfigError, match="ADAPTER=WHERE"):
        parse_feed("/run/feed")


# Where the bytes come from


async def first(where: str, count: int, poll_s: float = 0.01) -> list[Observation | Refusal]:
    """The first observations of a feed, then the feed is given up."""
    found: list[Observation | Refusal] = []
    enough = asyncio.Event()

    def deliver(said: Observation | Refusal) -> None:
        found.append(said)
        if len(found) >= count:
            enough.set()

    task = asyncio.create_task(pump(JsonAdapter(), where, deliver, poll_s))
    try:
        async with asyncio.timeout(DEADLINE_S):
            await enough.wait()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return found[:count]


def test_a_file_is_followed_also_when_another_takes_its_name(tmp_path: Path) -> None:
    path = tmp_path / "feed"
    path.write_bytes(LINE)

    async def story() -> None:
        adapter, seen = JsonAdapter(), 0
        source: AsyncGenerator[bytes, None] = adapters.chunks(str(path))
        async with aclosing(source), asyncio.timeout(DEADLINE_S):
            async for chunk in source:
                seen += len(adapter.feed(chunk))
                if seen == 1:
                    with path.open("ab") as file:
                        file.write(LINE)
                elif seen == 2:
                    path.with_suffix(".new").write_bytes(LINE)
                    path.with_suffix(".new").rename(path)
                    seen = 3  # the next one is of the new file
                elif seen == 4:
                    return

    asyncio.run(story())


def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def is_missing(path: str) -> bool:
        looked.append(path)
        return feeds_are_missing(path)

    feeds_are_missing = feeds.is_missing
    monkeypatch.setattr(feeds, "is_missing", is_missing)
    monkeypatch.setattr(feeds, "_RETRY_S", 0.01)

    async def story() -> list[Observation | Refusal]:
        reading = asyncio.create_task(first(str(tmp_path / "feed"), 1))
        async with asyncio.timeout(20):
            while not looked:  # noqa: ASYNC110 - it looks in its own time
                await asyncio.sleep(0)
        (tmp_path / "feed").write_bytes(LINE)
        return await reading

    assert asyncio.run(story()) == [SEEN]


def test_others_have_their_turns_while_a_long_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "feed").write_bytes(b"\n" * (100 << 16) + LINE)

    async def story() -> int:
        reading, turns = asyncio.create_task(first(str(tmp_path / "feed"), 1)), 0
        while not reading.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(story()) > 100


def test_a_page_server_that_talks_nonsense_is_asked_again() -> None:
    head = b"HTTP/1.0 200 OK\r\n"
    answers = [b"nonsense\r\n\r\n", head + b"Content-Length: 999\r\n\r\n", head + b"\r\n" + LINE]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0) if len(answers) > 1 else answers[0])
        await writer.drain()
        writer.close()

    async def story() -> list[Observation | Refusal]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            return await first(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", 1)

    assert asyncio.run(story()) == [SEEN]


def test_a_fifo_is_read_as_it_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "feed")

    # Open for reading too: no opening here waits for the other side.
    kept = os.open(tmp_path / "feed", os.O_RDWR | os.O_NONBLOCK)

    async def story() -> list[Observation | Refusal]:
        reading = asyncio.create_task(first(str(tmp_path / "feed"), 2))
        for _ in range(2):  # writers come and go
            writer = os.open(tmp_path / "feed", os.O_WRONLY | os.O_NONBLOCK)
            os.write(writer, LINE)
            os.close(writer)
        return await reading

    try:
        assert asyncio.run(story()) == [SEEN, SEEN]
    finally:
        os.close(kept)


def test_a_unix_socket_is_dialled_again_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfold.runtime.feeds._RETRY_S", 0.01)

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(LINE.strip())  # the end of a connection ends a line too
        writer.close()
        await writer.wait_closed()

    async def story() -> list[Observation | Refusal]:
        path = str(tmp_path / "sock")
        reading = asyncio.create_task(first(f"unix:{path}", 2))
        server = await asyncio.start_unix_server(serve, path)
        try:
            return await reading
        finally:
            server.close()

    assert asyncio.run(story()) == [SEEN, SEEN]


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = json.dumps([json.loads(LINE)]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_page_is_polled() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert asyncio.run(first(f"http://127.0.0.1:{server.server_port}/", 2)) == [SEEN, SEEN]
        finally:
            server.shutdown()
            thread.join()


def test_a_line_that_is_nested_without_end_is_refused() -> None:
    line = b'{"path": 0, "congestion": 1, "more": ' + b"[" * 100_000
    assert len(refused(adapters.JsonAdapter().feed(line + b"\n"))) == 1


def test_the_adapter_of_the_guide_works() -> None:
    guide = Path(__file__).resolve().parents[3] / "docs" / "guides" / "telemetry.md"
    blocks = [block.split("```")[0] for block in guide.read_text().split("```python\n")[1:]]
    names: dict[str, type[adapters.Adapter]] = {}
    exec(next(block for block in blocks if "class Lines" in block), names)
    said = names["Lines"]().feed(b"10.0.0.2 40\nnonsense\n10.0")
    assert said[0] == Observation(Congestion(0, THERE, 1, 102, 0, 0, 128))
    assert len(refused(said)) == 1
