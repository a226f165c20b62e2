"""torch's TCPStore: what a PyTorch job has anyway. In memory, one server, no leases, no listing, no notification.

What is added here, and why:
- *Versions.* A value is stored behind a header with a version from a counter of the namespace, so no two writes ever
  store the same bytes. That also distinguishes winners from losers: `compare_set` returns the value of the key
  afterwards, and two clients that write equal bytes would both read their own.
- *Reading.* `get` of a missing key blocks. `compare_set` with an expected value that is never stored changes nothing
  and returns at once: the value, or, for a missing key, the expected value itself.
- *Counters.* `increment` is torch's own `add`, of a key apart: `add` to the value of an entry would end the server.
- *Reading many keys.* `multi_get` takes one request, but waits for keys that are missing. `check` returns whether all
  are there; if not, each half is checked. A key that is removed in between costs a wait of `_MULTI_GET`.
- *Deleting on a condition* does not exist; a tombstone is written instead (a header without a value). It stays until
  the key is deleted unconditionally, or created again.
- *Notification.* `compare_set` wakes no waiter, and `wait` only returns when a key appears. So a write that replaces
  version v of a key sets the notification key of v, and waiters that have seen v wait for it; a slow poll is the
  fallback. A notification key stays for a while, for waiters that are just about to wait; its writer removes it later.
- *Deadlines.* A call to a server that hangs does not return. Calls are made in threads that can be abandoned, and a
  thread that was abandoned before it wrote does not write.

A TCPStore ends with its process, and its clients' connections with it: the generation is read whenever a connection is
made. It has no password: only the network protects it. With `serve` it listens at the given address only.
"""

import os
import struct
from collections import deque
from collections.abc import Callable, Sequence
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
_NEVER_STORED = b"?"  # shorter than any header
_FOR_EVER = timedelta(days=1)
_MULTI_GET = timedelta(seconds=2)
_SLOW_POLL_S = 0.5
_POLL_S = 0.02
_MAX_NOTIFICATION_KEYS = 64
_END_S = 1.0


class Torch(Protocol):
    """What is used of torch.distributed.TCPStore."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...

    def add(self, key: str, delta: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def set_timeout(self, timeout: timedelta) -> None: ...

    def set(self, key: str, value: bytes) -> None: ...

    def delete_key(self, key: str) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


def _packed(entry: Entry | None, version: int = 0) -> bytes:
    if entry is None:
        return _HEADER.pack(version, 0, 0)
    return _HEADER.pack(entry.version, entry.ttl_ms, 1) + entry.value


def _unpacked(raw: bytes) -> Entry | None:
    """The entry in the bytes of a key; None also for a missing key, and for a tombstone."""
    if len(raw) < _HEADER.size:
        return None
    version, ttl_ms, is_there = _HEADER.unpack_from(raw)
    return Entry(raw[_HEADER.size :], version, ttl_ms) if is_there else None


def _present(torch: Torch, keys: list[str]) -> dict[str, bytes]:
    """The values of those keys that exist."""
    if torch.check(keys):
        return dict(zip(keys, torch.multi_get(keys), strict=True))
    if len(keys) == 1:
        return {}
    half = len(keys) // 2
    return {**_present(torch, keys[:half]), **_present(torch, keys[half:])}


class _Attempt:
    """Whether a write may still begin, and whether it did: decided once, between its thread and the waiting one."""

    def __init__(self) -> None:
        self._lock = threads.Lock()
        self._is_over = False
        self.has_begun = False

    def begin(self) -> None:
        with self._lock:
            if self._is_over:
                raise TimeoutError("it was abandoned before it began")
            self.has_begun = True

    def abandon(self) -> bool:
        """Returns whether it has begun."""
        with self._lock:
            self._is_over = True
            return self.has_begun


class _Link:
    """One connection, used by one call at a time, and the generation when it was made."""

    def __init__(self, torch: Torch, caller: threads.CallThread, generation: str | None) -> None:
        self.torch = torch
        self.caller = caller
        self.generation = generation


class TcpDriver:
    """One namespace of a TCPStore."""

    can_list = False
    has_leases = False
    counts_writes = False  # a write takes its version before it is made: one with a lower version may come later
    has_counters = True

    def __init__(self, url: str, namespace: str, *, serve: bool = False) -> None:
        try:
            self._torch: ModuleType = import_module("torch.distributed")
        except ImportError as error:
            raise MissingPackage("torch", "torch", "a store at tcp://") from error
        host, colon, port = url.removeprefix("tcp://").rstrip("/").rpartition(":")
        if not host or not colon or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ConfigError(f"{url!r} is not an address of a TCPStore; write tcp://host:port")
        self._host, self._port = host.removeprefix("[").removesuffix("]"), int(port)
        self._served = self._serve() if serve else None
        self.name = f"tcp://{host}:{self._port}"
        self._namespace = namespace
        self._lock = threads.Lock()
        self._idle: list[_Link] = []
        self._notified: deque[str] = deque()
        self._pid = os.getpid()

    def _serve(self) -> object:
        try:
            descriptor, self._port = network.listening(self._host, self._port)
        except OSError as error:
            raise ConfigError(f"cannot listen at {self._host}:{self._port}: {error}") from error
        return self._torch.TCPStore(
            self._host, self._port, None, True, wait_for_workers=False, master_listen_fd=descriptor
        )

    def ensure_generation(self, nonce: str | None, deadline: Deadline) -> Generation | None:
        def body(torch: Torch) -> Generation | None:
            name, counter = self._internal_key("generation"), self._internal_key("versions")
            raw = torch.compare_set(name, b"" if nonce else _NEVER_STORED, _packed(Entry((nonce or "").encode(), 1)))
            entry = _unpacked(raw)
            return None if entry is None else Generation(entry.value.decode(errors="replace"), torch.add(counter, 0))

        link = self._connected(deadline)
        generation = self._call(link, body, deadline)
        link.generation = None if generation is None else generation.id
        return generation

    def read(self, key: str, guard: Generation, deadline: Deadline) -> Read:
        link = self._connected(deadline)
        entry = _unpacked(
            self._call(link, lambda torch: torch.compare_set(key, _NEVER_STORED, _NEVER_STORED), deadline)
        )
        return Read(entry, self._generation(link, guard, entry))

    def read_many(self, keys: Sequence[str], guard: Generation, deadline: Deadline) -> Scanned:
        link = self._connected(deadline)
        values = self._call(link, lambda torch: _present(torch, list(keys)), deadline)
        found = {key: entry for key, raw in values.items() if (entry := _unpacked(raw)) is not None}
        newest = max(found.values(), key=lambda entry: entry.version, default=None)
        return Scanned(found, self._generation(link, guard, newest))

    def write(self, write: Write, guard: Generation, deadline: Deadline) -> Written:
        link, attempt = self._connected(deadline), _Attempt()
        if link.generation != guard.id:
            self.put_back(link)
            return Written(False, None, self._generation(link, guard, None))
        body = (
            self._delete if write.value is None and isinstance(write.condition, AnyVersion) else self._compare_and_swap
        )
        made = self._call(link, lambda torch: body(torch, write, attempt), deadline, attempt)
        was_applied, entry, existed = made
        return Written(was_applied, entry, self._generation(link, guard, entry), existed)

    def add(self, key: str, delta: int, guard: Generation, deadline: Deadline) -> Added:
        return add_by_writing(self, key, delta, guard, deadline)

    def increment(self, key: str, by: int, guard: Generation, deadline: Deadline) -> Added:
        link, attempt = self._connected(deadline), _Attempt()
        if link.generation != guard.id:
            self.put_back(link)
            return Added(0, self._generation(link, guard, None))

        def body(torch: Torch) -> int:
            attempt.begin()
            return torch.add(self._counter_key(key), by)

        total = self._call(link, body, deadline, attempt if by else None)
        return Added(total, self._generation(link, guard, None))

    def scan(self, prefix: str, guard: Generation, deadline: Deadline) -> Scanned:
        raise AssertionError("this store cannot list")

    def renew(self, key: str, entry: Entry, guard: Generation, deadline: Deadline) -> Written:
        raise AssertionError("this store has no leases")

    def watch(self, key: str, deadline: Deadline) -> "TcpKeyWatch":
        return TcpKeyWatch(self, key, self._connected(deadline))

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.caller.abandon()
        self._served = None

    # Writes, in the thread that makes them

    def _compare_and_swap(self, torch: Torch, write: Write, attempt: _Attempt) -> tuple[bool, Entry | None, bool]:
        """Whether it was written, the entry of the key now, and whether it had one before."""
        match write.condition:
            case AnyVersion():
                held = torch.compare_set(write.key, _NEVER_STORED, _NEVER_STORED)
                expected = b"" if held == _NEVER_STORED else held
            case None:
                expected = b""
            case Entry() as demanded:
                expected = _packed(demanded)
        while True:
            version = torch.add(self._internal_key("versions"), 1)
            entry = None if write.value is None else Entry(write.value, version, write.ttl_ms)
            desired = _packed(entry, version)
            attempt.begin()
            held = torch.compare_set(write.key, expected, desired)
            if held == desired:
                before = _unpacked(expected)
                self._notify(torch, write.key, before, is_gone=entry is None)
                return True, entry, before is not None
            if held == expected:  # the key is missing
                held = b""
            may_try = isinstance(write.condition, AnyVersion) or (write.condition is None and _unpacked(held) is None)
            if not may_try:
                return False, _unpacked(held), False
            expected = held

    def _delete(self, torch: Torch, write: Write, attempt: _Attempt) -> tuple[bool, Entry | None, bool]:
        before = _unpacked(torch.compare_set(write.key, _NEVER_STORED, _NEVER_STORED))
        attempt.begin()
        existed = torch.delete_key(write.key) and before is not None
        torch.delete_key(self._counter_key(write.key))
        self._notify(torch, write.key, before, is_gone=True)
        return True, None, existed

    def _notify(self, torch: Torch, key: str, before: Entry | None, *, is_gone: bool) -> None:
        """Wake the waiters that have seen `before`. The write is made: errors here must not hide that."""
        name = self.notification_key(key, before)
        with self._lock:
            self._notified.append(name)
            old = [self._notified.popleft()] if len(self._notified) > _MAX_NOTIFICATION_KEYS else []
        if is_gone:  # or waiters for the key to be created again would return at once
            old.append(self.notification_key(key, None))
        with suppress(RuntimeError):
            torch.set(name, b"1")
            for each in old:
                torch.delete_key(each)

    # Connections

    def notification_key(self, key: str, seen: Entry | None) -> str:
        return self._internal_key(f"bell/{0 if seen is None else seen.version}/{key}")

    def _counter_key(self, key: str) -> str:
        return self._internal_key(f"counter/{key}")

    def wake(self, key: str, deadline: Deadline) -> None:
        """Wake the waiters for one notification key."""

        def body(torch: Torch) -> None:
            torch.set(key, b"1")
            torch.delete_key(key)

        self._call(self._connected(deadline), body, deadline)

    def _internal_key(self, name: str) -> str:
        return f"{self._namespace}/!{name}"

    def _generation(self, link: _Link, guard: Generation, entry: Entry | None) -> Generation | None:
        """A TCPStore cannot be restored: an open connection always leads to the same store."""
        if link.generation is None:
            return None
        return Generation(link.generation, max(guard.revision, 0 if entry is None else entry.version))

    def _call(
        self, link: _Link, body: Callable[[Torch], Value], deadline: Deadline, attempt: _Attempt | None = None
    ) -> Value:
        """Make a call on a connection, and put that back. A call without an attempt changes nothing."""
        pending = link.caller.start(lambda: body(link.torch))
        try:
            value = pending.result(max(0.001, deadline.left_s()))
        except (TimeoutError, RuntimeError) as error:
            link.caller.abandon()
            has_begun = attempt is not None and attempt.abandon()
            why = str(error).partition("\n")[0] or f"no response within {deadline.timeout_s:g} s"
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
            if self._pid != os.getpid():  # after a fork they belong to the parent, and their threads are gone
                self._pid, self._idle = os.getpid(), []
            if self._idle:
                return self._idle.pop()
        # torch logs a page for every attempt that fails: check first.
        if why := network.can_connect(self._host, self._port, deadline.left_s()):
            raise StoreUnreachable(self.name, why)
        caller = threads.CallThread("ringfold-tcpstore")
        limit = timedelta(seconds=max(0.1, deadline.left_s()))

        def connect() -> tuple[Torch, str | None]:
            torch = self._torch.TCPStore(self._host, self._port, None, False, timeout=limit, wait_for_workers=False)
            torch.set_timeout(_MULTI_GET)
            entry = _unpacked(torch.compare_set(self._internal_key("generation"), _NEVER_STORED, _NEVER_STORED))
            return torch, None if entry is None else entry.value.decode(errors="replace")

        try:
            torch, generation = caller.start(connect).result(max(0.001, deadline.left_s()))
            return _Link(torch, caller, generation)
        except (TimeoutError, RuntimeError) as error:
            caller.abandon()
            why = str(error).partition("\n")[0] or f"no response within {deadline.timeout_s:g} s"
            raise StoreUnreachable(self.name, why) from None


class TcpKeyWatch:
    """Waits for a notification key to appear, on a connection of its own.

    Ending a wait early makes torch log errors, so it stays pending from one poll to the next. A wait that is not needed
    any more is ended by setting its notification key.
    """

    def __init__(self, driver: TcpDriver, key: str, link: _Link) -> None:
        self._driver = driver
        self._key = key
        self._link = link
        self._awaited = ""
        self._last_notified = ""
        self._pending: threads.PendingCall[None] | None = None

    def wait(self, read: Read, timeout_s: float) -> None:
        awaited = self._driver.notification_key(self._key, read.entry)
        if awaited == self._last_notified:  # a notification without a change, and perhaps the key still exists
            threads.Event().wait(min(timeout_s, _POLL_S))
            return
        if self._pending is not None and self._awaited != awaited and not self._is_free():
            raise StoreUnreachable(self._driver.name, "a wait could not be ended")
        if self._pending is None:
            torch = self._link.torch
            self._awaited = awaited
            self._pending = self._link.caller.start(lambda: torch.wait([awaited], _FOR_EVER))
        try:
            self._pending.result(min(timeout_s, _SLOW_POLL_S))
        except TimeoutError:
            return
        except RuntimeError as error:
            raise StoreUnreachable(self._driver.name, str(error).partition("\n")[0]) from None
        self._pending = None
        self._last_notified = awaited

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
            self._driver.wake(self._awaited, limit)
            self._pending.result(limit.left_s())
        except (StoreError, RuntimeError, TimeoutError):
            return False
        self._pending = None
        return True
