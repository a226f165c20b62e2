"""The one place where bytes from outside become typed values, and where a check of them may fail in any way.

`msgspec` documents its own errors, and raises others too: UnicodeDecodeError (text that is not UTF-8, also in place of
a tag), RecursionError (deep nesting), MemoryError (a length that does not fit into memory), and whatever the
`__post_init__` of a type raises. A list of these would be complete until the next release. Decoding changes nothing, so
the opposite rule is safe: any exception means that the bytes are not a value of the type, and becomes the one error
that the caller documents.

The same holds for a check that only reads (`checked`). It does not hold for code that changes a machine's state: a
half-changed state must not be used, and an exception there ends its owner (decision 31).
"""

from collections.abc import Callable
from pathlib import PurePath
from typing import ParamSpec, TypeVar

from ringfold.errors import RemoteProtocolError

MAX_REASON_CHARS = 300
"""Errors quote what a remote sent, and are logged and sent: they quote no more than this."""

P = ParamSpec("P")
T = TypeVar("T")


def decode(
    decoder: Callable[[bytes], T], raw: bytes, error: Callable[[str], Exception] = RemoteProtocolError, what: str = ""
) -> T:
    """Decode these bytes. Only `error` is raised, with a short reason after `what`."""
    try:
        return decoder(raw)
    except Exception as fault:
        raise error(f"{what}{reason_of(fault)}") from fault


def checked(check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a check of what a remote sent; it must not change anything. Only RemoteProtocolError is raised."""
    try:
        return check(*args, **kwargs)
    except RemoteProtocolError:
        raise
    except Exception as fault:
        raise RemoteProtocolError(f"what it sent cannot be checked: {reason_of(fault)} {_place_of(fault)}") from fault


def reason_of(fault: Exception) -> str:
    """Why it failed, in one line of bounded length."""
    text = str(fault) or type(fault).__name__
    if not isinstance(fault, ValueError | RecursionError):
        text = f"{type(fault).__name__}: {text}"
    return " ".join(text.split())[:MAX_REASON_CHARS]


def _place_of(fault: Exception) -> str:
    """Where it was raised. No traceback is logged, because the remote controls how often this happens."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f"({PurePath(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
