"""Who may look at a dashboard."""

import pytest

from ringfold.observe.dashboard.access import may_look, why_refused


def test_only_the_right_token_may_look() -> None:
    assert may_look("abc", "abc")
    assert not may_look("abc", "abd")
    assert not may_look("abc", None)
    assert not may_look("abc", "")
    assert may_look("", None)


@pytest.mark.parametrize(
    ("host", "origin", "only_loopback", "allowed"),
    [
        ("127.0.0.1:48150", None, True, True),
        ("localhost:48150", "http://localhost:48150", True, True),
        ("[::1]:48150", "http://[::1]:48150", True, True),
        ("evil.example:48150", "http://evil.example:48150", True, False),
        ("127.0.0.1:48150", "http://evil.example", True, False),
        ("127.0.0.1:48150", "http://127.0.0.1:8000", True, False),
        ("127.0.0.1:48150", "null", True, False),
        ("node7:48150", "http://node7:48150", False, True),
        ("node7:48150", "http://evil.example", False, False),
        ("[::1", None, True, False),
    ],
)
def test_another_page_in_the_same_browser_cannot_look(
    host: str, origin: str | None, only_loopback: bool, allowed: bool
) -> None:
    assert (why_refused(host, origin, only_loopback=only_loopback) == "") == allowed
