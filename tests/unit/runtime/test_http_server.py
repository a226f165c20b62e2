"""The small HTTP server: who may read, what a client can cost, and that nothing is left behind."""

import gzip
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import exposition
import pytest

from ringfold.errors import ConfigError
from ringfold.runtime import http_server
from ringfold.runtime.http_server import Page, PageServer, PageUnavailable
from ringfold.wire.proof import prove, viewer_token

SECRET = b"a join token of some length"
VIEWER = viewer_token(SECRET)


class Pages(dict[str, object]):
    """Pages that count how often they are made."""

    made = 0

    def small(self) -> Page:
        self.made += 1
        return Page(b"number %d\n" % self.made)

    def large(self) -> Page:
        return Page(b"x" * 100_000)

    def unavailable(self) -> Page:
        raise PageUnavailable("not now")

    def broken(self) -> Page:
        raise AssertionError("a fault")


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def server(pages: Pages) -> Iterator[PageServer]:
    served = {"/small": pages.small, "/large": pages.large, "/unavailable": pages.unavailable, "/broken": pages.broken}
    running = PageServer(served, ["127.0.0.1:0"])
    yield running
    running.stop()


@pytest.fixture
def exposed() -> Iterator[PageServer]:
    """One that other machines can reach."""
    running = PageServer({"/": lambda: Page(b"seen")}, ["0.0.0.0:0"], secret=SECRET, viewer=VIEWER)
    yield running
    running.stop()


def raw(server: PageServer, request: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    with closing(socket.create_connection(("127.0.0.1", server.port), 10)) as sock:
        sock.sendall(request)
        parts = []
        while part := sock.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def test_a_page_is_served(server: PageServer) -> None:
    assert exposition.get(f"http://{server.addresses[0]}/small") == (200, b"number 1\n")
    assert exposition.get(f"http://{server.addresses[0]}/small?from=a-test")[0] == 200


def test_many_clients_get_one_page(server: PageServer, pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REUSE_S", 3_600)
    assert {exposition.get(f"http://{server.addresses[0]}/small") for _ in range(5)} == {(200, b"number 1\n")}
    monkeypatch.setattr(http_server, "REUSE_S", 0)
    assert exposition.get(f"http://{server.addresses[0]}/small") == (200, b"number 2\n")
    assert pages.made == 2


def test_a_connection_serves_many_requests(server: PageServer) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as client:
        for method, length in (("GET", 9), ("HEAD", 0), ("GET", 9)):
            client.request(method, "/small")
            response = client.getresponse()
            assert (response.status, len(response.read())) == (200, length)
            assert response.headers["Content-Length"] == "9"
        client.request("GET", "/large", headers={"Accept-Encoding": "gzip, deflate"})
        response = client.getresponse()
        assert response.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(response.read()) == b"x" * 100_000


@pytest.mark.parametrize(("path", "status"), [("/", 404), ("/../small", 404), ("/unavailable", 503), ("/small/", 404)])
def test_other_paths_are_errors(server: PageServer, path: str, status: int) -> None:
    assert exposition.get(f"http://{server.addresses[0]}{path}")[0] == status


def test_only_get_and_head_are_served(server: PageServer) -> None:
    response = raw(server, b"DELETE /small HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert response.startswith(b"HTTP/1.1 405 ")


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"POST /small HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /small HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 50_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
    ids=["no request", "a body", "too long", "TLS"],
)
def test_what_is_no_request_closes_the_connection(server: PageServer, request_: bytes) -> None:
    with suppress(ConnectionResetError):
        assert raw(server, request_) == b""
    assert exposition.get(f"http://{server.addresses[0]}/small")[0] == 200


def test_a_page_that_breaks_ends_that_connection_only(server: PageServer, caplog: pytest.LogCaptureFixture) -> None:
    assert raw(server, b"GET /broken HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
    assert "a fault" in caplog.text
    assert exposition.get(f"http://{server.addresses[0]}/small")[0] == 200


def test_a_request_that_does_not_come_is_not_waited_for(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.05)
    with suppress(ConnectionResetError):
        assert raw(server, b"GET /small HTTP/1.1\r\nHost: local") == b""


def test_connections_are_limited(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 1)
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as first:
        first.request("GET", "/small")
        assert first.getresponse().read() == b"number 1\n"
        with pytest.raises(OSError, match=r"closed|reset"):
            exposition.get(f"http://{server.addresses[0]}/small")


# Who may read


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:9", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("example.com", 403), ("127.0.0.1.example.com", 403)],
)
def test_a_page_of_another_origin_cannot_read_from_loopback(server: PageServer, host: str, status: int) -> None:
    """DNS rebinding: a page's host name is made to point to loopback, but the browser still sends the name."""
    response = raw(server, f"GET /small HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert response.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("", 401),
        (f"Bearer {VIEWER}", 200),
        (f"Bearer {VIEWER}0", 401),
        (f"Basic {VIEWER}", 401),
        (f"Bearer {SECRET.decode()}", 401),
        ("Bearer \xff", 401),
    ],
)
def test_beyond_loopback_the_viewer_token_is_needed(exposed: PageServer, given: str, status: int) -> None:
    headers = {"Authorization": given} if given else {}
    assert exposition.get(f"http://127.0.0.1:{exposed.port}/", headers)[0] == status


def test_beyond_loopback_a_token_must_exist() -> None:
    for secret in (b"", b"short"):
        with pytest.raises(ConfigError, match=r"0\.0\.0\.0 can be reached"):
            PageServer({}, ["0.0.0.0:0"], secret=secret, viewer=viewer_token(secret))


def test_a_viewers_token_is_no_join_token() -> None:
    assert viewer_token(b"") == ""
    assert viewer_token(SECRET) != viewer_token(SECRET + b".")
    assert bytes.fromhex(VIEWER) == prove(SECRET, "viewer")


# Begin and end


def test_a_port_in_use_is_an_error_or_the_next_one_is_taken(server: PageServer) -> None:
    with pytest.raises(OSError, match="in use"):
        PageServer({}, [server.addresses[0]])
    other = PageServer({}, [server.addresses[0]], tries=64)
    assert other.port > server.port
    other.stop()


def test_nothing_is_left_behind(pages: Pages) -> None:
    before = threading.active_count()
    running = PageServer({"/small": pages.small}, ["127.0.0.1:0"])
    with closing(http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)) as client:
        client.request("GET", "/small")
        client.getresponse().read()
        running.stop()
        running.stop()
        assert threading.active_count() == before
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", running.port), 10)
