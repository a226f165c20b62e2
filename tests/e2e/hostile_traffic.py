"""Hostile traffic for a live run: unauthenticated clients at every port, and a proxy that damages authenticated lanes.

Everything is drawn from a seed; when it happens is up to the machine.
"""

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from ringfold.wire.frames import FrameKind, Heartbeat, frame, heartbeat_frame, message_frame
from ringfold.wire.messages import PROTOCOL_VERSION as VERSION
from ringfold.wire.messages import BulkHello, Challenge, Hello, LaneHello, Refused, StatusRequest

PROVEN_BYTES = 4_096
"""What a connection must have carried before it is damaged: a handshake has less than 1 KiB each way."""
HELD = 40
"""How many connections that say nothing are kept open at once."""


class BitFlipper:
    """A TCP proxy in front of one data port. `flip` damages one bit of the next bytes of a proven connection."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.target = 0
        self.flipped = 0
        self._wanted = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def flip(self) -> None:
        self._wanted += 1

    def close(self) -> None:
        self._is_over = True
        self._thread.join(5)
        self._listener.close()

    def _serve(self) -> None:
        pairs: dict[socket.socket, socket.socket] = {}
        carried: dict[socket.socket, int] = {}
        waiting: dict[socket.socket, bytearray] = {}
        """What one end could not take yet: then the other one is not read."""

        def drop(one: socket.socket) -> None:
            other = pairs.pop(one, None)
            for each in (one, other):
                if each is not None:
                    pairs.pop(each, None)
                    carried.pop(each, None)
                    waiting.pop(each, None)
                    each.close()

        while not self._is_over:
            readable = [self._listener, *(one for one in pairs if not waiting[pairs[one]])]
            writable = [one for one in pairs if waiting[one]]
            ready, free, _ = select.select(readable, writable, [], 0.1)
            for one in free:
                if one in pairs:
                    self._push(one, waiting[one], drop)
            for one in ready:
                if one is self._listener:
                    here, _ = self._listener.accept()
                    try:
                        there = socket.create_connection(("127.0.0.1", self.target), timeout=2)
                    except OSError:
                        here.close()
                        continue
                    for each, other in ((here, there), (there, here)):
                        each.setblocking(False)
                        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        pairs[each], carried[each], waiting[each] = other, 0, bytearray()
                elif one in pairs:
                    try:
                        chunk = bytearray(one.recv(65_536))
                    except BlockingIOError:
                        continue
                    except OSError:
                        chunk = bytearray()
                    if not chunk:
                        drop(one)
                        continue
                    carried[one] += len(chunk)
                    if self._wanted and min(carried[one], carried[pairs[one]]) >= PROVEN_BYTES:
                        self._wanted -= 1
                        self.flipped += 1
                        chunk[self._rng.randrange(len(chunk))] ^= 1 << self._rng.randrange(8)
                    waiting[pairs[one]] += chunk
                    self._push(pairs[one], waiting[pairs[one]], drop)
        for one in list(pairs):
            drop(one)

    def _push(self, one: socket.socket, content: bytearray, drop: Callable[[socket.socket], None]) -> None:
        try:
            del content[: one.send(content)]
        except BlockingIOError:
            pass
        except OSError:
            drop(one)


class UnauthenticatedClients:
    """Connections to these ports that prove nothing, from a thread of their own."""

    def __init__(self, ports: list[int], udp: list[int], seed: int) -> None:
        self._ports, self._udp, self._rng = ports, udp, random.Random(seed)
        self._is_over = threading.Event()
        self._held: list[socket.socket] = []
        self.came = 0
        self._thread = threading.Thread(target=self._bother, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(10)

    def _bother(self) -> None:
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            while not self._is_over.wait(0.01):
                with contextlib.suppress(OSError):
                    self._come(self._rng.choice(self._ports))
                for port in self._udp:
                    with contextlib.suppress(OSError):
                        datagrams.sendto(self._rng.randbytes(self._rng.randrange(200)), ("127.0.0.1", port))
        finally:
            datagrams.close()
            for each in self._held:
                each.close()

    def _come(self, port: int) -> None:
        self.came += 1
        one = socket.create_connection(("127.0.0.1", port), timeout=2)
        one.settimeout(0.2)
        try:
            match self._rng.randrange(4):
                case 0:  # says nothing, and stays
                    self._keep(one)
                    return
                case 1:  # says half of something, byte by byte
                    for byte in self._noise()[:12]:
                        one.send(bytes([byte]))
                    self._keep(one)
                    return
                case 2:  # says something, and does not wait for the answer
                    one.sendall(self._noise())
                case _:
                    one.recv(4_096)
                    one.sendall(self._noise())
                    one.recv(4_096)
        finally:
            if one not in self._held:
                one.close()

    def _keep(self, one: socket.socket) -> None:
        self._held.append(one)
        if len(self._held) > HELD:
            self._held.pop(0).close()

    def _noise(self) -> bytes:
        rng = self._rng
        nonce, proof = rng.randbytes(32), rng.randbytes(32)
        number = rng.choice((0, 1, 2, 3, -1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63)))
        messages = (
            Hello(VERSION, 0, "host", "a client", ["127.0.0.1"], 9, nonce, proof),
            LaneHello(VERSION, number, 1, 2, 0, nonce, proof),
            LaneHello(VERSION, 1, number, 2, 0, nonce, proof),
            BulkHello(VERSION, "state", number, 1, 2, nonce, proof),
            StatusRequest(VERSION, nonce, proof),
            Challenge(nonce, VERSION, VERSION),
            Refused("go away"),
        )
        whole = message_frame(rng.choice(messages))
        damaged = bytearray(whole)
        damaged[rng.randrange(5, len(damaged))] ^= 1 << rng.randrange(8)
        kinds: tuple[bytes, ...] = (
            rng.randbytes(rng.randrange(1, 300)),
            frame(FrameKind.MESSAGE, b"\x81\xa4type\xa2\xff\xfe"),
            frame(FrameKind.MESSAGE, b"\x82\xa1x" + b"\x91" * 15_000),
            frame(FrameKind.MESSAGE, rng.randbytes(40)),
            struct.pack("<IB", rng.getrandbits(32), rng.randrange(8)) + rng.randbytes(20),
            heartbeat_frame(Heartbeat(1, 0)),
            frame(FrameKind.DONE, rng.randbytes(70)),
            b"RFLD" + rng.randbytes(60),
            whole,
            bytes(damaged),
            bytes(damaged),
        )
        return rng.choice(kinds)


def paced_flips(flippers: list[BitFlipper], seconds: float, every_s: float, look: Callable[[], None]) -> int:
    """A flip at one edge after the other. A link that breaks three times within ten seconds counts as a bad one, and in
    a ring of three there is no way around a bad one: so each edge is left alone for long enough."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        flippers[number % len(flippers)].flip()
        number += 1
        until = min(end, time.monotonic() + every_s)
        while time.monotonic() < until:
            look()
            time.sleep(0.1)
    return sum(each.flipped for each in flippers)
