"""Names and addresses of machines: what a host name means here, and by which address others see this machine."""

import os
import pwd
import socket

from ringfold.runtime.threads import Event


def literals(host: str, port: int) -> list[str]:
    """The IP literals that `host` stands for, the system's preferred one first. Raises OSError when there are none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def local_address_towards(literal: str, port: int) -> str:
    """The address of this machine that packets to `literal` leave from. Sends nothing; OSError without a route."""
    family = socket.AF_INET6 if ":" in literal else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((literal, port))
        return str(probe.getsockname()[0])


def own_address(*, v6: bool) -> str:
    """The address of this machine on the way to everybody else; loopback when there is no way out. Sends nothing."""
    far_away = "2001:db8::1" if v6 else "192.0.2.1"  # addresses for documentation: no machine has them
    try:
        return local_address_towards(far_away, 9)
    except OSError:
        return "::1" if v6 else "127.0.0.1"


def host_name() -> str:
    return socket.gethostname()


def user_name() -> str:
    """Who runs this process, by name if the machine has one for it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"


def pause(seconds: float) -> None:
    """Wait before another try; Ctrl-C ends it."""
    Event().wait(seconds)
