"""torch's TCPStore: what a PyTorch job has anyway. In memory, one server, no leases, no listing, no waking.

What is built on top of it here, and why:
- *Versions.* A value is stored behind a header with a version, taken from a counter of the namespace, so no two writes
  ever store the same bytes. That also tells winners from losers: `compare_set` answers with what the key holds then,
  and two clients that write equal bytes would both read their own.
- *Reading.* `get` of a missing key blocks. `compare_set` with an expectation that is never stored changes nothing and
  answers at once: with the value, or, on a missing key, with the expectation itself.
- *Deleting on a condition* is not there; a tombstone is written instead (a header without a value). It stays until the
  key is deleted without a condition, or made again.
- *Waking.* `compare_set` wakes nobody, and `wait` only wakes when a key appears. So a write that replaces version v
  of a key sets the key's bell for v, which those who have seen v wait for; a slow poll stands behind that. A bell stays
  for a while, for those who are just about to wait; its maker removes it some bells later.
- *Deadlines.* A call to a server that hangs does not return. Calls are made in threads that can be left behind, and a
  thread that was left behind before it wrote writes no more.

A TCPStore lives and dies with its process, and its clients' connections with it: the generation is looked at whenever a
connection is made. Nothing protects it but the network: there is no password. With `serve` it listens at the address
that was given and no other.
"""

import os
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from types import ModuleType
from typing import Protocol, TypeVar

from ringfold.errors import ConfigError, MissingPackage, StoreError, StoreUnknown, StoreUnreachable
from ringfold.runtime import clock, network, threads
from ringfold.store.base import (
    Added,
    AnyVersion,
    Deadline,
    Entry,
    Generation,
    Read,
    Scanned,
    Write,
    Written,
    add_by_writing,
)

Value = TypeVar("Value")

_HEADER = struct.Struct(">QIB")  # version, time to live in ms, whether there is a value
_QUESTION = b"?"  # shorter than any header, so it is never stored
_FOR_EVER = timedelta(days=1)
_SLOW_POLL_S = 0.5
_POLL_S = 0.02
_BELLS_KEPT = 64
_END_S = 1.0


class Torch(Protocol):
    """What we use of torch.distributed.TCPStore."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...

    def add(self, key: str, delta: int) -> int: ...

    def set(self, key: str, value: bytes) -> None: ...

    def delete_key(self, key: str) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


def _packed(entry: Entry | None, version: int = 0) -> bytes:
    if entry is None:
        return _HEADER.pack(version, 0, 0)
    return _HEADER.pack(entry.version, entry.ttl_ms, 1) + entry.value


def _unpacked(raw: bytes) -> Entry | None:
    """What a key holds; None also for the answer of a missing key, and for a tombstone."""
    if len(raw) < _HEADER.size:
        return None
    version, ttl_ms, is_there = _HEADER.unpack_from(raw)
    return Entry(raw[_HEADER.size :], version, ttl_ms) if is_there else None


class _Attempt:
    """Whether a write may still begin, and whether it did: decided once, between its thread and who waits for it."""

    def __init__(self) -> None:
        self._lock = threads.Lock()
        self._is_over = False
        self.has_begun = False

    def begin(self) -> None:
        with self._lock:
            if self._is_over:
                raise TimeoutError("it was given up before it began")
            self.has_begun = True

    def give_up(self) -> bool:
        """Returns whether it has begun."""
        with self._lock:
            self._is_over = True
            return self.has_begun


class _Link:
    """One connection, used by one call at a time, and the generation that was there when it was made."""

    def __init__(self, torch: Torch, caller: threads.CallThread, generation: str | None) -> None:
        self.torch, self.caller, self.generation = torch, caller, generation


class TcpDriver:
    """One namespace of a TCPStore."""

    can_list = False
    has_leases = False

    def __init__(self, url: str, namespace: str, *, serve: bool = False) -> None:
        try:
            self._torch: ModuleType = import_module("torch.distributed")
        except ImportError as error:
            raise MissingPackage("torch", "torch", "a store at tcp://") from error
        host, colon, port = url.removeprefix("tcp://").rstrip("/").rpartition(":")
        if not host or not colon or not port.isdigit():
            raise ConfigError(f"{url!r} is no address of a TCPStore; write tcp://host:port")
        self._host, self._port = host.removeprefix("[").removesuffix("]"), int(port)
        self._served = self._serve() if serve else None
        self.name = f"tcp://{host}:{self._port}"
        self._namespace = namespace
        self._lock = threads.Lock()
        self._idle: list[_Link] = []
        self._rung: deque[str] = deque()
        self._pid = os.getpid()

    def _serve(self) -> object:
        try:
            descriptor, self._port = network.listening(self._host, self._port)
        except OSError as error:
            raise ConfigError(f"cannot listen at {self._host}:{self._port}: {error}") from error
        return self._torch.TCPStore(
            self._host, self._port, None, True, wait_for_workers=False, master_listen_fd=descriptor
        )

    def found(self, nonce: str | None, deadline: Deadline) -> Generation | None:
        def body(torch: Torch) -> Generation | None:
            name, counter = self._inner("generation"), self._inner("versions")
            raw = torch.compare_set(name, b"" if nonce else _QUESTION, _packed(Entry((nonce or "").encode(), 1)))
            entry = _unpacked(raw)
            return None if entry is None else Generation(entry.value.decode(errors="replace"), torch.add(counter, 0))

        link = self._connected(deadline)
        stamp = self._made(link, body, deadline)
        link.generation = None if stamp is None else stamp.id
        return stamp

    def read(self, key: str, guard: Generation, deadline: Deadline) -> Read:
        link = self._connected(deadline)
        entry = _unpacked(self._made(link, lambda torch: torch.compare_set(key, _QUESTION, _QUESTION), deadline))
        return Read(entry, self._stamp(link, guard, entry))

    def write(self, write: Write, guard: Generation, deadline: Deadline) -> Written:
        link, attempt = self._connected(deadline), _Attempt()
        if link.generation != guard.id:
            self.put_back(link)
            return Written(False, None, self._stamp(link, guard, None))
        body = self._dropping if write.value is None and isinstance(write.condition, AnyVersion) else self._swapping
        made = self._made(link, lambda torch: body(torch, write, attempt), deadline, attempt)
        is_made, entry, was_there = made
        return Written(is_made, entry, self._stamp(link, guard, entry), was_there)

    def add(self, key: str, delta: int, guard: Generation, deadline: Deadline) -> Added:
        return add_by_writing(self, key, delta, guard, deadline)

    def scan(self, prefix: str, guard: Generation, deadline: Deadline) -> Scanned:
        raise AssertionError("a store that cannot list was asked to")

    def keep(self, key: str, entry: Entry, guard: Generation, deadline: Deadline) -> Written:
        raise AssertionError("a store without leases was asked to keep one")

    def listen(self, key: str, deadline: Deadline) -> "TcpBell":
        return TcpBell(self, key, self._connected(deadline))

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.caller.abandon()
        self._served = None

    # What a write does, in the thread that makes it

    def _swapping(self, torch: Torch, write: Write, attempt: _Attempt) -> tuple[bool, Entry | None, bool]:
        """Whether it was written, what the key holds now, and whether it held something before."""
        match write.condition:
            case AnyVersion():
                held = torch.compare_set(write.key, _QUESTION, _QUESTION)
                expected = b"" if held == _QUESTION else held
            case None:
                expected = b""
            case Entry() as demanded:
                expected = _packed(demanded)
        while True:
            version = torch.add(self._inner("versions"), 1)
            entry = None if write.value is None else Entry(write.value, version, write.ttl_ms)
            desired = _packed(entry, version)
            attempt.begin()
            held = torch.compare_set(write.key, expected, desired)
            if held == desired:
                before = _unpacked(expected)
                self._ring(torch, write.key, before, is_gone=entry is None)
                return True, entry, before is not None
            if held == expected:  # the answer of a key that is not there
                held = b""
            may_try = isinstance(write.condition, AnyVersion) or (write.condition is None and _unpacked(held) is None)
            if not may_try:
                return False, _unpacked(held), False
            expected = held

    def _dropping(self, torch: Torch, write: Write, attempt: _Attempt) -> tuple[bool, Entry | None, bool]:
        before = _unpacked(torch.compare_set(write.key, _QUESTION, _QUESTION))
        attempt.begin()
        was_there = torch.delete_key(write.key) and before is not None
        self._ring(torch, write.key, before, is_gone=True)
        return True, None, was_there

    def _ring(self, torch: Torch, key: str, before: Entry | None, *, is_gone: bool) -> None:
        """Wake those who have seen `before`. The write is made: nothing that fails here may make it look otherwise."""
        bell = self.bell(key, before)
        with self._lock:
            self._rung.append(bell)
            old = [self._rung.popleft()] if len(self._rung) > _BELLS_KEPT else []
        if is_gone:  # or whoever waits for the key to come back would find it rung
            old.append(self.bell(key, None))
        with suppress(RuntimeError):
            torch.set(bell, b"1")
            for name in old:
                torch.delete_key(name)

    # Connections

    def bell(self, key: str, seen: Entry | None) -> str:
        return self._inner(f"bell/{0 if seen is None else seen.version}/{key}")

    def ring_again(self, bell: str, deadline: Deadline) -> None:
        """Wake whoever waits for one bell."""

        def body(torch: Torch) -> None:
            torch.set(bell, b"1")
            torch.delete_key(bell)

        self._made(self._connected(deadline), body, deadline)

    def _inner(self, name: str) -> str:
        return f"{self._namespace}/!{name}"

    def _stamp(self, link: _Link, guard: Generation, entry: Entry | None) -> Generation | None:
        """A TCPStore cannot go back: a connection that still stands leads to the store that it was made to."""
        if link.generation is None:
            return None
        return Generation(link.generation, max(guard.revision, 0 if entry is None else entry.version))

    def _made(
        self, link: _Link, body: Callable[[Torch], Value], deadline: Deadline, attempt: _Attempt | None = None
    ) -> Value:
        """Make a call on a connection, and put that back. Without an attempt, nothing is changed by it."""
        pending = link.caller.start(lambda: body(link.torch))
        try:
            value = pending.result(max(0.001, deadline.left_s()))
        except (TimeoutError, RuntimeError) as error:
            link.caller.abandon()
            has_begun = attempt is not None and attempt.give_up()
            why = str(error).partition("\n")[0] or f"no answer within {deadline.timeout_s:g} s"
            raise (StoreUnknown if has_begun else StoreUnreachable)(self.name, why) from None
        except BaseException:
            link.caller.abandon()
            raise
        self.put_back(link)
        return value

    def put_back(self, link: _Link) -> None:
        with self._lock:
            self._idle.append(link)

    def _connected(self, deadline: Deadline) -> _Link:
        with self._lock:
            if self._pid != os.getpid():  # after a fork they are the parent's, and their threads are gone
                self._pid, self._idle = os.getpid(), []
            if self._idle:
                return self._idle.pop()
        # torch writes a page of complaints about every attempt that fails: look first.
        if why := network.can_connect(self._host, self._port, deadline.left_s()):
            raise StoreUnreachable(self.name, why)
        caller = threads.CallThread("ringfold-tcpstore")
        limit = timedelta(seconds=max(0.1, deadline.left_s()))

        def connect() -> tuple[Torch, str | None]:
            torch = self._torch.TCPStore(self._host, self._port, None, False, timeout=limit, wait_for_workers=False)
            entry = _unpacked(torch.compare_set(self._inner("generation"), _QUESTION, _QUESTION))
            return torch, None if entry is None else entry.value.decode(errors="replace")

        try:
            torch, generation = caller.start(connect).result(max(0.001, deadline.left_s()))
            return _Link(torch, caller, generation)
        except (TimeoutError, RuntimeError) as error:
            caller.abandon()
            why = str(error).partition("\n")[0] or f"no answer within {deadline.timeout_s:g} s"
            raise StoreUnreachable(self.name, why) from None


class TcpBell:
    """Waits for a bell key to appear, on a connection of its own.

    Ending a wait early makes torch complain, so it is left pending from one look to the next. A wait that nobody needs
    any more is ended by ringing that bell oneself.
    """

    def __init__(self, driver: TcpDriver, key: str, link: _Link) -> None:
        self._driver, self._key, self._link = driver, key, link
        self._bell, self._heard = "", ""
        self._pending: threads.PendingCall[None] | None = None

    def wait(self, read: Read, timeout_s: float) -> None:
        bell = self._driver.bell(self._key, read.entry)
        if bell == self._heard:  # somebody rang for nothing, and perhaps it still stands there
            threads.Event().wait(min(timeout_s, _POLL_S))
            return
        if self._pending is not None and self._bell != bell and not self._is_free():
            raise StoreUnreachable(self._driver.name, "a wait could not be ended")
        if self._pending is None:
            torch, self._bell = self._link.torch, bell
            self._pending = self._link.caller.start(lambda: torch.wait([bell], _FOR_EVER))
        try:
            self._pending.result(min(timeout_s, _SLOW_POLL_S))
        except TimeoutError:
            return
        except RuntimeError as error:
            raise StoreUnreachable(self._driver.name, str(error).partition("\n")[0]) from None
        self._pending, self._heard = None, bell

    def close(self) -> None:
        if self._is_free():
            self._driver.put_back(self._link)
        else:
            self._link.caller.abandon()

    def _is_free(self) -> bool:
        """End a pending wait; returns whether the connection can be used again."""
        if self._pending is None:
            return True
        limit = Deadline(clock.monotonic_ns, _END_S)
        try:
            self._driver.ring_again(self._bell, limit)
            self._pending.result(limit.left_s())
        except (StoreError, RuntimeError, TimeoutError):
            return False
        self._pending = None
        return True
