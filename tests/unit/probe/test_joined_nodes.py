"""Nodes of a master, and relays, as servers in this process: what ends them, and what does not."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path

import pytest

from ringfold.config import Resolved, load
from ringfold.errors import ConfigError, MasterUnreachable
from ringfold.master.server import MasterThread
from ringfold.probe.nodes.alone import StandaloneNode
from ringfold.probe.nodes.joined import NodeRequest, make_node
from ringfold.probe.nodes.relay import RelayRequest, RelayServer
from ringfold.runtime import master_client
from ringfold.wire.frames import FrameReader, decode_from_master, message_frame
from ringfold.wire.messages import PROTOCOL_VERSION, Challenge, Message, Refused
from ringfold.wire.probing import NodeHello, RoundId

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def settings(*masters: str, **given: object) -> Resolved:
    return load({"master": list(masters), **given})


def run(work: Coroutine[object, object, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(WAIT_S):
            await work

    asyncio.run(limited())


# Nodes


def test_a_directory_that_cannot_be_written_is_an_error_before_the_node_connects(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "logs"):
        with pytest.raises(ConfigError, match=f"no log can be written into {place}"):
            make_node(settings("127.0.0.1:1"), NodeRequest(export=place), lambda clock: None)


def test_a_log_that_cannot_be_opened_ends_the_node(tmp_path: Path) -> None:
    """Its name is known only after the master has accepted the node; and that is not the master's refusal."""
    (tmp_path / "1000001.jsonl").mkdir()
    with MasterThread() as master:
        node = make_node(settings(master.address), NodeRequest(export=tmp_path), lambda clock: None)
        with pytest.raises(ConfigError, match=r"1000001\.jsonl cannot be written: Is a directory"):
            run(node.run(asyncio.Event()))


TYPO = "10.0..2:48149"
"""An empty part of a name: the resolver raises UnicodeError."""


def test_a_typo_in_an_address_is_an_error_of_ours() -> None:
    with pytest.raises(
        ConfigError, match=r"no route to the master at 10\.0\.\.2:48149: '10\.0\.\.2' is no name of a host"
    ):
        make_node(settings(TYPO), NodeRequest(), lambda clock: None)
    with pytest.raises(ConfigError, match=r"node b: '10\.0\.\.2' is not known"):
        StandaloneNode({"a": "127.0.0.1:1", "b": TYPO}, "a", insecure=True)
    with pytest.raises(ConfigError, match=r"advertise: 10\.0\.\.2 is not known"):
        make_node(settings("127.0.0.1:1", advertise=["10.0..2"]), NodeRequest(), lambda clock: None)
    with pytest.raises(MasterUnreachable, match="is no name of a host"):
        master_client.ask([TYPO], b"", lambda client: client.status())


def test_a_node_uses_the_first_master_that_has_a_known_name() -> None:
    """A relay that is named wrongly is not in the way of the next address."""
    with MasterThread() as master:
        stop = asyncio.Event()
        node = make_node(
            settings(TYPO, master.address), NodeRequest(), lambda clock: None, on_connected=lambda *_: stop.set()
        )
        assert node.addresses == ["127.0.0.1"]
        run(node.run(stop))
        assert stop.is_set()


def test_a_node_is_bound_to_its_own_address_and_known_at_it() -> None:
    node = make_node(settings("127.0.0.1:1"), NodeRequest(address="127.0.0.2"), lambda clock: None)
    with closing(node.shell):
        assert (node.bind, node.addresses) == ("127.0.0.2", ["127.0.0.2"])


# Relays


def exchange(address: str, *messages: Message) -> list[Message]:
    """What a server sends to a client that sends these messages, until it closes the connection."""
    host, _, port = address.rpartition(":")
    received: list[Message] = []
    reader = FrameReader()
    with closing(socket.create_connection((host, int(port)), WAIT_S)) as client:
        client.sendall(b"".join(map(message_frame, messages)))
        while chunk := client.recv(65_536):
            received += [decode_from_master(body) for _, body in reader.feed(chunk)]
    return received


async def with_relay(masters: list[str], check: Callable[[str], None]) -> None:
    """Run `check(address)` in a thread while a relay serves."""
    server = RelayServer(RelayRequest(name="r", region="east", listen=["127.0.0.1:0"], masters=masters))
    stop, ready = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(server.run(stop, ready.set))
    await ready.wait()
    try:
        await asyncio.to_thread(check, server.addresses[0])
    finally:
        stop.set()
        await serving


def test_a_request_goes_to_the_master_behind_a_relay() -> None:
    with MasterThread() as master:

        def check(relay: str) -> None:
            both = [relay, master.address]
            where, status = master_client.ask(both, b"", lambda client: (client.address, client.status()))
            assert (where, status.world.peers) == (master.address, 0)
            assert master_client.ask(both, b"", lambda client: client.probe("show")).summary is None
            look = next(master_client.follow_status(both, b"", 0.01))
            assert isinstance(look, tuple)
            assert look[0] == master.address
            with pytest.raises(MasterUnreachable, match="this is a relay for nodes that only probe"):
                master_client.ask([relay], b"", lambda client: client.status())

        run(with_relay([master.address], check))


def test_a_strangers_run_name_is_refused_and_the_relay_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def check(relay: str) -> None:
        for name in ("not a name\n", "x" * 500, "other"):
            hello = NodeHello(PROTOCOL_VERSION, "h", "n", ["127.0.0.1"], 1, False, RoundId(), b"", b"", 0, name)
            challenge, refusal = exchange(relay, hello)
            assert isinstance(challenge, Challenge)
            assert isinstance(refusal, Refused)
            assert "this relay serves run default, not" in refusal.reason

    run(with_relay(["127.0.0.1:1"], check))
    assert not [record for record in caplog.records if record.name == "asyncio"], "no exception in the event loop"
