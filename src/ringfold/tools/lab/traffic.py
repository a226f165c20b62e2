"""Plain traffic, for experiments: `python -m ringfold.tools.lab.traffic receive|tcp|udp ...`.

    receive ADDRESS:PORT ...                  receives TCP and UDP, and prints the rate once a second
    tcp ADDRESS:PORT --seconds 10             one connection, as fast as it goes (or --mbit)
    udp ADDRESS:PORT --seconds 10 --mbit 80   datagrams of 1,400 bytes at a rate: they ignore congestion

A receiver runs until it is ended. Senders print at the end how much they sent, and how fast.
"""

import argparse
import selectors
import socket
import sys
import time
from collections.abc import Sequence

_CHUNK = bytes(65_536)
_DATAGRAM = bytes(1_400)
_TICK_S = 0.001


def main(arguments: Sequence[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="ringfold.tools.lab.traffic", description="Plain traffic, for experiments.")
    parser.add_argument("kind", choices=["receive", "tcp", "udp"])
    parser.add_argument("address", nargs="+", help="ADDRESS:PORT; a receiver may have several, one per path")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--mbit", type=float, default=None)
    given = parser.parse_args(arguments)
    places = [_place(text) for text in given.address]
    if given.kind == "receive":
        return _receive(places)
    if len(places) != 1:
        parser.error("a sender has one address")
    if given.kind == "udp" and given.mbit is None:
        parser.error("datagrams need a rate: --mbit")
    sent, took = _send(given.kind, places[0], given.seconds, given.mbit)
    _say(f"sent {sent / 1e6:.1f} MB in {took:.2f} s: {sent * 8 / took / 1e6:.1f} Mbit/s")


def _place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _receive(places: list[tuple[str, int]]) -> None:
    selector, counts = selectors.DefaultSelector(), [0] * len(places)
    for number, place in enumerate(places):
        listener = socket.create_server(place)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, (number, True))
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind(place)
        datagrams.setblocking(False)
        selector.register(datagrams, selectors.EVENT_READ, (number, False))
    _say("ready")
    began = time.monotonic()
    while True:
        for key, _ in selector.select(max(0.0, began + 1 - time.monotonic())):
            number, is_listener = key.data
            assert isinstance(key.fileobj, socket.socket)
            if is_listener:
                selector.register(key.fileobj.accept()[0], selectors.EVENT_READ, (number, False))
                continue
            try:
                got = len(key.fileobj.recv(1 << 20))
            except OSError:
                got = 0
            counts[number] += got
            if not got and key.fileobj.type == socket.SOCK_STREAM:
                selector.unregister(key.fileobj)
                key.fileobj.close()
        took = time.monotonic() - began
        if took >= 1:
            if any(counts):
                _say(", ".join(f"{count * 8 / took / 1e6:.1f}" for count in counts) + " Mbit/s")
            began, counts = time.monotonic(), [0] * len(places)


def _send(kind: str, place: tuple[str, int], seconds: float, mbit: float | None) -> tuple[int, float]:
    if kind == "tcp":
        sender, chunk = _connected(place), _CHUNK
    else:
        sender, chunk = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), _DATAGRAM
        sender.connect(place)
    began, sent = time.monotonic(), 0
    with sender:
        while (passed := time.monotonic() - began) < seconds:
            if mbit is not None and sent > passed * mbit * 1e6 / 8:
                time.sleep(_TICK_S)
                continue
            try:
                sent += sender.send(chunk)
            except (ConnectionRefusedError, BlockingIOError):  # no socket is bound there (yet)
                if kind == "tcp":
                    raise
                time.sleep(_TICK_S)
    return sent, time.monotonic() - began


def _connected(place: tuple[str, int]) -> socket.socket:
    """A connection, waited for: the receiver may be about to start."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(place, 10)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1:])
